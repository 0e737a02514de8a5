"""A few samples of a data set that is not in memory, compared between ranks."""

from __future__ import annotations

import copy
import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from hapi import rng
from hapi.batch import is_array
from hapi.distributed import group

_PLACES = 64
"""How many numbers of a tensor are looked at: enough to tell two samples apart."""


def first_other(data: Any, length: int) -> int | None:
    """The place of a sample that is another one on some rank; None if none is known. Called on every rank.

    Read are the first, the middle and the last, each with the same random streams on all ranks. What differs is read
    again: a data set that is random by itself, from a generator of its own, gives something else then, and proves
    nothing. Neither does one that cannot be read here; its error comes where it is read for use.

    Args:
        data: The data set, which stays as it is.
        length: Its length.
    """
    places = sorted({0, length // 2, length - 1})
    ours = _read(data, places)
    theirs: list[Any] = group.gather_objects(ours)
    if any(other is None for other in theirs):
        return None
    others = [n for n in range(len(places)) if not all(_alike(other[n], theirs[0][n]) for other in theirs)]
    if not others:
        return None
    steady = all(group.gather_objects(_alike(ours, _read(data, places))))
    return places[others[0]] if steady else None


def _read(data: Any, places: list[int]) -> list[Any] | None:
    found = []
    try:
        # Anything may be raised in here.
        apart = _apart(data)
        with rng.isolated(torch.device("cpu")):
            for place in places:
                rng.set_streams(rng.mix(rng.FETCH, place))
                found.append(_content(apart[place]))
    except Exception:
        return None
    return found


def _apart(data: Any) -> Any:
    """A shallow copy, of data sets within too: no file that is opened at first use is handed on to workers."""
    copied = copy.copy(data)
    for name, value in list(getattr(copied, "__dict__", {}).items()):
        if isinstance(value, Dataset):
            copied.__dict__[name] = _apart(value)
        elif type(value) in (list, tuple) and value and isinstance(value[0], Dataset):
            copied.__dict__[name] = type(value)(map(_apart, value))
    return copied


def _content(value: Any) -> Any:
    """What a sample holds: numbers with a fraction as they are, all else exactly or as a checksum."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, bool | int | str | bytes | None):
        return type(value).__name__, zlib.crc32(repr(value).encode(errors="replace"))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return [(repr(key), _content(part)) for key, part in value.items()]
    if isinstance(value, tuple | list):
        return [_content(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_content(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        # An image of PIL's.
        return value.mode, value.size, zlib.crc32(value.tobytes())
    return _of_tensor(torch.as_tensor(value)) if is_array(value) else type(value).__name__


def _of_tensor(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().cpu().reshape(-1)
    if not (flat.is_floating_point() or flat.is_complex()):
        return str(tensor.dtype), list(tensor.shape), zlib.crc32(flat.numpy().tobytes())
    # Processors differ in the last bits of what they compute, so that a checksum would say too much.
    numbers = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    count = min(len(numbers), _PLACES)
    chosen = torch.arange(count) * (len(numbers) - 1) // max(1, count - 1)
    return str(tensor.dtype), list(tensor.shape), numbers[chosen].double().tolist()


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-5) or (one != one and other != other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
