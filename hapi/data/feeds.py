"""What the loop reads: a `Feed` gives this process its pieces of each step, whatever the data is.

Read here how map-style data is shared out; `in_memory.py` does it for data that can be indexed a batch at a time,
`loaders.py` for the user's own DataLoader, `streams.py` for what has no indices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from hapi import batch as batches
from hapi.data.collate import Collate
from hapi.data.epochs import is_told, set_epoch
from hapi.data.order import GlobalOrder
from hapi.data.workers import Keyed, KeyedDataset, RefillableSampler, WorkerInit
from hapi.distributed import group

if TYPE_CHECKING:
    from hapi.data.side_stream import SideStream


class Piece(NamedTuple):
    """One process's share of one step."""

    batch: Any
    """This rank's batch where the data lies, mostly on the CPU; None where it has none in this step."""
    size: int
    """Samples in it."""
    total: int
    """Samples of the step over all ranks."""
    position: int | torch.Tensor
    """Where its rows belong in the data set's order: the number of the batch among all ranks' batches, or (size,) int64
    positions of single rows."""
    passed: int = 0
    """Rounds of the order before it, since the piece before, in which no rank had a sample: they were taken too."""


class Start(NamedTuple):
    """Where in an epoch a pass starts: at its beginning, or where an earlier process has left it."""

    step: int = 0
    """Steps taken before, each a batch a rank."""
    taken: int = 0
    """What they took of the order that all ranks share: samples, or batches where the data decides about them."""
    data: Any = None
    """What `Feed.state` gave in that process."""


BEGINNING = Start()

Local = tuple[Any, int, int | torch.Tensor]
"""A batch of this rank, its samples, its position."""


