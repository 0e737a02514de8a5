"""Trackers whose service fails on rank 0: the training goes on, or ends, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import same
from torch import nn

import hapi
from hapi.callbacks import tracking
from hapi.distributed import group


class Failing(tracking.Tracker):
    """A service that fails in one of its calls."""

    def __init__(self, where: str) -> None:
        super().__init__(log_freq=1)
        self.where, self.called = where, 0

    def _fails(self, where: str) -> None:
        self.called += 1
        if self.where == where:
            raise OSError("no way there")

    def _start(self, known: str | None) -> tuple[Any, str]:
        self._fails("start")
        return "run", "id"

    def _log(self, values: Any, step: int) -> None:
        self._fails("log")

    def _end(self, run: Any, how: str) -> None:
        self._fails("end")


def train(where: str) -> tuple[list[float], list[float]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(11, 4, generator=generator), torch.randint(3, (11,), generator=generator)
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    callback = Failing(where)
    model = hapi.Model(network).prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    history = model.fit((x, y), (x, y), batch_size=2, epochs=2, seed=3, verbose=0, callbacks=callback)
    assert bool(callback.called) == (group.get_rank() == 0)
    return network.weight.flatten().tolist(), history.history["val_loss"]


@pytest.mark.parametrize("world", [2, 3])
def test_an_error_on_the_way_or_at_the_end_costs_the_others_nothing(ranks, world):
    plain = same(ranks(world).run(train, "nowhere"))
    for where in ("log", "end"):
        assert same(ranks(world).run(train, where)) == plain
