"""The epoch values of a fit, which it returns."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from hapi.callbacks.base import FIRST, Callback, Logs
from hapi.callbacks.terminal import number

# Panels beside each other in a plot.
_COLUMNS = 4


class History(Callback):
    """The values of each epoch.

    Attributes:
        epoch: The epochs' numbers, from 1.
        history: Name -> a float for each of these epochs; NaN where an epoch had no such value (``val_``
            names with an ``eval_freq`` above 1).
    """

    _place = FIRST

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def __repr__(self) -> str:
        spans = [f"{name} {_span(values)}" for name, values in self.history.items()]
        return f"History({len(self.epoch)} epochs{': ' if spans else ''}{', '.join(spans)})"

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew."""
        self.epoch, self.history = [], {}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Keep the epoch's values."""
        logs = logs or {}
        for name in logs:
            self.history.setdefault(name, [math.nan] * len(self.epoch))
        self.epoch.append(epoch + 1)
        for name, values in self.history.items():
            values.append(float(logs.get(name, math.nan)))

    def plot(self, path: str | os.PathLike[str] | None = None) -> None:
        """Draw each value over the epochs, a panel each, training and evaluation together. Needs matplotlib.

        Under a launcher every process may call it, and rank 0 alone draws.

        Args:
            path: The image file to write, its format told by the ending; its folder is made. None: show it on the
                screen or in the notebook.

        Raises:
            ImportError: matplotlib is not installed.
            RuntimeError: There is nothing to draw, or nowhere to show it.
            TypeError: ``path`` is no path.
        """
        from hapi.callbacks import drawing  # not with `import hapi`

        if not self.epoch:
            raise RuntimeError("This History holds no epoch, so there is nothing to draw. Call fit first.")
        drawing.show(History, path, "history.png", self._draw)

    def state_dict(self) -> dict[str, Any]:
        """The epochs so far."""
        return {
            "epoch": list(self.epoch),
            "history": {name: list(values) for name, values in self.history.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the epochs so far."""
        self.epoch = list(state["epoch"])
        self.history = {name: list(values) for name, values in state["history"].items()}

    def _panels(self) -> list[str]:
        """The values that get a panel of their own: all but those that share the one of training."""
        return [name for name in self.history if not name.startswith("val_") or name[4:] not in self.history]

    def _draw(self, figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        names = self._panels()
        columns = min(_COLUMNS, len(names))
        rows = -(-len(names) // columns)
        figure.set_size_inches(4 * columns, 3 * rows)
        for place, name in enumerate(names, 1):
            axes = figure.add_subplot(rows, columns, place)
            curves = [key for key in (name, f"val_{name}") if key in self.history]
            for key in curves:
                # Over epochs without a value the line goes on to the next one.
                points = [(e, v) for e, v in zip(self.epoch, self.history[key], strict=True) if not math.isnan(v)]
                label = key if len(curves) == 1 else "validation" if key != name else "training"
                axes.plot([e for e, _ in points], [v for _, v in points], marker=".", label=label)
            axes.set_xlabel("epoch")
            axes.set_ylabel(name)
            axes.grid(alpha=0.3)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            if len(curves) > 1:
                axes.legend()


def _span(values: list[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "nan"
    first, last = number(known[0], "lr"), number(known[-1], "lr")
    return first if first == last else f"{first} -> {last}"
