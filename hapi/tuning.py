"""Finding a learning rate and a batch size by trials, which leave no trace on the model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from hapi import arguments, kinds, modes, rng, session
from hapi.batch import floats_for
from hapi.callbacks import drawing
from hapi.callbacks.base import CallbackList
from hapi.data import Feed, Piece, Request, make_feed
from hapi.distributed import group
from hapi.metrics.tally import Tally
from hapi.outcome import Outcome
from hapi.trial import untouched

if TYPE_CHECKING:
    from hapi.model import Model

# How much of the average of losses stays in a step of a sweep.
_SMOOTHING = 0.9
# The highest rate: what a float32 holds.
_HIGHEST = 3.4e38
# What part of itself a loss has to fall by, to have fallen.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class RateSweep:
    """What `find_lr` has seen.

    Attributes:
        rates: The learning rates of the steps, rising.
        losses: The loss of each step's batch, over all processes, before the step was taken.
        smoothed: Their running average, which says more.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]

    @property
    def suggestion(self) -> float | None:
        """The rate at which the loss fell most steeply, over the logarithm of rates; None where it never fell."""
        lowest = min(range(len(self.smoothed)), key=self.smoothed.__getitem__, default=0)
        if not self.smoothed or self.smoothed[0] - self.smoothed[lowest] <= _ROUNDING * abs(self.smoothed[0]):
            return None
        # Averaged from both sides: a running average comes late, by so many steps that the rate would be far too high.
        losses = _averaged(_averaged(self.losses[: lowest + 1])[::-1])[::-1]
        slopes = {
            (losses[index + 1] - losses[index - 1]) / math.log(self.rates[index + 1] / self.rates[index - 1]): index
            for index in range(1, lowest)
        }
        return self.rates[slopes[min(slopes)]] if slopes else self.rates[lowest]

    def plot(self, path: str | os.PathLike[str] | None = None) -> None:
        """Draw the losses over the rates. Needs matplotlib. Every process may call it, and rank 0 alone draws.

        Args:
            path: The image file to write, its format told by the ending; its folder is made. None: show it on the
                screen or in the notebook.

        Raises:
            ImportError: matplotlib is not installed.
            RuntimeError: There is nothing to draw, or nowhere to show it.
        """
        if not self.rates:
            raise RuntimeError(
                "This RateSweep holds no step, since the very first loss was infinite or NaN, so there is nothing to "
                "draw. Check the data and the loss."
            )
        drawing.show(RateSweep, path, "lr.png", self._draw)

    def _draw(self, figure: Any) -> None:
        figure.set_size_inches(6, 4)
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, alpha=0.3, label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle=":", color="gray", label=f"{self.suggestion:.3g}")
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.legend()


def find_lr(
    model: Model,
    train_data: Any,
    batch_size: int | None = None,
    min_lr: float = 1e-7,
    max_lr: float = 10.0,
    steps: int = 100,
    *,
    global_batch_size: int | None = None,
    num_workers: int | None = None,
    diverged: float = 4.0,
) -> RateSweep:
    """Train for some steps while the learning rate rises exponentially, and see how the loss goes (Smith, 2015).

    Afterwards the model is as it was: weights, buffers, optimizer, scheduler, loss scaler, counters, and the script's
    random state. The sweep ends early where the loss grows out of all bounds. The scheduler is left out; further groups
    of parameters keep their rate's ratio to the first's. Choose a rate by what you see, or take the suggestion (and
    make a scheduler anew, which has the rate that the optimizer had when it was made)::

        sweep = hapi.find_lr(model, train_data, batch_size=64)
        sweep.plot("lr.png")
        model.optimizer.param_groups[0]["lr"] = sweep.suggestion

    Under a launcher every process calls it, and gets the same values.

    Args:
        model: A `hapi.Model`, prepared with optimizer and loss.
        train_data: As of `fit`; it is begun anew where it ends before the sweep.
        batch_size: Samples per process and step (32). Not with a DataLoader.
        min_lr: The first rate.
        max_lr: The last rate.
        steps: How many.
        global_batch_size: Samples per step over all processes, instead.
        num_workers: Processes that load data (0).
        diverged: How many times its lowest value the smoothed loss may reach.

    Returns:
        The rates and losses, with a suggestion and a plot.

    Raises:
        ValueError: An argument cannot work, or the model is not prepared for training.
    """
    kinds.check(find_lr, locals())
    _check_sweep(min_lr, max_lr, steps, diverged)
    session._check_trainable(model, "find_lr")
    if batch_size is not None and global_batch_size is not None:
        raise ValueError(
            f"find_lr received batch_size={batch_size} (per process) and global_batch_size={global_batch_size} (over "
            "all processes), of which only one can decide. Leave one of them out."
        )
    stated = {"rates": (min_lr, max_lr, steps), "batch": (batch_size, global_batch_size)}
    arguments.same_call("find_lr", stated | arguments.alike(model._engine.prepared))
    rates = [min_lr * (max_lr / min_lr) ** (step / (steps - 1)) for step in range(steps)]
    with untouched(model):
        request = request_for(model, train_data, batch_size, global_batch_size, num_workers)
        feed = make_feed(train_data, request, model._engine.ready().device)
        return _sweep(model, feed, rates, diverged, request.seed)


