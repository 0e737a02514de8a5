"""What runs around the user's data set inside a DataLoader, in worker processes too."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from hapi import rng


class KeyedBatch(list[int]):
    """The indices of a batch, with the key from which its random streams start."""

    def __init__(self, indices: list[int], key: int) -> None:
        super().__init__(indices)
        self.key = key

    def __reduce__(self) -> tuple[type[KeyedBatch], tuple[list[int], int]]:
        # Lists are pickled without attributes of a subclass; the key has to reach the worker.
        return KeyedBatch, (list(self), self.key)


class KeyedItem(int):
    """One index with a key, for loaders without automatic batching (`batch_size=None`)."""

    key: int

    def __new__(cls, index: int, key: int) -> KeyedItem:
        """An int with a key."""
        item = super().__new__(cls, index)
        item.key = key
        return item

    def __reduce__(self) -> tuple[type[KeyedItem], tuple[int, int]]:
        return KeyedItem, (int(self), self.key)


class KeyedDataset(Dataset[Any]):
    """The user's data set, with its random streams set for each batch before the batch is fetched.

    An augmentation then depends on seed, epoch, step and rank alone: not on how many workers there are, nor on what
    was fetched before. torch's fetcher runs `collate_fn` right after, so that is covered too.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, KeyedItem):
            rng.set_streams(index.key)
        return self.dataset[int(index) if isinstance(index, KeyedItem) else index]

    def __getitems__(self, indices: list[int]) -> Any:
        if isinstance(indices, KeyedBatch):
            rng.set_streams(indices.key)
            indices = list(indices)
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch(indices) if fetch is not None else [self.dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        # A user's worker_init_fn reads attributes of `get_worker_info().dataset`.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


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
