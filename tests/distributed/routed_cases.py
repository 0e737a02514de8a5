"""Networks of which a batch reaches only a part: the part depends on the samples, so on step and rank."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

import hapi

PARTS = 3


@dataclass(frozen=True)
class Routes:
    """Which part of the network each sample goes through, and how it is trained."""

    number: int
    world: int
    batch: int
    """Of the whole step."""
    accumulate: int
    optimizer: str
    routes: tuple[int, ...]
    """Of each sample: the number of a part, or -1 for none."""
    counted: bool
    """Whether the loss knows its own weight."""
    frozen: int | None
    """A part that does not train."""
    spare: bool
    """Whether there is a layer that no sample ever reaches."""


def draw(seed: int, number: int) -> Routes:
    rng = random.Random(f"routes {seed}/{number}")
    world = rng.choice((2, 2, 3, 4))
    # Runs of equal routes, so that whole steps, windows and ranks go without a part.
    routes = chain.from_iterable([rng.randrange(-1, PARTS)] * rng.randint(1, 6) for _ in range(rng.randint(1, 8)))
    return Routes(
        number=number,
        world=world,
        batch=rng.randint(1, 3 * world),
        accumulate=rng.choice((1, 1, 2, 3)),
        optimizer=rng.choice(("momentum", "decay", "adam")),
        # Often the first step reaches all parts on all ranks.
        routes=(*(n % PARTS for n in range(rng.choice((0, PARTS * world)))), *routes),
        counted=rng.random() < 0.4,
        frozen=rng.choice((None, None, 0, PARTS - 1)),
        spare=rng.random() < 0.3,
    )


class Routed(nn.Module):
    """A trunk for all samples, parts for some."""

    def __init__(self, case: Routes) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.trunk = nn.Linear(2, 3)
        self.parts = nn.ModuleList([nn.Linear(2, 3) for _ in range(PARTS)])
        self.spare = nn.Linear(2, 3) if case.spare else None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if case.frozen is not None:
            self.parts[case.frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, 3), the route and two features."""
        outputs = self.trunk(x[:, 1:])
        for number, part in enumerate(self.parts):
            rows = x[:, 0] == number
            if bool(rows.any()):
                outputs = outputs.index_add(0, rows.nonzero()[:, 0], part(x[rows, 1:]))
        return outputs


def data_of(case: Routes) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.number)
    routes = torch.tensor(case.routes, dtype=torch.float32)[:, None]
    x = torch.cat([routes, torch.randn(len(routes), 2, generator=generator)], 1)
    return x, torch.randint(3, (len(routes),), generator=generator)


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if name == "decay":
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5)
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-3)


def train(case: Routes) -> list[Tensor]:
    """The weights after two epochs."""
    net = Routed(case)
    weight = torch.ones(3) if case.counted else None
    loss: Any = nn.CrossEntropyLoss(weight=weight) if case.counted else _mean
    model = hapi.Model(net).prepare(make_optimizer(case.optimizer, net.parameters()), loss)
    model.fit(
        data_of(case), epochs=2, global_batch_size=case.batch, accumulate_grad_batches=case.accumulate, shuffle=False,
        verbose=0,
    )  # fmt: skip
    return [parameter.detach().clone() for parameter in net.parameters()]


def _mean(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels)


def follow(case: Routes) -> list[Tensor]:
    """The same in plain torch, in one process, on whole windows."""
    net = Routed(case)
    x, y = data_of(case)
    optimizer = make_optimizer(case.optimizer, net.parameters())
    window = case.batch * case.accumulate
    for first in [*range(0, len(x), window)] * 2:
        optimizer.zero_grad()
        rows = slice(first, first + window)
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]
