"""Callbacks: what happens beside training. `hapi.callbacks.base` draws when each hook is called."""

from __future__ import annotations

from hapi.callbacks.base import Callback
from hapi.callbacks.checkpoint import ModelCheckpoint
from hapi.callbacks.csv_logger import CSVLogger
from hapi.callbacks.history import History
from hapi.callbacks.lr import LRScheduler, ReduceLROnPlateau
from hapi.callbacks.progress import ProgBarLogger
from hapi.callbacks.stopping import EarlyStopping

__all__ = [
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "LRScheduler",
    "ModelCheckpoint",
    "ProgBarLogger",
    "ReduceLROnPlateau",
]
