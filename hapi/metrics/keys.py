"""Under which keys an object of torchmetrics gives its values, told before the first batch."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from hapi.metrics.base import OPEN

_OF_WRAPPERS = ("torchmetrics.wrappers", "torchmetrics.metric")


def keys_of(metric: Any) -> list[str]:
    """The class's name where it computes one value, otherwise the keys, with `OPEN` where there may be others.

    What is written as giving one value is not asked: its value may take long, or need data. Wrappers and collections,
    which give several, compute on a copy in which zeros stand for such values. What does not say what it gives
    computes, on the copy too, without data.
    """
    name = type(metric).__name__
    if all(_gives_one(part) for _, part in parts_of(metric)):
        return [str(key) for key in metric] if _is_collection(metric) else [name]
    twin = copy.deepcopy(metric)
    _put_zeros(twin)
    try:
        with warnings.catch_warnings():
            # That it computes before any update.
            warnings.simplefilter("ignore")
            # What no wrapper has made may have keys that depend on the data, such as a key for each class seen.
            asked = [part.compute() for _, part in parts_of(twin) if not _gives_one(part) and not _wraps(part)]
            computed = twin.compute()
    except Exception:
        return [OPEN]
    if not isinstance(computed, Mapping):
        return [name]
    return [*map(str, computed), *([OPEN] if any(isinstance(value, Mapping) for value in asked) else [])]


def parts_of(metric: Any) -> Iterator[tuple[str, Any]]:
    """A metric or collection and all metrics within it, by their paths."""
    base = sys.modules["torchmetrics"].Metric
    for path, module in metric.named_modules():
        if isinstance(module, base):
            yield path, module


def _put_zeros(metric: Any) -> None:
    # By id: torchmetrics compares its metrics by what they compute.
    sizes: dict[int, int | None] = {}
    for _, part in parts_of(metric):
        if type(part).__name__ == "ClasswiseWrapper":
            for _, inner in parts_of(part.metric):
                sizes[id(inner)] = len(part.labels) if part.labels else _classes(inner)
    for _, part in parts_of(metric):
        size = sizes.get(id(part), 0)
        if _gives_one(part) and size is not None:
            part.compute = partial(torch.zeros, (size,) if size else ())


def _classes(metric: Any) -> int | None:
    """How many values it gives without an average."""
    numbers = (getattr(metric, field, None) for field in ("num_classes", "num_labels", "num_outputs"))
    return next((number for number in numbers if number), None)


def _gives_one(metric: Any) -> bool:
    """Whether it is written to compute a tensor, rather than a dict or who knows what."""
    computes = getattr(type(metric).compute, "__annotations__", {})
    returned = str(computes.get("return", "Any")).lower()
    return "dict" not in returned and "mapping" not in returned and "any" not in returned


def _wraps(metric: Any) -> bool:
    return type(metric).__module__.startswith(_OF_WRAPPERS)


def _is_collection(metric: Any) -> bool:
    return isinstance(metric, sys.modules["torchmetrics"].MetricCollection)
