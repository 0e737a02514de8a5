"""What all ranks decide together in the middle of an epoch: to stop, to save, and that a loss is no longer a number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hapi.distributed import group
from hapi.metrics.tally import Tally
from hapi.signals import StopSignals

_SECONDS = 0.5
_MOST_STEPS = 4096


class _Asked(NamedTuple):
    """What the ranks were asked, and where: the answer is under way."""

    answer: group.Pending
    epoch: int
    step: int


class Agreement:
    """A meeting every k optimizer steps, k such that it comes about twice a second: one tiny collective.

    k is agreed in the meeting itself, so ranks of different speed never miss each other. Several ranks ask one another
    a step before, if k is more than 1, so that nobody waits for the answer: it goes round meanwhile. The losses since
    the last meeting are looked at together, for which a device's queue is waited for.

    Args:
        model: Its `stop_training` is what a rank asks for; what one has asked for, a meeting sets on all ranks.
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
        self._asked: _Asked | None = None
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
        if self._alone and self._countdown > 0:
            # A process without others needs no meeting.
            self.signal = self._signals.received
            return bool(self._model.stop_training)
        stops = self._countdown <= 0 and self._meet(tally, epoch, step)
        # Where steps take so long that all meet after each, the answer of the one before would be late by a whole step.
        ahead = self._countdown == 1 < self._interval
        if ahead and not (self._alone or stops or self.saves or self.signal):
            self._asked = self._ask(tally, epoch, step, *self._wishes())
        return stops

    def in_evaluation(self) -> bool:
        """Called after each step of an evaluation within fit: whether a signal ends it."""
        self._countdown -= 1
        if self._countdown <= 0:
            self._meet(None, 0, 0)
        elif self._alone:
            self.signal = self._signals.received
        return bool(self.signal)

    def before_save(self, tally: Tally, epoch: int, step: int) -> bool:
        """Called before a save within an epoch, so that no weights are kept that a loss has spoilt.

        Returns:
            Whether all ranks stop here.

        Raises:
            RuntimeError: A loss since the last meeting was infinite or NaN, on any rank.
        """
        return self._exchange(tally, epoch, step)

    @property
    def told(self) -> bool:
        """Whether this process itself was told to stop, whatever the others know."""
        return bool(self._signals.received)

    def stops(self) -> bool:
        """Whether a rank has asked to stop, at the end of an epoch or of an evaluation; what one was told, all know."""
        return self._exchange(None, 0, 0)

    def end_epoch(self, tally: Tally, epoch: int, step: int) -> bool:
        """After the last step of an epoch, before anything of it is kept: all ranks know who has asked to stop.

        Returns:
            Whether all ranks stop here.

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
        return self._exchange(tally, epoch, step)

    def _meet(self, tally: Tally | None, epoch: int, step: int) -> bool:
        """Agree on whether to stop, to save, and when to meet next; whether all stop."""
        asked, self._asked = self._asked or self._ask(tally, epoch, step, *self._wishes()), None
        stops, slowest, *wishes = self._answer(asked)
        self._interval = self._countdown = max(1, -int(slowest))
        # In an evaluation nothing is saved; whoever wants it asks again.
        self.saves = any(self._wants_save([bool(wish) and tally is not None for wish in wishes]))
        return bool(stops)

    def _wishes(self) -> list[float]:
        """In how many steps this rank would meet next, as `_ask` takes the largest; whether it is time to save."""
        now = time.monotonic()
        seconds, self._since = (now - self._since) / self._interval, now
        interval = min(_MOST_STEPS, 2 * self._interval, max(1, int(_SECONDS / max(seconds, 1e-9))))
        return [-float(interval), *map(float, self._wants_save(None))]

    def _exchange(self, tally: Tally | None, epoch: int, step: int) -> bool:
        """Agree here and now on whether to stop."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._answer(asked)
            self._countdown = self._interval
        return bool(self._answer(self._ask(tally, epoch, step))[0])

    def _ask(self, tally: Tally | None, epoch: int, step: int, *more: float) -> _Asked:
        """Begin the one collective.

        Args:
            tally: Whose losses are looked at; None: none.
            epoch: For the message, as `step`.
            step: The last batch's number in the epoch.
            more: What else to find the largest of over all ranks.
        """
        ago = tally.take_nonfinite() if tally is not None and self._watches_loss else None
        if tally is not None and not self._watches_loss:
            tally.forget_nonfinite()
        values = [
            float(self._model.stop_training), float(self._signals.received), float(ago is not None), float(ago or 0),
            *more,
        ]  # fmt: skip
        return _Asked(group.begin_max(values), epoch, step)

    def _answer(self, asked: _Asked) -> list[float]:
        """Wait for it: whether all stop, and the largest of what else was asked.

        Raises:
            RuntimeError: A loss was infinite or NaN, on any rank.
        """
        stops, number, bad, most, *others = asked.answer.wait()
        if bad:
            raise nonfinite(asked.epoch, asked.step - int(most))
        # What this rank has asked for since then is left for the next meeting.
        self._model.stop_training |= bool(stops)
        self.signal = int(number)
        return [stops, *others]


def nonfinite(epoch: int, step: int) -> RuntimeError:
    """The error of a loss that is infinite or NaN. Numbers are from 0; the message counts from 1."""
    where = f"epoch {epoch + 1}, step {step + 1}"
    return RuntimeError(
        f"The loss became infinite or NaN in {where}: the weights are spoilt from there on, and nothing of them was "
        "saved. Lower the learning rate, set prepare(clip_grad_norm=1.0), check the data for NaN, or, with fp16, try "
        'amp_configs="bf16". fit(nan_policy="ignore") trains on regardless.'
    )
