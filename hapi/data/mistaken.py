"""Data that its user has mistaken for something else: refused, or told of."""

from __future__ import annotations

import warnings
from numbers import Real
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Subset

from hapi.batch import is_array, leaves


def tell_of_samples(data: list[Any], name: str) -> None:
    """Warn where the entries of a list, each of which is a batch, look like samples.

    Of one number a sample, and of one label for several samples, a batch can be made; it seldom is.
    """
    first = data[0] if len(data) > 1 else None
    tensors = list(leaves(first))
    if not tensors or not tensors[0].dim() or len(tensors[0]) < 2:
        return
    x, *others = tensors
    # Numbers of tokens come in one dimension, too; of one class number for several outputs the loss tells.
    alone = (isinstance(first, Tensor) or is_array(first)) and x.dim() == 1 and x.is_floating_point()
    if alone or (others and all(other.numel() == 1 and other.is_floating_point() for other in others)):
        warnings.warn(
            f"{name} is a list of {len(data)} batches, and the first, of shape {tuple(x.shape)}, is taken for {len(x)} "
            f"samples. If each entry is one sample, write DataLoader({name}, batch_size=32), or columns: "
            "torch.stack(...).",
            stacklevel=2,
        )


def refuse(data: Any, name: str) -> None:
    """Raise for what cannot be meant.

    Args:
        data: As fit, evaluate or predict was given it.
        name: The argument's name.

    Raises:
        TypeError: It is a class, a tuple of containers beside tensors, or a Subset of a mask.
    """
    _refuse_mask(data.dataset if isinstance(data, DataLoader) else data, name)
    if isinstance(data, type):
        raise TypeError(
            f"{name} received the class {data.__name__}, which makes data sets and is none. Write {data.__name__}(...)."
        )
    if isinstance(data, tuple) and len({isinstance(part, tuple | list) for part in data}) > 1:
        if any(isinstance(part, list) and _holds_numbers(part) for part in data):
            raise TypeError(
                f"{name} is a tuple in which a column is a list of numbers, and only tensors and arrays are columns. "
                "Write torch.tensor(numbers) in its place."
            )
        raise TypeError(
            f"{name} is a tuple of containers and tensors, ((a, b), y), in which nothing says what a batch is. Write "
            "the columns side by side, (a, b, y): the last is the label."
        )


def _holds_numbers(column: list[Any]) -> bool:
    # NumPy's numbers too.
    return bool(column) and all(isinstance(number, Real) for number in column)


def _refuse_mask(data: Any, name: str) -> None:
    """A Subset of which a mask was given, or more dimensions than one: it would take rows again and again, or nests."""
    if type(data) is not Subset:
        return
    _refuse_mask(data.dataset, name)
    indices: Any = data.indices
    # Not by iter(), which makes a tensor of each index.
    first = indices[0] if len(indices) else None
    if isinstance(first, bool) or str(getattr(first, "dtype", "")) in ("bool", "torch.bool"):
        raise TypeError(
            f"{name} is a Subset whose indices are a mask, {len(indices)} times True or False, where the numbers of "
            "samples belong. Write Subset(dataset, numpy.flatnonzero(mask))."
        )
    if getattr(indices, "ndim", 1) > 1 or (type(indices) is tuple and getattr(first, "ndim", 0)):
        shape = tuple(getattr(indices, "shape", (len(indices), *getattr(first, "shape", ()))))
        raise TypeError(
            f"{name} is a Subset whose indices have the shape {shape}, where one number a sample belongs. Write "
            "Subset(dataset, indices.flatten()), or of a mask numpy.flatnonzero(mask)."
        )
