"""What runs around the user's data set inside a DataLoader, in worker processes too."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hapi import rng
from hapi.data.epochs import set_epoch


class Keyed(NamedTuple):
    """What a sampler yields, an index or a batch of them, with the key from which its random streams start."""

    index: Any
    key: int
    epoch: int


class KeyedDataset(Dataset[Any]):
    """The user's data set, with its random streams set for each batch before the batch is fetched.

    An augmentation then depends on seed, epoch, step and rank alone: not on how many workers there are, nor on what
    was fetched before. torch's fetcher runs `collate_fn` right after, so that is covered too.

    Attributes are read from and written to the user's data set: a `worker_init_fn` finds and changes them on
    `get_worker_info().dataset`.
    """

    dataset: Any

    def __init__(self, dataset: Any) -> None:
        self.__dict__.update(dataset=dataset, _epoch=None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, keyed: Any) -> Any:
        return self.dataset[self._unlocked(keyed)]

    def __getitems__(self, keyed: Any) -> Any:
        indices = self._unlocked(keyed)
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch(indices) if fetch is not None else [self.dataset[index] for index in indices]

    def _unlocked(self, keyed: Any) -> Any:
        """The index itself, once the random streams are set from its key."""
        if not isinstance(keyed, Keyed):
            return keyed
        if get_worker_info() is not None and keyed.epoch != self._epoch:
            # A worker has a copy of the data set, which nobody else can tell.
            self.__dict__["_epoch"] = keyed.epoch
            set_epoch(self.dataset, keyed.epoch)
        rng.set_streams(keyed.key)
        return keyed.index

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __reduce__(self) -> tuple[type[KeyedDataset], tuple[Any]]:
        return KeyedDataset, (self.dataset,)


class RefillableSampler:
    """A batch sampler whose batches are set anew for each epoch, so that persistent workers live on."""

    def __init__(self) -> None:
        self._batches: Iterator[Any] = iter(())

    def refill(self, batches: Iterator[Any]) -> None:
        """Set the batches that the next pass over the loader takes."""
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches


class WorkerInit:
    """`worker_init_fn`: the signals that tell a run to stop are for the main process; then the user's own function.

    A launcher signals whole process groups. A worker that died of it would turn the main process's orderly stop
    into "DataLoader worker exited unexpectedly".
    """

    def __init__(self, user: Callable[[int], Any] | None) -> None:
        self._user = user

    def __call__(self, worker_id: int) -> None:
        """Called by torch in each worker."""
        for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", None)):
            if number is not None:
                signal.signal(number, signal.SIG_IGN)
        torch.set_num_threads(1)
        if self._user is not None:
            self._user(worker_id)


class GivenWorkers:
    """The workers of a loader that is read as the user gave it: stop signals are kept from them, and `end` ends them.

    A copy with a `worker_init_fn` of ours would not do: what a loader counts, and where it stands, is asked of itself.

    Args:
        data: The loader, or what has one as an attribute, or in a list that is one, and passes its batches on.
            Anything else has no workers here.
    """

    def __init__(self, data: Any) -> None:
        values = list(getattr(data, "__dict__", {}).values())
        parts = [data, *values, *(part for value in values if isinstance(value, list) for part in value)]
        self._loaders = [part for part in parts if isinstance(part, DataLoader) and part.num_workers]
        # Those of passes that have ended are gone.
        self._started: weakref.WeakSet[Any] = weakref.WeakSet()

    def reading(self, data: Iterable[Any]) -> Iterator[Any]:
        """A pass over the data, whose workers may start at any of its batches."""
        with self.starting():
            items = iter(data)
        ended = object()
        while True:
            with self.starting():
                item = next(items, ended)
            if item is ended:
                return
            yield item

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Within, workers that a loader starts are spared."""
        for loader in self._loaders:
            # Found before the class's own, by whatever __iter__ calls it.
            vars(loader)["_get_iterator"] = partial(self._start, loader)
        try:
            yield
        finally:
            for loader in self._loaders:
                vars(loader).pop("_get_iterator", None)

    def _start(self, loader: DataLoader[Any]) -> Any:
        given = loader.worker_init_fn
        loader.worker_init_fn = WorkerInit(given)
        try:
            started = type(loader)._get_iterator(loader)
        finally:
            loader.worker_init_fn = given
        self._started.add(started)
        return started

    @property
    def would_stay(self) -> bool:
        """Whether workers outlive their pass."""
        return any(loader.persistent_workers for loader in self._loaders)

    def end(self) -> None:
        """End them: see `Feed.close`. A loader that has kept them starts others at its next pass."""
        for started in list(self._started):
            started._shutdown_workers()
        for loader in self._loaders:
            if loader.persistent_workers and loader._iterator in self._started:
                loader._iterator = None
