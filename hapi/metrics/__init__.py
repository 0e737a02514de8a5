"""Metrics: sums on the device that are read when somebody asks, and reduced over the ranks once."""

from __future__ import annotations

import importlib
from typing import Any

from hapi.metrics.auc import Auc
from hapi.metrics.base import Metric
from hapi.metrics.classification import F1, Accuracy, Precision, Recall
from hapi.metrics.regression import MeanAbsoluteError, MeanSquaredError

__all__ = [
    "F1",
    "Accuracy",
    "Auc",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
]


def __getattr__(name: str) -> Any:
    elsewhere = importlib.import_module("hapi.elsewhere")  # which only an error needs
    raise elsewhere.package_attribute(name, __all__, "hapi.metrics")
