"""hapi: a high-level trainer for PyTorch that runs unchanged on one device or on many."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hapi import callbacks, distributed, metrics
from hapi._version import __version__
from hapi.device import get_device, set_device
from hapi.model import Model
from hapi.rng import seed

if TYPE_CHECKING:
    from hapi import datasets, debug
    from hapi.flop_count import flops
    from hapi.sizing import find_batch_size
    from hapi.tuning import find_lr


__all__ = [
    "Model",
    "__version__",
    "callbacks",
    "datasets",
    "debug",
    "distributed",
    "find_batch_size",
    "find_lr",
    "flops",
    "get_device",
    "metrics",
    "seed",
    "set_device",
]


# Imported on first use, so that `import hapi` stays light.
_ON_DEMAND = {
    "find_batch_size": "hapi.sizing",
    "find_lr": "hapi.tuning",
    "flops": "hapi.flop_count",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # The data sets are imported on first use: `import hapi` stays as light as `import torch`.
    if name in ("datasets", "debug"):
        return importlib.import_module(f"hapi.{name}")
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(_ON_DEMAND[name]), name)
    # Nor is what only an error needs. (`from hapi import elsewhere` would ask here for it.)
    elsewhere = importlib.import_module("hapi.elsewhere")
    raise elsewhere.package_attribute(name, __all__, "hapi")
