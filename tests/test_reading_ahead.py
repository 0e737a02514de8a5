"""Workers begin with the next epoch while the last step of one is trained, and what follows it is done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import hapi

SAMPLES = 12


class Noisy(Dataset[Any]):
    """Samples drawn anew in each epoch; each that is read is written down, with its epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = -1
        path.touch()

    def __len__(self) -> int:
        return SAMPLES

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self.path.open("a") as file:
            file.write(f"{self.epoch}\n")
        return torch.randn(3) + index / SAMPLES + self.epoch, torch.rand(1)

    def read(self) -> list[int]:
        return sorted(map(int, self.path.read_text().split()))


class Watch(hapi.callbacks.Callback):
    """At the end of an epoch: how many samples of later ones have been read, at most within some seconds."""

    def __init__(self, data: Noisy, wanted: list[int], stop_after: int | None = None) -> None:
        self.data, self.wanted, self.stop_after = data, wanted, stop_after
        self.seen: list[int] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        until = time.monotonic() + 20
        while self.later(epoch) < self.wanted[epoch] and time.monotonic() < until:
            time.sleep(0.01)
        self.seen.append(self.later(epoch))
        self.model.stop_training |= epoch == self.stop_after

    def later(self, epoch: int) -> int:
        return sum(read > epoch for read in self.data.read())


def trained(data: Noisy, watch: Watch | None = None, **options: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.01), nn.MSELoss())
    history = model.fit(data, batch_size=2, verbose=0, callbacks=watch or [], seed=3, **options)
    return list(net.parameters()), history.history


def test_workers_read_over_the_ends_of_epochs_and_nothing_beyond_the_last(tmp_path: Path) -> None:
    data = Noisy(tmp_path / "read")
    # Two workers have two batches of two samples each before them.
    watch = Watch(data, [8, 8, 0])
    weights, values = trained(data, watch, epochs=3, num_workers=2)
    assert watch.seen == [8, 8, 0]
    assert data.read() == sorted([0, 1, 2] * SAMPLES)
    alone = Noisy(tmp_path / "alone")
    others, wanted = trained(alone, epochs=3)
    assert values == wanted and all(map(torch.equal, weights, others))


def test_a_run_may_end_where_workers_have_read_ahead(tmp_path: Path) -> None:
    data = Noisy(tmp_path / "read")
    watch = Watch(data, [8, 8], stop_after=1)
    weights, values = trained(data, watch, epochs=9, num_workers=2)
    assert watch.seen == [8, 8]
    assert data.read()[: 2 * SAMPLES] == sorted([0, 1] * SAMPLES) and max(data.read()) == 2
    others, wanted = trained(Noisy(tmp_path / "alone"), epochs=2)
    assert values == wanted and all(map(torch.equal, weights, others))


class Counting(Noisy):
    """A data set with a place of its own to be kept: it goes on from there after a restart."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


@pytest.mark.parametrize("kind, options", [(Noisy, {"num_iters": 9}), (Counting, {})])
def test_nothing_is_read_ahead_of_what_may_not_follow(tmp_path: Path, kind: type[Noisy], options: Any) -> None:
    data = kind(tmp_path / "read")
    watch = Watch(data, [0, 0])
    trained(data, watch, epochs=2, num_workers=2, **options)
    assert watch.seen == [0, 0]
