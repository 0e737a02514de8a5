"""Samples of a data set as a batch, where the user gave no collate function of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from hapi.batch import is_array, is_record, leaves, move, rebuilt_mapping, rebuilt_record


class Collate:
    """torch's `default_collate`; dataclasses too, and float64 only where a sample asked for it by a tensor.

    Args:
        floats: What float64 of NumPy's and Python's numbers becomes, which both make unasked.
    """

    def __init__(self, floats: torch.dtype) -> None:
        self._floats = floats

    def __call__(self, samples: list[Any]) -> Any:
        """The batch.

        Raises:
            TypeError: A sample holds what cannot be stacked.
            ValueError: Samples have different shapes.
        """
        first = samples[0]
        if _holds_record(first):
            return self._by_parts(samples)
        try:
            batch = default_collate(samples)
        except (TypeError, RuntimeError, ValueError) as error:
            cause = _cause(samples)
            if cause is None:
                raise
            raise cause from error
        unasked = self._floats != torch.float64 and any(leaf.dtype == torch.float64 for leaf in leaves(batch))
        return self._cast(batch, first) if unasked else batch

    def _by_parts(self, samples: list[Any]) -> Any:
        """Samples that are dataclasses, which torch does not enter, or hold some."""
        first = samples[0]
        if is_record(first):
            return rebuilt_record(first, lambda name: self([getattr(sample, name) for sample in samples]))
        if isinstance(first, Mapping):
            return rebuilt_mapping(first, {key: self([sample[key] for sample in samples]) for key in first})
        parts = [self(list(column)) for column in zip(*samples, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else parts

    def _cast(self, batch: Any, sample: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            asked = isinstance(sample, torch.Tensor) or batch.dtype != torch.float64
            return batch if asked else batch.to(self._floats)
        if isinstance(batch, Mapping):
            return rebuilt_mapping(batch, {key: self._cast(part, sample[key]) for key, part in batch.items()})
        if isinstance(batch, tuple | list) and not isinstance(sample, str | bytes):
            parts = [self._cast(part, item) for part, item in zip(batch, sample, strict=True)]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return batch


class Convert:
    """torch's `default_convert`, for batches that a data set makes itself; float64 of NumPy's as in `Collate`.

    Args:
        floats: What float64 of NumPy's becomes.
    """

    def __init__(self, floats: torch.dtype) -> None:
        self._floats = floats

    def __call__(self, batch: Any) -> Any:
        """The batch with tensors in place of arrays."""
        return move(batch, torch.device("cpu"), self._floats)


def _holds_record(sample: Any) -> bool:
    if isinstance(sample, Mapping):
        return any(map(_holds_record, sample.values()))
    if isinstance(sample, tuple | list):
        return any(map(_holds_record, sample))
    return is_record(sample)


def _cause(samples: Sequence[Any]) -> Exception | None:
    """Why samples cannot be stacked, in words of the samples; None: it cannot be told."""
    for number, sample in enumerate(samples):
        place, found = _strange(sample, "")
        if place is not None:
            return TypeError(
                f"The data set gave a sample with {found!r:.60}, of type {type(found).__name__}{place}, which cannot "
                f"be stacked into a batch. {_instead(found)}. Or pass a DataLoader with a collate_fn that knows it."
            )
        shapes = [_shapes(samples[0]), _shapes(sample)]
        if shapes[0] != shapes[1]:
            return ValueError(
                f"The data set gave samples of different shapes, {shapes[0]} and, {number} further on, {shapes[1]}, "
                "which cannot be stacked. Bring them to one shape in its __getitem__ (crop, resize, pad) or pass a "
                "DataLoader with a collate_fn that does."
            )
    return None


def _instead(found: Any) -> str:
    if type(found).__module__.startswith("PIL."):
        return "Make it a tensor, transform=torchvision.transforms.ToTensor()"
    if is_array(found) and not found.dtype.isnative:
        return f'Write x.astype("{found.dtype.name}"), whose bytes are in the order of this machine'
    return "Let its __getitem__ leave it out or give a tensor or number instead"


def _strange(sample: Any, place: str) -> tuple[str | None, Any]:
    """Where in a sample something stands that is no tensor, array, number, text, or container of them."""
    if isinstance(sample, Mapping):
        parts = [(f" at {key!r}", part) for key, part in sample.items()]
    elif isinstance(sample, tuple | list):
        parts = [(f" at position {i}", part) for i, part in enumerate(sample)]
    else:
        known = isinstance(sample, torch.Tensor | int | float | complex | str | bytes)
        numeric = type(sample).__module__ == "numpy" and getattr(sample, "dtype", None) is not None
        if known or (numeric and sample.dtype.kind not in "OUSVMm" and sample.dtype.isnative):
            return None, None
        return place, sample
    for where, part in parts:
        found = _strange(part, where)
        if found[0] is not None:
            return found
    return None, None


def _shapes(sample: Any) -> list[Any] | tuple[int, ...]:
    """The shapes in a sample; in place of one of a mapping or sequence, those within."""
    if isinstance(sample, Mapping):
        return [(key, _shapes(part)) for key, part in sample.items()]
    if isinstance(sample, tuple | list):
        return [_shapes(part) for part in sample]
    return tuple(getattr(sample, "shape", ()))
