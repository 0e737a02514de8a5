"""What callbacks share that draw curves elsewhere: TensorBoard's, Weights & Biases', MLflow's."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hapi import files, kinds, signals
from hapi.callbacks.base import Callback, Logs
from hapi.callbacks.terminal import say
from hapi.distributed import get_rank


class Curves(Callback, ABC):
    """Writes values on rank 0, over the steps trained: ``epoch/...`` and ``batch/...``, the learning rate among them.

    A subclass overrides `_write`.

    Args:
        log_freq: Steps from one ``batch/...`` to the next. None: fit's.

    Raises:
        ValueError: ``log_freq`` is below 1.
    """

    def __init__(self, log_freq: int | None = None) -> None:
        check_log_freq(type(self).__name__, log_freq)
        self.log_freq = log_freq
        self._steps_before = 0

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Take fit's ``log_freq`` where there is none of its own."""
        super().set_params(params)
        self.batch_freq = self.log_freq or params.get("log_freq") or 10

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note where the epoch starts."""
        self._steps_before = self.model.steps_trained

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Write the running values."""
        if get_rank() == 0:
            values = {**(logs or {}), "lr": self.model._engine.learning_rate}
            self._write("batch", values, self._steps_before + step + 1)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch's values."""
        if get_rank() == 0:
            self._write("epoch", logs or {}, self.model.steps_trained)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch has started."""
        return {"steps_before": self._steps_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._steps_before = state["steps_before"]

    @abstractmethod
    def _write(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Write values, of a "batch" or an "epoch", as those of a step."""


class Tracker(Curves):
    """Curves of a run that a service knows by an id: a resumed fit goes on with the run that it had begun.

    A subclass overrides `_start`, `_log` and `_end`, which are called on rank 0. An error of the last two, of a server
    that cannot be reached, is told in a line, and the training goes on.
    """

    def __init__(self, log_freq: int | None = None) -> None:
        super().__init__(log_freq)
        self._run: Any = None
        self._run_id: str | None = None
        self._lost = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew; the run itself starts with the first epoch, when it is known whether it goes on."""
        self._run = self._run_id = None
        self._lost = False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start the run, if it has not."""
        super().on_epoch_begin(epoch, logs)
        if self._run is None and get_rank() == 0:
            self._run, self._run_id = self._start(self._run_id)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """The run has come to its end."""
        self._finish("finished")

    def on_exception(self, exc: BaseException) -> None:
        """The run was stopped, or has failed."""
        self._finish("stopped" if isinstance(exc, signals.Stopped | KeyboardInterrupt) else "failed")

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch has started, and the run's id."""
        return super().state_dict() | {"run": self._run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that run."""
        super().load_state_dict(state)
        if self._run is None:
            self._run_id = state["run"]

    def _finish(self, how: str) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            try:
                self._end(run, how)
            except Exception as error:
                say(f"{type(self).__name__}: the end of the run could not be told: {error}")

    def _write(self, group: str, values: Mapping[str, Any], step: int) -> None:
        if self._run is None:
            return
        plain = {f"{group}/{name}": float(value) for name, value in values.items()}
        try:
            self._log(plain, step)
        except Exception as error:
            if not self._lost:
                say(f"{type(self).__name__}: values are lost from step {step} on, as long as this lasts: {error}")
            self._lost = True
        else:
            self._lost = False

    @abstractmethod
    def _start(self, known: str | None) -> tuple[Any, str]:
        """Start a run, or go on with one whose id is known; what it is, and its id."""

    @abstractmethod
    def _log(self, values: Mapping[str, float], step: int) -> None:
        """Send the values of a step."""

    @abstractmethod
    def _end(self, run: Any, how: str) -> None:
        """The end of a run: "finished", "stopped" or "failed"."""


def require(owner: str, package: str) -> None:
    """See that the package of an extra is there: before the first epoch, and on every rank.

    Raises:
        ImportError: It is not installed.
    """
    spec = importlib.util.find_spec(package)
    # A folder of that name, as some of them make one for their files, is no package.
    if spec is None or spec.origin is None:
        raise ImportError(
            f"{owner} needs the package {package}, which is not installed, to write its files. "
            f'Run `pip install "torch-hapi[{package}]"`, or use CSVLogger.'
        )


def check_place(owner: str, argument: str, path: Path, is_file: bool = False) -> None:
    """See that a file, or files in a folder, can be written before a fit takes its first step. Nothing is touched.

    Args:
        owner: The callback's name, for the message.
        argument: Its argument's name.
        path: What the argument received; neither it nor its folder need be there.
        is_file: Whether it is the file rather than the folder.

    Raises:
        ValueError: None can.
    """
    if is_file and path.is_dir():
        problem: str | None = f"{path} is a folder"
    else:
        problem = files.why_not_writable(path.parent if is_file else path)
    if problem is not None:
        raise ValueError(
            f"{owner} received {argument}={str(path)!r}, where nothing can be written: {problem}. Write a path that "
            f"you may write to, such as {argument}={str(Path('runs') / path.name)!r}."
        )


def check_log_freq(owner: str, log_freq: Any) -> None:
    """See that a callback's own ``log_freq`` is a number of steps, or None.

    Raises:
        TypeError: It is no number.
        ValueError: It is below 1.
    """
    if log_freq is not None:
        kinds.count("log_freq", log_freq, 10, owner=owner, what="steps")