def _check_sweep(min_lr: Any, max_lr: Any, steps: Any, diverged: Any) -> None:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (min_lr, max_lr, diverged))
    # The largest rate, too, has to be a float's, of whatever the layers hold.
    if not numbers or not 0 < min_lr < max_lr <= _HIGHEST or not diverged > 1:
        raise ValueError(
            f"find_lr received min_lr={min_lr!r}, max_lr={max_lr!r} and diverged={diverged!r}: rates rise from one "
            "above 0 to a larger one that is finite, and a loss has diverged at more than once its lowest value. Write "
            "min_lr=1e-7, max_lr=10.0, diverged=4.0."
        )
    kinds.count("steps", steps, 100)
    if steps < 3:
        raise ValueError(f"find_lr received steps={steps}, which show no slope. Write steps=100.")


def request_for(
    model: Model, data: Any, batch_size: int | None, global_batch_size: int | None = None, workers: int | None = None
) -> Request:
    """How to read the data of a trial.

    Raises:
        ValueError: A size is not above zero.
    """
    for name, size in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
        if size is not None:
            kinds.count(name, size, 32)
    arguments.check_reading(workers or 0, 0)
    # The seed that a fit would draw, so that the batches are those of its first epoch.
    seed = group.broadcast_object(rng.draw_seed())
    return Request(
        "train_data", batch_size, global_batch_size, None, None, workers, seed, True, floats_for(model.network)
    )


def _sweep(model: Model, feed: Feed, rates: Sequence[float], diverged: float, seed: int) -> RateSweep:
    seen = RateSweep([], [], [])
    average, lowest = 0.0, math.inf
    optimizer = model.optimizer
    ratios = _ratios(optimizer)
    with training(model, feed) as step:
        for number, (rate, piece) in enumerate(zip(rates, endless(feed), strict=False)):
            rng.set_streams(rng.mix(seed, rng.STEP, 0, number, group.get_rank()), feed._device)
            for entry, ratio in zip(optimizer.param_groups, ratios, strict=True):
                if isinstance(entry["lr"], torch.Tensor):
                    entry["lr"].fill_(rate * ratio)
                else:
                    entry["lr"] = rate * ratio
            loss = _over_ranks(step(piece), feed._device)
            seen.rates.append(rate)
            seen.losses.append(loss)
            average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
            seen.smoothed.append(average / (1 - _SMOOTHING ** (number + 1)))
            lowest = min(lowest, seen.smoothed[-1])
            # A loss below zero (a likelihood's) has no multiple that would be worse.
            if not math.isfinite(loss) or (lowest > 0 and seen.smoothed[-1] > diverged * lowest):
                break
    if not math.isfinite(seen.losses[-1]):
        for values in (seen.rates, seen.losses, seen.smoothed):
            values.pop()
    return seen


def _averaged(values: Sequence[float]) -> list[float]:
    """The running average at each value, which starts with the first."""
    average, averages = 0.0, []
    for number, value in enumerate(values, 1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        averages.append(average / (1 - _SMOOTHING**number))
    return averages


def _ratios(optimizer: torch.optim.Optimizer) -> list[float]:
    """Of the groups' rates to the first's."""
    rates = [float(entry["lr"]) for entry in optimizer.param_groups]
    return [rate / rates[0] if rates[0] else 1.0 for rate in rates]


def _over_ranks(outcome: Outcome | None, device: torch.device) -> float:
    tally = Tally([], device)
    if outcome is not None:
        tally.update(outcome.loss, outcome.weight, None, None)
    return tally.reduced()["loss"]


def endless(feed: Feed) -> Iterator[Piece]:
    """The pieces of one pass after the other.

    Raises:
        ValueError: A pass gave none.
    """
    for epoch in count():
        piece = None
        for piece in feed.pieces(epoch):
            yield piece
        if piece is None:
            raise ValueError(
                f"train_data gave no batch in pass {epoch + 1}: it is empty, or it can be iterated only once. Pass "
                "data with at least one sample, whose __iter__ starts anew each time."
            )


@contextmanager
def training(model: Model, feed: Feed) -> Iterator[Any]:
    """Within, a piece can be trained on: gives the function that does."""
    engine = model._engine
    stepper = engine.ready()
    # What moves the rate by itself; `untouched` puts it back.
    engine.prepared.schedule = None
    stepper.sync(parameters=True)
    stepper.begin(None)

    chosen = modes.by_piece(stepper.network, feed)

    def step(piece: Piece) -> Outcome | None:
        inputs, labels = (None, None) if piece.batch is None else engine.split(feed.place(piece.batch))
        backward = stepper.backward if chosen is None else chosen(piece, stepper.backward)
        outcome = backward(inputs, labels, piece.size, piece.total, True)
        stepper.update()
        return outcome

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        engine.in_call(CallbackList([], model, {})),
        modes.training(model.network),
    ):
        try:
            engine.look_at_labels([feed])
            yield step
        finally:
            feed.close()
