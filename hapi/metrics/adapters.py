"""Whatever the user calls a metric -> `Metric`."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hapi.batch import is_text, map_tensors, size_of
from hapi.metrics.base import OPEN, Metric, as_exact

# Keys that logs and files of logs hold already.
_RESERVED = ("loss", "lr", "epoch", "step")
_BUILT_IN = {
    "acc": "Accuracy",
    "accuracy": "Accuracy",
    "precision": "Precision",
    "recall": "Recall",
    "f1": "F1",
}
_BUILT_IN |= {"auc": "Auc", "mae": "MeanAbsoluteError", "mse": "MeanSquaredError"}


def as_metrics(metrics: Any) -> list[Metric]:
    """The metrics that the user passed: none, one, or several.

    Raises:
        TypeError: One of them is no metric.
        ValueError: Two have the same name, or one has a name that logs use otherwise.
    """
    if metrics is None:
        return []
    several = metrics if isinstance(metrics, list | tuple) else [metrics]
    adapted = [as_metric(metric) for metric in several]
    names = [name for metric in adapted for name in metric.names if name != OPEN]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"Several metrics are called {', '.join(map(repr, twice))}: each value needs a key of its own "
            "in the logs. "
            'Give one another name, such as Accuracy(name="acc_2"); for torchmetrics '
            'MetricCollection({"acc_2": ...}).'
        )
    taken = [name for name in names if name in _RESERVED or name.startswith("val_")]
    if taken:
        raise ValueError(
            f"A metric is called {taken[0]!r}, which logs use for something else (loss, lr, epoch, step, and val_... "
            'for values of the evaluation). Give it another name: name="my_metric".'
        )
    return adapted


def as_metric(metric: Any) -> Metric:
    """One metric: a `Metric` as it is, a torchmetrics object or a function behind `Metric`'s methods.

    Raises:
        TypeError: It is none of these, or a `Metric` that cannot work.
    """
    if isinstance(metric, Metric):
        _check(metric)
        return metric
    if _is_torchmetrics(metric):
        return TorchMetric(metric)
    if isinstance(metric, str):
        cls = _BUILT_IN.get(metric.lower(), "Accuracy")
        raise TypeError(
            f"metrics holds the text {metric!r}: a metric is an object, which keeps its counts. Write "
            f"hapi.metrics.{cls}()."
        )
    if isinstance(metric, type):
        raise TypeError(
            f"metrics holds the class {metric.__name__}, not an object of it. Write {metric.__name__}() with "
            "parentheses."
        )
    if callable(metric) and not hasattr(metric, "accumulate"):
        return FunctionMetric(metric)
    raise TypeError(
        f"metrics holds an object of type {type(metric).__name__}, which is no metric. Write a subclass of "
        "hapi.metrics.Metric with update(outputs, labels) and compute(), or a function f(outputs, labels) that "
        "returns a value per sample."
    )


class FunctionMetric(Metric):
    """The mean over the samples of what a function returns.

    Args:
        function: ``f(outputs, labels)`` -> a tensor (N, ...) for N samples, numbers or booleans.
    """

    total: Tensor
    samples: int

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        named = getattr(function, "func", function)
        super().__init__(getattr(named, "__name__", type(named).__name__).strip("<>"))
        self._function = function
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64))
        self.add_state("samples", 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionMetric:
        # The function is shared: it keeps nothing, and what it closes over need not be copyable.
        twin = type(self)(self._function).to(self._device)
        twin.name = self.name
        twin.load_states(self.states())
        return twin

    def update(self, outputs: Any, labels: Any) -> None:
        """Add the values of one batch.

        Raises:
            TypeError: The function returned something else than a tensor.
            ValueError: It returned something else than a value per sample.
        """
        values = self._function(outputs, labels)
        # By the outputs where there are no labels, or of text among others.
        samples = len(labels) if is_text(labels) else size_of((labels, outputs))
        if not isinstance(values, Tensor):
            raise TypeError(
                f"The metric function {self.name!r} returned a {type(values).__name__}: values stay on the device "
                "until they are read. Return a tensor with a value per sample, shape (N,)."
            )
        if values.ndim == 0 or len(values) != samples or values.numel() < samples:
            raise ValueError(
                f"The metric function {self.name!r} returned a tensor of shape {tuple(values.shape)} for a batch of "
                f"{samples} samples: hapi takes the mean over all samples of a pass, which the means of batches do "
                "not tell. Return a value per sample, shape (N,): without .mean() or .sum()."
            )
        if samples:
            self.total += as_exact(values.detach()).sum() * samples / values.numel()
            self.samples += samples

    def result(self) -> Tensor:
        """The mean; NaN if nothing was taken in."""
        return self.total / self.samples if self.samples else self.total * torch.nan


class TorchMetric(Metric):
    """A torchmetrics metric or collection, whose ranks come together as all others do.

    Its own collectives are off.

    Each state is reduced by the function that the metric declares for it. Ranks that saw nothing are left
    out; that a state reduced by ``"mean"`` weighs all others alike is that metric's definition.

    Args:
        metric: The metric; a copy is kept.
    """

    def __init__(self, metric: Any) -> None:
        # Only for a process that has imported torchmetrics.
        from hapi.metrics import keys

        super().__init__(type(metric).__name__)
        self._metric = copy.deepcopy(metric)
        for _, part in self._parts():
            part.sync_on_compute = part._to_sync = False
        self._names = keys.keys_of(self._metric)

    @property
    def names(self) -> list[str]:
        """The class's name, or the keys of several values; `OPEN` where there may be others."""
        return list(self._names)

    def reset(self) -> None:
        """Set every state to its default."""
        self._metric.reset()

    def update(self, outputs: Any, labels: Any) -> None:
        """Take in one batch as ``update(outputs, labels)``: predictions, targets."""
        self._metric.update(outputs, labels)

    def values(self) -> dict[str, Tensor]:
        """The values as logs hold them.

        Raises:
            ValueError: One of them is not a single number.
        """
        computed = self._metric.compute()
        named = computed if isinstance(computed, Mapping) else {self.name: computed}
        for name, value in named.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
                raise ValueError(
                    f"The metric {name!r} computed a value of {shape}: logs hold one number per name. Choose an "
                    'average (average="macro"), or wrap it in torchmetrics.ClasswiseWrapper.'
                )
        return {str(name): value.detach().reshape(()) for name, value in named.items()}

    def result(self) -> dict[str, Tensor]:
        """The values."""
        return self.values()

    def to(self, device: torch.device | str) -> TorchMetric:
        """Move the states to a device, in place."""
        self._device = torch.device(device)
        self._metric.to(device)
        return self

    def states(self) -> dict[str, Any]:
        """States (tensors, or lists of them) and numbers of updates, of the metric and all those within."""
        states: dict[str, Any] = {}
        for path, part in self._parts():
            states[f"{path}.updates"] = part._update_count
            for name in part._defaults:
                value = getattr(part, name)
                states[f"{path}.{name}"] = list(value) if isinstance(value, list) else value
        return states

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Set the states from what `states` returned."""
        for path, part in self._parts():
            part._update_count, part._computed = states[f"{path}.updates"], None
            for name in part._defaults:
                value = states[f"{path}.{name}"]
                setattr(part, name, map_tensors(self._own, value))

    def merge(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Set the states to the ranks' states, each reduced as its metric declares."""
        merged: dict[str, Any] = {}
        for path, part in self._parts():
            counts = [states[f"{path}.updates"] for states in ranks]
            merged[f"{path}.updates"] = sum(counts)
            informed = [states for states, count in zip(ranks, counts, strict=True) if count] or ranks[:1]
            for name in part._defaults:
                parts = [states[f"{path}.{name}"] for states in informed]
                merged[f"{path}.{name}"] = _reduced(parts, part._reductions[name])
        self.load_states(merged)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, copy=True)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        from hapi.metrics import keys

        return keys.parts_of(self._metric)


def _reduced(parts: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], list):
        # Left as a list, as in one process; joining it is what `compute` begins with.
        return [piece for pieces in parts for piece in pieces]
    stacked = torch.stack(parts)
    return reduction(stacked) if reduction is not None else stacked


def _is_torchmetrics(metric: Any) -> bool:
    # An object of torchmetrics cannot be here unless torchmetrics was imported.
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(metric, module.Metric | module.MetricCollection)


def _check(metric: Metric) -> None:
    cls = type(metric)
    if cls.update is Metric.update:
        raise TypeError(
            f"The metric {cls.__name__} does not say how it takes in a batch. Define update(self, outputs, labels)."
        )
    if cls.compute is Metric.compute and cls.result is Metric.result:
        raise TypeError(
            f"The metric {cls.__name__} does not say what its value is. Define compute(self), which returns a float."
        )
    if not metric.states():
        raise TypeError(
            f"The metric {cls.__name__} declares no state: what it keeps could not be put together over the ranks. "
            'Call self.add_state("total", torch.tensor(0.0)) in __init__ and add to self.total in update.'
        )
