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
    from hapi import datasets


__all__ = [
    "Model",
    "__version__",
    "callbacks",
    "datasets",
    "distributed",
    "get_device",
    "metrics",
    "seed",
    "set_device",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # The data sets are imported on first use: `import hapi` stays as light as `import torch`.
    if name == "datasets":
        return importlib.import_module("hapi.datasets")
    # Nor is what only an error needs. (`from hapi import elsewhere` would ask here for it.)
    elsewhere = importlib.import_module("hapi.elsewhere")
    raise elsewhere.package_attribute(name, __all__)
