"""Arguments of constructors and functions against the kinds that their annotations name, and whole numbers."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from numbers import Real
from os import PathLike
from typing import Any


def count(name: str, value: Any, example: int, least: int | None = 1, *, owner: str = "", what: str = "") -> int:
    """See that an argument is a whole number, NumPy's too, that is not too small.

    Args:
        name: The argument's name.
        value: What it received.
        example: What to write.
        least: The least that it may be; None: it may be any.
        owner: Whose argument it is, for the message; empty: that of a method of `Model`'s.
        what: What it counts, for the message.

    Returns:
        The value as an int.

    Raises:
        TypeError: It is no whole number. True and False are none.
        ValueError: It is below `least`, or beyond 64 bits.
    """
    number = whole(value)
    # Data is named by its shape: its numbers would fill the line.
    shape = getattr(value, "shape", ())
    is_data = isinstance(shape, tuple) and bool(shape)
    shown = f"{type(value).__name__} of shape {tuple(shape)}" if is_data else f"{value!r:.60}"
    received = f"{owner} received {name}={shown}" if owner else f"{name} received {shown}"
    if number is None:
        # Labels that were passed after the data, where a method takes its next argument.
        columns = "; data and labels go together, as one tuple (x, y)" if is_data and not owner else ""
        kind = "" if is_data else f", of type {type(value).__name__}"
        meant = _meant(value, least, example)
        raise TypeError(f"{received}{kind}, which is not a whole number. Write {name}={meant}{columns}.")
    if least is not None and number < least:
        counted = f"counts {what} from" if what else "counts from"
        raise ValueError(f"{received}, but it {counted} {least}. Write {name}={example}.")
    if least is not None and number >= 1 << 63:
        raise ValueError(
            f"{received}, more than 64 bits count: no memory or run comes to so many. Write {name}={example}."
        )
    return number


def whole(value: Any) -> int | None:
    """The value as an int, NumPy's whole numbers too; None for anything else, True and False included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _meant(value: Any, least: int | None, example: int) -> int:
    """The number that a text such as "2", or 2.0, stands for if it would do, else the example."""
    stands = value.strip().isdecimal() if isinstance(value, str) else isinstance(value, float) and value.is_integer()
    number = int(value) if stands else example
    return number if (1 if least is None else least) <= number < 1 << 63 else example


def check(owner: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """See that arguments are of the kinds that a signature names; what it names beside those below is left alone.

    Args:
        owner: The class or function. Its annotations are texts, as `from __future__ import annotations` makes them.
        given: Argument -> value, such as `locals()` at the start of its body. Where it holds `self`, messages name
            that object's class, which may be a subclass.

    Raises:
        TypeError: A value is of another kind.
        ValueError: A path is empty.
    """
    name = type(given["self"]).__name__ if "self" in given else owner.__name__
    signature = inspect.signature(owner.__init__ if isinstance(owner, type) else owner)  # type: ignore[misc]
    for parameter in signature.parameters.values():
        if parameter.name in given and parameter.name != "self":
            _check_one(name, parameter, given[parameter.name])


def refuse_unknown(owner: type, unknown: Mapping[str, Any]) -> None:
    """Raise TypeError if a constructor was given keywords that it does not have, such as Keras' `save_best_only`."""
    if unknown:
        from hapi import elsewhere

        raise elsewhere.constructor(owner, unknown)


def _check_one(owner: str, parameter: inspect.Parameter, value: Any) -> None:
    words = [word.strip() for word in str(parameter.annotation).split("|")]
    kinds = [_KINDS.get(word.partition("[")[0]) for word in words]
    if _PATH in kinds and value == "":
        raise ValueError(
            f"{owner} received {parameter.name}='', which is no file and no folder: a variable that is not set "
            f'may stand behind it. Write {parameter.name}={_PATH.example}, or "." for where the script was started.'
        )
    if any(kind is None or kind.fits(value) for kind in kinds):
        return
    # What is asked for first; None is only what leaves it out.
    wanted = next(kind for kind in kinds if kind is not None)
    default = parameter.default
    example = wanted.example if default in (parameter.empty, None, "") else repr(default)
    leave_out = "" if default is parameter.empty else ", or leave it out"
    raise TypeError(
        f"{owner} received {parameter.name}={value!r:.60}, of type {type(value).__name__}, which is not {wanted.name}. "
        f"Write {parameter.name}={example}{leave_out}."
    )


class _Kind:
    """What values an annotation admits, how messages call it, and an example."""

    def __init__(self, name: str, example: str, fits: Callable[[Any], bool]) -> None:
        self.name, self.example, self.fits = name, example, fits


def _is_switch(value: Any) -> bool:
    # 0 and 1, and NumPy's, are as good. By type first: arrays compare element by element.
    return not hasattr(value, "__len__") and value in (True, False)


_PATH = _Kind("a path", '"runs/1"', lambda value: isinstance(value, str | PathLike))
_KINDS = {
    "int": _Kind("a whole number", "1", lambda value: whole(value) is not None),
    "float": _Kind("a number", "0.1", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    "bool": _Kind("True or False", "True", _is_switch),
    "str": _Kind("a text", '"name"', lambda value: isinstance(value, str)),
    "Mapping": _Kind("a dict", "{}", lambda value: isinstance(value, Mapping)),
    "dict": _Kind("a dict", "{}", lambda value: isinstance(value, Mapping)),
    "os.PathLike": _PATH,
    "Path": _PATH,
    # By what the trials of it use: importing its class here would load all of hapi.
    "Model": _Kind("a hapi.Model", "hapi.Model(network)", lambda value: hasattr(value, "_engine")),
    "None": _Kind("None", "None", lambda value: value is None),
}
