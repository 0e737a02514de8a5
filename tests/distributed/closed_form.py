"""A network whose every number is known: one weight w, output w * x, loss the mean output.

The gradient is the mean of the samples, whatever w is: with SGD(lr=1) a step subtracts the mean of its samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import hapi


class Line(nn.Module):
    """w * x; notes the samples that it gets in train mode."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, weight)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.extend(x.flatten().tolist())
        return self.layer(x)

    @property
    def value(self) -> float:
        return float(self.layer.weight.detach())


def mean_output(outputs: Tensor, labels: Any = None) -> Tensor:
    return outputs.mean()


def ramp(n: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """x = first, first + 1, ... as (n, 1), and zeros as labels."""
    return torch.arange(first, first + n, dtype=torch.float32)[:, None], torch.zeros(n, 1)


def ones(n: int) -> tuple[Tensor, Tensor]:
    return torch.ones(n, 1), torch.zeros(n, 1)


class Ramp(Dataset[Any]):
    """The same, sample by sample."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.zeros(1)


def prepared(weight: float = 1.0, metrics: Any = None, **options: Any) -> hapi.Model:
    """A model of one weight, SGD with lr 1."""
    net = Line(weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    return hapi.Model(net).prepare(optimizer, mean_output, metrics, **options)
