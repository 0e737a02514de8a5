"""Data without indices: iterable data sets, lists of batches, loaders that shard themselves."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from itertools import count, islice
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from hapi import batch as batches
from hapi import rng
from hapi.data.epochs import set_epoch
from hapi.data.feeds import BEGINNING, Feed, Local, Piece, Start, in_step
from hapi.data.workers import GivenWorkers
from hapi.distributed import group

T = TypeVar("T")


def drawn_alike(data: Iterable[T], seed: int, epoch: int, at_once: int = 1) -> Iterator[T]:
    """Iterate over something that may draw its order on the way, from the global generators: alike on every rank.

    Args:
        data: A sampler, or a re-iterable of batches.
        seed: Of the order.
        epoch: Whose order.
        at_once: How many items to draw at once.
    """
    stream = rng.Stream(rng.mix(seed, rng.ORDER, epoch))
    items: Iterator[T] | None = None
    while True:
        with stream.running():
            items = iter(data) if items is None else items
            drawn = list(islice(items, at_once))
        yield from drawn
        if len(drawn) < at_once:
            return


class SelfShardedFeed(Feed):
    """A loader, or any iterable of batches, that is taken as it is: it shards itself, or there is one process.

    One with `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader, is asked after each batch where it
    stands; of any other, what an earlier process has trained on is read again.

    Random streams start alike on every rank: who shuffles all of the data before taking a part of it counts on it, as
    scripts do. From the second batch on each has streams of its own, whatever training steps have drawn in between.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, seed: int, lockstep: bool) -> None:
        super().__init__(device)
        self._loader = loader
        self._seed = seed
        self._lockstep = lockstep
        self._workers = GivenWorkers(loader)
        self.ordered = group.get_world_size() == 1
        if self.ordered and isinstance(loader, Sized) and not _is_iterable_loader(loader):
            self.steps = len(loader)
        # Only training is gone on with: an evaluation need not ask.
        stateful = lockstep and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._stateful: Any = loader if stateful else None
        # After each of the last two batches: one may have been read ahead.
        self._states: deque[Any] = deque(maxlen=2)
        self._ahead = 0
        self._has_loaded = False
        self._at_close: Any = None

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`."""
        set_epoch(self._loader, epoch)
        self.restore(start.data)
        skipped = start.step if self._stateful is None or start.data is None else 0
        self._states.clear()
        self._ahead = -skipped
        for piece in in_step(self._numbered(epoch, start.step - skipped), self._lockstep, skipped):
            self._ahead -= 1
            yield piece

    def _numbered(self, epoch: int, first: int) -> Iterator[Local]:
        self._set_out(epoch)
        rank, empty = group.get_rank(), 0
        if first:
            rng.set_streams(rng.mix(self._seed, rng.FETCH, epoch, first, empty, rank))
        # Streams are keyed by the batches that had samples before: so far a state that is loaded again knows its place.
        given = first
        for number, batch in enumerate(self._workers.reading(self._loader), first):
            size = batches.size_of(batch)
            given, empty = (given + 1, 0) if size else (given, empty + 1)
            if size:
                self._ahead += 1
                if self._stateful is not None:
                    self._states.append(copy.deepcopy(self._stateful.state_dict()))
            yield batch, size, number
            rng.set_streams(rng.mix(self._seed, rng.FETCH, epoch, given, empty, rank))

    def _set_out(self, epoch: int) -> None:
        key = rng.mix(self._seed, rng.ORDER, epoch)
        rng.set_streams(key)
        if self._has_loaded and isinstance(self._loader, DataLoader):
            # torchdata's takes a loaded state in when it is asked for its own, and draws as at the start of a pass.
            # Were it to happen as a batch is read, that one would have other streams than in a run that was not ended.
            self._ask()
            rng.set_streams(key)
        self._has_loaded = False

    def state(self, within: bool) -> Any:
        """See `Feed.state`. A batch that is read ahead belongs to the next process."""
        if self._stateful is None:
            return None
        if not within or not self._states:
            return self._ask() if self._at_close is None else self._at_close
        # Below zero where this rank's data has ended before the others'.
        return self._states[-1 - min(max(0, self._ahead), len(self._states) - 1)]

    def _ask(self) -> Any:
        with self._workers.starting():
            return self._stateful.state_dict()

    def restore(self, state: Any) -> None:
        """See `Feed.restore`."""
        if state is not None and self._stateful is not None:
            self._stateful.load_state_dict(state)
            self._has_loaded = True

    def close(self) -> None:
        """See `Feed.close`."""
        if self._stateful is not None and self._workers.would_stay:
            # Asked later it would start workers anew to find out. After an error there may be nothing to be had.
            with suppress(Exception):
                self._at_close = copy.deepcopy(self._ask())
        self._workers.end()


class BatchesFeed(Feed):
    """A list (or re-iterable) of ready batches, dealt to the ranks in turn: step s takes batches sW ... sW+W-1."""

    def __init__(self, data: Iterable[Any], device: torch.device, seed: int) -> None:
        super().__init__(device)
        self._data = data
        self._seed = seed
        self._workers = GivenWorkers(data)
        self._world_size = group.get_world_size()
        self._rank = group.get_rank()
        self.aligned, self.stride, self.unit = True, self._world_size, "batches"
        if isinstance(data, Sized):
            self.steps = -(-len(data) // self._world_size)

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`."""
        set_epoch(self._data, epoch)
        # Every rank walks through all of it. A batch without samples is none.
        all_batches = self._data if isinstance(self._data, list) else self._drawn(epoch)
        sized = ((batch, size) for batch in all_batches if (size := batches.size_of(batch)))
        stream = islice(sized, start.taken, None)
        position = start.taken + self._rank
        while dealt := list(islice(stream, self._world_size)):
            batch, size = dealt[self._rank] if self._rank < len(dealt) else (None, 0)
            yield Piece(batch, size, sum(size for _, size in dealt), position)
            position += self._world_size

    def _drawn(self, epoch: int) -> Iterator[Any]:
        return drawn_alike(self._workers.reading(self._data), self._seed, epoch, at_once=self._world_size)

    def close(self) -> None:
        """See `Feed.close`."""
        self._workers.end()


