"""Data in memory as a `Feed`: indexed in this process, several small batches at once.

Imported with the first data of that kind, not by `import hapi`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from hapi import batch as batches
from hapi.data.epochs import set_epoch
from hapi.data.feeds import BEGINNING, DatasetFeed, Feed, Piece, Start, of_size
from hapi.data.order import GlobalOrder, Share, joined
from hapi.data.sources import BatchSource, SubsetSource, columns_of, labels_of, over, whole_of

if TYPE_CHECKING:
    from hapi.data.resident import Resident

_TOGETHER = 1 << 18
"""So many numbers are read at once: few enough for a core's cache."""
_MOST_TOGETHER = 32
_ALIGNED = 64
"""Bytes. Where a tensor starts within so many may decide about the last bits of what is computed of it."""


class SourceFeed(Feed):
    """In-memory data, indexed in this process.

    Several small batches are read at once and handed out in slices: to index one costs more than to copy it.
    """

    def __init__(self, source: BatchSource, order: GlobalOrder, device: torch.device) -> None:
        super().__init__(device)
        self._source = source
        self._order = order
        self.steps = order.steps
        self.samples = order.samples
        self.global_batch = order.global_batch
        self.aligned, self.stride, self.unit = True, order.global_batch, "samples"
        self.is_usual = of_size(order.first_size)
        self._rows = source
        self._resident: Resident | None = None
        if device.type != "cpu":
            # Only for a process that computes on a device.
            from hapi.data import resident

            self.kept_bytes = resident.kept_bytes(source, device)
            if self.kept_bytes is not None:
                self._resident = resident.Resident(source, device)
        self._pinned: BatchSource | None = None
        if device.type == "cuda":
            from hapi.data.pinned import Pinned

            self._pinned = Pinned(whole_of(source))
        self._placed = self._pin = False
        self._finish: Callable[[Any], Any] = self._finish_moved
        # How many batches are read at once, and of those, how many are finished at once. Found out by each pass.
        self._read_together = self._finished_together = 1

    def pieces(self, epoch: int, start: Start = BEGINNING) -> Iterator[Piece]:
        """See `Feed.pieces`."""
        set_epoch(self._source, epoch)
        if isinstance(self._source, SubsetSource):
            self._source.read_indices()
        self._rows = self._source if self._resident is None else self._resident.source()
        unbatched = getattr(self._source, "unbatched", None)
        if unbatched is not None:
            self._placed, self._finish = False, self._finish_moved
            floats = self.floats or torch.get_default_dtype()
            yield from DatasetFeed(unbatched, self._order, self._device, 0, floats).pieces(epoch, start)
            return
        self._pin = self._pinned is not None and self._rows is self._source
        if self._pinned is not None and self._pin and columns_of(self._source) is not None:
            self._rows, self._pin = over(self._source, self._pinned), False
        # Tensors on the CPU are not moved.
        stays = self._device.type == "cpu" and columns_of(self._source) is not None
        self._finish = self._source.finish_batch if stays else self._finish_moved
        # What is drawn for a batch is drawn where it is placed, within its step.
        self._placed = not getattr(self._source, "is_random", True)
        self._read_together = self._finished_together = 1
        is_measured = not self._placed
        shares = self._order.numbered(epoch, start.step, start.taken)
        while bundle := list(islice(shares, self._read_together)):
            if len(bundle) > 1:
                yield from self._each(bundle) if self._finished_together == 1 else self._several(bundle)
                continue
            ((number, share),) = bundle
            rows = self._fetch(share.indices)
            placed = self._finish(rows) if self._placed and rows is not None else rows
            if not is_measured and rows is not None:
                self._measure(rows, placed)
                is_measured = True
            yield Piece(placed, len(share.indices), share.total, number)
            # Their memory is the next one's, while it is still in the processor's cache.
            del rows, placed

    def _measure(self, rows: Any, placed: Any) -> None:
        """See from a first batch how many are best handled at once."""
        self._finished_together = _how_many(batches.leaves(placed))
        copied = batches.leaves(rows)
        if self._order.follows_on:
            # Of the data's own memory one slice holds many batches as well as one.
            of_data = set(map(_memory_of, batches.leaves(columns_of(self._source))))
            copied = (tensor for tensor in copied if _memory_of(tensor) not in of_data)
        self._read_together = max(self._finished_together, _how_many(copied))

    def _each(self, bundle: list[tuple[int, Share]]) -> Iterator[Piece]:
        """The pieces of several batches, whose rows are read at once, and which are finished one by one."""
        finish = self._finish
        parts = _cut(self._fetch(joined([share.indices for _, share in bundle])), _sizes(bundle))
        for (number, (indices, total)), own in zip(bundle, parts, strict=True):
            size = len(indices)
            # Not kept here, as above.
            yield Piece(finish(own) if size else None, size, total, number)

    def _several(self, bundle: list[tuple[int, Share]]) -> Iterator[Piece]:
        """The pieces of several batches, whose rows are read at once, and of which some are finished at once."""
        together = self._finished_together
        groups = [bundle[first : first + together] for first in range(0, len(bundle), together)]
        rows = self._fetch(joined([share.indices for _, share in bundle]))
        for group, own in zip(groups, _cut(rows, [sum(_sizes(group)) for group in groups]), strict=True):
            sizes = _sizes(group)
            parts = _cut(self._finish(own) if any(sizes) else None, sizes)
            for (number, share), size, part in zip(group, sizes, parts, strict=True):
                yield Piece(part if size else None, size, share.total, number)

    def _fetch(self, indices: torch.Tensor | range) -> Any:
        """Rows as they are stored; None if there are none."""
        if not len(indices):
            return None
        rows = self._rows.fetch_batch(indices)
        return batches.map_tensors(torch.Tensor.pin_memory, rows) if self._pin else rows

    @property
    def draws(self) -> str:
        """See `Feed.draws`."""
        source = whole_of(self._source)
        # Whether a transform can be done in batches is asked anew, since it may have been changed.
        if not type(source).__module__.startswith("hapi.") or not getattr(source, "batched", True):
            return "all"
        return "torch" if getattr(source, "is_random", True) else "none"

    def labels(self) -> torch.Tensor | None:
        """See `Feed.labels`."""
        if isinstance(self._source, SubsetSource):
            self._source.read_indices()
        return labels_of(self._source)

    def place(self, batch: Any) -> Any:
        """The batch on the device, its transform finished there for the whole batch."""
        return batch if self._placed else self._finish(batch)

    def _finish_moved(self, rows: Any) -> Any:
        return self._source.finish_batch(super().place(rows))


