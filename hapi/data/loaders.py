"""The user's own DataLoader, shared out among the ranks without being made anew.

Its batch sampler decides: it is iterated on rank 0, its batches of indices are broadcast in pieces, and step `s` takes
batches `sW ... sW+W-1`, one a rank. The loader that reads them is a shallow copy, so its class, attributes, workers and
collate function are the user's.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from hapi import batch as batches
from hapi import rng
from hapi.data.collate import Collate, Convert
from hapi.data.epochs import set_epoch
from hapi.data.feeds import BEGINNING, Feed, Piece, Start, in_step, of_size
from hapi.data.given_order import Order, OrderState, known_length, length
from hapi.data.streams import (
    IterableFeed,
    SelfShardedFeed,
    declares_shards,
    drawn_alike,
    shards_itself,
)
from hapi.data.workers import Keyed, KeyedDataset, RefillableSampler, WorkerInit
from hapi.distributed import group

T = TypeVar("T")

_BATCHES_PER_BROADCAST = 64


def loader_feed(loader: DataLoader[Any], device: torch.device, seed: int, lockstep: bool, floats: torch.dtype) -> Feed:
    """A feed over the user's DataLoader."""
    is_plain = type(loader).__iter__ is DataLoader.__iter__
    # Nobody's choice: batches are made as those of a data set without a loader are.
    if is_plain and loader.collate_fn in (default_collate, default_convert):
        ours = Collate(floats) if loader.collate_fn is default_collate else Convert(floats)
        loader = copy.copy(loader)
        loader.collate_fn = ours
    feed = _chosen(loader, device, seed, lockstep)
    feed.is_usual = _tells_usual(loader, feed)
    return feed


def _chosen(loader: DataLoader[Any], device: torch.device, seed: int, lockstep: bool) -> Feed:
    is_plain = type(loader).__iter__ is DataLoader.__iter__
    if isinstance(loader.dataset, IterableDataset):
        if hasattr(loader, "state_dict") and group.get_world_size() == 1:
            # It knows its place in the data, and nothing is read again to find it.
            return SelfShardedFeed(loader, device, seed, lockstep)
        if shards_itself(loader) and not (is_plain and declares_shards(loader.dataset)):
            return SelfShardedFeed(loader, device, seed, lockstep)
        if is_plain or _is_torchdatas(loader):
            return IterableFeed(_with_shards(loader, seed), device, lockstep)
        if group.get_world_size() == 1:
            # What its __iter__ does with batches is done with the user's own: they are not told apart.
            given = _with_shards(loader, seed, told=False) if loader.num_workers else loader
            return SelfShardedFeed(given, device, seed, lockstep)
        raise _own_iteration(loader)
    if shards_itself(loader):
        kind = OwnOrderFeed if is_plain else SelfShardedFeed
        return kind(loader, device, seed, lockstep)
    if not is_plain and group.get_world_size() == 1:
        return SelfShardedFeed(loader, device, seed, lockstep)
    if not (is_plain or _is_torchdatas(loader)):
        raise _own_iteration(loader)
    return SharedLoaderFeed(loader, device, seed, lockstep)


