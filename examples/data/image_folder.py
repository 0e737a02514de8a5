"""Folders of images, one folder a class: torchvision's ImageFolder, with augmentation in workers.

    python examples/data/image_folder.py
    torchrun --nproc-per-node 2 examples/data/image_folder.py

What an augmentation draws depends on the seed, the epoch and the step alone, not on the number of workers.
"""

import os
import tempfile

import torch
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.functional import to_pil_image

import hapi
from hapi.datasets import FashionMNIST

WORKERS = 1
TO_TENSOR = [v2.Grayscale(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


def write_images(folder, mode, count):
    """Stands for images of yours: {folder}/{mode}/{class}/{name}.png."""
    sample = FashionMNIST(mode=mode, sample=True)
    for number in range(count):
        place = f"{folder}/{mode}/{int(sample.targets[number])}"
        os.makedirs(place, exist_ok=True)
        to_pil_image(sample.data[number]).save(f"{place}/{number:05d}.png")


hapi.seed(0)
folder = tempfile.TemporaryDirectory()
for mode, count in (("train", 1500), ("test", 501)):
    write_images(folder.name, mode, count)

augmented = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(28, padding=2), *TO_TENSOR])
train = ImageFolder(f"{folder.name}/train", transform=augmented)
test = ImageFolder(f"{folder.name}/test", transform=v2.Compose(TO_TENSOR))

net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, len(train.classes)))
model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
model.fit(train, test, epochs=2, batch_size=32, num_workers=WORKERS)
print(f"test accuracy {model.evaluate(test, num_workers=WORKERS, verbose=0)['acc']:.4f}")
