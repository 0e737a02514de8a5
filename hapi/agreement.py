"""What all ranks decide together in the middle of an epoch: to stop, and that a loss is no longer a number."""

from __future__ import annotations

import time
from typing import Any

from hapi.distributed import group
from hapi.metrics.tally import Tally

_SECONDS = 0.5
_MOST_STEPS = 4096


class Agreement:
    """A meeting every k optimizer steps, k such that it comes about twice a second: one tiny collective.

    k is agreed in the meeting itself, so ranks of different speed never miss each other.

    Args:
        model: Its `stop_training` is what a rank asks for; after a meeting it is the same on all ranks.
        nan_policy: "stop" raises on a loss that is not finite, "ignore" lets it pass.
    """

    def __init__(self, model: Any, nan_policy: str) -> None:
        self._model = model
        self._watches_loss = nan_policy == "stop"
        self._alone = group.get_world_size() == 1
        self._interval = 1
        self._countdown = 1
        self._since = time.monotonic()

    def after_step(self, tally: Tally, epoch: int, step: int) -> bool:
        """Called after each optimizer step, on every rank.

        Args:
            tally: The running values, whose losses are looked at.
            epoch: For the message, from 0.
            step: The last batch's number in the epoch, from 0.

        Returns:
            Whether all ranks stop here.

        Raises:
            RuntimeError: A loss was infinite or NaN, on any rank.
        """
        self._countdown -= 1
        if self._countdown > 0:
            return self._alone and bool(self._model.stop_training)
        return self._meet(tally, epoch, step)

    def stops(self) -> bool:
        """Whether a rank has asked to stop, at the end of an epoch."""
        self._agree_to_stop(group.reduce_max([float(self._model.stop_training)])[0])
        return bool(self._model.stop_training)

    def end_epoch(self, tally: Tally, epoch: int, step: int) -> None:
        """After the last step of an epoch, before anything of it is kept: all ranks know who has asked to stop.

        Raises:
            RuntimeError: A loss since the last meeting was infinite or NaN, on any rank.
            ValueError: The epoch had no step at all.
        """
        if step < 0:
            raise ValueError(
                f"train_data gave no batch in epoch {epoch + 1}: it is empty, it can be iterated only once, or "
                "drop_last=True leaves nothing of the parts in which it is read. Pass data with at least one sample, "
                "whose __iter__ starts anew each time, or leave drop_last out."
            )
        ago = tally.take_nonfinite() if self._watches_loss else None
        stop, bad, most = group.reduce_max([float(self._model.stop_training), float(ago is not None), float(ago or 0)])
        if bad:
            raise nonfinite(epoch, step - int(most))
        self._agree_to_stop(stop)

    def _agree_to_stop(self, stop: float) -> None:
        self._model.stop_training = bool(stop)

    def _meet(self, tally: Tally, epoch: int, step: int) -> bool:
        seconds = (time.monotonic() - self._since) / self._interval
        interval = min(_MOST_STEPS, 2 * self._interval, max(1, int(_SECONDS / max(seconds, 1e-9))))
        ago = tally.take_nonfinite() if self._watches_loss else None
        if not self._watches_loss:
            tally.recent_losses.clear()
        stop, bad, slowest, most = group.reduce_max(
            [float(self._model.stop_training), float(ago is not None), float(-interval), float(ago or 0)]
        )
        self._interval = self._countdown = max(1, -int(slowest))
        self._since = time.monotonic()
        if bad:
            raise nonfinite(epoch, step - int(most))
        self._agree_to_stop(stop)
        return bool(stop)


def nonfinite(epoch: int, step: int) -> RuntimeError:
    """The error of a loss that is infinite or NaN. Numbers are from 0; the message counts from 1."""
    where = f"epoch {epoch + 1}, step {step + 1}"
    return RuntimeError(
        f"The loss became infinite or NaN in {where}: the weights are spoilt from there on, and nothing of them was "
        "saved. "
        "Lower the learning rate, set prepare(clip_grad_norm=1.0), check the data for NaN, or, with fp16, try "
        'amp_configs="bf16". fit(nan_policy="ignore") trains on regardless.'
    )
