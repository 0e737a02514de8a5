"""Saving the model during a fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hapi.callbacks.base import LAST, Callback, Logs
from hapi.callbacks.monitor import Monitor
from hapi.callbacks.terminal import note


class ModelCheckpoint(Callback):
    """Saves the model: ``{epoch}`` after epochs, ``final`` at the end, ``best_model`` at each best value.

    It comes after all other callbacks, so that a checkpoint holds their state of the same moment.

    Args:
        save_freq: Save ``{epoch}`` every so many epochs, counted from 1, and after the last. None: fit's.
        save_dir: The folder. None: fit's.
        monitor: The key in epoch logs that decides which model is the best. None: no ``best_model``.
        mode: ``"min"``, ``"max"``, or ``"auto"``: told from the name.
        verbose: 1: a line for each file. 0: none.

    Raises:
        ValueError: ``save_freq`` is below 1, ``mode`` is unknown or cannot be told from the name.
    """

    _place = LAST

    def __init__(
        self,
        save_freq: int | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        monitor: str | None = None,
        mode: str = "auto",
        verbose: int = 0,
    ) -> None:
        whole = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq >= 1
        if save_freq is not None and not whole:
            raise ValueError(
                f"ModelCheckpoint received save_freq={save_freq!r}: it counts whole epochs from 1. Write save_freq=1."
            )
        self.save_freq, self.save_dir, self.monitor, self.verbose = save_freq, save_dir, monitor, verbose
        self._watch = Monitor("ModelCheckpoint", monitor, mode) if monitor is not None else None
        self._unsaved: int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew."""
        if self.save_dir is None and self.params.get("save_dir") is None:
            raise ValueError(
                "ModelCheckpoint has no save_dir, and neither has fit: there is nowhere to save to. Write fit(..., "
                'save_dir="checkpoints") or ModelCheckpoint(save_dir="checkpoints").'
            )
        self._unsaved = None
        if self._watch is not None:
            self._watch.check(self.params)
            self._watch.best = None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save what is due."""
        number = epoch + 1
        if self._watch is not None:
            value = (logs or {}).get(self._watch.name)
            if value is not None and self._watch.improves(float(value)):
                self._save("best_model")
        self._unsaved = number
        save_freq = self.save_freq or self.params.get("save_freq") or 1
        if number % save_freq == 0 or number == self.params.get("last_epoch"):
            self._save_epoch(number)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Save ``final``, and the last epoch if the fit was stopped before it was due."""
        if self._unsaved is not None:
            self._save_epoch(self._unsaved)
        self._save("final")

    def state_dict(self) -> dict[str, Any]:
        """The best value."""
        return {"best": self._watch.best} if self._watch is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if self._watch is not None:
            self._watch.best = state["best"]

    def _save_epoch(self, number: int) -> None:
        self._unsaved = None
        self._save(str(number))

    def _save(self, name: str) -> None:
        save_dir = self.save_dir if self.save_dir is not None else self.params["save_dir"]
        path = os.path.join(save_dir, name)
        self.model.save(path)
        note(self.verbose, self.params, f"ModelCheckpoint: saved {path}")
