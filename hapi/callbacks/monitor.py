"""Watching one value of the epoch logs: what early stopping, plateaus and best models share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hapi.metrics.base import OPEN

# Checked in this order, so that "accuracy_loss" falls.
_FALLING = ("loss", "error", "mae", "mse")
_RISING = ("acc", "auc", "precision", "recall", "f1")


class Monitor:
    """The best value so far of one name.

    Args:
        owner: The callback's name, for messages.
        name: The key in epoch logs.
        mode: ``"min"``, ``"max"``, or ``"auto"``: told from the name.
        min_delta: What a value must be better by.

    Raises:
        ValueError: The mode is unknown, or ``min_delta`` is not finite.
    """

    def __init__(self, owner: str, name: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f'{owner} received mode={mode!r}, which is unknown. Write "min", "max" or "auto".')
        if not math.isfinite(min_delta):
            raise ValueError(
                f"{owner} received min_delta={min_delta!r}, by which no value can be better than another. Write "
                "min_delta=0.001."
            )
        self.owner, self.name, self._mode = owner, name, mode
        self.min_delta = abs(min_delta)
        self.best: float | None = None

    def check(self, params: Mapping[str, Any]) -> None:
        """See that the epoch logs will have the name, and that it tells what is good.

        Raises:
            ValueError: They will not, or it does not.
        """
        names = params.get("metrics")
        is_val = self.name.startswith("val_")
        # A metric that cannot tell its names beforehand may give this one.
        if names is None or self.name in names or (f"val_{OPEN}" if is_val else OPEN) in names:
            _is_rising(self.owner, self.name, self._mode)
            return
        cure = f"Write monitor= one of {', '.join(repr(name) for name in names if not name.endswith(OPEN))}"
        if is_val and not any(name.startswith("val_") for name in names):
            cure += ", or pass fit an eval_data: names with val_ are values of the evaluation"
        raise ValueError(
            f"{self.owner} monitors {self.name!r}, but the logs of this fit will not have it: it could never act. "
            f"{cure}."
        )

    @property
    def rising(self) -> bool:
        """Whether large values are good."""
        return _is_rising(self.owner, self.name, self._mode)

    def improves(self, value: float) -> bool:
        """Whether the value is the best so far; it is then kept. NaN is never better."""
        if math.isnan(value):
            return False
        if self.best is not None:
            gain = value - self.best if self.rising else self.best - value
            if not gain > self.min_delta:
                return False
        self.best = value
        return True


def _is_rising(owner: str, name: str, mode: str) -> bool:
    if mode != "auto":
        return mode == "max"
    lower = name.lower()
    if any(word in lower for word in _FALLING):
        return False
    if any(word in lower for word in _RISING):
        return True
    raise ValueError(
        f"{owner} monitors {name!r} with mode='auto', but the name does not tell whether small or large values are "
        'good. Write mode="min" or mode="max".'
    )