def _how_many(tensors: Iterable[torch.Tensor]) -> int:
    """How many batches, of which one has these tensors, are best handled at once."""
    held = list(tensors)
    if any([tensor.layout is not torch.strided or tensor.nbytes % _ALIGNED for tensor in held]):
        return 1
    numbers = sum([tensor.numel() for tensor in held])
    return max(1, min(_MOST_TOGETHER, _TOGETHER // max(1, numbers)))


def _memory_of(tensor: torch.Tensor) -> int:
    """What tells where a tensor lies; a sparse one lies in several places, none of them another's."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _sizes(group: list[tuple[int, Share]]) -> list[int]:
    return [len(share.indices) for _, share in group]


def _cut(rows: Any, sizes: list[int]) -> Iterable[Any]:
    """Batches of these sizes, in memory that they share, without being views of each other.

    Slices are: a gradient that flows into one of them, where a network adds a parameter to it in place, flows into the
    batches after it.
    """
    if rows is None or len(sizes) == 1:
        return [rows] * len(sizes)
    columns = [torch.unsafe_split_with_sizes(column, sizes) for column in batches.leaves(rows)]
    if isinstance(rows, torch.Tensor):
        return columns[0]
    if type(rows) is tuple and all([isinstance(part, torch.Tensor) for part in rows]):
        return zip(*columns, strict=True)
    return [_refilled(rows, iter(parts)) for parts in zip(*columns, strict=True)]


def _refilled(rows: Any, tensors: Iterator[torch.Tensor]) -> Any:
    return batches.map_tensors(lambda _: next(tensors), rows)
