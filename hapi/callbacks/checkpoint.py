"""Saving the model during a fit."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hapi import checkpoint, kinds
from hapi.callbacks.base import LAST, Logs, Saver
from hapi.callbacks.monitor import Monitor
from hapi.callbacks.retention import Retention
from hapi.callbacks.terminal import note
from hapi.distributed import group

if TYPE_CHECKING:
    from hapi.writer import Writer


class ModelCheckpoint(Saver):
    """Saves the model: ``{epoch}`` after epochs, ``final`` at the end, ``best_model`` at each best value.

    It comes after all other callbacks, so that a checkpoint holds their state of the same moment. Within epochs it
    saves ``step_{n}``, n the steps trained so far, at edges of optimizer steps: where asked for below, and when the run
    is told to stop by SIGTERM, SIGUSR1 or Ctrl-C.

    Args:
        save_freq: Save ``{epoch}`` every so many epochs, counted from 1, and after the last. None: fit's.
        save_dir: The folder. None: fit's.
        monitor: The key in epoch logs that decides which model is the best. None: no ``best_model``.
        mode: ``"min"``, ``"max"``, or ``"auto"``: told from the name.
        verbose: 1: a line for each file. 0: none.
        every_n_steps: Also save ``step_{n}`` each time so many steps (batches a rank) are done.
        every_seconds: Also save ``step_{n}`` after so many seconds, by rank 0's clock, seen about twice a second.
        keep_last: How many of ``{epoch}`` and ``step_{n}`` to keep, the newest. None: every ``{epoch}``, and
            the newest ``step_{n}`` until an epoch's follows. Only what this run has saved is ever deleted.
        save_top_k: How many best models to keep: ``best_model``, and with more than one ``top_{epoch}`` for each of the
            k best epochs.
        asynchronous: Copy the state and write it in a thread, while training goes on. It takes the memory of one more
            checkpoint.
        on_save_error: ``"stop"``: a save that fails (a full disk, a folder that is gone) raises ``OSError`` on all
            ranks. ``"continue"``: it warns, and training goes on.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: A number is not positive, ``mode`` or ``on_save_error`` is unknown, ``save_top_k`` lacks a
            ``monitor``.
    """

    _place = LAST

    def __init__(
        self,
        save_freq: int | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        monitor: str | None = None,
        mode: str = "auto",
        verbose: int = 0,
        *,
        every_n_steps: int | None = None,
        every_seconds: float | None = None,
        keep_last: int | None = None,
        save_top_k: int = 1,
        asynchronous: bool = False,
        on_save_error: str = "stop",
        **unknown: NoReturn,
    ) -> None:
        kinds.refuse_unknown(type(self), unknown)
        counts = {
            "save_freq": save_freq, "every_n_steps": every_n_steps, "keep_last": keep_last, "save_top_k": save_top_k
        }  # fmt: skip
        for name, value in counts.items():
            if value is not None:
                kinds.count(name, value, 1, owner="ModelCheckpoint")
        kinds.check(ModelCheckpoint, locals())
        _check_rest(every_seconds, on_save_error, save_top_k, monitor)
        self.save_freq, self.save_dir, self.monitor, self.verbose = save_freq, save_dir, monitor, verbose
        self.every_n_steps, self.every_seconds = every_n_steps, every_seconds
        self.keep_last, self.save_top_k = keep_last, save_top_k
        self.mode, self.asynchronous, self.on_save_error = mode, asynchronous, on_save_error
        watch = Monitor("ModelCheckpoint", monitor or "", mode)
        self._watch = watch if monitor is not None else None
        self._writer = _writer() if asynchronous else None
        self._retention = Retention(keep_last, save_top_k)
        self._unsaved: int | None = None
        self._unsaved_top: str | None = None
        self._epochs: int | None = None
        self._saved_at = 0
        self._newest: str | None = None
        self._since = 0.0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew."""
        if self.save_dir is None and self.params.get("save_dir") is None:
            raise ValueError(
                "ModelCheckpoint has no save_dir, and neither has fit: there is nowhere to save to. Write fit(..., "
                'save_dir="checkpoints") or ModelCheckpoint(save_dir="checkpoints").'
            )
        if group.speaks_for_all():
            checkpoint.sweep(self._folder())
            if self._writer is not None:
                self._writer.warm_up()
        self._unsaved = self._unsaved_top = self._newest = None
        self._epochs = self.model.epochs_trained
        # Rank 0's, on all ranks: on another host the folder may have another name.
        folder = group.broadcast_object(os.path.realpath(self._folder()))
        self._retention = Retention(self.keep_last, self.save_top_k, folder)
        self._saved_at, self._since = self.model.steps_trained, time.monotonic()
        if self._watch is not None:
            self._watch.check(self.params)
            self._watch.best = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Save what a kill came before: the run goes on from ``best_model``, and its epoch's own file is not there."""
        if self._unsaved != epoch or (self._unsaved_top is None and not self._is_due(epoch)):
            return
        cursor = self.model._engine.cursor
        if cursor.is_between_epochs:
            # The places of all ranks, which are not known since the epoch has begun.
            cursor.gather()
            self._save_top()
            self._save_if_due(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save what is due."""
        number = self._unsaved = self._epochs = epoch + 1
        if self._watch is not None:
            self._save_best(number, (logs or {}).get(self._watch.name))
        self._save_if_due(number)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Save ``final``, and the last epoch if the fit was stopped before it was due."""
        self._save_top()
        if self._unsaved is not None:
            self._save_epoch(self._unsaved)
        self._save("final")
        self._finish()

    def on_exception(self, exc: BaseException) -> None:
        """Let a save that is under way come to its end."""
        if self._writer is not None:
            error = self._writer.wait()
            if error is not None:
                warnings.warn(f"ModelCheckpoint: {error}", stacklevel=2)

    def saves_at(self, steps_trained: int) -> bool:
        """See `Saver.saves_at`."""
        freq = self.every_n_steps
        return freq is not None and steps_trained // freq > self._saved_at // freq

    def wants_save(self) -> bool:
        """See `Saver.wants_save`. Rank 0's clock decides."""
        due = self.every_seconds is not None and time.monotonic() - self._since >= self.every_seconds
        return due and group.speaks_for_all()

    def save_within(self, stopping: bool) -> None:
        """See `Saver.save_within`."""
        steps = self.model.steps_trained
        # Stopped right where it has saved, there is nothing new; another callback's wish is not its own.
        if self._saved_at != steps and (stopping or self.saves_at(steps) or self.is_due):
            self._save_periodic(f"step_{steps}")
        if stopping:
            whole = self._finish() and self._newest is not None
            place = f"{self._folder()}/{self._newest}" if whole else f"the newest checkpoint in {self._folder()}"
            note(1, self.params, f"hapi: stopped after step {steps}; fit(..., resume=True) goes on from {place}")

    def state_dict(self) -> dict[str, Any]:
        """The best value, and which files are its own."""
        best = {"best": self._watch.best} if self._watch is not None else {}
        # Another callback may save when an epoch is over, before this one has heard of it.
        ended = self._epochs is not None and self.model.epochs_trained > self._epochs
        unsaved = {"unsaved": self.model.epochs_trained if ended else self._unsaved, "unsaved_top": self._unsaved_top}
        return {**best, **unsaved, **self._retention.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if self._watch is not None:
            self._watch.best = state.get("best")
        self._unsaved = state.get("unsaved")
        self._retention.load_state_dict(state)
        top = state.get("unsaved_top")
        # In another folder than before, none of the best is there.
        self._unsaved_top = top if top is not None and self._retention.identity(top) is not None else None

    def _is_due(self, number: int) -> bool:
        save_freq = self.save_freq or self.params.get("save_freq") or 1
        return bool(number % save_freq == 0 or number == self.params.get("last_epoch"))

    def _save_if_due(self, number: int) -> None:
        if self._is_due(number):
            self._save_epoch(number)

    def _save_best(self, number: int, value: Any) -> None:
        if self._watch is None or value is None:
            return
        if self._retention.enters(float(value), f"top_{number}", self._watch.rising):
            self._unsaved_top = f"top_{number}"
        if self._watch.improves(float(value)):
            self._save("best_model")
        self._save_top()

    def _save_top(self) -> None:
        name, self._unsaved_top = self._unsaved_top, None
        if name is not None:
            self._save(name)

    def _save_epoch(self, number: int) -> None:
        self._unsaved = None
        self._save_periodic(str(number))

    def _save_periodic(self, name: str) -> None:
        self._saved_at, self._since = self.model.steps_trained, time.monotonic()
        self._retention.add(name)
        # A thread tells of a failure only at the next save: then neither name is sure.
        self._newest = name if self._save(name) else None

    def _save(self, name: str) -> bool:
        """Save under a name, then delete what is not to be kept any more; whether it was saved. Called on all ranks."""
        folder, identity, dropped = self._folder(), self._retention.identity(name), self._retention.dropped()
        path = os.path.join(folder, name)

        def save() -> None:
            with checkpoint.identified(identity):
                self._write(path, folder, dropped)

        saved = save_on_rank_0(save, self.on_save_error)
        if saved:
            note(self.verbose, self.params, f"ModelCheckpoint: saved {path}")
        return saved

    def _saves_in(self, save_dir: str | os.PathLike[str]) -> bool:
        """Whether it saves in fit's folder."""
        return self.save_dir is None or os.path.realpath(self.save_dir) == os.path.realpath(save_dir)

    def _folder(self) -> Path:
        return Path(self.save_dir if self.save_dir is not None else self.params["save_dir"])

    def _write(self, path: str, folder: Path, dropped: dict[str, str]) -> None:
        def drop() -> None:
            for name, identity in dropped.items():
                checkpoint.remove(folder / name, identity)

        def write() -> None:
            checkpoint.write(path, snapshot)
            drop()

        if self._writer is None:
            self.model.save(path)
            drop()
            return
        snapshot = self.model._snapshot().copied()
        error = self._writer.wait()
        if error is None or self.on_save_error == "continue":
            self._writer.start(write)
        if error is not None:
            raise error

    def _finish(self) -> bool:
        """Wait for the last save, and agree on what became of it: whether it is there."""
        return self._writer is None or save_on_rank_0(self._raise_pending, self.on_save_error)

    def _raise_pending(self) -> None:
        error = self._writer.wait() if self._writer is not None else None
        if error is not None:
            raise error


def save_on_rank_0(save: Callable[[], None], on_save_error: str = "stop") -> bool:
    """Save on rank 0, called on all ranks; what it raises stops all of them, which would wait for rank 0 otherwise.

    Args:
        save: Called on rank 0 alone.
        on_save_error: ``"continue"``: an ``OSError`` becomes a warning.

    Returns:
        Whether it was saved.
    """
    error: Exception | None = None
    if group.speaks_for_all():
        try:
            save()
        except Exception as raised:
            error = raised
    told = group.broadcast_object(None if error is None else (isinstance(error, OSError), str(error)))
    if told is None:
        return True
    is_of_disk, text = told
    if is_of_disk and on_save_error == "continue":
        if error is not None:
            warnings.warn(f"ModelCheckpoint goes on without this checkpoint: {text}", stacklevel=2)
        return False
    if error is not None:
        raise error
    raise OSError(text) if is_of_disk else RuntimeError(f"Rank 0 could not save: {text}")


def _writer() -> Writer:
    from hapi.writer import Writer

    return Writer()


def _check_rest(every_seconds: Any, on_save_error: str, save_top_k: int, monitor: str | None) -> None:
    if every_seconds is not None and (isinstance(every_seconds, bool) or not every_seconds > 0):
        raise ValueError(
            f"ModelCheckpoint received every_seconds={every_seconds!r}, which is no time to wait. "
            "Write every_seconds=600."
        )
    if on_save_error not in ("stop", "continue"):
        raise ValueError(
            f'ModelCheckpoint received on_save_error={on_save_error!r}, which is unknown. Write "stop" or "continue".'
        )
    if save_top_k > 1 and monitor is None:
        raise ValueError(
            f"ModelCheckpoint received save_top_k={save_top_k} without monitor, so nothing says which models are the "
            'best. Write ModelCheckpoint(monitor="val_loss", save_top_k=3).'
        )
