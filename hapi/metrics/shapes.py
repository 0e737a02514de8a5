"""What the built-in metrics take: one tensor of outputs and one of labels, brought to shapes that fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hapi.batch import is_array, is_counted, is_text, tensor_of
from hapi.metrics.base import Metric, as_exact


def pair(metric: Metric, outputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Outputs and labels, one tensor each; NumPy's arrays as tensors.

    Raises:
        TypeError: There are several of them, or none.
    """
    if isinstance(outputs, Tensor) and isinstance(labels, Tensor):
        return outputs, labels
    outputs, labels = (tensor_of(value, torch.float64) if is_array(value) else value for value in (outputs, labels))
    for noun, value in (("outputs", outputs), ("labels", labels)):
        if not isinstance(value, Tensor):
            cls = next(kind.__name__ for kind in type(metric).__mro__ if kind.__module__.startswith("hapi."))
            received = f"{type(metric).__name__} ({metric.name!r}) received"
            if value is None and noun == "labels":
                raise TypeError(
                    f"{received} no labels: all of the batch went into the network. Say which part they are, "
                    'Model(network, labels=["label"]) for dict batches, labels=1 for tuples.'
                )
            if noun == "labels" and is_text(value):
                # Only for a process that fails.
                from hapi import refused

                raise refused.text_labels(f"{type(metric).__name__} ({metric.name!r})", value)
            part = f"{noun}[{next(iter(value), 0)!r}]" if isinstance(value, Mapping) else f"{noun}[0]"
            given = f"{part}, labels" if noun == "outputs" else f"outputs, {part}"
            raise TypeError(
                f"{received} {noun} of type {type(value).__name__}, not one tensor: it cannot know which part is "
                f"meant. Write a subclass whose update picks it: class My{cls}(hapi.metrics.{cls}): def update(self, "
                f"outputs, labels): super().update({given})."
            )
    return outputs, labels


def align(metric: Metric, outputs: Tensor, labels: Tensor, classes: int | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and class numbers of a classification.

    Args:
        metric: Whose they are.
        outputs: As `pair` gives them.
        labels: Likewise.
        classes: How many there are, where outputs that are class numbers do not tell.

    Returns:
        Outputs (N, C, ...) with C > 1 and labels (N, ...), or, where there is one output a sample, both (N,
        ...).

    Raises:
        ValueError: The shapes do not fit each other, or labels are no class numbers.
    """
    given = outputs, labels
    if not outputs.ndim or not labels.ndim:
        raise misfit(metric, *given)
    if outputs.ndim > 1 and outputs.shape[1] == 1:
        outputs = outputs.squeeze(1)
    elif outputs.ndim > 1 and outputs.is_floating_point():
        classes = outputs.shape[1]
        if labels.shape == outputs.shape:
            _refuse_several(metric, labels)
            # Booleans have no largest one.
            return outputs, (labels.byte() if labels.dtype == torch.bool else labels).argmax(1)
        labels = _squeezed(metric, labels, outputs.shape[:1] + outputs.shape[2:], given)
        _look_at_numbers(metric, outputs, labels, classes)
        return outputs, labels
    labels = _squeezed(metric, labels, outputs.shape, given)
    _look_at_numbers(metric, outputs, labels, 2 if outputs.is_floating_point() else classes)
    return outputs, labels


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


def _look_at_numbers(metric: Metric, outputs: Tensor, labels: Tensor, classes: int | None) -> None:
    """Raise if labels are no numbers of classes, of which they would silently be another, or none.

    Values are read in the first batch of a pass only.
    """
    if metric in _looked or not labels.numel():
        return
    _looked.add(metric)
    ignored = getattr(metric, "ignore_index", None)
    counted, predicted = labels.detach(), outputs
    if ignored is not None:
        left_out = ~is_counted(labels, ignored)
        counted = labels.masked_fill(left_out, 0)
        if not outputs.is_floating_point():
            # Predictions may be padded where the labels are.
            predicted = outputs.masked_fill(left_out, 0)
    columns = outputs.ndim > labels.ndim
    has_place = getattr(metric, "num_classes", None) is not None
    # Where each class has a place, or has to be hit, rather than 1 told from 0.
    matched = has_place or (columns and hasattr(metric, "topk"))
    # A label below 0 is then none: one that the loss leaves out, say.
    from_zero = matched and (has_place or ignored is not None)
    _check_numbers(metric, "labels", counted, classes, from_zero, whole=matched and columns)
    if not outputs.is_floating_point() and classes is not None:
        _check_numbers(metric, "outputs", predicted, classes, has_place, whole=False)


def _check_numbers(
    metric: Metric, noun: str, values: Tensor, classes: int | None, from_zero: bool, whole: bool
) -> None:
    exact = as_exact(values)
    low, high = exact.aminmax()
    lowest, highest, fraction = torch.stack([low, high, (exact - exact.round()).abs().max()]).tolist()
    received = f"{type(metric).__name__} ({metric.name!r}) received {noun} from {lowest:g} to {highest:g}"
    if classes is not None and (highest >= classes or (from_zero and lowest < 0)):
        raise _no_class(metric, received, classes, lowest)
    # Of one column, labels may be probabilities, as smoothed ones are.
    if fraction and whole:
        raise ValueError(
            f"{received} that are no whole numbers, for outputs of {classes} classes: class numbers are whole. For "
            "quantities use MeanAbsoluteError or MeanSquaredError; class probabilities have the outputs' own shape."
        )


def _no_class(metric: Metric, received: str, classes: int, lowest: float) -> ValueError:
    what = f"for {classes} classes, whose numbers run from 0 to {classes - 1}"
    more = ", write num_classes= where there are more" if hasattr(metric, "num_classes") else ""
    left_out = f", or write ignore_index={lowest:g} if such samples are to be left out" if lowest < 0 else ""
    return ValueError(f"{received} {what}. Number the classes from 0{more}{left_out}.")


def misfit(metric: Metric, outputs: Tensor, labels: Tensor) -> ValueError:
    """The error for shapes that do not fit each other."""
    return ValueError(
        f"{type(metric).__name__} ({metric.name!r}) received outputs of shape {tuple(outputs.shape)} and labels of "
        f"shape {tuple(labels.shape)}, which do not fit each other. Write a subclass whose update reshapes them; "
        "help(hapi.metrics.classification) lists the shapes of classifications, with the classes in dimension 1."
    )
