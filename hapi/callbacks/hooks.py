"""Whether the hooks of a callback can be called. Imported with the first call that has callbacks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from hapi import kinds
from hapi.callbacks.base import Callback


def overrides(callback: Callback, hook: str) -> bool:
    """Whether a callback has made something of a hook."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook)


# Called between the last step of an epoch and the first of the next one.
_BETWEEN_EPOCHS = (
    "on_epoch_begin", "on_epoch_end", "on_eval_begin", "on_eval_end", "on_eval_batch_begin", "on_eval_batch_end",
)  # fmt: skip


def act_between_epochs(callbacks: Iterable[Callback]) -> bool:
    """Whether code of the user's may run between two epochs, which may change what the data gives."""
    return any(_is_users(callback, hook) for callback in callbacks for hook in _BETWEEN_EPOCHS)


def act_before_an_epoch(callbacks: Iterable[Callback]) -> bool:
    """Whether code of the user's may run between the begin of a fit and that of its last epoch, steps included."""
    hooks = (*_BETWEEN_EPOCHS, "on_train_begin", "on_train_batch_begin", "on_train_batch_end")
    return any(_is_users(callback, hook) for callback in callbacks for hook in hooks)


def _is_users(callback: Callback, hook: str) -> bool:
    return overrides(callback, hook) and (hook in vars(callback) or not type(callback).__module__.startswith("hapi."))


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
    kinds.count("batch_freq", callback.batch_freq, 1, owner=type(callback).__name__, what="steps")


# What Keras, Lightning and Hugging Face call it, part by part in this order, and what it is here.
_PARTS_ELSEWHERE = {
    "_start": "_begin",
    "_fit_": "_train_",
    "_validation_": "_eval_",
    "_test_": "_eval_",
    "_train_epoch_": "_epoch_",
    "_eval_epoch_": "_eval_",
    "_predict_epoch_": "_predict_",
    "on_batch_": "on_train_batch_",
    "on_step_": "on_train_batch_",
    "on_save_checkpoint": "state_dict",
    "on_load_checkpoint": "load_state_dict",
    "on_evaluate": "on_eval_end",
}


# Classes whose hooks are in order: evaluate, which may be called often, need not look at them again.
_checked: WeakSet[type] = WeakSet()


def _meant(name: str, known: list[str]) -> str | None:
    """What a method that is no hook was to be, if that can be told."""
    ours = name
    for theirs, part in _PARTS_ELSEWHERE.items():
        ours = ours.replace(theirs, part)
    if ours in (*known, "state_dict", "load_state_dict"):
        return ours
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


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
            meant = _meant(name, known)
            raise TypeError(
                f"{type(callback).__name__} has a method {name}, which is no hook and would never be called. "
                f"Hooks are {', '.join(known)}" + (f"; {meant} is meant?" if meant else ".")
            )
        if not overrides(callback, name):
            continue
        expected = inspect.signature(getattr(Callback, name))
        try:
            inspect.signature(hook).bind(*[None] * (len(expected.parameters) - 1))
        except TypeError:
            raise TypeError(
                f"{type(callback).__name__}.{name}{inspect.signature(hook)} cannot be called as hooks are. "
                f"Write def {name}{_without_annotations(expected)}."
            ) from None
    if of_class:
        _checked.add(type(callback))


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=signature.empty)
