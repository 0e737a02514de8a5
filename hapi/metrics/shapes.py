"""What the built-in metrics take: one tensor of outputs and one of labels, brought to shapes that fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hapi.metrics.base import Metric


def pair(metric: Metric, outputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Outputs and labels, one tensor each.

    Raises:
        TypeError: There are several of them, or none.
    """
    for noun, value in (("outputs", outputs), ("labels", labels)):
        if not isinstance(value, Tensor):
            cls = next(kind.__name__ for kind in type(metric).__mro__ if kind.__module__.startswith("hapi."))
            received = f"{type(metric).__name__} ({metric.name!r}) received"
            if value is None and noun == "labels":
                raise TypeError(
                    f"{received} no labels: all of the batch went into the network. Say which part they are, "
                    'Model(network, labels=["label"]) for dict batches, labels=1 for tuples.'
                )
            part = f"{noun}[{next(iter(value), 0)!r}]" if isinstance(value, Mapping) else f"{noun}[0]"
            given = f"{part}, labels" if noun == "outputs" else f"outputs, {part}"
            raise TypeError(
                f"{received} {noun} of type {type(value).__name__}, not one tensor: it cannot know which part is "
                f"meant. Write a subclass whose update picks it: class My{cls}(hapi.metrics.{cls}): def update(self, "
                f"outputs, labels): super().update({given})."
            )
    return outputs, labels


def align(metric: Metric, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and class numbers of a classification.

    Returns:
        Outputs (N, C, ...) with C > 1 and labels (N, ...), or, where there is one output a sample, both (N,
        ...).

    Raises:
        ValueError: The shapes do not fit each other.
    """
    given = outputs, labels
    if outputs.ndim > 1 and outputs.shape[1] == 1:
        outputs = outputs.squeeze(1)
    elif outputs.ndim > 1 and outputs.is_floating_point():
        if labels.shape == outputs.shape:
            _refuse_several(metric, labels)
            labels = labels.argmax(1)
        expected = outputs.shape[:1] + outputs.shape[2:]
        return outputs, _squeezed(metric, labels, expected, given)
    return outputs, _squeezed(metric, labels, outputs.shape, given)


def _squeezed(metric: Metric, labels: Tensor, shape: torch.Size, given: tuple[Tensor, Tensor]) -> Tensor:
    if labels.ndim == len(shape) + 1 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if labels.shape != shape:
        raise misfit(metric, *given)
    return labels


# Each pass has a metric of its own.
_looked: WeakSet[Metric] = WeakSet()


def _refuse_several(metric: Metric, labels: Tensor) -> None:
    """Raise if samples have several classes at once, or none. Values are read in the first batch of a pass only."""
    if metric in _looked:
        return
    _looked.add(metric)
    sums = labels.detach().double().sum(1)
    if bool((sums - 1).abs().gt(1e-3).any()):
        raise ValueError(
            f"{type(metric).__name__} ({metric.name!r}) received labels of shape {tuple(labels.shape)} whose rows do "
            "not add up to 1: several classes at once (multi-label), of which it would take the largest for the only "
            "one. Use torchmetrics.classification's Multilabel metrics, or a function of outputs and labels that gives "
            "a value for each sample: ((outputs > 0) == (labels > 0.5)).float().mean(1)."
        )


def misfit(metric: Metric, outputs: Tensor, labels: Tensor) -> ValueError:
    """The error for shapes that do not fit each other."""
    return ValueError(
        f"{type(metric).__name__} ({metric.name!r}) received outputs of shape {tuple(outputs.shape)} and labels of "
        f"shape {tuple(labels.shape)}, which do not fit each other. Write a subclass whose update reshapes them; "
        "help(hapi.metrics.classification) lists the shapes of classifications, with the classes in dimension 1."
    )
