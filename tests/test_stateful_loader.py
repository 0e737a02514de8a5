"""torchdata's StatefulDataLoader, the real one: asked for its place, resumed to the bit, no sample loaded twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import hapi

N = 44


class Rows(Dataset[Any]):
    def __init__(self, loaded: list[int]) -> None:
        self.loaded = loaded

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        return torch.full((6,), index / N), index % 3


class Stream(IterableDataset[Any]):
    """Knows its place by itself."""

    def __init__(self, loaded: list[int]) -> None:
        self.loaded = loaded
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < N:
            self.place += 1
            self.loaded.append(self.place - 1)
            yield torch.full((6,), self.place / N), self.place % 3
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Told(hapi.callbacks.Callback):
    """The run is told to stop after so many steps."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if self.model.steps_trained == self.steps:
            os.kill(os.getpid(), signal.SIGTERM)


def trained(
    make: Callable[[list[int]], Any],
    loaded: list[int],
    folder: Path,
    stop: int | None = None,
    resume: bool = False,
    more: Sequence[Any] = (),
) -> tuple[Any, Any]:
    torch.manual_seed(1)
    # Its sampler draws a seed when it is made.
    loader = make(loaded)
    net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3))
    model = hapi.Model(net).prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    history = model.fit(
        loader, epochs=3, save_dir=folder, resume=resume, verbose=0, seed=3, callbacks=[Told(stop), *more]
    )
    return net.state_dict(), history.history


MADE: dict[str, Callable[[list[int]], Any]] = {
    "map-style": lambda loaded: StatefulDataLoader(Rows(loaded), batch_size=4, shuffle=True),
    "map-style with workers": lambda loaded: StatefulDataLoader(
        Rows(loaded), batch_size=4, shuffle=True, num_workers=2
    ),
    "iterable": lambda loaded: StatefulDataLoader(Stream(loaded), batch_size=4),
    "iterable with a worker": lambda loaded: StatefulDataLoader(Stream(loaded), batch_size=4, num_workers=1),
}


# Its own, of torch's.
@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("stop", [4, 15])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if "worker" in kind else kind for kind in MADE]
)
def test_it_goes_on_where_it_was(kind: str, stop: int, tmp_path: Path) -> None:
    loaded: list[int] = []
    straight, history = trained(MADE[kind], [], tmp_path / "straight")
    with pytest.raises(SystemExit):
        trained(MADE[kind], loaded, tmp_path / "cut", stop)
    assert (tmp_path / "cut" / f"step_{stop}.pt").exists()
    resumed, resumed_history = trained(MADE[kind], loaded, tmp_path / "cut", resume=True)
    assert all(map(torch.equal, straight.values(), resumed.values()))
    assert resumed_history == history
    # Workers load in processes of their own.
    assert len(loaded) == (0 if "worker" in kind else 3 * N)


class NoisyRows(Rows):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(6), y


class Noisy(StatefulDataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield x + 0.1 * torch.randn(6), y


NOISY: dict[str, Callable[[list[int]], Any]] = {
    "map-style": lambda loaded: StatefulDataLoader(NoisyRows(loaded), batch_size=4, shuffle=True),
    "a subclass": lambda loaded: Noisy(NoisyRows(loaded), batch_size=4, shuffle=True),
    "a sampler that redraws": lambda loaded: Noisy(
        NoisyRows(loaded), batch_size=4, sampler=torch.utils.data.SubsetRandomSampler(range(N))
    ),
    "workers": lambda loaded: Noisy(Rows(loaded), batch_size=4, shuffle=True, num_workers=1),
    "workers that stay": lambda loaded: Noisy(
        Rows(loaded), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("stop", [4, 11, 15])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if "worker" in kind else kind for kind in NOISY]
)
def test_its_noise_goes_on_too(kind: str, stop: int, tmp_path: Path) -> None:
    straight, history = trained(NOISY[kind], [], tmp_path / "straight")
    with pytest.raises(SystemExit):
        trained(NOISY[kind], [], tmp_path / "cut", stop)
    resumed, resumed_history = trained(NOISY[kind], [], tmp_path / "cut", resume=True)
    assert all(map(torch.equal, straight.values(), resumed.values()))
    assert resumed_history == history


class Shuffled(IterableDataset[Any]):
    """Without a state: all of it is read again."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.full((6,), i / N) + 0.1 * torch.randn(6), i % 3) for i in torch.randperm(N).tolist()])


class Stateless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.full((6,), i / N), i % 3) for i in range(N)])


class From(Stream):
    """The place that is loaded is where its next pass starts; a pass ends with its state there."""

    def __init__(self, loaded: list[int]) -> None:
        super().__init__(loaded)
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.start = self.start, 0
        for self.place in range(first + 1, N + 1):
            yield torch.full((6,), self.place / N) + 0.1 * torch.randn(6), self.place % 3

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


class Part:
    """Batches, of a rank's own."""

    sharded = True

    def __init__(self, loaded: list[int]) -> None:
        self.rows = From(loaded)
        self.state_dict, self.load_state_dict = self.rows.state_dict, self.rows.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.rows:
            yield x[None], torch.tensor([y])


def with_generator(loaded: list[int], workers: int = 0) -> Any:
    generator = torch.Generator().manual_seed(8)
    return StatefulDataLoader(Rows(loaded), batch_size=4, shuffle=True, generator=generator, num_workers=workers)


TWICE: dict[str, Callable[[list[int]], Any]] = {
    "no state": lambda loaded: StatefulDataLoader(Shuffled(), batch_size=4),
    "no state, a worker": lambda loaded: StatefulDataLoader(Stateless(), batch_size=4, num_workers=1),
    "a generator": with_generator,
    "a generator, a worker": lambda loaded: with_generator(loaded, 1),
    "starts where it ended": lambda loaded: StatefulDataLoader(From(loaded), batch_size=4),
    "starts where it ended, without a loader": Part,
}


class KilledAtItsEnd(hapi.callbacks.Callback):
    """Ends the run when an epoch's checkpoint is there."""

    _place = 10**6

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if "worker" in kind else kind for kind in TWICE]
)
def test_a_run_is_resumed_more_than_once(kind: str, tmp_path: Path) -> None:
    """Within an epoch, within it again, and at its edge."""
    straight, history = trained(TWICE[kind], [], tmp_path / "straight")
    for stop in (3, 6):
        with pytest.raises(SystemExit):
            trained(TWICE[kind], [], tmp_path / "cut", stop, resume=stop > 3)
    with pytest.raises(KeyboardInterrupt):
        trained(TWICE[kind], [], tmp_path / "cut", resume=True, more=[KilledAtItsEnd()])
    resumed, resumed_history = trained(TWICE[kind], [], tmp_path / "cut", resume=True)
    assert all(map(torch.equal, straight.values(), resumed.values()))
    assert resumed_history == history
