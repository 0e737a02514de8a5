"""Whether the hooks of a callback can be called. Imported with the first call that has callbacks."""

from __future__ import annotations

import difflib
import inspect
from typing import Any
from weakref import WeakSet

from hapi.callbacks.base import Callback


def overrides(callback: Callback, hook: str) -> bool:
    """Whether a callback has made something of a hook."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook)


def check(callback: Any) -> None:
    """See that an object is a callback whose hooks can be called.

    Raises:
        TypeError: It is none, or a hook is misspelled or takes other arguments.
        ValueError: Its ``batch_freq`` is below 1.
    """
    if isinstance(callback, type):
        raise TypeError(
            f"callbacks holds the class {callback.__name__}, not an object of it. Write {callback.__name__}()."
        )
    if not isinstance(callback, Callback):
        raise TypeError(
            f"callbacks holds an object of type {type(callback).__name__}, which has not the hooks that are called. "
            "Derive its class from hapi.callbacks.Callback and override the hooks that it needs."
        )
    _check_hooks(callback)
    freq = callback.batch_freq
    if isinstance(freq, bool) or not isinstance(freq, int) or freq < 1:
        raise ValueError(
            f"{type(callback).__name__} has batch_freq={freq!r}: it counts steps from 1. Write batch_freq = 1."
        )


# Keras' and Lightning's names.
_HOOKS_ELSEWHERE = {
    "on_batch_begin": "on_train_batch_begin",
    "on_batch_end": "on_train_batch_end",
    "on_train_batch_start": "on_train_batch_begin",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_fit_start": "on_train_begin",
    "on_train_start": "on_train_begin",
    "on_fit_end": "on_train_end",
    "on_test_end": "on_eval_end",
    "on_validation_end": "on_eval_end",
    "on_validation_epoch_end": "on_eval_end",
}


# Classes whose hooks are in order: evaluate, which may be called often, need not look at them again.
_checked: WeakSet[type] = WeakSet()


def _check_hooks(callback: Callback) -> None:
    """A hook that is misspelled would never be called, one with other parameters would fail after an epoch."""
    of_class = not any(name.startswith("on_") for name in vars(callback))
    if of_class and type(callback) in _checked:
        return
    known = [name for name in dir(Callback) if name.startswith("on_")]
    for name in dir(callback):
        hook = getattr(callback, name) if name.startswith("on_") else None
        if not callable(hook):
            continue
        if name not in known:
            near = [_HOOKS_ELSEWHERE[name]] if name in _HOOKS_ELSEWHERE else difflib.get_close_matches(name, known, n=1)
            raise TypeError(
                f"{type(callback).__name__} has a method {name}, which is no hook and would never be called. "
                f"Hooks are {', '.join(known)}" + (f"; {near[0]} is meant?" if near else ".")
            )
        if not overrides(callback, name):
            continue
        expected = inspect.signature(getattr(Callback, name))
        try:
            inspect.signature(hook).bind(*[None] * (len(expected.parameters) - 1))
        except TypeError:
            raise TypeError(
                f"{type(callback).__name__}.{name}{inspect.signature(hook)} cannot be called as hooks are. "
                f"Write def {name}{expected}."
            ) from None
    if of_class:
        _checked.add(type(callback))
