"""The full data sets at several world sizes: the same accuracy to the last sample, the same losses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import alone, same
from torch import nn

import hapi
from hapi.datasets import CIFAR10, MNIST

KINDS = {"MNIST": (MNIST, 784), "CIFAR10": (CIFAR10, 3072)}


def model_for(kind: str) -> hapi.Model:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(KINDS[kind][1], 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    metrics = [hapi.metrics.Accuracy(topk=(1, 5)), hapi.metrics.F1(num_classes=10, average="macro")]
    return hapi.Model(net).prepare(optimizer, nn.CrossEntropyLoss(), metrics)


def evaluate(kind: str, root: str, batch: int) -> tuple[dict[str, float], int]:
    model = model_for(kind)
    with warnings.catch_warnings():
        # Files that are not byte for byte the published ones serve as well here.
        warnings.filterwarnings("ignore", ".*not byte for byte the published one")
        data = KINDS[kind][0](root, mode="test")
    outputs = model.predict(data, batch_size=batch, verbose=0)
    right = int((outputs.argmax(1) == data.targets).sum())
    return model.evaluate(data, batch_size=batch, verbose=0), right


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_agrees_to_the_last_sample(ranks, data_home, kind):
    wanted, right = alone(evaluate, kind, str(data_home), 256)
    assert wanted["acc_top1"] == right / 10_000
    for world, batch in ((2, 200), (3, 77), (4, 256)):
        values, correct = same(ranks(world).run(evaluate, kind, str(data_home), batch))
        assert correct == right
        assert values == pytest.approx(wanted, rel=1e-6)
        assert values["acc_top1"] == wanted["acc_top1"]


def train(root: str) -> dict[str, list[float]]:
    model = model_for("MNIST")
    history = model.fit(MNIST(root, mode="train"), MNIST(root, mode="test"), global_batch_size=64, seed=3, verbose=0)
    return history.history


@pytest.mark.slow
def test_an_epoch_of_mnist_ends_with_the_same_losses(ranks, data_home):
    wanted = alone(train, str(data_home))
    assert wanted["val_loss"][0] < 1.2
    for world in (2, 4):
        got: Any = same(ranks(world).run(train, str(data_home)))
        assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert got["val_loss"] == pytest.approx(wanted["val_loss"], rel=1e-5)
