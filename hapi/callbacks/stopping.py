"""Stopping a fit when a value no longer improves."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from hapi import kinds
from hapi.callbacks.base import SAVING, Callback, Logs
from hapi.callbacks.checkpoint import ModelCheckpoint, save_on_rank_0
from hapi.callbacks.monitor import Monitor
from hapi.callbacks.terminal import note, number


class EarlyStopping(Callback):
    """Stops training at the end of an epoch once a value has not improved for some epochs.

    Only epochs whose logs have the value count. At each improvement the model is saved to ``best_model`` in
    fit's ``save_dir`` (without one it is not kept), unless a ``ModelCheckpoint(monitor=...)`` looks after
    that file. Whether a save that fails ends the run, the ``ModelCheckpoint`` of that folder says.

    Args:
        monitor: The key in epoch logs.
        mode: ``"min"``, ``"max"``, or ``"auto"``: told from the name.
        patience: How many epochs without improvement stop the training; 0 and 1: the first.
        verbose: 1: a line when it stops. 0: none.
        min_delta: What a value must be better by to count as an improvement.
        baseline: What the first value must be better than.
        save_best_model: Whether to save the best model.

    Attributes:
        stopped_epoch: The number, from 1, of the epoch after which it stopped; None: it did not.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: ``mode`` is unknown or cannot be told from the name, ``patience`` is negative.
    """

    # Its best model holds the other callbacks' state of the same moment.
    _place = SAVING
    _on_all_ranks = True

    def __init__(
        self,
        monitor: str = "val_loss",
        mode: str = "auto",
        patience: int = 0,
        verbose: int = 1,
        min_delta: float = 0,
        baseline: float | None = None,
        save_best_model: bool = True,
        **unknown: NoReturn,
    ) -> None:
        kinds.refuse_unknown(type(self), unknown)
        kinds.check(EarlyStopping, locals())
        kinds.count("patience", patience, 0, 0, owner="EarlyStopping", what="epochs")
        if baseline is not None and math.isnan(baseline):
            raise ValueError(
                "EarlyStopping received baseline=nan, than which no value is better. Write baseline=0.5, or leave it "
                "out."
            )
        self.monitor, self.patience, self.verbose = monitor, patience, verbose
        self.baseline, self.save_best_model = baseline, save_best_model
        self.mode, self.min_delta = mode, min_delta
        self._watch = Monitor("EarlyStopping", monitor, mode, min_delta)
        self._wait = 0
        self.stopped_epoch: int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew."""
        self._watch.check(self.params)
        self._watch.best, self._wait, self.stopped_epoch = self.baseline, 0, None
        if self.save_best_model and self.params.get("save_dir") is None:
            note(self.verbose, self.params, "EarlyStopping: fit has no save_dir, so no best model is saved.")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Look at the epoch's value; ask the model to stop if it is time."""
        value = (logs or {}).get(self.monitor)
        if value is None:
            return
        if self._watch.improves(float(value)):
            self._wait = 0
            self._save_best()
            return
        self._wait += 1
        if self._wait >= self.patience:
            self.stopped_epoch = epoch + 1
            self.model.stop_training = True
            best = "none" if self._watch.best is None else number(self._watch.best)
            text = f"EarlyStopping: stopped after epoch {epoch + 1}, best {self.monitor} {best}."
            note(self.verbose, self.params, text)

    def state_dict(self) -> dict[str, Any]:
        """Best value and epochs without improvement."""
        return {"best": self._watch.best, "wait": self._wait, "stopped_epoch": self.stopped_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._watch.best, self._wait, self.stopped_epoch = (
            state["best"],
            state["wait"],
            state["stopped_epoch"],
        )

    def _save_best(self) -> None:
        save_dir = self.params.get("save_dir")
        if not self.save_best_model or save_dir is None:
            return
        here = [
            each
            for each in self.params.get("callbacks", ())
            if isinstance(each, ModelCheckpoint) and each._saves_in(save_dir)
        ]
        if not any(each.monitor is not None for each in here):
            goes_on = any(each.on_save_error == "continue" for each in here)
            path = os.path.join(save_dir, "best_model")
            save_on_rank_0(lambda: self.model.save(path), "continue" if goes_on else "stop")
