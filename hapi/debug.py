"""Trying out a script before it trains in earnest. Nothing is left of it: no weight moved, no file written."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from hapi import arguments, kinds
from hapi.callbacks.base import Callback, as_list
from hapi.callbacks.history import History
from hapi.callbacks.lr import LRScheduler
from hapi.callbacks.terminal import number, say
from hapi.trial import untouched

if TYPE_CHECKING:
    from hapi.model import Model

__all__ = ["fast_dev_run", "overfit_batches"]

# Of hapi's own callbacks, those that write no file.
_WITHOUT_FILES = (
    "EMA", "EarlyStopping", "GradientNorm", "History", "LRScheduler", "ProgBarLogger", "ReduceLROnPlateau"
)  # fmt: skip


def fast_dev_run(
    model: Model,
    train_data: Any,
    eval_data: Any = None,
    test_data: Any = None,
    batch_size: int | None = None,
    *,
    steps: int = 1,
    callbacks: Any = None,
    num_workers: int | None = None,
    verbose: int = 1,
) -> dict[str, float]:
    """Train, evaluate and predict on one batch each, to find mistakes that would else show after an epoch.

    No file is written: there is no ``save_dir``, and of hapi's own callbacks those that write (`ModelCheckpoint`,
    loggers, `Profiler`) are left out. Callbacks of your own are called. Afterwards the model, the loaders' generators
    and the script's random state are as they were.

    Args:
        model: A prepared `hapi.Model`.
        train_data: As of `fit`.
        eval_data: As of `fit`; None: nothing is evaluated.
        test_data: As of `predict`; None: `eval_data` or `train_data`.
        batch_size: Samples per process and step (32). Not with a DataLoader.
        steps: How many batches of each.
        callbacks: As of `fit`.
        num_workers: Processes that load data (0).
        verbose: As of `fit`.

    Returns:
        The values of the epoch, as its logs hold them.
    """
    kinds.check(fast_dev_run, {"model": model})
    kinds.count("steps", steps, 1)
    kept = [callback for callback in as_list(callbacks) if not _writes(callback)]
    with untouched(model, steps):
        history = model.fit(
            train_data, eval_data, batch_size, verbose=verbose, num_workers=num_workers, callbacks=kept, resume=False
        )
        to_predict = next(data for data in (test_data, eval_data, train_data) if data is not None)
        with warnings.catch_warnings():
            if test_data is None:
                # Nobody's choice here: data that is shuffled.
                warnings.filterwarnings("ignore", message="predict received a loader with")
            model.predict(to_predict, batch_size or 32, num_workers or 0, stack_outputs=False, verbose=verbose)
    return {name: values[-1] for name, values in history.history.items()}


def overfit_batches(
    model: Model,
    train_data: Any,
    batches: int = 1,
    epochs: int = 100,
    batch_size: int | None = None,
    *,
    callbacks: Any = None,
    num_workers: int | None = None,
    verbose: int = 1,
) -> History:
    """Train on a few batches again and again: a network that can learn anything brings the loss near 0.

    It trains at the optimizer's own rate, without the scheduler, writes no file, and the model is as it was
    afterwards. Dropout and augmentation that is done on whole batches go on drawing; where they hold the loss up, leave
    them out.

    Args:
        model: A prepared `hapi.Model`.
        train_data: As of `fit`; the first batches of its first epoch are taken.
        batches: How many, on each process.
        epochs: How many times.
        batch_size: Samples per process and step (32). Not with a DataLoader.
        callbacks: As of `fast_dev_run`, `LRScheduler` left out too.
        num_workers: Processes that load data (0).
        verbose: 1: a line that says how the loss went. 2: a line for each pass too. 0: none.

    Returns:
        The values of each pass.
    """
    kinds.check(overfit_batches, {"model": model})
    kinds.count("batches", batches, 1)
    arguments.check_reading(num_workers or 0, verbose)
    # One that moves the scheduler would find none.
    kept = [each for each in as_list(callbacks) if not (_writes(each) or isinstance(each, LRScheduler))]
    with untouched(model, batches, repeat=True):
        model._engine.prepared.schedule = None
        history = model.fit(
            train_data, batch_size=batch_size, epochs=epochs, num_workers=num_workers, callbacks=kept, resume=False,
            verbose=1 if verbose == 2 else 0,
        )  # fmt: skip
    losses = history.history["loss"]
    if verbose:
        say(
            f"overfit_batches: loss {number(losses[0])} -> {number(losses[-1])} in {len(losses)} passes over "
            f"{batches} batch{'es' if batches > 1 else ''}"
        )
    return history


def _writes(callback: Callback) -> bool:
    """Whether a callback is one of hapi's that writes files, or made of one. What is no callback is refused by fit."""
    ours = [kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("hapi.callbacks.")]
    return any(name not in (*_WITHOUT_FILES, "Callback") for name in ours)
