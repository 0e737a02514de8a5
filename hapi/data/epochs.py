"""Telling the epoch to whatever around the data wants to know it: whatever has a `set_epoch`."""

from __future__ import annotations

from typing import Any


def set_epoch(data: Any, epoch: int) -> None:
    """Tell the epoch to a loader, to its samplers and to its data set, or to a data set; each once."""
    batch_sampler = getattr(data, "batch_sampler", None)
    told: set[int] = set()
    for part in (
        getattr(data, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(data, "dataset", None),
        data,
    ):
        _tell(part, epoch, told)


def _tell(part: Any, epoch: int, told: set[int]) -> None:
    if part is None or id(part) in told:
        return
    told.add(id(part))
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)
        return
    # Inside a Subset, a ConcatDataset and the like.
    within = getattr(part, "datasets", None)
    for inner in within if isinstance(within, list | tuple) else [getattr(part, "dataset", None)]:
        _tell(inner, epoch, told)
