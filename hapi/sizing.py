"""`find_batch_size`: the largest batch that trains within the device's memory."""

from __future__ import annotations

import gc
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from hapi import arguments, kinds, session
from hapi.callbacks.terminal import say
from hapi.data import make_feed
from hapi.data.make import has_own_batches
from hapi.distributed import group
from hapi.trial import untouched
from hapi.tuning import endless, request_for, training

if TYPE_CHECKING:
    from hapi.model import Model


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
    kinds.check(find_batch_size, locals())
    arguments.check_reading(num_workers or 0, verbose)
    for name, value in (("start", start), ("steps", steps), *([("largest", largest)] if largest is not None else [])):
        kinds.count(name, value, 2)
    _refuse_fixed_sizes(train_data)
    session._check_trainable(model, "find_batch_size")
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
    samples = make_feed(data, request_for(model, data, 1), model._engine.ready().device).samples
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
    feed = make_feed(data, request_for(model, data, size, workers=workers), model._engine.ready().device)
    given = 0
    fits = True
    try:
        with training(model, feed) as step:
            for piece in islice(endless(feed), steps):
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
