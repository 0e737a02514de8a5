"""Which feed serves which kind of data: the one place where a sampler is injected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from hapi import rng
from hapi.batch import map_tensors
from hapi.data.feeds import BEGINNING, DatasetFeed, Feed, LocalFeed, Piece, Start, of_size
from hapi.data.order import GlobalOrder
from hapi.data.sources import as_batch_source, is_columns
from hapi.data.streams import (
    BatchesFeed,
    IterableFeed,
    SelfShardedFeed,
    declares_shards,
    keeps_its_place,
    shards_itself,
)
from hapi.distributed import group

DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class Request:
    """How data is to be read: the arguments of fit, evaluate and predict that concern it.

    None means that the user said nothing, which is all that fits a DataLoader or a list of batches.
    """

    name: str
    """The argument's name, for messages: "train_data", "eval_data", "test_data"."""
    batch_size: int | None = None
    global_batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    num_workers: int | None = None
    seed: int = 0
    lockstep: bool = True
    """Training: ranks take equally many steps and share short batches evenly. False: evaluation and prediction."""
    floats: torch.dtype = torch.float32
    """What float64 becomes that nobody asked for; see `hapi.batch.floats_for`."""

    def global_batch(self, world_size: int) -> int:
        """Samples per step over all ranks."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return (self.batch_size or DEFAULT_BATCH_SIZE) * world_size


def make_feed(data: Any, request: Request, device: torch.device) -> Feed:
    """Give the feed for any kind of data.

    Args:
        data: A map-style or iterable data set, a DataLoader, tensors or arrays, a list or other re-iterable of batches.
        request: How to read it.
        device: Where the network computes.

    Raises:
        TypeError: The data is of no kind that can be trained on, or cannot be iterated twice.
        ValueError: It is empty, or options were given that contradict it.
    """
    # Only for a process that reads data.
    from hapi.data import foreign, mistaken

    mistaken.refuse(data, request.name)
    if type(data) is list and group.speaks_for_all():
        mistaken.tell_of_samples(data, request.name)
    foreign.refuse(data, request.name, group.get_world_size())
    if _can_be_compared(data):
        data = _compared(data, request)
    feed = _choose(data, request, device)
    feed.floats = request.floats
    dataset = data.dataset if isinstance(data, DataLoader) else data
    iterable = isinstance(dataset, IterableDataset)
    asked_as_a_whole = isinstance(feed, SelfShardedFeed) and keeps_its_place(data)
    if request.lockstep and not (iterable or asked_as_a_whole) and _is_map_style(dataset) and keeps_its_place(dataset):
        feed.stateful = dataset
    if feed.steps == 0 or feed.samples == 0:
        raise _empty(data, request)
    current = _trial.get()
    if current is not None:
        current.take(feed)
    return feed


def _compared(data: Any, request: Request) -> Any:
    if group.get_world_size() == 1:
        return data
    # Only for a process among others.
    from hapi.data.sameness import same_data

    try:
        return same_data(data, request.name)
    except TypeError:
        if is_columns(data):
            # Ranks cannot compare what can be no data; alone, that is said here.
            as_batch_source(data, request.floats)
        raise


@dataclass
class _Trial:
    """See `trial`."""

    steps: int | None
    repeat: bool
    feeds: list[tuple[Feed, Any]] = field(default_factory=list)

    def take(self, feed: Feed) -> None:
        """Cut a feed's passes short, and note where its data stands."""
        self.feeds.append((feed, feed.state(within=False)))
        if self.steps is None:
            return
        whole, steps, repeat, first = feed.pieces, self.steps, self.repeat, list[Piece]()

        def pieces(epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
            if not repeat:
                yield from islice(whole(epoch, start), steps)
                return
            if not first:
                first.extend(islice(whole(epoch, start), steps))
            yield from first

        feed.pieces = pieces  # type: ignore[method-assign]
        feed.steps = steps if feed.steps is None else min(steps, feed.steps)


_trial: ContextVar[_Trial | None] = ContextVar("hapi.data.make.trial", default=None)


@contextmanager
def trial(steps: int | None = None, repeat: bool = False) -> Iterator[None]:
    """Within, data is read for a look; afterwards what the user's loaders draw from is as it was.

    Args:
        steps: After how many steps a pass ends; None: at the data's end.
        repeat: Give in each pass the batches of the first.
    """
    current = _Trial(steps, repeat)
    token = _trial.set(current)
    try:
        yield
    finally:
        _trial.reset(token)
        # Two feeds over the same data: as the first has found it.
        for feed, state in reversed(current.feeds):
            feed.restore(state)


def _choose(data: Any, request: Request, device: torch.device) -> Feed:
    if isinstance(data, DataLoader):
        return _loader(data, request, device)
    if isinstance(data, IterableDataset) and not _is_batched_pipeline(data):
        return _iterable(data, request, device)
    source = as_batch_source(data, request.floats) if is_columns(data) or _is_map_style(data) else None
    if source is not None or _is_map_style(data):
        length = len(source) if source is not None else len(data)
        local = declares_shards(data)
        order = _order(length, request, local)
        feed: Feed
        if source is not None and not request.num_workers:
            from hapi.data.in_memory import SourceFeed

            feed = SourceFeed(source, order, device)
        else:
            feed = DatasetFeed(_per_sample(data, source), order, device, request.num_workers or 0, request.floats)
        return LocalFeed(feed, device, request.lockstep) if local else feed
    if isinstance(data, Iterator):
        raise TypeError(
            f"{request.name} is a {type(data).__name__}, which can be iterated only once: a second epoch would be "
            "empty. Pass a list of batches, a Dataset or a DataLoader, or an object whose __iter__ starts anew each "
            "time."
        )
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | dict):
        _refuse_options(request, "a list of batches", "when the batches are made")
        return (
            SelfShardedFeed(data, device, request.seed, request.lockstep)
            if shards_itself(data)
            else BatchesFeed(data, device, request.seed)
        )
    from hapi.data import foreign

    raise TypeError(
        f"{request.name} is of type {type(data).__name__}, which is neither a data set (with __getitem__ and __len__), "
        "nor iterable, nor tensors. Pass a Dataset, a DataLoader, tensors such as (x, y), or a list of batches"
        f"{foreign.cure_for(data)}."
    )


