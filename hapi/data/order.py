"""Who gets which sample in which step: the order of an epoch, cut into global batches and those into ranks' parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from hapi import rng

if TYPE_CHECKING:
    from hapi.data.permutation import LazyPermutation

# Of a longer order (32 MB, half a second to draw) only the piece that is read is computed.
_MOST_IN_MEMORY = 1 << 22


class Share(NamedTuple):
    """One rank's part of one global batch."""

    indices: torch.Tensor | range
    """(size,) int64, into the data set; a range where they follow one another."""
    total: int
    """Samples of the whole global batch."""

    def listed(self) -> list[int]:
        """The indices as plain numbers."""
        return list(self.indices) if isinstance(self.indices, range) else self.indices.tolist()


def joined(parts: list[torch.Tensor | range]) -> torch.Tensor | range:
    """The indices of several shares, one after the other."""
    if len(parts) == 1:
        return parts[0]
    ranges = [part for part in parts if isinstance(part, range)]
    if len(ranges) == len(parts) and all(a.stop == b.start for a, b in pairwise(ranges)):
        return range(ranges[0].start, ranges[-1].stop)
    return torch.cat([torch.arange(p.start, p.stop) if isinstance(p, range) else p for p in parts])


def filled_part(total: int, size: int, rank: int) -> tuple[int, int]:
    """Cut `total` samples into parts of `size`, in rank order: the batches that one process would make."""
    return min(total, rank * size), min(total, (rank + 1) * size)


def even_part(total: int, world_size: int, rank: int, single: bool) -> tuple[int, int]:
    """Cut `total` samples into contiguous parts of nearly equal size, one a rank.

    Args:
        total: Samples of the global batch.
        world_size: Ranks.
        rank: Whose part.
        single: Whether a part may hold one sample where the whole has more. BatchNorm cannot train on one
            sample, so a short batch rather leaves ranks without any.

    Returns:
        Start and stop within the global batch; equal for a rank without samples.
    """
    ranks = world_size if single else min(world_size, max(1, total // 2))
    if rank >= ranks:
        return total, total
    base, extra = divmod(total, ranks)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


class GlobalOrder:
    """The order of a map-style data set, the same at any world size.

    Args:
        length: Samples in the data set.
        global_batch: Samples per step over all ranks.
        world_size: Ranks.
        rank: This one.
        shuffle: Draw a new order each epoch from (seed, epoch); otherwise the data set's own.
        drop_last: Leave out a last, short global batch.
        seed: Of the order and of the keys.
        even: Cut short global batches evenly (training); otherwise fill one rank's batch after the other, so that the
            ranks' batches are exactly those of one process (evaluation, prediction).
        single: Whether an even part may hold one sample where the whole has more; by default only where full parts
            do.
        purpose: Of the keys: `rng.FETCH` or `rng.EVALUATE`.
    """

    def __init__(
        self,
        length: int,
        global_batch: int,
        world_size: int,
        rank: int,
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        even: bool = True,
        single: bool | None = None,
        purpose: int = rng.FETCH,
    ) -> None:
        self._length = length
        self.global_batch = global_batch
        self._world_size = world_size
        self._rank = rank
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._seed = seed
        self._purpose = purpose
        self._even = even
        self._single = global_batch // world_size <= 1 if single is None else single
        self.steps = length // global_batch if drop_last else -(-length // global_batch)
        self.samples = self.steps * global_batch if drop_last else length

    @property
    def follows_on(self) -> bool:
        """Whether each share of this rank begins in the data set where the one before it ended."""
        return self._world_size == 1 and not self._shuffle

    @property
    def first_size(self) -> int:
        """Samples of this rank's part of the first step, and of every other one whose global batch is as large."""
        start, stop = self._part(min(self.global_batch, self._length))
        return stop - start

    def shares(self, epoch: int, start: int = 0, taken: int | None = None) -> Iterator[Share]:
        """This rank's part of each step of an epoch.

        Args:
            epoch: Which.
            start: The number of the first step.
            taken: How many samples the steps before it have taken; None: as many as they take with this global batch.
        """
        permutation = self._permutation(epoch)
        full = self._part(self.global_batch)
        firsts = range(start * self.global_batch if taken is None else taken, self._length, self.global_batch)
        for first in firsts:
            total = min(self.global_batch, self._length - first)
            if self._drop_last and total < self.global_batch:
                return
            begin, end = full if total == self.global_batch else self._part(total)
            indices = (
                range(first + begin, first + end) if permutation is None else permutation[first + begin : first + end]
            )
            yield Share(indices, total)

    def numbered(self, epoch: int, start: int = 0, taken: int | None = None) -> Iterator[tuple[int, Share]]:
        """The shares with their numbers among all ranks' batches: the order in which their rows belong together."""
        numbers = count(start * self._world_size + self._rank, self._world_size)
        return zip(numbers, self.shares(epoch, start, taken), strict=False)

    def key(self, epoch: int, number: int) -> int:
        """Where the random streams start for the batch of this number in `numbered`."""
        return rng.mix(self._seed, self._purpose, epoch, number)

    def _part(self, total: int) -> tuple[int, int]:
        if not self._even:
            return filled_part(total, -(-self.global_batch // self._world_size), self._rank)
        return even_part(total, self._world_size, self._rank, self._single)

    def _permutation(self, epoch: int) -> torch.Tensor | LazyPermutation | None:
        if not self._shuffle:
            return None
        key = rng.mix(self._seed, rng.ORDER, epoch)
        if self._length > _MOST_IN_MEMORY:
            # Only for a process with that much data.
            from hapi.data.permutation import LazyPermutation

            return LazyPermutation(self._length, key)
        generator = torch.Generator().manual_seed(key >> 1)
        return torch.randperm(self._length, generator=generator)
