"""Generators and plain iterables: samples from an IterableDataset, batches from an object that starts anew each time.

    python examples/data/iterables.py
    torchrun --nproc-per-node 2 examples/data/iterables.py

A generator itself ends after one epoch; hapi refuses it. Several processes and workers share out what is read, each
sample once, without a word about it here.
"""

import csv
import tempfile

import torch
from torch import nn
from torch.utils.data import IterableDataset

import hapi
from hapi.datasets import FashionMNIST


def written(folder, mode, count):
    """Stands for a file of yours that does not fit into memory: a label and 784 pixels a line."""
    sample = FashionMNIST(mode=mode, sample=True)
    with open(f"{folder}/{mode}.csv", "w", newline="") as file:
        for image, label in zip(sample.data[:count], sample.targets[:count], strict=True):
            csv.writer(file).writerow([int(label), *image.flatten().tolist()])
    return file.name


class Lines(IterableDataset):
    """Samples, one a line, in an order that a buffer shuffles."""

    def __init__(self, path, buffer):
        self.path, self.buffer = path, buffer

    def __iter__(self):
        kept = []
        with open(self.path, newline="") as file:
            for label, *pixels in csv.reader(file):
                kept.append((torch.tensor([float(pixel) / 255 for pixel in pixels]), int(label)))
                if len(kept) > self.buffer:
                    yield kept.pop(int(torch.randint(len(kept), ())))
        yield from kept


class Batches:
    """Batches, from a function that makes a generator."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __iter__(self):
        return self.function(*self.arguments)


def in_batches(path, size):
    samples = list(Lines(path, buffer=0))
    for first in range(0, len(samples), size):
        pixels, labels = zip(*samples[first : first + size], strict=True)
        yield torch.stack(pixels), torch.tensor(labels)


hapi.seed(0)
folder = tempfile.TemporaryDirectory()
train = Lines(written(folder.name, "train", 1500), buffer=200)
test = Batches(in_batches, written(folder.name, "test", 501), 32)

net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
model.fit(train, epochs=2, batch_size=32)
print(f"test accuracy {model.evaluate(test, verbose=0)['acc']:.4f}")
