"""Callbacks: what happens beside training. `hapi.callbacks.base` draws when each hook is called."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hapi.callbacks.base import Callback
from hapi.callbacks.checkpoint import ModelCheckpoint
from hapi.callbacks.history import History
from hapi.callbacks.progress import ProgBarLogger

if TYPE_CHECKING:
    from hapi.callbacks.csv_logger import CSVLogger
    from hapi.callbacks.ema import EMA
    from hapi.callbacks.gradient_norm import GradientNorm
    from hapi.callbacks.lr import LRScheduler, ReduceLROnPlateau
    from hapi.callbacks.mlflow import MLflowCallback
    from hapi.callbacks.profiler import Profiler
    from hapi.callbacks.stopping import EarlyStopping
    from hapi.callbacks.tensorboard import TensorBoard
    from hapi.callbacks.wandb import WandbCallback

__all__ = [
    "EMA",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "GradientNorm",
    "History",
    "LRScheduler",
    "MLflowCallback",
    "ModelCheckpoint",
    "Profiler",
    "ProgBarLogger",
    "ReduceLROnPlateau",
    "TensorBoard",
    "WandbCallback",
]

# Those that no fit has by itself: imported when asked for, so that `import hapi` stays light.
_ON_DEMAND = {
    "CSVLogger": "hapi.callbacks.csv_logger",
    "EMA": "hapi.callbacks.ema",
    "EarlyStopping": "hapi.callbacks.stopping",
    "GradientNorm": "hapi.callbacks.gradient_norm",
    "LRScheduler": "hapi.callbacks.lr",
    "MLflowCallback": "hapi.callbacks.mlflow",
    "Profiler": "hapi.callbacks.profiler",
    "ReduceLROnPlateau": "hapi.callbacks.lr",
    "TensorBoard": "hapi.callbacks.tensorboard",
    "WandbCallback": "hapi.callbacks.wandb",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(_ON_DEMAND[name]), name)
    elsewhere = importlib.import_module("hapi.elsewhere")  # which only an error needs
    raise elsewhere.package_attribute(name, __all__, "hapi.callbacks")
