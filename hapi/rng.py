"""Random streams: one key per (seed, purpose, epoch, step, rank) instead of states that must be carried along.

Within fit the global torch, NumPy and `random` generators are set anew from such a key before each step, and before
each batch is fetched. What a step draws therefore depends on its place in the run alone, not on what was drawn
before: not on the evaluation between two epochs, the number of workers, or a restart.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hapi import kinds

_MASK = (1 << 64) - 1

# Purposes, the second word of each key.
ORDER, FETCH, STEP, EVALUATE, EPOCH, EPOCH_TRAINED, EPOCH_END, UPDATE = range(8)


def seed(n: int) -> None:
    """Set the torch (every device), NumPy and `random` generators of this process.

    Args:
        n: The seed, a whole number. `fit` draws its own seed from torch's generator, so that this call at the
            top of a script repeats the whole run; ranks draw different numbers all the same.

    Raises:
        TypeError: It is no whole number.
        ValueError: It has more than 64 bits.
    """
    n = kinds.count("n", n, 0, None, owner="hapi.seed")
    if not -(1 << 63) <= n < 1 << 64:
        raise ValueError(f"hapi.seed received n={n}, but torch's generators take 64 bits. Write n={n & _MASK}.")
    random.seed(n)
    torch.manual_seed(n)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        numpy_random.seed(n % (1 << 32))


def mix(*words: int, after: int = 0) -> int:
    """Hash whole numbers into 64 bits. The finalizer is that of SplitMix64 (Steele et al., 2014).

    Args:
        words: The numbers.
        after: The hash of those that come before: `mix(a, b)` is `mix(b, after=mix(a))`.
    """
    state = after
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def draw_seed() -> int:
    """A seed from torch's global generator: what `torch.manual_seed` at the top of a script decides."""
    return int(torch.empty((), dtype=torch.int64).random_())


def set_streams(key: int, device: torch.device | None = None) -> None:
    """Set the global generators from a key; with a device, its generator too."""
    set_torch(key, device)
    random.seed(key)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        numpy_random.seed(key & 0xFFFFFFFF)


def set_torch(key: int, device: torch.device | None = None) -> None:
    """The same of torch's generators only, for where nobody draws from others; see `hapi.draws`.

    They are set one by one: `torch.manual_seed` looks at every device and takes 20 times as long.
    """
    torch.default_generator.manual_seed(key & (_MASK >> 1))
    if device is not None and device.type != "cpu":
        _seed_device(device, key & (_MASK >> 1))


class Stream:
    """A course of the global CPU generators of its own, for code that draws now and then while others draw too.

    Args:
        key: Where it starts.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._states: tuple[Any, Any, Any] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, the generators go on from where they were at the end of the last such context."""
        numpy_random = _numpy_random()
        if self._states is None:
            set_streams(self._key)
        else:
            torch.default_generator.set_state(self._states[0])
            random.setstate(self._states[1])
            if numpy_random is not None:
                numpy_random.set_state(self._states[2])
        try:
            yield
        finally:
            numpy_state = numpy_random.get_state() if numpy_random is not None else None
            self._states = torch.default_generator.get_state(), random.getstate(), numpy_state


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Give the script its random state back afterwards, whatever was drawn within."""
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    numpy_random = _numpy_random()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    on_device: Any = torch.get_device_module(device) if device.type != "cpu" else None
    device_state = on_device.get_rng_state(device) if on_device is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        if on_device is not None:
            on_device.set_rng_state(device_state, device)


def _numpy_random() -> Any:
    # Only where the script uses NumPy. Its generator is loaded at first use, which may come within a step: by then
    # it must have been set.
    if "numpy" not in sys.modules:
        return None
    return sys.modules.get("numpy.random") or importlib.import_module("numpy.random")


def _seed_device(device: torch.device, seed: int) -> None:
    if device.type == "cuda" and torch.cuda.default_generators:
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)