def _loader(data: DataLoader[Any], request: Request, device: torch.device) -> Feed:
    # Here and below: only for a process that reads such data.
    from hapi.data import loaders

    if not request.lockstep and group.speaks_for_all():
        loaders.tell_of_the_sampler(data, request.name == "test_data")
    _refuse_options(request, "a DataLoader", "to the DataLoader")
    return loaders.loader_feed(data, device, request.seed, request.lockstep, request.floats)


def has_own_batches(data: Any) -> bool:
    """Whether the data comes in batches already, so that a batch size is not ours to choose."""
    return (
        isinstance(data, DataLoader)
        or _is_batched_pipeline(data)
        or not (isinstance(data, IterableDataset) or is_columns(data) or _is_map_style(data))
    )


def kind_of(data: Any) -> str:
    """What kind of data it is, as far as it decides where ranks meet while they read."""
    own_batches = has_own_batches(data)
    if isinstance(data, DataLoader):
        batches = "no batches" if data.batch_sampler is None else "batches"
        inner = "an iterable data set" if isinstance(data.dataset, IterableDataset) else "a data set"
        kind = f"a DataLoader with {batches} of {inner}"
    elif own_batches:
        kind = "batches"
    else:
        kind = "an iterable data set" if isinstance(data, IterableDataset) else "a data set or columns"
    is_shared_out = shards_itself(data) if own_batches else declares_shards(data)
    return f"{kind}, shared out already" if is_shared_out else kind


