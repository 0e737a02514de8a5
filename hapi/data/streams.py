"""Data without indices: iterable data sets, lists of batches, loaders that shard themselves."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

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


class PassStart:
    """The state of data at the start of a pass: a resumed run reads the pass again from there.

    So whatever the order is drawn from, the data's state or the global generators, it is drawn again, and the data is
    asked once a pass. Data without `state_dict` and `load_state_dict` has none.

    Args:
        data: What is read in this process.
    """

    def __init__(self, data: Any) -> None:
        self._data: Any = data if keeps_its_place(data) else None
        self._next: list[Any] = []
        self._state: Any = None
        self.was_loaded = False
        """Whether the pass under way started from a state that was loaded. If it then gives nothing, it is begun once
        more: some data takes the state in which a pass has ended for the place where its next one starts."""

    def begin(self) -> None:
        """A pass starts: load what is to be loaded, and note the state."""
        if self._data is None:
            return
        self.was_loaded = False
        if self._next:
            self._state = self._next.pop()
            self.return_to()
        else:
            self._state = copy.deepcopy(self._data.state_dict())

    def return_to(self) -> None:
        """Put the data back to the start of the pass.

        Raises:
            ValueError: It is the state of other data.
        """
        if self._data is None:
            return
        self.was_loaded = True
        self._put(self._state)

    def _put(self, state: Any) -> None:
        try:
            self._data.load_state_dict(copy.deepcopy(state))
        except Exception as error:
            raise ValueError(
                f"A state that was saved of the data was given to {type(self._data).__name__}.load_state_dict, which "
                f"refused it: {type(error).__name__}: {error}. Resume with the data that the run was trained on."
            ) from error

    def load(self, state: Any) -> None:
        """Start the next pass from a state. The data has it at once: no other pass may follow here."""
        if state is not None and self._data is not None:
            self._next = [state]
            self._put(state)

    def state(self, within: bool) -> Any:
        """That at the start of the pass under way, or of the next one; None: there is none to be had."""
        if self._data is None:
            return None
        if self._next:
            return self._next[0]
        return self._state if within else copy.deepcopy(self._data.state_dict())


class _Places:
    """Where data stood after each of the last two batches of a pass: one of them may have been read ahead."""

    def __init__(self) -> None:
        self.begin(0, None)

    def begin(self, skipped: int, place: Any) -> None:
        """A pass starts.

        Args:
            skipped: How many batches are read again and passed over.
            place: Where the data goes on instead; None: at its beginning.
        """
        self._places: deque[Any] = deque([] if place is None else [place], maxlen=2)
        self._ahead = -skipped

    def read(self, place: Any) -> None:
        """A batch was read; the data stands there now."""
        self._ahead += 1
        self._places.append(place)

    def take(self) -> None:
        """A batch goes into training."""
        self._ahead -= 1

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def reached(self) -> Any:
        """After the last batch that went into training: one that is read ahead belongs to the next process."""
        # Below zero where this rank's data has ended before the others'.
        return self._places[-1 - min(max(0, self._ahead), len(self._places) - 1)]


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
        self._stateful: Any = loader if lockstep and keeps_its_place(loader) else None
        self._places = _Places()
        self._has_loaded = False
        self._at_close: Any = None
        # torchdata's loader says where its generator stood before the pass drew from it, less than all that it draws.
        is_asked = self._stateful is not None and isinstance(loader, DataLoader)
        self._generator: torch.Generator | None = cast(Any, loader).generator if is_asked else None
        self._drawn_so_far: torch.Tensor | None = None

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`."""
        set_epoch(self._loader, epoch)
        self.restore(start.data)
        skipped = start.step if self._stateful is None or start.data is None else 0
        self._places.begin(skipped, start.data)
        for piece in in_step(self._numbered(epoch, start.step - skipped), self._lockstep, skipped):
            self._places.take()
            yield piece

    def _numbered(self, epoch: int, first: int) -> Iterator[Local]:
        from_loaded = self._set_out(epoch)
        rank, empty = group.get_rank(), 0
        if first:
            rng.set_streams(rng.mix(self._seed, rng.FETCH, epoch, first, empty, rank))
        # Streams are keyed by the batches that had samples before: so far a state that is loaded again knows its place.
        given = first
        for number, batch in enumerate(self._read(epoch, again=from_loaded and not first), first):
            size = batches.size_of(batch)
            given, empty = (given + 1, 0) if size else (given, empty + 1)
            if size and self._stateful is not None:
                self._places.read(self._with_generator(copy.deepcopy(self._stateful.state_dict())))
            yield batch, size, number
            rng.set_streams(rng.mix(self._seed, rng.FETCH, epoch, given, empty, rank))

    def _read(self, epoch: int, again: bool) -> Iterator[Any]:
        """A pass; `again`: if it gives nothing it is begun once more, see `PassStart.was_loaded`."""
        for batch in self._workers.reading(self._loader):
            again = False
            yield batch
        if again:
            rng.set_streams(rng.mix(self._seed, rng.ORDER, epoch))
            yield from self._workers.reading(self._loader)

    def _set_out(self, epoch: int) -> bool:
        """A pass starts; whether it does so from a state that was loaded."""
        key = rng.mix(self._seed, rng.ORDER, epoch)
        rng.set_streams(key)
        if self._has_loaded and isinstance(self._loader, DataLoader):
            # torchdata's takes a loaded state in when it is asked for its own, and draws as at the start of a pass.
            # Were it to happen as a batch is read, that one would have other streams than in a run that was not ended.
            self._ask()
            rng.set_streams(key)
        if self._generator is not None and self._drawn_so_far is not None:
            self._generator.set_state(self._drawn_so_far)
        from_loaded, self._has_loaded, self._drawn_so_far = self._has_loaded, False, None
        return from_loaded

    def state(self, within: bool) -> Any:
        """See `Feed.state`."""
        if self._stateful is None:
            return None
        if within and self._places:
            state = self._places.reached
        else:
            state = self._ask() if self._at_close is None else self._at_close
        if not _is_iterable_loader(self._loader):
            return state
        from hapi.data import foreign  # only for a process that reads such data

        return None if foreign.holds_no_place(state) else state

    def _ask(self) -> Any:
        with self._workers.starting():
            return self._with_generator(self._stateful.state_dict())

    def _with_generator(self, state: Any) -> Any:
        return state if self._generator is None else {"loader": state, "generator": self._generator.get_state()}

    def restore(self, state: Any) -> None:
        """See `Feed.restore`."""
        if state is not None and self._stateful is not None:
            if self._generator is not None and isinstance(state, dict) and state.keys() == {"loader", "generator"}:
                state, self._drawn_so_far = state["loader"], state["generator"]
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

    keeps_beginning = True

    def __init__(self, data: Iterable[Any], device: torch.device, seed: int) -> None:
        super().__init__(device)
        self._data = data
        self._seed = seed
        self._pass_start = PassStart(data)
        self._workers = GivenWorkers(data)
        self._world_size = group.get_world_size()
        self._rank = group.get_rank()
        self.aligned, self.stride, self.unit = True, self._world_size, "batches"
        if isinstance(data, Sized):
            self.steps = -(-len(data) // self._world_size)

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`."""
        set_epoch(self._data, epoch)
        self.restore(start.data)
        self._pass_start.begin()
        piece = None
        for piece in self._dealt(epoch, start):
            yield piece
        if piece is None and not start.taken and self._pass_start.was_loaded:
            yield from self._dealt(epoch, start)

    def _dealt(self, epoch: int, start: Start) -> Iterator[Piece]:
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

    def state(self, within: bool) -> Any:
        """See `Feed.state`."""
        return self._pass_start.state(within)

    def restore(self, state: Any) -> None:
        """See `Feed.restore`."""
        self._pass_start.load(state)

    def close(self) -> None:
        """See `Feed.close`."""
        self._workers.end()


class IterableFeed(Feed):
    """An `IterableDataset`: each item once over ranks and workers, unless it shards itself.

    Args:
        loader: Over a `ShardedIterable`.
        device: Where the network computes.
        lockstep: Whether the ranks must take the same number of steps.
    """

    keeps_beginning = True

    def __init__(self, loader: DataLoader[Any], device: torch.device, lockstep: bool) -> None:
        super().__init__(device)
        self._loader = loader
        self._lockstep = lockstep
        sharded: Any = loader.dataset
        # Workers have copies of their own, which nobody can ask.
        self._pass_start: PassStart | None = None if loader.num_workers else sharded.start

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`. What an earlier process has trained on is read again, and passed over."""
        set_epoch(self._loader, epoch)
        self.restore(start.data)
        return in_step(self._numbered(), self._lockstep, start.step)

    def _numbered(self) -> Iterator[Local]:
        for positions, batch in self.read(self._loader):
            self.ordered = self.ordered and not bool((positions < 0).any())
            size = batches.size_of(batch)
            if positions.dim() and len(positions) != size:
                # A collate function has left items out, or made several rows of one: all stand at the first one.
                positions = positions[:1].expand(size)
            yield batch, size, positions if positions.dim() else int(positions)

    def state(self, within: bool) -> Any:
        """See `Feed.state`."""
        return None if self._pass_start is None else self._pass_start.state(within)

    def restore(self, state: Any) -> None:
        """See `Feed.restore`."""
        if self._pass_start is not None:
            self._pass_start.load(state)


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


def keeps_its_place(data: Any) -> bool:
    """Whether data can be asked where it stands, and told where to go on, without being told more."""
    methods = getattr(data, "state_dict", None), getattr(data, "load_state_dict", None)
    if not all(map(callable, methods)):
        return False
    try:
        inspect.signature(cast(Any, methods[0])).bind()
        inspect.signature(cast(Any, methods[1])).bind({})
    except (TypeError, ValueError):
        return False
    return True


def _is_iterable_loader(loader: Any) -> bool:
    # len() of a loader over an iterable data set is a guess.
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
