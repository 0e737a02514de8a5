"""Ranks that hold different data sets, found before the first step: repaired where that is safe, else refused."""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from hapi.batch import is_array
from hapi.data import samples
from hapi.data.sources import places_of, viewed
from hapi.distributed import group

_PIECE_BYTES = 1 << 20


def same_data(data: Any, name: str) -> Any:
    """The data, the same on every rank. Called on every rank of several.

    Compared are lengths, the indices of `Subset`s, and shape, dtype and checksum of tensors in memory, those of
    `hapi.datasets` and torchvision's data sets too; of other data sets a few samples. `Subset`s that differ (a
    `random_split` that was not seeded) become those of rank 0, with a warning.

    Args:
        data: A map-style data set, columns, or a DataLoader over a data set.
        name: The argument's name, for messages.

    Returns:
        The data itself, or a copy with rank 0's indices.

    Raises:
        ValueError: The ranks hold different data.
    """
    dataset = data.dataset if isinstance(data, DataLoader) else data
    ours = _described(dataset)
    theirs = group.gather_objects(ours)
    if not all(_without_indices(other) == _without_indices(theirs[0]) for other in theirs):
        first, other = next((theirs[0], other) for other in theirs if other != theirs[0])
        raise _differing(name, _shown(first), _shown(other))
    _, length, columns = theirs[0][-1]
    if length and not columns:
        place = samples.first_other(_whole(dataset), length)
        if place is not None:
            raise _differing(name, _shown(theirs[0]), f"one with another sample {place}")
    if all(other == theirs[0] for other in theirs):
        return data
    warnings.warn(
        f"{name}: the processes hold different Subsets of one data set (a random_split without a common seed). "
        "All of them take process 0's from here on.",
        stacklevel=2,
    )
    repaired = _with_indices(dataset, group.broadcast_object(_indices(dataset)))
    return _over(data, repaired) if isinstance(data, DataLoader) else repaired


def _differing(name: str, first: str, other: str) -> ValueError:
    return ValueError(
        f"{name} differs between the processes: process 0 has {first}, another has {other}. Each step takes its "
        "samples from one order, so all processes need the same data in the same order. Seed what makes or shuffles it "
        "(hapi.seed(0) before), or give each its own part and set `sharded = True` on the data set."
    )


def _described(data: Any) -> list[Any]:
    """A level for each Subset around the data, then the data itself."""
    if type(data) is Subset:
        places = places_of(data.indices)
        # Keys that only the data set knows, where they are no numbers.
        mark = zlib.crc32(repr([*data.indices]).encode()) if places is None else _checksum(places)
        return [("Subset", len(data.indices), mark), *_described(data.dataset)]
    columns = _columns(data)
    # Whose sampler draws from elsewhere needs no length.
    length = len(columns[0]) if columns else len(data) if hasattr(data, "__len__") else None
    return [(type(data).__name__, length, [(tuple(c.shape), str(c.dtype), _checksum(c)) for c in columns])]


def _whole(data: Any) -> Any:
    """What the Subsets are of."""
    return _whole(data.dataset) if type(data) is Subset else data


def _columns(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor) or is_array(data):
        data = (data,)
    parts = data.tensors if type(data) is TensorDataset else data.values() if isinstance(data, Mapping) else data
    if not isinstance(parts, tuple) and not isinstance(data, Mapping):
        parts = _images_and_targets(data)
    return [part if isinstance(part, torch.Tensor) else viewed(part, torch.float64) for part in parts]


def _images_and_targets(data: Any) -> tuple[Any, ...]:
    """What of a library's data set lies in memory under these names; others may bear them too, such as paths."""
    libraries = ("hapi.datasets", "torchvision.datasets")
    if not any(kind.__module__.startswith(libraries) for kind in type(data).__mro__):
        return ()
    parts = [getattr(data, name, None) for name in ("data", "targets")]
    # torchvision keeps some class numbers as a list.
    parts = [torch.as_tensor(p) if isinstance(p, list) and {*map(type, p)} == {int} else p for p in parts]
    return tuple(part for part in parts if isinstance(part, torch.Tensor) or is_array(part))


def _checksum(tensor: torch.Tensor) -> int:
    checksum = 0
    # Piece by piece, since it may be a map of a file that is larger than the memory.
    rows = max(1, _PIECE_BYTES * len(tensor) // max(1, tensor.numel() * tensor.element_size())) if tensor.dim() else 1
    for piece in torch.split(tensor.detach(), rows) if tensor.dim() else [tensor.detach()]:
        # A copy in any case: to `contiguous` a dimension of size 1 may have any stride.
        raw = piece.cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        content: Any = raw.view(torch.uint8).numpy() if raw.numel() else b""
        checksum = zlib.crc32(content, checksum)
    return checksum


def _without_indices(levels: list[Any]) -> list[Any]:
    return [level[:2] if level[0] == "Subset" else level for level in levels]


def _indices(data: Any) -> list[list[int]]:
    return [list(data.indices), *_indices(data.dataset)] if type(data) is Subset else []


def _with_indices(data: Any, indices: list[list[int]]) -> Any:
    return Subset(_with_indices(data.dataset, indices[1:]), indices[0]) if indices else data


def _over(loader: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
    copied = copy.copy(loader)
    copied.__dict__.update(dataset=dataset, _iterator=None)
    return copied


def _shown(levels: list[Any]) -> str:
    return " of ".join(f"a {kind} of {length} samples" + _shapes(rest) for kind, length, rest in levels)


def _shapes(rest: Any) -> str:
    if isinstance(rest, int) or not rest:
        return ""
    return " (" + ", ".join(f"{dtype} {shape}, checksum {crc:08x}" for shape, dtype, crc in rest) + ")"
