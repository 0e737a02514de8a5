"""What all ranks decide together in the middle of an epoch: to stop, to save, and that a loss is no longer a number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hapi.distributed import group
from hapi.metrics.tally import Tally
from hapi.signals import StopSignals

_SECONDS = 0.5
_MOST_STEPS = 4096


class Agreement:
    """A meeting every k optimizer steps, k such that it comes about twice a second: one tiny collective.

    k is agreed in the meeting itself, so ranks of different speed never miss each other.

    Args:
        model: Its `stop_training` is what a rank asks for; after a meeting it is the same on all ranks.
        nan_policy: "stop" raises on a loss that is not finite, "ignore" lets it pass.
        signals: The stop signals of this process.
        wants_save: Whether it is time to save, for each that may, as this rank sees it. Called once more with what all
            ranks have made of it.

    Attributes:
        signal: The stop signal that all ranks act on; 0: none.
        saves: Whether all ranks save after this optimizer step, since it is time.
    """

    def __init__(
        self,
        model: Any,
        nan_policy: str,
        signals: StopSignals,
        wants_save: Callable[[Sequence[bool] | None], Sequence[bool]] = lambda agreed: (),
    ) -> None:
        self._model = model
        self._watches_loss = nan_policy == "stop"
        self._signals = signals
        self._wants_save = wants_save
        self._alone = group.get_world_size() == 1
        self._interval = 1
        self._countdown = 1
        self._since = time.monotonic()
        self.signal = 0
        self.saves = False

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
        self.saves = False
        self._countdown -= 1
        if self._countdown <= 0:
            self._meet(tally, epoch, step)
        elif not self._alone:
            return False
        else:
            # A process without others needs no meeting.
            self.signal = self._signals.received
        return bool(self._model.stop_training)

    def in_evaluation(self) -> bool:
        """Called after each step of an evaluation within fit: whether a signal ends it."""
        self._countdown -= 1
        if self._countdown <= 0:
            self._meet(None, 0, 0)
        elif self._alone:
            self.signal = self._signals.received
        return bool(self.signal)

    def before_save(self, tally: Tally, epoch: int, step: int) -> None:
        """Called before a save within an epoch: no weights that a loss has spoilt are kept.

        Raises:
            RuntimeError: A loss since the last meeting was infinite or NaN, on any rank.
        """
        self._exchange(tally, epoch, step)

    @property
    def told(self) -> bool:
        """Whether this process itself was told to stop, whatever the others know."""
        return bool(self._signals.received)

    def stops(self) -> bool:
        """Whether a rank has asked to stop, at the end of an epoch or of an evaluation; what one was told, all know."""
        self._exchange(None, 0, 0)
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
        self._exchange(tally, epoch, step)

    def _meet(self, tally: Tally | None, epoch: int, step: int) -> None:
        seconds = (time.monotonic() - self._since) / self._interval
        interval = min(_MOST_STEPS, 2 * self._interval, max(1, int(_SECONDS / max(seconds, 1e-9))))
        slowest, *wishes = self._exchange(tally, epoch, step, -float(interval), *map(float, self._wants_save(None)))
        self._interval = self._countdown = max(1, -int(slowest))
        self._since = time.monotonic()
        # In an evaluation nothing is saved; whoever wants it asks again.
        self.saves = any(self._wants_save([bool(wish) and tally is not None for wish in wishes]))

    def _exchange(self, tally: Tally | None, epoch: int, step: int, *more: float) -> list[float]:
        """The one collective: agree on whether to stop, raise if a loss is not finite, give the maxima of more values.

        Args:
            tally: Whose losses are looked at; None: none.
            epoch: For the message, as `step`.
            step: The last batch's number in the epoch.
            more: What else to find the largest of over all ranks.
        """
        ago = tally.take_nonfinite() if tally is not None and self._watches_loss else None
        if tally is not None and not self._watches_loss:
            tally.forget_nonfinite()
        asked, number, bad, most, *others = group.reduce_max(
            [
                float(self._model.stop_training), float(self._signals.received), float(ago is not None),
                float(ago or 0), *more,
            ]
        )  # fmt: skip
        if bad:
            raise nonfinite(epoch, step - int(most))
        self._model.stop_training = bool(asked)
        self.signal = int(number)
        return others


def nonfinite(epoch: int, step: int) -> RuntimeError:
    """The error of a loss that is infinite or NaN. Numbers are from 0; the message counts from 1."""
    where = f"epoch {epoch + 1}, step {step + 1}"
    return RuntimeError(
        f"The loss became infinite or NaN in {where}: the weights are spoilt from there on, and nothing of them was "
        "saved. Lower the learning rate, set prepare(clip_grad_norm=1.0), check the data for NaN, or, with fp16, try "
        'amp_configs="bf16". fit(nan_policy="ignore") trains on regardless.'
    )
