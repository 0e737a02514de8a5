"""Finding a learning rate and a batch size by trials, which leave no trace on the model."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch

from hapi import arguments, modes, rng, session
from hapi.batch import floats_for
from hapi.callbacks.base import CallbackList
from hapi.callbacks.terminal import say
from hapi.checks import positive_int
from hapi.data import Feed, Piece, Request, make_feed
from hapi.data.make import has_own_batches
from hapi.distributed import group
from hapi.metrics.tally import Tally
from hapi.step import Outcome
from hapi.trial import untouched

if TYPE_CHECKING:
    from hapi.model import Model

__all__ = ["RateSweep", "find_batch_size", "find_lr"]

# How much of the average of losses stays in a step of a sweep.
_SMOOTHING = 0.9
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
        """Draw the losses over the rates. Needs matplotlib.

        Args:
            path: The image file to write, its format told by the ending. None: show it on the screen or in the
                notebook.

        Raises:
            ImportError: matplotlib is not installed.
            RuntimeError: There is nowhere to show it.
        """
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "RateSweep.plot draws with matplotlib, which is not installed. Install it: pip install torch-hapi[plot]"
            ) from error
        if path is not None:
            figure = Figure(figsize=(6, 4), layout="constrained")
            self._draw(figure)
            figure.savefig(path)
            return
        if matplotlib.get_backend().lower() == "agg":
            raise RuntimeError(
                "RateSweep.plot was to show the curve, but there is no screen here. Write it to a file: plot('lr.png')."
            )
        from matplotlib import pyplot

        self._draw(pyplot.figure(figsize=(6, 4), layout="constrained"))
        pyplot.show()

    def _draw(self, figure: Any) -> None:
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
    of parameters keep their rate's ratio to the first's. Choose a rate by what you see, or take the suggestion::

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
    _check_sweep(min_lr, max_lr, steps, diverged)
    session._check_trainable(model)
    stated = {"rates": (min_lr, max_lr, steps), "batch": (batch_size, global_batch_size)}
    arguments.same_call("find_lr", stated | arguments.alike(model._engine.prepared))
    rates = [min_lr * (max_lr / min_lr) ** (step / (steps - 1)) for step in range(steps)]
    with untouched(model):
        request = _request(model, train_data, batch_size, global_batch_size, num_workers)
        feed = make_feed(train_data, request, model._engine.ready().device)
        return _sweep(model, feed, rates, diverged, request.seed)


def _check_sweep(min_lr: Any, max_lr: Any, steps: Any, diverged: Any) -> None:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (min_lr, max_lr, diverged))
    if not numbers or not 0 < min_lr < max_lr or not diverged > 1:
        raise ValueError(
            f"find_lr received min_lr={min_lr!r}, max_lr={max_lr!r} and diverged={diverged!r}: rates rise from one "
            "above 0 to a larger one, and a loss has diverged at more than once its lowest value. Write min_lr=1e-7, "
            "max_lr=10.0, diverged=4.0."
        )
    positive_int("steps", steps, 100)
    if steps < 3:
        raise ValueError(f"find_lr received steps={steps}, which show no slope. Write steps=100.")


def _request(
    model: Model, data: Any, batch_size: int | None, global_batch_size: int | None = None, workers: int | None = None
) -> Request:
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
    with _training(model, feed) as step:
        for number, (rate, piece) in enumerate(zip(rates, _endless(feed), strict=False)):
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


def _endless(feed: Feed) -> Iterator[Piece]:
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
def _training(model: Model, feed: Feed) -> Iterator[Any]:
    """Within, a piece can be trained on: gives the function that does."""
    engine = model._engine
    stepper = engine.ready()
    # What moves the rate by itself; `untouched` puts it back.
    engine.prepared.schedule = None
    stepper.sync(parameters=True)
    stepper.begin(None)

    def step(piece: Piece) -> Outcome | None:
        inputs, labels = (None, None) if piece.batch is None else engine.split(feed.place(piece.batch))
        outcome = stepper.backward(inputs, labels, piece.size, piece.total, last=True)
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


def find_batch_size(
    model: Model,
    train_data: Any,
    start: int = 2,
    largest: int | None = None,
    steps: int = 3,
    *,
    num_workers: int | None = None,
    verbose: int = 1,
) -> int:
    """The largest batch size that trains within the device's memory: doubled until it does not, then halved in between.

    Each size trains a few steps, optimizer state included, on as many samples of the data. Afterwards the model and the
    script's random state are as they were. Leave some room for batches that need more: longer texts, say.

    Args:
        model: A `hapi.Model`, prepared with optimizer and loss, on an accelerator.
        train_data: As of `fit`, in no batches of its own.
        start: The first size to try.
        largest: Where to stop; None: at the number of samples.
        steps: Of each size.
        num_workers: Processes that load data (0).
        verbose: 1: a line for each size. 0: none.

    Returns:
        The size, for `fit(batch_size=...)`.

    Raises:
        ValueError: The data comes in batches, or an argument cannot work.
        RuntimeError: There is no memory of a device to run out of, there are several processes, or no size fits.
    """
    for name, value in (("start", start), ("steps", steps), *([("largest", largest)] if largest is not None else [])):
        positive_int(name, value, 2)
    _refuse_fixed_sizes(train_data)
    session._check_trainable(model)
    with untouched(model):
        _refuse_machines(model._engine.ready().device)
        return _search(model, train_data, start, largest, steps, num_workers, verbose)


def _refuse_fixed_sizes(data: Any) -> None:
    if has_own_batches(data):
        raise ValueError(
            f"find_batch_size received train_data of type {type(data).__name__}, which comes in batches of its own "
            "size. Pass the data set itself, such as loader.dataset, and make the loader with the size that is found."
        )


def _refuse_machines(device: torch.device) -> None:
    if not _runs_out(device):
        raise RuntimeError(
            f"find_batch_size was called on the {device.type}, whose memory is the machine's: too large a batch raises "
            "no error there, the system swaps or ends the process. Call it on an accelerator, or choose a size by time."
        )
    if group.get_world_size() > 1:
        raise RuntimeError(
            f"find_batch_size was called in {group.get_world_size()} processes: where one runs out of memory, the "
            "others would wait for its gradients. Call it in one process, python train.py, and give all the size that "
            "is found as batch_size, which is per process."
        )


def _runs_out(device: torch.device) -> bool:
    """Whether a device tells when its memory is used up."""
    return device.type not in ("cpu", "meta")


def _search(
    model: Model, data: Any, start: int, largest: int | None, steps: int, workers: int | None, verbose: int
) -> int:
    samples = make_feed(data, _request(model, data, 1), model._engine.ready().device).samples
    limit = min(size for size in (largest, samples, 2**40) if size is not None)
    good, bad, size = 0, None, min(start, limit)
    while bad is None or bad - good > 1:
        fits, given = _fits(model, data, size, steps, workers)
        if verbose:
            say(f"find_batch_size: {size} {'fits' if fits else 'is too large'}")
        if fits:
            good = size
        else:
            bad = size
        if fits and (given < size or size == limit):
            break  # there are no more samples
        size = min(size * 2, limit) if bad is None else (good + bad) // 2
    if good == 0:
        raise RuntimeError(
            "find_batch_size found no size that fits: a single sample needs more memory than the device has left. Use "
            'a smaller network or input, or prepare(amp_configs="bf16").'
        )
    if verbose and bad is None:
        say(f"find_batch_size: {good} samples are all that were to be tried")
    return min(good, given) if bad is None else good


def _fits(model: Model, data: Any, size: int, steps: int, workers: int | None) -> tuple[bool, int]:
    """Whether so many samples fit, and how many a step was given."""
    feed = make_feed(data, _request(model, data, size, workers=workers), model._engine.ready().device)
    given = 0
    fits = True
    try:
        with _training(model, feed) as step:
            for piece in islice(_endless(feed), steps):
                given = max(given, piece.size)
                step(piece)
                _wait(feed._device)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        fits = False
    if not fits:
        # The error is gone here, and with it the frames that held what did not fit.
        model._engine.ready().clear()
        gc.collect()
    if feed._device.type not in ("cpu", "meta"):
        # What blocks of another batch size have left in pieces.
        torch.get_device_module(feed._device).empty_cache()
    return fits, given


def _wait(device: torch.device) -> None:
    """Let the device come to its end, so that an error belongs to this step."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize()


def _is_out_of_memory(error: RuntimeError) -> bool:
    # Libraries under torch, and some backends, say it in words.
    words = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)