def _tells_usual(loader: DataLoader[Any], feed: Feed) -> Callable[[Piece], bool] | None:
    """`Feed.is_usual` of a loader, where torch's classes make its batches: an __iter__ of its own may do anything."""
    if not (type(loader).__iter__ is DataLoader.__iter__ or _is_torchdatas(loader)):
        return None
    sampler = loader.batch_sampler
    if not (type(sampler) is BatchSampler or str(type(sampler).__module__).startswith("torchdata.")):
        return None
    made = cast(BatchSampler, sampler)
    size, samples = made.batch_size, known_length(made.sampler)
    deals = isinstance(feed, SharedLoaderFeed)
    if loader.collate_fn is default_collate or isinstance(loader.collate_fn, Collate):
        # Where all of the data is less than a batch a rank, the last rank that has any has a short one only.
        left = size if samples is None else samples - size * (group.get_rank() if deals else 0)
        return of_size(left if 0 < left < size else size)
    if samples is None or not (deals or isinstance(feed, OwnOrderFeed)):
        return None
    # A collate function of the user's makes as many rows of the samples as it likes: the batch's number tells.
    whole = max(samples // size, group.get_world_size() if deals else 1)
    return lambda piece: int(piece.position) < whole


def _own_iteration(loader: DataLoader[Any]) -> TypeError:
    return TypeError(
        f"A {type(loader).__name__} arrived, a DataLoader with an __iter__ of its own, which may not follow how its "
        f"data is shared out among {group.get_world_size()} processes. Put the logic into a batch_sampler, a "
        "collate_fn or the data set; or shard by yourself and set `sharded = True` on the loader."
    )


def tell_of_the_sampler(loader: DataLoader[Any], to_predict: bool) -> None:
    """Warn where evaluation or prediction would not see each sample once, or rows come in an order nobody knows."""
    sampler, cure = loader.sampler, "Leave the sampler out: hapi shares the data out by itself."
    padded, held = getattr(sampler, "total_size", None), getattr(sampler, "dataset", None)
    if isinstance(padded, int) and isinstance(held, Sized) and padded != len(held):
        what = "repeats" if padded > len(held) else "leaves out"
        warnings.warn(
            f"The loader's {type(sampler).__name__} {what} {abs(padded - len(held))} of {len(held)} samples, so that "
            f"each process has as many. {cure}",
            stacklevel=2,
        )
    elif loader.drop_last and loader.batch_size and isinstance(sampler, Sized) and len(sampler) % loader.batch_size:
        warnings.warn(
            f"The loader's drop_last=True leaves out {len(sampler) % loader.batch_size} of {len(sampler)} samples. "
            "Leave drop_last out where each sample counts.",
            stacklevel=2,
        )
    if to_predict and isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        warnings.warn(
            f"predict received a loader with a {type(sampler).__name__}: its rows come in the order that the sampler "
            "draws, which nobody knows afterwards. Write DataLoader(..., shuffle=False) for the data set's own.",
            stacklevel=2,
        )


def _is_torchdatas(loader: DataLoader[Any]) -> bool:
    """Whether it is read by torchdata's StatefulDataLoader, which follows its batch sampler as torch's does."""
    return str(type(loader).__iter__.__module__).startswith("torchdata.")


class OwnOrderFeed(Feed):
    """A map-style DataLoader whose order is this rank's own: all of it is read, its random streams keyed like others'.

    The order itself is drawn from streams that are alike on every rank: a sampler may shuffle all of the data before it
    takes this rank's part.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, seed: int, lockstep: bool) -> None:
        super().__init__(device)
        self._given = loader
        self._seed = seed
        self._lockstep = lockstep
        self._sampler = RefillableSampler()
        self._loader = _with_order(loader, self._sampler, loader.batch_sampler is not None)
        self.ordered = group.get_world_size() == 1
        if self.ordered:
            self.steps = length(loader)
        self._order_state = OrderState(loader)

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`."""
        set_epoch(self._given, epoch)
        self._order_state.begin(start.data)
        order = enumerate(drawn_alike(Order(self._given), self._seed, epoch))
        rank = group.get_rank()
        # A collate function of the user's may leave batches out, which are no steps: then all are read again.
        first = start.step if isinstance(self._given.collate_fn, Collate | Convert) else 0
        self._sampler.refill(
            Keyed(indices, rng.mix(self._seed, rng.FETCH, epoch, number, rank), epoch)
            for number, indices in islice(order, first, None)
        )
        numbered = enumerate(self.read(self._loader), first)
        local = ((batch, batches.size_of(batch), number) for number, batch in numbered)
        return in_step(local, self._lockstep, start.step - first, ahead=self.stateful is None)

    def state(self, within: bool) -> Any:
        """See `Feed.state`."""
        return self._order_state.state(within)

    def restore(self, state: Any) -> None:
        """See `Feed.restore`."""
        self._order_state.restore(state)


class SharedLoaderFeed(Feed):
    """A map-style DataLoader whose order is drawn on rank 0 and shared out."""

    keeps_beginning = True

    def __init__(self, loader: DataLoader[Any], device: torch.device, seed: int, lockstep: bool) -> None:
        super().__init__(device)
        self._given = loader
        self._seed = seed
        self._lockstep = lockstep
        self._rank = group.get_rank()
        self._world_size = group.get_world_size()
        self._batched = loader.batch_sampler is not None
        self._sampler = RefillableSampler()
        self._loader = _with_order(loader, self._sampler, self._batched)
        # A collate function of the user's may drop or join samples; only then are sizes agreed on at run time.
        self._sizes_known = self._batched and isinstance(loader.collate_fn, Collate)
        # How far a loader with its prefetching workers reads ahead; the same everywhere, since broadcasts follow it.
        ahead = loader.num_workers * (loader.prefetch_factor or 0) + 2
        self._depth = int(group.begin_max([float(ahead)]).wait()[0])
        self.global_batch = None if loader.batch_size is None else loader.batch_size * self._world_size
        if type(loader.batch_sampler) is BatchSampler and not loader.drop_last:
            self.samples = known_length(loader.sampler)
        rounds = length(loader)
        self.steps = None if rounds is None else -(-rounds // self._world_size)
        self.aligned, self.stride, self.unit = True, self._world_size, "batches"
        self._order_state = OrderState(loader)

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`."""
        set_epoch(self._given, epoch)
        self._order_state.begin(start.data)
        planned = self._planned(epoch, start)
        if self._sizes_known:
            return planned
        # Rounds are as many on every rank: they are told by broadcasts. One may be without samples here.
        measured = map(_measured, planned)
        if self._world_size == 1:
            return _with_samples((piece, piece.size) for piece in measured)
        return _with_samples(_agreed(measured, self.stateful is None)) if self._lockstep else measured

    def state(self, within: bool) -> Any:
        """See `Feed.state`."""
        return self._order_state.state(within)

    def restore(self, state: Any) -> None:
        """See `Feed.restore`."""
        self._order_state.restore(state)

    def _planned(self, epoch: int, start: Start) -> Iterator[Piece]:
        """The pieces with sizes as the indices tell them."""
        rounds = self._rounds(epoch, start.taken)
        ahead: deque[list[Any]] = deque()
        waiting: deque[Any] = deque()
        # The batch's place in the order: steps are fewer where a round was without samples.
        position = start.taken + self._rank

        def take_rounds() -> None:
            # The loader asks for batches ahead of time and at its own moments. Broadcasts happen here alone, at the
            # same steps on every rank.
            for dealt in islice(rounds, self._depth - len(ahead)):
                if self._rank < len(dealt):
                    number = position + len(ahead) * self._world_size
                    key = rng.mix(self._seed, rng.FETCH, epoch, number)
                    waiting.append(Keyed(dealt[self._rank], key, epoch))
                ahead.append(dealt)

        take_rounds()
        self._sampler.refill(iter(lambda: waiting.popleft() if waiting else None, None))
        loaded = self.read(self._loader)
        while ahead:
            dealt = ahead.popleft()
            mine = self._rank < len(dealt)
            sizes = [len(indices) for indices in dealt] if self._sizes_known else [1] * len(dealt)
            batch = next(loaded) if mine else None
            position += self._world_size
            take_rounds()
            yield Piece(batch, sizes[self._rank] if mine else 0, sum(sizes), position - self._world_size)

    def _rounds(self, epoch: int, taken: int) -> Iterator[list[Any]]:
        """The batches of indices of each step after so many batches, one a rank; fewer in the last."""
        per_broadcast = _BATCHES_PER_BROADCAST * self._world_size
        order = Order(self._given) if self._rank == 0 else ()
        drawn = islice(drawn_alike(order, self._seed, epoch, per_broadcast), taken, None)
        while True:
            chunk = group.broadcast_object(list(islice(drawn, per_broadcast)))
            for first in range(0, len(chunk), self._world_size):
                yield chunk[first : first + self._world_size]
            if len(chunk) < per_broadcast:
                return


def _measured(piece: Piece) -> Piece:
    """A piece whose size the batch itself tells; no batch at all where a collate function has left no sample."""
    size = batches.size_of(piece.batch)
    return Piece(piece.batch if size else None, size, size, piece.position)


def _agreed(pieces: Iterator[Piece], ahead: bool) -> Iterator[tuple[Piece, int]]:
    """Each round's piece, and its samples over all ranks, of which as many rounds are read on each.

    Args:
        pieces: One a round, with its own size.
        ahead: As for `in_step`: the sums begin a round ahead, and nobody waits.
    """
    begun = ((piece, group.begin_sum(piece.size)) for piece in pieces)
    for piece, total in _one_ahead(begun) if ahead else begun:
        yield piece, total.wait()[0]


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The items, each once the next one has been read. None of them is None."""
    current = next(items, None)
    while current is not None:
        upcoming = next(items, None)
        yield current
        current = upcoming


def _with_samples(rounds: Iterable[tuple[Piece, int]]) -> Iterator[Piece]:
    """The rounds in which a rank has samples, each with how many were passed over; those without are no steps."""
    passed = 0
    for piece, total in rounds:
        if total:
            yield Piece(piece.batch, piece.size, total, piece.position, passed)
        passed = 0 if total else passed + 1


def iterable_loader(
    dataset: IterableDataset[Any],
    batch_size: int,
    num_workers: int,
    drop_last: bool,
    pin_memory: bool,
    seed: int,
    floats: torch.dtype,
) -> DataLoader[Any]:
    """A DataLoader of our own over an iterable data set."""
    # Here and below: only for a process that reads such data.
    from hapi.data.sharding import PositionedCollate, ShardedIterable

    return DataLoader(
        ShardedIterable(dataset, group.get_rank(), group.get_world_size(), seed, turn=batch_size),
        batch_size=batch_size,
        num_workers=num_workers,
        drop_last=drop_last,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        collate_fn=PositionedCollate(Collate(floats), batched=True),
        worker_init_fn=WorkerInit(None) if num_workers else None,
    )


def _copied(loader: DataLoader[Any], **replaced: Any) -> DataLoader[Any]:
    copied = copy.copy(loader)
    # DataLoader's own setter refuses to change these after construction; on a copy of ours it is safe. The live
    # workers of the original, if any, stay its own.
    copied.__dict__.update(replaced, _iterator=None, generator=None, in_order=True)
    # torchdata's, with a state that was loaded into it: the order of this pass is ours.
    copied.__dict__.update(next_iter_state=None, _initial_iter_for_state_dict=False)
    if loader.num_workers:
        copied.worker_init_fn = WorkerInit(loader.worker_init_fn)
    return copied


def _with_order(loader: DataLoader[Any], sampler: RefillableSampler, batched: bool) -> DataLoader[Any]:
    place = "batch_sampler" if batched else "sampler"
    return _copied(loader, dataset=KeyedDataset(loader.dataset), **{place: sampler})


def _with_shards(loader: DataLoader[Any], seed: int, told: bool = True) -> DataLoader[Any]:
    """A copy that shares an iterable data set out; with `told` each batch comes with its items' positions."""
    from hapi.data.sharding import PositionedCollate, ShardedIterable

    dataset = ShardedIterable(
        cast(Iterable[Any], loader.dataset), group.get_rank(), group.get_world_size(), seed, turn=loader.batch_size or 1
    )
    copied = _copied(loader, dataset=dataset)
    copied.collate_fn = PositionedCollate(loader.collate_fn, loader.batch_size is not None, told)
    return copied
