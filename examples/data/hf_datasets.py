"""A data set of Hugging Face's: dict batches, read from a folder that save_to_disk has written (the extra `examples`).

    python examples/data/hf_datasets.py
    torchrun --nproc-per-node 2 examples/data/hf_datasets.py

`forward` gets the columns that it names, the rest are labels. With "torch" as its format the columns arrive as tensors.
"""

import tempfile

import datasets
import torch
from torch import nn

import hapi
from hapi.datasets import FashionMNIST


def written(folder, mode, count):
    """Stands for a data set of yours: one that load_dataset gives is used alike."""
    sample = FashionMNIST(mode=mode, sample=True)
    features = datasets.Features({"image": datasets.Array2D((28, 28), "uint8"), "label": datasets.Value("int64")})
    columns = {"image": sample.data[:count, 0].numpy(), "label": sample.targets[:count].numpy()}
    datasets.Dataset.from_dict(columns, features).save_to_disk(f"{folder}/{mode}")


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, image):
        return self.layers(image / 255)


hapi.seed(0)
datasets.disable_progress_bars()
folder = tempfile.TemporaryDirectory()
for mode, count in (("train", 1500), ("test", 501)):
    written(folder.name, mode, count)

train = datasets.load_from_disk(f"{folder.name}/train").with_format("torch")
test = datasets.load_from_disk(f"{folder.name}/test").with_format("torch")

net = Classifier()
model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
model.fit(train, test, epochs=2, batch_size=32)
print(f"test accuracy {model.evaluate(test, verbose=0)['acc']:.4f}")
