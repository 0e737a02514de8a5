"""What a run shows while it goes: a bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from hapi import kinds
from hapi.callbacks.base import PROGRESS, Callback, Logs
from hapi.callbacks.terminal import number, say
from hapi.distributed import get_rank
from hapi.signals import in_notebook

# Seconds between two refreshes of a bar, each of which waits for the device, and between two plain lines within a pass.
_BAR_SECONDS, _LINE_SECONDS = 0.25, 5.0
# Columns that a bar takes at most, and at least where its values leave it less.
_WIDEST, _NARROWEST = 12, 3
# How many of them a pass of known length has: with its evaluation and its own line, an epoch has less than 20.
_LINES, _EVALUATION_LINES = 10, 5
# By how much each line is rarer than the one before where the length is unknown.
_RARER = 3


class ProgBarLogger(Callback):
    """Shows progress and values, on rank 0 alone. Values are read from the device only when they are shown.

    Each epoch ends with one line on stdout that holds all its values, its learning rate, its time and the speed of its
    training; so do ``evaluate`` and ``predict``. In between, ``verbose=1`` shows a bar on stderr if that is a terminal
    or a notebook; otherwise a few lines on stdout, at least five seconds apart, less than 20 an epoch. ``verbose=2``
    writes a line to stdout every ``log_freq`` steps.

    The speed is in samples per second over all ranks, or in milliseconds per step where the data decides how many
    samples a step has. The time left is that of the pass; data of unknown length has none.

    Args:
        log_freq: The bar is refreshed, and a line may be written, every so many steps.
        verbose: 0, 1 or 2.

    Raises:
        ValueError: ``log_freq`` is below 1, or ``verbose`` none of these.
    """

    _place = PROGRESS

    def __init__(self, log_freq: int = 10, verbose: int = 1) -> None:
        log_freq = kinds.count("log_freq", log_freq, 10, owner="ProgBarLogger", what="steps")
        if verbose not in (0, 1, 2):
            raise ValueError(
                f"ProgBarLogger received verbose={verbose!r}, which is unknown. Write 0 (silent), 1 (a bar) or 2 "
                "(lines)."
            )
        self.log_freq, self.verbose = log_freq, verbose
        self._pass: _Pass | None = None
        self._shows, self._training, self._title, self._epoch_began = False, False, "", 0.0
        self._speed: str | None = None
        # Steps trained when the fit began, and when its epoch did: a run that is resumed goes on within both.
        self._fit_start = self._epoch_start = 0

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Find out whether this process shows anything."""
        super().set_params(params)
        self._shows = bool(self.verbose) and get_rank() == 0
        # Where nothing is shown, no step need gather values.
        self.batch_freq = self.log_freq if self._shows else sys.maxsize
        # An evaluate or predict whose number of steps shows only at its end.
        self._counts = self._shows and "epochs" not in params and params.get("samples") is None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Evaluations until `on_train_end` belong to epochs."""
        self._training = True
        self._fit_start = self.model.steps_trained

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Done."""
        self._training = False
        self._end_pass()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin a bar."""
        self._epoch_began = time.monotonic()
        last = self.params.get("last_epoch")
        self._title = f"Epoch {epoch + 1}/{last}" if last else f"Epoch {epoch + 1}"
        self._epoch_start = self.model.steps_trained
        self._begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch's line."""
        self._end_training()
        self._summarize(self._title, time.monotonic() - self._epoch_began, logs)

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Show the running values."""
        self._show(step, logs)

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """Begin a bar."""
        if not self._training:
            self._begin_pass("Evaluate", self._extent())
            return
        self._end_training()
        extent = _Extent((logs or {}).get("steps"), self.params.get("eval_global_batch"))
        self._begin_pass(f"{self._title} evaluate", extent, _EVALUATION_LINES)

    def on_eval_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Count it: the hook of its end is called for some steps alone."""
        if self._pass is not None:
            self._pass.last = step, time.monotonic()

    on_predict_batch_begin = on_eval_batch_begin

    def on_eval_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Show the running values."""
        self._show(step, logs)

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """Write the evaluation's line, unless the epoch's will hold its values."""
        if self._training:
            self._end_pass()
        else:
            self._end_single("Evaluate", logs)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Begin a bar."""
        self._begin_pass("Predict", self._extent())

    def on_predict_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Show how far it is."""
        self._show(step, logs)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Write the prediction's line."""
        self._end_single("Predict", logs)

    def on_exception(self, exc: BaseException) -> None:
        """Take the bar away, so that the traceback stands alone."""
        self.on_train_end()

    def state_dict(self) -> dict[str, Any]:
        """Where the fit and its epoch began."""
        return {"fit_start": self._fit_start, "epoch_start": self._epoch_start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._fit_start = state["fit_start"]
        if self._pass is not None:
            # Within an epoch, whose bar has begun as if it were at its beginning.
            self._epoch_start = state["epoch_start"]
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        trained = self.model.steps_trained
        before = trained - self._epoch_start
        steps, num_iters = self.params.get("steps"), self.params.get("num_iters")
        if num_iters is not None:
            allowed = before + max(0, num_iters - (trained - self._fit_start))
            steps = allowed if steps is None else min(steps, allowed)
        self._begin_pass(self._title, self._extent()._replace(steps=steps, before=before))

    def _end_training(self) -> None:
        """The training of the epoch is over, if it was not before."""
        if (ended := self._end_pass()) is not None:
            ended.reach(self.model.steps_trained - self._epoch_start)
            self._speed = ended.speed()

    def _extent(self) -> _Extent:
        return _Extent(self.params.get("steps"), self.params.get("global_batch"), self.params.get("samples"))

    def _begin_pass(self, title: str, extent: _Extent, lines: int = _LINES) -> None:
        self._end_pass()
        if not self._shows:
            return
        if self.verbose == 2:
            self._pass = _Lines(title, extent, self.log_freq, 0.0)
        elif _has_screen():
            self._pass = _Bar(title, extent)
        else:
            self._pass = _Lines(title, extent, _line_step(extent.steps, self.log_freq, lines), _LINE_SECONDS)

    def _needs(self, hook: str) -> bool:
        return self._counts or getattr(getattr(self, hook), "__func__", None) is not ProgBarLogger.on_eval_batch_begin

    def _looks_at(self, step: int) -> bool:
        if self._pass is None:
            return False
        self._pass.reach(step + 1)
        return self._pass.is_due()

    def _show(self, step: int, logs: Logs | None) -> None:
        if self._pass is not None:
            self._pass.reach(step + 1)
            self._pass.show(logs or {})

    def _end_pass(self) -> _Pass | None:
        ended, self._pass = self._pass, None
        if ended is not None:
            ended.close()
        return ended

    def _end_single(self, title: str, logs: Logs | None) -> None:
        """The end of evaluate or predict."""
        if (ended := self._end_pass()) is not None:
            self._speed = ended.speed_of_all()
            self._summarize(title, time.monotonic() - ended.began, logs)

    def _summarize(self, title: str, seconds: float, logs: Logs | None) -> None:
        if self._shows:
            speed, self._speed = self._speed, None
            say(" - ".join([title, f"{seconds:.1f}s", *_parts(logs or {}), *([speed] if speed else [])]))


class _Extent(NamedTuple):
    """How much a pass has to do, as far as it is known."""

    steps: int | None
    batch: int | None
    """Samples of a step over all ranks, the last one aside."""
    samples: int | None = None
    """Of the whole pass."""
    before: int = 0
    """Steps that an earlier process has done."""

    def speed(self, done: int, seconds: float) -> str | None:
        """The speed of the steps that were done here; None where it cannot be told."""
        steps = done - self.before
        if steps <= 0 or seconds <= 0:
            return None
        if self.batch is None:
            return f"{seconds / steps * 1000:.1f} ms/step"
        samples = steps * self.batch
        if self.samples is not None:
            samples = min(samples, self.samples - self.before * self.batch)
        rate = samples / seconds
        return f"{rate:.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s"


class _Pass(ABC):
    """One pass over data as it is shown; `done` are its steps that are known to be done, at the time `at`."""

    def __init__(self, title: str, extent: _Extent) -> None:
        self.title, self.extent = title, extent
        self.done = extent.before
        self.began = self.shown = self.at = time.monotonic()
        # What was done when the last step began, and when that was: known of evaluate and predict.
        self.last = -1, self.began

    def reach(self, done: int) -> None:
        """So many steps are done now."""
        self.done, self.at = done, time.monotonic()

    def speed_of_all(self) -> str | None:
        """That of evaluate or predict at its end: of the steps that began; `num_iters` may be more than there are."""
        self.reach(self.last[0] + 1)
        if self.extent.samples is not None:
            self.done = self.extent.steps or 0
        elif self.extent.batch is not None:
            self.done, self.at = self.last  # how many samples the last step had is not known
        return self.speed()

    @abstractmethod
    def is_due(self) -> bool:
        """Whether it is to be shown now; what it would show need not be gathered before."""

    @abstractmethod
    def show(self, logs: Logs) -> None:
        """Show how far it is."""

    def close(self) -> None:
        """Take away what does not stay."""
        return None

    def speed(self) -> str | None:
        """That of the pass so far."""
        return self.extent.speed(self.done, self.at - self.began)


class _Lines(_Pass):
    def __init__(self, title: str, extent: _Extent, every: int, seconds: float) -> None:
        super().__init__(title, extent)
        self._every, self._seconds = every, seconds

    def is_due(self) -> bool:
        return not self.done % self._every and time.monotonic() - self.shown >= self._seconds

    def show(self, logs: Logs) -> None:
        now = self.shown = time.monotonic()
        steps = self.extent.steps
        if steps is None and self._seconds:
            # Of unknown length: ever rarer, so that a long pass writes few lines too.
            self._every *= _RARER
        told = [f"{self.title} step {self.done}" + (f"/{steps}" if steps is not None else ""), *_parts(logs)]
        if (speed := self.speed()) is not None:
            told.append(speed)
            if steps is not None:
                left = (steps - self.done) / (self.done - self.extent.before) * (now - self.began)
                told.append(f"{_clock(left)} left")
        say(" - ".join(told))


class _Bar(_Pass):
    def __init__(self, title: str, extent: _Extent) -> None:
        super().__init__(title, extent)
        # Refreshed whenever it is told of steps: how often that is is decided here, where the values are read.
        self._bar = _bar_class(extent)(
            total=extent.steps,
            initial=extent.before,
            desc=title,
            leave=False,
            mininterval=0,
            miniters=1,
            file=sys.stderr,
            **_bar_size(),
        )

    def is_due(self) -> bool:
        return self.done == self.extent.steps or time.monotonic() - self.shown >= _BAR_SECONDS

    def show(self, logs: Logs) -> None:
        self.shown = time.monotonic()
        self._bar.set_postfix_str(", ".join(_parts(logs)), refresh=False)
        self._bar.update(self.done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _parts(logs: Logs) -> list[str]:
    return [f"{name} {number(float(value), name)}" for name, value in logs.items()]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _line_step(steps: int | None, log_freq: int, lines: int) -> int:
    return log_freq if steps is None else -(-steps // (lines * log_freq)) * log_freq


def _has_screen() -> bool:
    return in_notebook() or (sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty())


def _bar_size() -> dict[str, Any]:
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):
        return {}  # a notebook, say: what the bar takes there is known to tqdm
    # A terminal made by a program often has the size 0 x 0, in which tqdm would hide the bar.
    return {"dynamic_ncols": True} if columns and rows else {"ncols": 80, "nrows": 24}


def _bar_class(extent: _Extent) -> Any:
    widget = in_notebook() and importlib.util.find_spec("ipywidgets") is not None
    tqdm: Any = importlib.import_module("tqdm.notebook" if widget else "tqdm").tqdm

    class Bar(tqdm):  # type: ignore[misc]
        # Without tqdm's watching thread: data workers that are forked beside a thread may hang.
        monitor_interval = 0

        @property
        def format_dict(self) -> dict[str, Any]:
            values: dict[str, Any] = super().format_dict
            return values | {"bar_format": _bar_format(values, extent, widget)}

    return Bar


def _bar_format(values: dict[str, Any], extent: _Extent, widget: bool) -> str:
    """What tqdm is to fill in: as much as there is room for, the values before the rest."""
    # tqdm's rate is that of late; the first time it has none.
    rate = values["rate"]
    speed = _Extent(1, extent.batch).speed(1, 1 / rate) if rate else extent.speed(values["n"], values["elapsed"])
    told = _told(speed, values["postfix"])
    if extent.steps is None:
        return "{desc}: {n_fmt} steps [{elapsed}" + told + "]"
    percentage, room = "{percentage:3.0f}%", _WIDEST
    if values["ncols"]:
        fixed = f"{values['prefix']}: 100%|| {extent.steps}/{extent.steps} [00:00<00:00{told}]"
        room = values["ncols"] - len(fixed)
        if _NARROWEST - len("100%") <= room < _NARROWEST:
            percentage, room = "", room + len("100%")
        elif room < _NARROWEST:
            told = _told(None, values["postfix"])
            room = values["ncols"] - len(fixed) + len(f", {speed}")
    # A widget's bar is no text.
    bar = "{bar}" if widget else "{bar:" + str(max(_NARROWEST, min(_WIDEST, room))) + "}"
    return "{desc}: " + percentage + "|" + bar + "| {n_fmt}/{total_fmt} [{elapsed}<{remaining}" + told + "]"


def _told(speed: str | None, values: str | None) -> str:
    return "".join(f", {text}" for text in (speed, values) if text).replace("{", "{{").replace("}", "}}")
