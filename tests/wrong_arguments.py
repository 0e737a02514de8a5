"""Every public call, and arguments of wrong types and values for it.

The calls are found by introspection, so that a new one is tested without being named here. What is wrong for an
argument follows from the words of its annotation, and from its name where that says `Any`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import hapi
from hapi import callbacks, datasets, distributed, metrics
from hapi.distributed import fleet
from hapi.tuning import RateSweep

X, Y = torch.rand(8, 4), torch.arange(8) % 3
NETWORK = nn.Linear(4, 3)

BY_ANNOTATION: dict[str, tuple[Any, ...]] = {
    "int": ("3", 2.5, [[1]], -7, 10**30),
    "float": ("0.5", [0.5]),
    "bool": ("yes", 7),
    "str": (3, ["x"], "nonsense"),
    "PathLike": (3, ["x"], ""),
    "Path": (3, ["x"], ""),
    "Callable": (3, "x"),
    "Sequence": ({}, 2.5),
    "dict": (3, ["x"]),
    "nn.Module": (3, "x", nn.Linear),
    "Tensor": ("x", 3),
    "torch.device": ("nonsense", 3),
    "Sized": (3,),
    "DistributedStrategy": (3,),
    "Model": (3, "x", NETWORK),
}
BY_NAME: dict[str, tuple[Any, ...]] = {
    "optimizer": (3, "nonsense", nn.Linear(2, 2)),
    "loss": (3, "nonsense", nn.CrossEntropyLoss),
    "metrics": (3, "nonsense", [metrics.Accuracy], metrics.Accuracy),
    "scheduler": (3, "nonsense"),
    "callbacks": (3, "nonsense", [callbacks.History], callbacks.History),
    "train_data": (3, "nonsense", None, iter([]), {}, []),
    "eval_data": (3, "nonsense", iter([]), {}, []),
    "test_data": (3, "nonsense", None, iter([]), {}, []),
    "inputs": (3, "nonsense", [], {}),
    "labels": ("nonsense", torch.rand(5)),
    "example_inputs": (3, "nonsense"),
    "input_size": ("nonsense", (2.5,), -1),
    "dtype": (3, "nonsense"),
    "outputs": ("nonsense", 3),
    "default": ("nonsense", [1]),
}
# Texts that may be anything, and numbers below zero: not wrong, or found out later.
FREE_TEXTS = {
    "monitor", "name", "path", "save_dir", "log_dir", "root", "gpus", "backend", "resume", "batch_size", "topk",
    "project", "entity", "dir", "job_type", "experiment", "run_name", "tracking_uri",
}  # fmt: skip
MAY_BE_NEGATIVE = {"n", "seed", "ignore_index", "verbose", "baseline"}
MAY_BE_LARGE = {"seed", "ignore_index", "verbose"}
# How many inputs and labels a batch has, or their names, shows with the first batch.
LATER = {
    ("hapi.Model", "inputs"),
    ("hapi.Model", "labels"),
    # A CPU, where no size can be found, is refused before; the data of an evaluation serves for None.
    ("hapi.find_batch_size", "train_data"),
    ("hapi.debug.fast_dev_run", "test_data"),
    # Which of several is looked up in the file.
    ("hapi.callbacks.EMA.load", "number"),
}
# What makes a call a right one but for the argument under test.
RIGHT: dict[str, Any] = {
    "network": NETWORK, "train_data": (X, Y), "eval_data": (X, Y), "test_data": X, "inputs": X, "labels": Y,
    "outputs": torch.rand(8, 3), "path": "x.pt2", "name": "kept", "default": 0, "func": len, "n": 1, "batch_size": 2,
    "dataset": [1, 2, 3], "optimizer": torch.optim.SGD([nn.Parameter(X)], lr=0.1),
}  # fmt: skip


def model() -> hapi.Model:
    network = nn.Linear(4, 3)
    return hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.1), nn.CrossEntropyLoss())


def public_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Name -> the call: all that `__all__` lists, and the methods of `Model`."""
    for method in ("__init__", *(name for name in vars(hapi.Model) if not name.startswith("_"))):
        if inspect.isfunction(vars(hapi.Model)[method]):
            yield ("hapi.Model", hapi.Model) if method == "__init__" else (f"hapi.Model.{method}", method)
    for module in (hapi, hapi.debug, callbacks, metrics, datasets, distributed):
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found) and found is not hapi.Model:
                yield f"{module.__name__}.{name}", found
    for name, found in vars(fleet).items():
        if not name.startswith("_") and getattr(found, "__module__", "") == fleet.__name__:
            yield f"{fleet.__name__}.{name}", found
    for name in metrics.__all__:
        if name != "Metric":
            yield f"hapi.metrics.{name}.update", getattr(metrics, name)().update
    yield "hapi.metrics.Metric.add_state", metrics.Accuracy().add_state
    history = callbacks.History()
    history.on_epoch_end(0, {"loss": 1.0})
    sweep = RateSweep([0.1, 0.2, 0.3], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0])
    yield "hapi.callbacks.History.plot", history.plot
    yield "hapi.tuning.RateSweep.plot", sweep.plot
    yield "hapi.callbacks.EMA.load", callbacks.EMA().load


def wrong_values(call: str, parameter: inspect.Parameter) -> list[Any]:
    words = set(re.findall(r"[\w.]+", str(parameter.annotation)))
    if call == "hapi.Model.export" and parameter.name == "path":
        words = {"Path"}
    found = [value for word, values in BY_ANNOTATION.items() if words & {word, f"os.{word}"} for value in values]
    if ("Any" in words and "dict" not in words) or parameter.name == "optimizer":
        found = list(BY_NAME.get(parameter.name, ()))
    return [value for value in found if not is_right(parameter, words, value)]


def is_right(parameter: inspect.Parameter, words: set[str], value: Any) -> bool:
    if parameter.name in FREE_TEXTS and isinstance(value, str) and words & {"str", "Path"} and value:
        return True
    if value is None and parameter.default is None:
        return True
    if isinstance(value, int) and value < 0 and parameter.name in MAY_BE_NEGATIVE:
        return True
    # One of several kinds is right where another would be wrong.
    return (isinstance(value, list) and "Sequence" in words) or (
        isinstance(value, int)
        and "int" in words
        and 0 < value < (math.inf if "float" in words or parameter.name in MAY_BE_LARGE else 1 << 63)
    )


CALLS = dict(public_calls())
CASES = [
    (name, parameter.name, value)
    for name, call in CALLS.items()
    for parameter in inspect.signature(getattr(hapi.Model, call) if isinstance(call, str) else call).parameters.values()
    if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    and parameter.name != "self"
    and (name, parameter.name) not in LATER
    and not name.endswith("_step")
    for value in wrong_values(name, parameter)
]


def make(name: str, argument: str, value: Any) -> None:
    """The call, right but for one argument."""
    call: Any = CALLS[name]
    call = getattr(model(), call) if isinstance(call, str) else call
    parameters = inspect.signature(call).parameters.values()
    given = {p.name: RIGHT[p.name] for p in parameters if p.default is p.empty and p.name in RIGHT}
    given |= {"verbose": 0} if name in ("hapi.Model.fit", "hapi.Model.evaluate", "hapi.Model.predict") else {}
    given |= {"model": model()} if any(p.name == "model" for p in parameters) else {}
    given |= {"input_size": (2, 4)} if (name, argument) == ("hapi.flops", "dtype") else {}
    given |= {"nprocs": 1} if name == "hapi.distributed.spawn" else {}
    call(**{**given, argument: value})
