"""Telling the epoch to whatever around the data wants to know it: whatever has a `set_epoch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def set_epoch(data: Any, epoch: int) -> None:
    """Tell the epoch to a loader, to its samplers and to its data set, or to a data set; each once."""
    for part in _told(data):
        part.set_epoch(epoch)


def is_told(data: Any) -> bool:
    """Whether code of the user's is told the epoch."""
    return any(not type(part).__module__.startswith("hapi.") for part in _told(data))


def _told(data: Any) -> Iterator[Any]:
    batch_sampler = getattr(data, "batch_sampler", None)
    seen: set[int] = set()
    for part in (
        getattr(data, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(data, "dataset", None),
        data,
    ):
        yield from _told_within(part, seen)


def _told_within(part: Any, seen: set[int]) -> Iterator[Any]:
    if part is None or id(part) in seen:
        return
    seen.add(id(part))
    if hasattr(part, "set_epoch"):
        yield part
        return
    # Inside a Subset, a ConcatDataset and the like.
    within = getattr(part, "datasets", None)
    for inner in within if isinstance(within, list | tuple) else [getattr(part, "dataset", None)]:
        yield from _told_within(inner, seen)
