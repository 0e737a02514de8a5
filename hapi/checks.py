"""Faults found before they cost a training run, each said in three parts: received, why not, what instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Losses that compare outputs and labels element by element, and would broadcast unequal shapes without a word.
_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)


def positive_int(name: str, value: Any, example: int) -> int:
    """A whole number of at least one.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is below one.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} received {value!r}, of type {type(value).__name__}, which is not a whole number. Write "
            f"{name}={example}."
        )
    if value < 1:
        raise ValueError(f"{name} received {value}, but it counts from 1. Write {name}={example}, or leave it out.")
    return value


def optimizer_parameters(optimizer: torch.optim.Optimizer, network: nn.Module, companions: nn.Module | None) -> None:
    """The optimizer must hold parameters of this network (or of the loss) and no others.

    Raises:
        ValueError: It holds others, or its step needs a closure.
    """
    known = {id(p) for module in (network, companions) if module is not None for p in module.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [tuple(p.shape) for p in held if id(p) not in known]
    if strangers:
        raise ValueError(
            f"The optimizer holds {len(strangers)} of {len(held)} parameters (first shape: {strangers[0]}) that are "
            "not of the "
            "network given to Model, so training would not move the network. Make the optimizer from this network: "
            "torch.optim.Adam(model.parameters(), lr=1e-3)."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} calls a closure several times within one step, which fit does not give it. "
            "Use an optimizer whose step() needs no closure, such as torch.optim.Adam, or a loop of your own."
        )


def check_loss_has_graph(loss: torch.Tensor, network: nn.Module) -> None:
    """A training loss must depend on parameters.

    Raises:
        ValueError: It does not, so nothing could be learned.
    """
    if not loss.requires_grad:
        frozen = not any(p.requires_grad for p in network.parameters())
        cause = "every parameter of the network is frozen" if frozen else "it was computed without a graph"
        raise ValueError(
            f"The loss ({loss.dtype}) does not depend on any parameter that requires a gradient: {cause}. "
            "Set requires_grad_(True) on what is to be trained, and keep .item(), .detach() and torch.no_grad() out of "
            "the forward pass and the loss."
        )


def class_labels(labels: Any, outputs: Any) -> None:
    """Labels that are class numbers, against the outputs' number of classes. Reads the labels' values.

    Raises:
        ValueError: Their dtype, shape or range does not fit cross-entropy.
    """
    if not isinstance(labels, torch.Tensor) or not isinstance(outputs, torch.Tensor) or outputs.dim() < 1:
        return
    shown = f"labels of dtype {str(labels.dtype).removeprefix('torch.')} and shape {tuple(labels.shape)}"
    against = f"outputs of shape {tuple(outputs.shape)}"
    if labels.is_floating_point():
        if labels.shape != outputs.shape:
            raise ValueError(
                f"Cross-entropy received {shown} for {against}: class numbers must be whole numbers. "
                "Write labels.long(), or give class probabilities of the outputs' own shape."
            )
        return
    if labels.dtype not in (torch.int64, torch.uint8):
        raise ValueError(
            f"Cross-entropy received {shown}: torch takes class numbers as int64 only. Write labels.long()."
        )
    expected = (outputs.shape[0], *outputs.shape[2:]) if outputs.dim() > 1 else ()
    if tuple(labels.shape) != expected:
        a_column = labels.dim() == 2 and labels.shape[1] == 1
        cure = "Write labels.squeeze(1)." if a_column else "Check the network's last layer and the labels."
        raise ValueError(
            f"Cross-entropy received {shown} for {against}, where it needs labels of shape {expected}, one class "
            f"number each. {cure}"
        )


def label_range(lowest: int, highest: int, classes: int, ignored: int | None) -> None:
    """Class numbers must be numbers of outputs.

    Raises:
        ValueError: Some are not.
    """
    if (lowest < 0 and lowest != ignored) or highest >= classes:
        raise ValueError(
            f"Labels from {lowest} to {highest} arrived for {classes} outputs: class numbers run from 0 to "
            f"{classes - 1}. Give the last layer {highest + 1} outputs, or number the classes from 0."
        )


def same_shape(loss: Any, outputs: Any, labels: Any) -> None:
    """Outputs and labels of a loss that compares elements.

    Raises:
        ValueError: Their shapes differ, and torch would broadcast them into a wrong number.
    """
    both_tensors = isinstance(labels, torch.Tensor) and isinstance(outputs, torch.Tensor)
    if not isinstance(loss, _ELEMENTWISE) or not both_tensors or outputs.shape == labels.shape:
        return
    raise ValueError(
        f"{type(loss).__name__} received outputs of shape {tuple(outputs.shape)} and labels of shape "
        f"{tuple(labels.shape)}: torch would stretch the smaller one and give a wrong number. "
        "Bring them to one shape, such as labels.unsqueeze(1) or outputs.squeeze(1)."
    )


def explained(compute: Callable[[], Any], outputs: Any, labels: Any, classifies: bool) -> Any:
    """Compute a loss; where torch refuses, look for the cause in the labels and say it.

    Raises:
        ValueError: The labels do not fit the loss.
    """
    try:
        return compute()
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        if classifies:
            try:
                class_labels(labels, outputs)
                if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
                    _labels_within(labels, outputs)
            except ValueError as cause:
                raise cause from error
        raise


def _labels_within(labels: torch.Tensor, outputs: torch.Tensor) -> None:
    counted = labels[labels != -100]
    if counted.numel():
        label_range(
            int(counted.min()),
            int(counted.max()),
            outputs.shape[1] if outputs.dim() > 1 else len(outputs),
            None,
        )