class IterableFeed(Feed):
    """An `IterableDataset`: each item once over ranks and workers, unless it shards itself."""

    def __init__(self, loader: DataLoader[Any], device: torch.device, lockstep: bool) -> None:
        super().__init__(device)
        self._loader = loader
        self._lockstep = lockstep

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`. What an earlier process has trained on is read again, and passed over."""
        set_epoch(self._loader, epoch)
        return in_step(self._numbered(), self._lockstep, start.step)

    def _numbered(self) -> Iterator[Local]:
        for positions, batch in self.read(self._loader):
            if self.ordered and bool((positions < 0).any()):
                self.ordered = False
            whole = positions.dim() == 0
            yield batch, batches.size_of(batch), int(positions) if whole else positions


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
    """

    dataset: Any

    def __init__(self, dataset: Iterable[Any], rank: int, world_size: int, seed: int, turn: int) -> None:
        own = {"dataset": dataset, "_rank": rank, "_world_size": world_size, "_seed": seed, "_turn": turn}
        # In shared memory: workers that live on have copies of everything else.
        epoch: Any = torch.zeros((), dtype=torch.int64)
        epoch.share_memory_()
        self.__dict__.update(own, _epoch=epoch, _set_up_by_worker=False)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next passes, in workers too."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        set_epoch(self.dataset, int(self._epoch))
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
        the second item on they are alike only for those who read the same part and take turns.

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
            if number < 2 or not alone:
                where = (int(alone), place if alone else part) if number else ()
                rng.set_streams(rng.mix(self._seed, rng.ORDER, int(self._epoch), number, *where))
            with _in_place_of_worker_info(shown):
                items = iter(self.dataset) if items is None else items
                item = next(items, ended)
            if item is ended:
                return
            yield item

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

    def __init__(self, collate: Callable[[Any], Any], batched: bool) -> None:
        self._collate = collate
        self._batched = batched

    def __call__(self, items: Any) -> tuple[torch.Tensor, Any]:
        """The positions, and the batch as the user's function makes it."""
        if not self._batched:
            return torch.tensor(items[0]), self._collate(items[1])
        return torch.tensor([position for position, _ in items]), self._collate([item for _, item in items])


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


def shards_itself(loader: Any) -> bool:
    """Whether a loader, its sampler or its data set already gives each rank its own part."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    )
    return any(declares_shards(part) for part in parts)


def declares_shards(part: Any) -> bool:
    """Whether an object says that it gives each rank its own part."""
    if part is None:
        return False
    declared = getattr(part, "sharded", None)
    if isinstance(declared, bool):
        return declared
    # Only for a process that reads data.
    from hapi.data import foreign

    return (hasattr(part, "num_replicas") and hasattr(part, "rank")) or foreign.splits_among_ranks(part)


def _is_iterable_loader(loader: Any) -> bool:
    # len() of a loader over an iterable data set is a guess.
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
