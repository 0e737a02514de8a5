"""An iterable data set shared out over ranks and workers: how it is found whether it does that by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from hapi import rng
from hapi.data.epochs import set_epoch
from hapi.data.streams import PassStart, declares_shards
from hapi.distributed import group


class ShardedIterable(IterableDataset[Any]):
    """Yields `(position, item)` for this rank's and this worker's share of an iterable data set.

    Whether the data set shards itself is found by watching it until its first item:

    - It asks for its rank: it shards over ranks. It starts again, and is left to share out workers as it likes.
    - It reads the worker info, which counts workers over all ranks here: it shards over both.
    - A `worker_init_fn` has set attributes on it: it shards over workers; the ranks take turns.
    - None of these: every shard walks through all of it, with the same random streams, and takes its turn.

    A turn is a batch: item by item, the batches of a rank would not be those of one process. Turns go over the ranks
    first, then over workers, as a DataLoader asks its workers: together the ranks' n-th batches are a stretch of the
    data, whatever the number of workers, and a loader with `drop_last` leaves out the end alone.

    Items of a data set that shards itself have position -1: their order is its own. What cannot be watched (a rank read
    from the environment) is said by an attribute `sharded = True`.

    The state of a data set that has one (`state_dict`, `load_state_dict`) is kept in the process that reads it; see
    `PassStart`.
    """

    dataset: Any

    def __init__(self, dataset: Iterable[Any], rank: int, world_size: int, seed: int, turn: int) -> None:
        own = {"dataset": dataset, "_rank": rank, "_world_size": world_size, "_seed": seed, "_turn": turn}
        # In shared memory: workers that live on have copies of everything else.
        epoch: Any = torch.zeros((), dtype=torch.int64)
        epoch.share_memory_()
        self.__dict__.update(own, _epoch=epoch, _set_up_by_worker=False)
        self.__dict__.update(start=PassStart(dataset))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next passes, in workers too."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        set_epoch(self.dataset, int(self._epoch))
        self.start.begin()
        info = torch_worker.get_worker_info()
        workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
        shards, shard = self._world_size * workers, worker * self._world_size + self._rank
        if declares_shards(self.dataset):
            return ((-1, item) for item in self._items(None, shard, own=True))
        if self._set_up_by_worker:
            return self._in_turns(self._items(None, shard, worker), self._rank, self._world_size, ordered=False)
        with group.watched_rank() as asked:
            shown = _WatchedInfo(shard, shards, self.dataset)
            items = self._items(shown, shard)
            first = list(islice(items, 1))
        if asked.was_read and self._world_size > 1:
            shards, shard = workers, worker
            shown = _WatchedInfo(shard, shards, self.dataset)
            self.start.return_to()
            items = self._items(shown, worker * self._world_size + self._rank, self._rank)
            first = list(islice(items, 1))
        whole = (item for part in (first, items) for item in part)
        if shown.was_read and shards > 1:
            return ((-1, item) for item in whole)
        return self._in_turns(whole, shard, shards, ordered=not asked.was_read or self._world_size == 1)

    def _in_turns(self, items: Iterator[Any], shard: int, shards: int, ordered: bool) -> Iterator[tuple[int, Any]]:
        return ((n if ordered else -1, item) for n, item in enumerate(items) if n // self._turn % shards == shard)

    def _items(self, shown: _WatchedInfo | None, place: int, part: int = 0, *, own: bool = False) -> Iterator[Any]:
        """The data set's items.

        Random streams start alike everywhere: who shuffles all of the data and then takes a share counts on it. From
        the second item on they are alike only for those who read the same part and take turns. Who reads alone has new
        ones for each batch, so that what training draws in between does not matter.

        Args:
            shown: What stands in the place of torch's worker info while items are made; None: that itself.
            place: The number of this worker over all ranks.
            part: The number of the part that it reads with others.
            own: Whether nobody else reads what it reads. Found out from `shown` too.
        """
        items: Iterator[Any] | None = None
        ended = object()
        for number in count():
            alone = own or (shown is not None and shown.was_read)
            if number < 2 or not alone or number % self._turn == 0:
                self._set_streams(number, place if alone else part, alone)
            with _in_place_of_worker_info(shown):
                items = iter(self.dataset) if items is None else items
                item = next(items, ended)
                if item is ended and number == 0 and self.start.was_loaded:
                    self._set_streams(0, part, False)
                    items = iter(self.dataset)
                    item = next(items, ended)
            if item is ended:
                return
            yield item

    def _set_streams(self, number: int, place: int, alone: bool) -> None:
        where = (int(alone), place) if number else ()
        rng.set_streams(rng.mix(self._seed, rng.ORDER, int(self._epoch), number, *where))

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Called by a user's worker_init_fn, on `get_worker_info().dataset`: torch's documented way to share out.
        setattr(self.dataset, name, value)
        if torch_worker.get_worker_info() is not None:
            self.__dict__["_set_up_by_worker"] = True

    def __reduce__(self) -> Any:
        arguments = (self.dataset, self._rank, self._world_size, self._seed, self._turn)
        return _remade, (arguments, self._epoch)


def _remade(arguments: tuple[Any, ...], epoch: torch.Tensor) -> ShardedIterable:
    made = ShardedIterable(*arguments)
    made.__dict__["_epoch"] = epoch
    return made


@contextmanager
def _in_place_of_worker_info(shown: _WatchedInfo | None) -> Iterator[None]:
    real: Any = torch_worker._worker_info
    torch_worker._worker_info = real if shown is None else cast(Any, shown)
    try:
        yield
    finally:
        torch_worker._worker_info = real


class PositionedCollate:
    """Collates the items of a `ShardedIterable`, keeping their positions beside the batch."""

    def __init__(self, collate: Callable[[Any], Any], batched: bool, told: bool = True) -> None:
        self._collate = collate
        self._batched = batched
        self._told = told

    def __call__(self, items: Any) -> Any:
        """The positions, and the batch as the user's function makes it; the batch alone where they are not `told`."""
        positions, own = zip(*items, strict=True) if self._batched else items
        batch = self._collate(list(own) if self._batched else own)
        return (torch.tensor(positions), batch) if self._told else batch


class _WatchedInfo:
    """Stands in for torch's worker info and notes whether it was read."""

    def __init__(self, shard: int, shards: int, dataset: Any) -> None:
        self._shard = shard
        self._shards = shards
        self.dataset = dataset
        self.seed = torch.initial_seed()
        self.was_read = False

    @property
    def id(self) -> int:
        """This worker's number among the workers of all ranks."""
        self.was_read = True
        return self._shard

    @property
    def num_workers(self) -> int:
        """The workers of all ranks."""
        self.was_read = True
        return self._shards
