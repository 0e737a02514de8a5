"""`DistributedBatchSampler`: this rank's batches, for loops of the user's own. `Model` shards by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from hapi import kinds
from hapi.data.order import GlobalOrder
from hapi.distributed import group


class DistributedBatchSampler(Sampler[list[int]]):
    """Yields this rank's part of each global batch, as lists of indices; for `DataLoader(batch_sampler=...)`.

    Every rank yields equally many batches, and each sample comes once per epoch, whatever the number of ranks. One
    exception: where the last global batch holds fewer samples than there are ranks, the ranks left over repeat samples
    of it, since a rank that misses a step would leave the others waiting.

    Args:
        dataset: Anything with a length.
        batch_size: Samples per rank and step.
        num_replicas: Ranks; by default all processes.
        rank: This one; by default this process's.
        shuffle: Draw a new order each epoch from (seed, epoch), the same on all ranks.
        drop_last: Leave out a last, short global batch.
        seed: Of the order.

    Raises:
        TypeError: The data set has no length, or an argument is of another kind.
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        kinds.check(DistributedBatchSampler, locals())
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"DistributedBatchSampler received dataset={dataset!r:.60}, of type {type(dataset).__name__}, "
                "which has no length to share out. Write DistributedBatchSampler(data, batch_size), data map-style."
            )
        kinds.count("batch_size", batch_size, 32, owner="DistributedBatchSampler")
        if num_replicas is not None:
            kinds.count("num_replicas", num_replicas, 2, owner="DistributedBatchSampler")
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_replicas = group.get_world_size() if num_replicas is None else num_replicas
        self.rank = group.get_rank() if rank is None else rank
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = 0
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"DistributedBatchSampler received num_replicas={self.num_replicas}, rank={self.rank}: ranks run from "
                "0 to num_replicas - 1. Leave num_replicas and rank out to take them from the launcher."
            )

    def __len__(self) -> int:
        return self._order(self.rank).steps

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        # As Paddle's: who never calls set_epoch gets a new order each time all the same.
        self.epoch += 1
        for share in self._order(self.rank).shares(epoch):
            indices = share.listed()
            yield indices or [self._spare(epoch, share.total)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def _spare(self, epoch: int, total: int) -> int:
        """A sample of the last global batch for a rank that it left without."""
        lender = self._order(self.rank % total)
        *_, last = lender.shares(epoch, lender.steps - 1)
        return int(last.indices[0])

    def _order(self, rank: int) -> GlobalOrder:
        return GlobalOrder(
            len(self.dataset),
            self.batch_size * self.num_replicas,
            self.num_replicas,
            rank,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            seed=self.seed,
            single=True,
        )
