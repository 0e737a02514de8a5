"""When the learning rate moves: once per optimizer step or per epoch, never once per process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

# Schedulers whose length is counted in optimizer steps; torch's documentation steps them after each batch.
_PER_STEP = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)


class Schedule:
    """A learning rate scheduler with its interval.

    Args:
        scheduler: Any of torch's, ReduceLROnPlateau included, or an object with `step`.
        interval: "step" or "epoch"; None takes what the scheduler's class is meant for.

    Raises:
        TypeError: It is no scheduler.
        ValueError: The scheduler belongs to another optimizer.
    """

    def __init__(self, scheduler: Any, interval: str | None, optimizer: torch.optim.Optimizer) -> None:
        if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
            raise TypeError(
                f"scheduler received {scheduler!r:.100}, which has no step() and state_dict(). Write a scheduler of "
                "torch.optim.lr_scheduler, or a callable that makes one: "
                "scheduler=lambda optimizer: StepLR(optimizer, 1)."
            )
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                f"The scheduler ({type(scheduler).__name__}) was made for another optimizer than the prepared one, "
                "whose learning rate it would not move. Make it with the same optimizer object, or pass "
                "scheduler=lambda optimizer: ..."
            )
        self.scheduler = scheduler
        self.interval = interval or default_interval(scheduler)
        self._is_restored = False

    def check(self, names: Sequence[str], moves: int | None, interval: str) -> None:
        """Called before the first epoch.

        Args:
            names: Those that epoch logs will have.
            moves: Optimizer steps, or epochs, to come; None: unknown.
            interval: Which of the two, "step" or "epoch": what the fit will have, its callbacks considered.

        Raises:
            ValueError: The value that the scheduler watches is not among the names, or it ends before training does.
        """
        if isinstance(self.scheduler, lr_scheduler.OneCycleLR) and moves is not None:
            to_come = f"{moves} {'optimizer steps' if interval == 'step' else 'epochs with a step each'}"
            self._check_length(int(self.scheduler.total_steps), int(self.scheduler.last_epoch), moves, to_come)
        if self.needs_metric and "val_loss" not in names:
            raise ValueError(
                "The scheduler ReduceLROnPlateau watches val_loss, but fit has no eval_data, so that it would never "
                "move. Write fit(train_data, eval_data), or use the callback "
                'hapi.callbacks.ReduceLROnPlateau(monitor="loss") instead.'
            )

    def _check_length(self, total: int, done: int, moves: int, to_come: str) -> None:
        if done + moves <= total:
            return
        if self._is_restored:
            # What the script writes now was replaced by what was saved.
            raise ValueError(
                f"OneCycleLR goes on from a checkpoint, whose cycle has {total} steps, of which {done} are taken, but "
                f"{to_come} are to come. Train as long as that run was to, with its epochs, batch_size "
                "and accumulate_grad_batches, or load the weights alone by model.load(path, reset_optimizer=True) and "
                "begin a new cycle by a fit without resume."
            )
        raise ValueError(
            f"OneCycleLR was made for {total} steps, of which {done} are taken, but {to_come} are to come. Write "
            f"total_steps={done + moves}."
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Put a saved state in.

        Raises:
            ValueError: It is of another scheduler; this one is then as before.
        """
        before = self.scheduler.state_dict()
        try:
            self.scheduler.load_state_dict(state)
        except Exception as error:  # Each class fails in its own way.
            self.scheduler.load_state_dict(before)
            raise ValueError(
                f"The saved scheduler state does not fit this {type(self.scheduler).__name__} ({error!r}). "
                "Make the scheduler as it was when saved. Or load the weights alone and fit without resume: "
                "model.load(path, reset_optimizer=True)."
            ) from error
        self._is_restored = True

    def after_step(self) -> None:
        """Called after each optimizer step that really happened."""
        if self.interval == "step" and not self.needs_metric:
            self.scheduler.step()

    def after_epoch(self, logs: dict[str, float]) -> None:
        """Called once an epoch, after its evaluation, with the epoch's logs."""
        if self.needs_metric:
            if "val_loss" in logs:
                self.scheduler.step(logs["val_loss"])
        elif self.interval == "epoch":
            self.scheduler.step()

    @property
    def needs_metric(self) -> bool:
        """Whether its step takes a value to watch."""
        return isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)


def set_interval(schedule: Schedule | None, interval: Any) -> None:
    """Set what a schedule counts.

    Raises:
        ValueError: There is no schedule, or the interval is unknown.
    """
    if schedule is None:
        raise ValueError(
            f"scheduler_interval was set to {interval!r}, but no scheduler was prepared whose steps it could "
            "count. Write model.prepare(optimizer, loss, scheduler=...)."
        )
    _check_interval(interval)
    schedule.interval = interval


def _check_interval(interval: Any) -> None:
    if interval not in ("step", "epoch"):
        raise ValueError(
            f'scheduler_interval received {interval!r}, which is no unit of training. Write "step" or "epoch".'
        )


def make_schedule(scheduler: Any, interval: str | None, optimizer: torch.optim.Optimizer | None) -> Schedule | None:
    """The schedule of what `prepare` was given: None, a scheduler, or a callable that makes one from the optimizer.

    Raises:
        ValueError: There is no optimizer to schedule, or the interval is unknown.
        TypeError: It is no scheduler.
    """
    if interval is not None:
        _check_interval(interval)
    if scheduler is None:
        return None
    if optimizer is None:
        raise ValueError(
            f"scheduler received {scheduler!r:.80} without an optimizer, so there is no learning rate to move. "
            "Write prepare(optimizer, loss, scheduler=...)."
        )
    if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
        try:
            scheduler = scheduler(optimizer)
        except TypeError as error:
            if not isinstance(scheduler, type):
                raise
            raise TypeError(
                f"scheduler received the class {scheduler.__name__}, which cannot be made from the optimizer alone "
                f"({error}). Write scheduler=lambda optimizer: {scheduler.__name__}(optimizer, ...)."
            ) from error
    return Schedule(scheduler, interval, optimizer)


def default_interval(scheduler: Any) -> str:
    """The interval that a scheduler's class is meant for; a composed one goes by its parts."""
    parts = getattr(scheduler, "_schedulers", None)
    if parts:
        return "step" if any(default_interval(part) == "step" for part in parts) else "epoch"
    return "step" if isinstance(scheduler, _PER_STEP) else "epoch"


def rate_of(optimizer: torch.optim.Optimizer) -> float | torch.Tensor:
    """The learning rate of the first group, as it is now."""
    rate: float | torch.Tensor = optimizer.param_groups[0]["lr"]
    # A scheduler overwrites a rate that is a tensor in place; reading it here would wait for the device.
    return rate.detach().clone() if isinstance(rate, torch.Tensor) else rate
