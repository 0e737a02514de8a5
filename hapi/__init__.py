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
    from hapi.tuning import find_batch_size, find_lr


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
    "find_batch_size": "hapi.tuning",
    "find_lr": "hapi.tuning",
    "flops": "hapi.flop_count",
}

# Names that scripts come with from Paddle, and what takes their place.
_ELSEWHERE = {
    "InputSpec": "Shapes are seen in the first batch: write hapi.Model(network), and for a table of them "
    "model.summary(input_size=(1, 28, 28)).",
    "summary": "Write hapi.Model(network).summary(input_size=(1, 28, 28)).",
    "to_tensor": "Write torch.tensor(values).",
    "nn": "Write torch.nn.",
    "optimizer": 'Write torch.optim, or prepare("adam", ...).',
    "vision": "Data sets are in hapi.datasets, transforms and networks in torchvision.",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # The data sets are imported on first use: `import hapi` stays as light as `import torch`.
    if name in ("datasets", "debug"):
        return importlib.import_module(f"hapi.{name}")
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(_ON_DEMAND[name]), name)
    instead = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module 'hapi' has no attribute {name!r}{instead}")
