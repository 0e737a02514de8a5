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
    from hapi.callbacks.lr import LRScheduler, ReduceLROnPlateau
    from hapi.callbacks.mlflow import MLflowCallback
    from hapi.callbacks.stopping import EarlyStopping
    from hapi.callbacks.tensorboard import TensorBoard
    from hapi.callbacks.wandb import WandbCallback

__all__ = [
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "LRScheduler",
    "MLflowCallback",
    "ModelCheckpoint",
    "ProgBarLogger",
    "ReduceLROnPlateau",
    "TensorBoard",
    "WandbCallback",
]

# Those that no fit has by itself: imported when asked for, so that `import hapi` stays light.
_ON_DEMAND = {
    "CSVLogger": "hapi.callbacks.csv_logger",
    "EarlyStopping": "hapi.callbacks.stopping",
    "LRScheduler": "hapi.callbacks.lr",
    "MLflowCallback": "hapi.callbacks.mlflow",
    "ReduceLROnPlateau": "hapi.callbacks.lr",
    "TensorBoard": "hapi.callbacks.tensorboard",
    "WandbCallback": "hapi.callbacks.wandb",
}


# Names that scripts come with from Paddle and Keras, and what takes their place.
_ELSEWHERE = {"VisualDL": "TensorBoard", "WandbLogger": "WandbCallback", "LearningRateScheduler": "LRScheduler"}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(_ON_DEMAND[name]), name)
    instead = f": write hapi.callbacks.{_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module 'hapi.callbacks' has no attribute {name!r}{instead}")
