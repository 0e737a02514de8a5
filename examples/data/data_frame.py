"""A CSV file or a frame of pandas', with columns of numbers and of categories (the extra `examples`).

    python examples/data/data_frame.py
    torchrun --nproc-per-node 2 examples/data/data_frame.py

Numbers go into one array, each category into one of its codes. As a dict of arrays they lie in memory and are read a
batch at a time; `forward` gets those that it names, the rest are labels.
"""

import tempfile

import pandas
import torch
from torch import nn

import hapi
from hapi.datasets import FashionMNIST

NUMBERS = ["mean", "spread", "top", "bottom", "left", "width"]


def written(folder, mode):
    """Stands for a file of yours: what a look at each image finds, numbers and a word."""
    sample = FashionMNIST(mode=mode, sample=True)
    images = sample.data[:, 0].float() / 255
    halves = images[:, :14].mean((1, 2)), images[:, 14:].mean((1, 2)), images[:, :, :14].mean((1, 2))
    widths = (images.mean(1) > 0.1).sum(1) / 28
    values = torch.stack([images.mean((1, 2)), images.std((1, 2)), *halves, widths], 1)
    frame = pandas.DataFrame(values.numpy(), columns=NUMBERS)
    # A word that says something of the image: where its brightest row is.
    rows = images.mean(2).argmax(1).numpy()
    frame["brightest"] = pandas.cut(rows, [-1, 6, 13, 20, 28], labels=["top", "upper", "lower", "bottom"])
    frame["label"] = sample.targets.numpy()
    frame.to_csv(f"{folder}/{mode}.csv", index=False)
    return f"{folder}/{mode}.csv"


class Tabular(nn.Module):
    def __init__(self, categories):
        super().__init__()
        self.embedding = nn.Embedding(categories, 4)
        self.layers = nn.Sequential(nn.Linear(len(NUMBERS) + 4, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, numbers, brightest):
        return self.layers(torch.cat([numbers, self.embedding(brightest)], 1))


hapi.seed(0)
folder = tempfile.TemporaryDirectory()
train, test = (pandas.read_csv(written(folder.name, mode)) for mode in ("train", "test"))

# Learned from the training data alone, and applied to both.
mean, deviation = train[NUMBERS].mean(), train[NUMBERS].std()
kinds = pandas.CategoricalDtype(sorted(train["brightest"].unique()))


def columns(frame):
    return {
        "numbers": ((frame[NUMBERS] - mean) / deviation).to_numpy("float32"),
        "brightest": frame["brightest"].astype(kinds).cat.codes.to_numpy("int64"),
        "label": frame["label"].to_numpy("int64"),
    }


net = Tabular(len(kinds.categories))
model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
model.fit(columns(train), columns(test), epochs=3, batch_size=32)
print(f"test accuracy {model.evaluate(columns(test), verbose=0)['acc']:.4f}")