class Feed(ABC):
    """The data of one pass, as this process sees it.

    Attributes:
        steps: Steps per epoch, the same on every rank; None where it shows only at the end.
        samples: Samples per epoch over all ranks, or None.
        global_batch: Samples per step over all ranks, the last one aside; None where the data decides it.
        ordered: Whether `Piece.position` gives the data set's own order; otherwise ranks' rows come in turn.
        aligned: Whether every rank takes as many steps as the others, in evaluation too.
        stride: What a step takes of the order that all ranks share, counted as in `Start.taken`; None where each rank
            has an order of its own, in which another number of ranks cannot go on.
        unit: What that order is made of: "samples", or "batches" that the data decides about; "parts" where the ranks
            have orders of their own. A run cannot go on in the middle of another kind of order.
    """

    steps: int | None = None
    samples: int | None = None
    global_batch: int | None = None
    ordered: bool = True
    aligned: bool = False
    stride: int | None = None
    unit: str = "parts"
    keeps_beginning: bool = False
    """Whether `state` within an epoch is that of its beginning; otherwise it is that of the last step's edge."""
    kept_bytes: int | None = None
    """How much of the data is kept on the device; None: it is read from the host's memory."""
    floats: torch.dtype | None = None
    """What float64 arrays in batches become; see `hapi.batch.tensor_of`."""
    is_usual: Callable[[Piece], bool] | None = None
    """Tells of a piece whether it is cut as this rank's first of an epoch is, as all but short ones at the end are.
    None: that is not known beforehand."""
    stateful: Any = None
    """The map-style data set, where it has a state of its own (`state_dict`, `load_state_dict`) to be kept."""
    until: int = 0
    """Up to this epoch, itself left out, passes follow one another with nothing of the user's between them: workers may
    begin with one in the last step of the one before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reading: Iterator[Any] | None = None
        self._copies: SideStream | None = None
        if device.type == "cuda":
            # Only for a process that computes on a card.
            from hapi.data.side_stream import SideStream

            self._copies = SideStream(device)

    @property
    def batch_size(self) -> int | None:
        """Samples per rank and step, where all have equally many; else None."""
        world_size = group.get_world_size()
        if self.global_batch is None or self.global_batch % world_size:
            return None
        return self.global_batch // world_size

    @property
    def draws(self) -> str:
        """From which generators this process may draw while it reads and places batches: "all", "torch" or "none"."""
        return "all"

    @abstractmethod
    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """The pieces of an epoch. In training every rank takes the same number of them."""

    def state(self, within: bool) -> Any:
        """What only the data knows of its place, for `Start.data`: plain values, None where there is nothing.

        Args:
            within: Whether an epoch is under way. Otherwise it is asked for before the next one starts.
        """
        return None

    def restore(self, state: Any) -> None:
        """Take over what `state` gave between two epochs."""
        return None

    def read(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Start a pass over a loader of ours, whose workers `close` ends."""
        self._reading = iter(loader)
        return self._reading

    def close(self) -> None:
        """End the workers.

        They leave signals to this process, the one with which `multiprocessing` ends them at exit included. After an
        error its traceback keeps the loader alive until then, and this process would wait for its workers for ever.
        """
        shut_down = getattr(self._reading, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def labels(self) -> torch.Tensor | None:
        """All labels, (n,) int64, where they lie in memory; None where they would have to be read."""
        return None

    def place(self, batch: Any) -> Any:
        """The batch on the device, ready for the network."""
        if self._copies is not None:
            return self._copies.move(batch, self.floats)
        return batches.move(batch, self._device, self.floats)


def of_size(size: int) -> Callable[[Piece], bool]:
    """For `Feed.is_usual`, where the size tells it."""

    def is_usual(piece: Piece) -> bool:
        return piece.size == size

    return is_usual


def in_step(local: Iterator[Local], lockstep: bool, skipped: int = 0, ahead: bool = True) -> Iterator[Piece]:
    """This rank's batches as pieces that end together on all ranks.

    Who still has data is agreed by one asynchronous sum a step, begun a step ahead: a rank whose data has ended goes
    on with empty pieces until the last one has ended, and nobody waits.

    Args:
        local: This rank's own batches.
        lockstep: Whether the ranks must take the same number of steps (training). Otherwise each goes to its own end.
        skipped: How many of the batches an earlier process has trained on.
        ahead: Whether a batch may be read before the one before it was trained on. Not of data whose own state is
            kept, which then would be a batch further than the run; the ranks wait for each other instead.
    """
    # A batch without samples (all filtered out by a collate function) is no step, and no end either.
    local = islice((entry for entry in local if entry[1]), skipped, None)
    if not lockstep or group.get_world_size() == 1:
        for batch, size, position in local:
            yield Piece(batch, size, size, position)
        return
    if not ahead:
        while True:
            current = next(local, None)
            total = _pending_total(current).wait()[0]
            if not total:
                return
            yield _piece(current, total)
    upcoming = next(local, None)
    pending = _pending_total(upcoming)
    while total := pending.wait()[0]:
        current = upcoming
        upcoming = next(local, None) if current else None
        pending = _pending_total(upcoming)
        yield _piece(current, total)


def _pending_total(batch: Local | None) -> group.Pending:
    """The samples of a step over all ranks, whose sum begins now; None: this rank's data has ended."""
    return group.begin_sum(batch[1] if batch else 0)


def _piece(batch: Local | None, total: int) -> Piece:
    return Piece(*batch[:2], total, batch[2]) if batch else Piece(None, 0, total, 0)


class DatasetFeed(Feed):
    """A map-style data set, read through a DataLoader of our own."""

    def __init__(
        self, dataset: Any, order: GlobalOrder, device: torch.device, num_workers: int, floats: torch.dtype
    ) -> None:
        super().__init__(device)
        self._dataset = dataset
        self._order = order
        self._sampler = RefillableSampler()
        self._loader: DataLoader[Any] = DataLoader(
            KeyedDataset(dataset),
            batch_sampler=self._sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=device.type == "cuda",
            collate_fn=Collate(floats),
            worker_init_fn=WorkerInit(None) if num_workers else None,
            # What workers' seeds are drawn from, on each rank others: not the script's generator, as a pass may begin
            # within a step.
            generator=torch.Generator().manual_seed(order.key(-1, group.get_rank()) >> 1),
        )
        self._ahead: int | None = None
        self.steps = order.steps
        self.samples = order.samples
        self.global_batch = order.global_batch
        self.aligned, self.stride, self.unit = True, order.global_batch, "samples"
        self.is_usual = of_size(order.first_size)

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`."""
        set_epoch(self._dataset, epoch)
        loaded = self._begun(epoch, start)
        shares = self._order.numbered(epoch, start.step, start.taken)
        upcoming = next(shares, None)
        while upcoming is not None:
            (position, (indices, total)), upcoming = upcoming, next(shares, None)
            size = len(indices)
            batch = next(loaded) if size else None
            if upcoming is None and epoch + 1 < self.until:
                self._begin_ahead(epoch + 1)
            yield Piece(batch, size, total, position)

    def _begun(self, epoch: int, start: Start) -> Iterator[Any]:
        """A pass over the loader, which may have been begun ahead."""
        ahead, self._ahead = self._ahead, None
        if self._reading is not None and ahead == epoch and start == BEGINNING:
            return self._reading
        self._sampler.refill(
            Keyed(share.listed(), self._order.key(epoch, number), epoch)
            for number, share in self._order.numbered(epoch, start.step, start.taken)
            if len(share.indices)
        )
        return self.read(self._loader)

    def _begin_ahead(self, epoch: int) -> None:
        """Let the workers read while the last step of the epoch before is trained, and what follows it is done.

        Not of data that is told of its epochs, or whose state is kept.
        """
        if self._loader.num_workers and self.stateful is None and not is_told(self._dataset):
            self._begun(epoch, BEGINNING)
            self._ahead = epoch


class LocalFeed(Feed):
    """Map-style data of which this rank holds its own part: every rank reads all of its own, and they end together.

    Args:
        own: The feed of this rank's part, as if it were alone.
        device: Where the network computes.
        lockstep: Whether the ranks must take the same number of steps.
    """

    def __init__(self, own: Feed, device: torch.device, lockstep: bool) -> None:
        super().__init__(device)
        self._own = own
        self._lockstep = lockstep
        self.kept_bytes = own.kept_bytes
        self.is_usual = own.is_usual
        self.ordered = group.get_world_size() == 1
        if self.ordered:
            self.steps, self.samples = own.steps, own.samples

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`."""
        self._own.until, self._own.floats = 0 if self.stateful is not None else self.until, self.floats
        own = start._replace(taken=start.step * (self._own.stride or 0))
        local = ((piece.batch, piece.size, piece.position) for piece in self._own.pieces(epoch, own))
        return in_step(local, self._lockstep, ahead=self.stateful is None)

    def place(self, batch: Any) -> Any:
        """See `Feed.place`."""
        return self._own.place(batch)

    def close(self) -> None:
        """See `Feed.close`."""
        self._own.close()
