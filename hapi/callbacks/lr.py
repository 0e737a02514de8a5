"""The learning rate during a fit: when the model's scheduler steps, and lowering it on a plateau."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hapi import kinds
from hapi.callbacks.base import Callback, Logs
from hapi.callbacks.monitor import Monitor
from hapi.callbacks.terminal import note, number


class LRScheduler(Callback):
    """Says for one fit when the scheduler of ``prepare`` steps, whatever its ``scheduler_interval``.

    Args:
        by_step: True: after each optimizer step.
        by_epoch: True: after each epoch. With neither given, the model's own interval stays.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: Both are True, or both False.
    """

    _on_all_ranks = True

    def __init__(self, by_step: bool | None = None, by_epoch: bool | None = None) -> None:
        kinds.check(LRScheduler, locals())
        if by_step is not None and by_step == by_epoch:
            raise ValueError(
                f"LRScheduler received by_step={by_step} and by_epoch={by_epoch}: a scheduler steps at one of the "
                "two. Write LRScheduler(by_step=True) or LRScheduler(by_epoch=True)."
            )
        self.by_step, self.by_epoch = by_step, by_epoch
        self._before: tuple[Any] | None = None

    @property
    def interval(self) -> str | None:
        """What it sets the model's interval to: "step" or "epoch"; None: it stays."""
        if self.by_step is None and self.by_epoch is None:
            return None
        steps = self.by_step if self.by_step is not None else not self.by_epoch
        return "step" if steps else "epoch"

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Set the model's interval."""
        if self.model.scheduler is None:
            raise ValueError(
                "LRScheduler says when the model's scheduler steps, but the model has none. Write prepare(..., "
                "scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10))."
            )
        count = sum(isinstance(each, LRScheduler) for each in self.params.get("callbacks", ()))
        if count > 1:
            raise ValueError(
                f"callbacks holds {count} of LRScheduler, but a scheduler steps at one time, and the model's own "
                "interval would be lost. Keep one of them."
            )
        if self.interval is not None:
            self._before = (self.model.scheduler_interval,)
            self.model.scheduler_interval = self.interval

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Give the model its own interval back."""
        if self._before is not None:
            (self.model.scheduler_interval,) = self._before
            self._before = None

    def on_exception(self, exc: BaseException) -> None:
        """Give the model its own interval back."""
        self.on_train_end()


class ReduceLROnPlateau(Callback):
    """Lowers the learning rate once a value has not improved for some epochs.

    The rate of every parameter group is multiplied by a factor. Only epochs whose logs have the value count.

    Args:
        monitor: The key in epoch logs.
        factor: What the learning rate is multiplied by, between 0 and 1.
        patience: How many epochs without improvement lower it; 0 and 1: the first.
        verbose: 1: a line when it is lowered. 0: none.
        mode: ``"min"``, ``"max"``, or ``"auto"``: told from the name.
        min_delta: What a value must be better by to count as an improvement.
        cooldown: For how many epochs after lowering it nothing is counted.
        min_lr: What it is not lowered below.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: ``factor`` is not between 0 and 1, ``patience`` or ``cooldown`` is negative, ``mode`` is
            unknown or cannot be told from the name.
    """

    _on_all_ranks = True

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 1,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0,
    ) -> None:
        kinds.check(ReduceLROnPlateau, locals())
        if not 0 < factor < 1:
            raise ValueError(
                f"ReduceLROnPlateau received factor={factor}: it would not lower the rate. Write factor=0.1."
            )
        kinds.count("patience", patience, 10, 0, owner="ReduceLROnPlateau", what="epochs")
        kinds.count("cooldown", cooldown, 0, 0, owner="ReduceLROnPlateau", what="epochs")
        if not min_lr >= 0:
            raise ValueError(
                f"ReduceLROnPlateau received min_lr={min_lr!r}, which is no rate to stay above: it is 0 or more. Write "
                "min_lr=1e-6."
            )
        self.monitor, self.factor, self.patience, self.verbose = monitor, factor, patience, verbose
        self.cooldown, self.min_lr, self.mode, self.min_delta = cooldown, min_lr, mode, min_delta
        self._watch = Monitor("ReduceLROnPlateau", monitor, mode, min_delta)
        self._wait = self._resting = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start anew."""
        self._watch.check(self.params)
        if self.model.scheduler is not None:
            raise ValueError(
                f"The callback ReduceLROnPlateau and the model's {type(self.model.scheduler).__name__} would both set "
                "the learning rate. Keep one of them; torch.optim.lr_scheduler.ReduceLROnPlateau can be the "
                "scheduler of prepare."
            )
        self._watch.best, self._wait, self._resting = None, 0, 0

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Look at the epoch's value; lower the rates if it is time."""
        value = (logs or {}).get(self.monitor)
        if value is None:
            return
        resting = self._resting > 0
        self._resting = max(self._resting - 1, 0)
        if self._watch.improves(float(value)) or resting:
            self._wait = 0
            return
        self._wait += 1
        if self._wait >= self.patience:
            self._lower(epoch)
            self._wait, self._resting = 0, self.cooldown

    def state_dict(self) -> dict[str, Any]:
        """Best value, epochs without improvement, epochs of rest left."""
        return {"best": self._watch.best, "wait": self._wait, "resting": self._resting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._watch.best, self._wait, self._resting = state["best"], state["wait"], state["resting"]

    def _lower(self, epoch: int) -> None:
        for group in self.model.optimizer.param_groups:
            old = float(group["lr"])
            new = max(old * self.factor, self.min_lr)
            if new >= old:
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(new)
            else:
                group["lr"] = new
            rates = f"{number(old, 'lr')} -> {number(new, 'lr')}"
            text = f"ReduceLROnPlateau: learning rate {rates} after epoch {epoch + 1}."
            note(self.verbose, self.params, text)
