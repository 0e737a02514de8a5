"""What a run shows while it goes: a bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from hapi.callbacks.base import PROGRESS, Callback, Logs
from hapi.callbacks.terminal import number, say
from hapi.distributed import get_rank

# Seconds between two refreshes of a bar, each of which waits for the device.
_BAR_SECONDS = 0.1
# Seconds between two plain lines within a pass, and their number in a pass of known length.
_LINE_SECONDS, _LINES = 5.0, 10
# A short bar, so that two values fit in beside it in 80 columns.
_BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class ProgBarLogger(Callback):
    """Shows progress and values, on rank 0 alone. Values are read from the device only when they are shown.

    Each epoch ends with one line on stdout that holds all its values, its learning rate and time; so do
    ``evaluate`` and ``predict``. In between, ``verbose=1`` shows a bar on stderr if that is a terminal or a
    notebook; otherwise at most ten lines on stdout, at least five seconds apart. ``verbose=2`` writes a line
    to stdout every ``log_freq`` steps.

    Args:
        log_freq: The bar is refreshed, and a line may be written, every so many steps.
        verbose: 0, 1 or 2.

    Raises:
        ValueError: ``log_freq`` is below 1, or ``verbose`` none of these.
    """

    _place = PROGRESS

    def __init__(self, log_freq: int = 10, verbose: int = 1) -> None:
        if isinstance(log_freq, bool) or not isinstance(log_freq, int) or log_freq < 1:
            raise ValueError(
                f"ProgBarLogger received log_freq={log_freq!r}: it counts steps from 1. Write log_freq=10."
            )
        if verbose not in (0, 1, 2):
            raise ValueError(
                f"ProgBarLogger received verbose={verbose!r}, which is unknown. Write 0 (silent), 1 (a bar) or 2 "
                "(lines)."
            )
        self.log_freq, self.verbose = log_freq, verbose
        self._shows = False
        self._pass: _Pass | None = None
        self._training = False
        self._title = ""
        self._epoch_began = 0.0

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Find out whether this process shows anything."""
        super().set_params(params)
        self._shows = bool(self.verbose) and get_rank() == 0
        # Where nothing is shown, no step need gather values.
        self.batch_freq = self.log_freq if self._shows else sys.maxsize

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Evaluations until `on_train_end` belong to epochs."""
        self._training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Done."""
        self._training = False
        self._end_pass()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin a bar."""
        self._epoch_began = time.monotonic()
        last = self.params.get("last_epoch")
        self._title = f"Epoch {epoch + 1}/{last}" if last else f"Epoch {epoch + 1}"
        self._begin_pass(self._title, self.params.get("steps"))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch's line."""
        self._end_pass()
        self._summarize(self._title, time.monotonic() - self._epoch_began, logs)

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Show the running values."""
        self._show(step, logs)

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """Begin a bar."""
        title = f"{self._title} evaluate" if self._training else "Evaluate"
        self._begin_pass(title, self._steps(logs))

    def on_eval_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Show the running values."""
        self._show(step, logs)

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """Write the evaluation's line, unless the epoch's will hold its values."""
        seconds = self._end_pass()
        if not self._training:
            self._summarize("Evaluate", seconds, logs)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Begin a bar."""
        self._begin_pass("Predict", self._steps(logs))

    def on_predict_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Show how far it is."""
        self._show(step, logs)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Write the prediction's line."""
        self._summarize("Predict", self._end_pass(), logs)

    def on_exception(self, exc: BaseException) -> None:
        """Take the bar away, so that the traceback stands alone."""
        self._training = False
        self._end_pass()

    def _steps(self, logs: Logs | None) -> int | None:
        steps: int | None = (logs or {}).get("steps", None if self._training else self.params.get("steps"))
        return steps

    def _begin_pass(self, title: str, steps: int | None) -> None:
        self._end_pass()
        if not self._shows:
            return
        if self.verbose == 2:
            self._pass = _Lines(title, steps, self.log_freq, 0.0)
        elif _has_screen():
            self._pass = _Bar(title, steps)
        else:
            self._pass = _Lines(title, steps, _line_step(steps, self.log_freq), _LINE_SECONDS)

    def _show(self, step: int, logs: Logs | None) -> None:
        if self._pass is not None:
            self._pass.show(step + 1, logs or {})

    def _end_pass(self) -> float:
        if self._pass is None:
            return 0.0
        ended, self._pass = self._pass, None
        ended.close()
        return time.monotonic() - ended.began

    def _summarize(self, title: str, seconds: float, logs: Logs | None) -> None:
        if self._shows:
            say(" - ".join([title, f"{seconds:.1f}s", *_parts(logs or {})]))


class _Pass:
    """One pass over data as it is shown."""

    def __init__(self, title: str, steps: int | None) -> None:
        self.title, self.steps = title, steps
        self.began = self.shown = time.monotonic()

    def show(self, done: int, logs: Logs) -> None:
        """Show that so many steps are done."""
        raise NotImplementedError

    def close(self) -> None:
        """Take away what does not stay."""


class _Lines(_Pass):
    def __init__(self, title: str, steps: int | None, every: int, seconds: float) -> None:
        super().__init__(title, steps)
        self._every, self._seconds = every, seconds

    def show(self, done: int, logs: Logs) -> None:
        now = time.monotonic()
        if done % self._every or now - self.shown < self._seconds:
            return
        self.shown = now
        if self.steps is None and self._seconds:
            # Of unknown length: ever rarer, so that a long pass writes few lines too.
            self._every *= 2
        of = f"/{self.steps}" if self.steps is not None else ""
        pace = f"{(now - self.began) / done * 1000:.1f} ms/step"
        say(" - ".join([f"{self.title} step {done}{of}", *_parts(logs), pace]))


class _Bar(_Pass):
    def __init__(self, title: str, steps: int | None) -> None:
        super().__init__(title, steps)
        # Refreshed whenever it is told of steps: how often that is is decided here, where the values are read.
        self._bar = _bar_class()(
            total=steps,
            desc=title,
            unit="step",
            leave=False,
            bar_format=_BAR_FORMAT if steps else None,
            mininterval=0,
            miniters=1,
            file=sys.stderr,
            **_bar_size(),
        )

    def show(self, done: int, logs: Logs) -> None:
        now = time.monotonic()
        if now - self.shown < _BAR_SECONDS and done != self.steps:
            return
        self.shown = now
        self._bar.set_postfix_str(", ".join(_parts(logs)), refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _parts(logs: Logs) -> list[str]:
    return [f"{name} {number(float(value), name)}" for name, value in logs.items()]


def _line_step(steps: int | None, log_freq: int) -> int:
    if steps is None:
        return log_freq
    tenth = -(-steps // _LINES)
    return -(-tenth // log_freq) * log_freq


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


def _has_screen() -> bool:
    return _in_notebook() or (sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty())


def _bar_size() -> dict[str, Any]:
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):
        return {}  # a notebook, say: what the bar takes there is known to tqdm
    # A terminal made by a program often has the size 0 x 0, in which tqdm would hide the bar.
    return {"dynamic_ncols": True} if columns and rows else {"ncols": 80, "nrows": 24}


def _bar_class() -> Any:
    if _in_notebook() and importlib.util.find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm
    # Without tqdm's watching thread: data workers that are forked beside a thread may hang.
    return type("Bar", (tqdm,), {"monitor_interval": 0})
