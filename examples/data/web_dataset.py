"""A WebDataset: samples in tar files, which are split over processes and workers (the extra `examples`).

    python examples/data/web_dataset.py
    torchrun --nproc-per-node 2 examples/data/web_dataset.py

There are to be as many shards as workers over all processes, at least. `split_by_node` takes a process's shards;
without it WebDataset refuses several processes. The order is the pipeline's own: shuffle within it.
"""

import tempfile

import torch
import webdataset
from torch import nn

import hapi
from hapi.datasets import FashionMNIST

WORKERS = 1


def write_shards(folder, mode, count):
    """Stands for shards of yours."""
    sample = FashionMNIST(mode=mode, sample=True)
    with webdataset.ShardWriter(f"{folder}/{mode}-%02d.tar", maxcount=-(-count // 4), verbose=0) as shards:
        for number in range(count):
            image, label = sample.data[number, 0].numpy(), int(sample.targets[number])
            shards.write({"__key__": f"{number:05d}", "image.npy": image, "label.cls": label})


def read_shards(folder, mode):
    urls = f"{folder}/{mode}-{{00..03}}.tar"
    pipeline = webdataset.WebDataset(urls, nodesplitter=webdataset.split_by_node, shardshuffle=False)
    if mode == "train":
        pipeline = pipeline.shuffle(500, seed=0)
    return pipeline.decode().to_tuple("image.npy", "label.cls").map_tuple(as_floats)


def as_floats(image):
    return torch.from_numpy(image).float() / 255


hapi.seed(0)
folder = tempfile.TemporaryDirectory()
for mode, count in (("train", 3000), ("test", 501)):
    write_shards(folder.name, mode, count)

net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
test = read_shards(folder.name, "test")
model.fit(read_shards(folder.name, "train"), test, epochs=2, batch_size=32, num_workers=WORKERS)
print(f"test accuracy {model.evaluate(test, num_workers=WORKERS, verbose=0)['acc']:.4f}")