def _can_be_compared(data: Any) -> bool:
    if isinstance(data, DataLoader):
        return not isinstance(data.dataset, IterableDataset) and not shards_itself(data)
    iterable = isinstance(data, IterableDataset)
    return (is_columns(data) or _is_map_style(data)) and not iterable and not declares_shards(data)


def _is_batched_pipeline(data: Any) -> bool:
    from hapi.data import foreign

    return foreign.is_batched_pipeline(data)


def _is_map_style(data: Any) -> bool:
    return (
        # An iterable data set inherits a __getitem__ that it does not have.
        not _is_batched_pipeline(data)
        and hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, list | tuple | dict | str | bytes)
    )


def _order(length: int, request: Request, local: bool) -> GlobalOrder:
    """The order of all samples; that of a rank's own part is drawn as if it were alone, with a seed of its own."""
    world_size, rank = group.get_world_size(), group.get_rank()
    global_batch = request.global_batch(world_size)
    return GlobalOrder(
        length,
        -(-global_batch // world_size) if local else global_batch,
        1 if local else world_size,
        0 if local else rank,
        # Training shuffles unless told otherwise; evaluation never does.
        shuffle=request.lockstep if request.shuffle is None else request.shuffle,
        drop_last=bool(request.drop_last),
        seed=rng.mix(request.seed, rank) if local else request.seed,
        even=request.lockstep,
        purpose=rng.FETCH if request.lockstep else rng.EVALUATE,
    )


def _per_sample(data: Any, source: Any) -> Any:
    """Data for workers, which read sample by sample: columns have to look like a data set."""
    if not is_columns(data):
        return data
    return _Rows(source)


class _Rows(torch.utils.data.Dataset[Any]):
    """Columns as a map-style data set, for the workers of a DataLoader."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        row = self._source.fetch_batch(torch.tensor([index]))
        return map_tensors(lambda tensor: tensor[0], row)


def _iterable(data: IterableDataset[Any], request: Request, device: torch.device) -> Feed:
    if request.shuffle:
        raise ValueError(
            f"shuffle=True was given with {request.name} of type {type(data).__name__}, an iterable data set, whose "
            "order is its own. Leave shuffle out, and shuffle inside the data set."
        )
    from hapi.data.loaders import iterable_loader

    world_size = group.get_world_size()
    batch_size = -(-request.global_batch(world_size) // world_size)
    loader = iterable_loader(
        data, batch_size, request.num_workers or 0, bool(request.drop_last), device.type == "cuda", request.seed,
        request.floats,
    )  # fmt: skip
    feed = IterableFeed(loader, device, request.lockstep)
    feed.is_usual = of_size(batch_size)
    return feed


def _refuse_options(request: Request, kind: str, where: str) -> None:
    given = [
        f"{name}={value!r}"
        for name in ("batch_size", "global_batch_size", "shuffle", "drop_last", "num_workers")
        if (value := getattr(request, name)) is not None
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)} was given together with {request.name} that is {kind}, which has already decided it. "
            f"Leave it out here, and set it {where}."
        )


def _empty(data: Any, request: Request) -> ValueError:
    if isinstance(data, DataLoader) and data.drop_last and not isinstance(data.dataset, IterableDataset):
        length, batch = len(cast(Sized, data.dataset)), data.batch_size
        cure = "Make the DataLoader's batch_size smaller, or leave its drop_last out."
    else:
        source = as_batch_source(data) if is_columns(data) else None
        length = len(source) if source is not None else len(data) if isinstance(data, Sized) else 0
        batch = request.global_batch(group.get_world_size()) if request.drop_last else None
        cure = "Make batch_size smaller, or leave drop_last out."
    if length and batch:
        return ValueError(
            f"{request.name} has {length} samples, fewer than one global batch of {batch}, and drop_last=True leaves "
            f"none of them. {cure}"
        )
    return ValueError(
        f"{request.name} is empty ({type(data).__name__} of length {length}), so there is nothing to compute on. "
        "Pass data with at least one sample; check the path or the filter that made it."
    )
