"""Faults found before they cost a training run, each said in three parts: received, why not, what instead."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hapi.batch import is_counted, is_text

if TYPE_CHECKING:
    from hapi.objective import Objective

# Losses that compare outputs and labels element by element, and would broadcast unequal shapes without a word.
_ELEMENTWISE = {
    "MSELoss": nn.functional.mse_loss,
    "L1Loss": nn.functional.l1_loss,
    "SmoothL1Loss": nn.functional.smooth_l1_loss,
    "HuberLoss": nn.functional.huber_loss,
    "BCELoss": nn.functional.binary_cross_entropy,
    "BCEWithLogitsLoss": nn.functional.binary_cross_entropy_with_logits,
}
_BACKWARD = (
    "train_step called backward() itself, but hapi does that once it has scaled the loss, as accumulation, precision "
    "and several processes need. Leave backward(), zero_grad() and step() out of it, and write `return loss, outputs`."
)
_OF_PROBABILITIES = ("BCELoss", "BCEWithLogitsLoss")


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
            f"The optimizer holds {len(held)} parameters, of which {len(strangers)} (first shape: {strangers[0]}) are "
            "not of the network given to Model, so that training would not move the network. Make the optimizer from "
            "this network: torch.optim.Adam(model.parameters(), lr=1e-3); what else is to be trained belongs into the "
            "one nn.Module that Model gets, or into a loss that is a module."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} calls a closure several times within one step, which fit does not give it. "
            "Use an optimizer whose step() needs no closure, such as torch.optim.Adam, or a loop of your own."
        )


def modules_beside(owner: Any, network: nn.Module, companions: nn.Module | None) -> None:
    """Warn of modules that a Model's subclass keeps beside its network: they are trained by nobody here."""
    known = {id(p) for module in (network, companions) if module is not None for p in module.parameters()}
    for name, value in vars(owner).items():
        if isinstance(value, nn.Module) and any(p.requires_grad and id(p) not in known for p in value.parameters()):
            warnings.warn(
                f"{type(owner).__name__}.{name} holds parameters that require a gradient and are not of the network "
                "given to Model: they are neither trained nor exchanged between processes, saved or resumed. Give "
                f"Model one nn.Module that holds both, or write {name}.requires_grad_(False).",
                stacklevel=6,
            )


def reduction(loss: Any) -> None:
    """A loss of torch's must give a mean: a sum would be taken for one, and weigh batches by their size.

    Raises:
        ValueError: It does not.
    """
    function = loss.func if isinstance(loss, partial) else type(loss)
    if not str(getattr(function, "__module__", "")).startswith("torch.nn."):
        return  # somebody's own, which knows what it means by the word
    given = loss.keywords.get("reduction") if isinstance(loss, partial) else getattr(loss, "reduction", None)
    if given in ("sum", "none"):
        name = getattr(function, "__name__", "the function")
        what = "the sum over the batch" if given == "sum" else "a value for each sample"
        raise ValueError(
            f"loss received {name} with reduction={given!r}, which gives {what}, where a mean over the samples is "
            'needed: batches differ in size. Write reduction="mean"; for a mean over something else, a function that '
            "returns (sum, count)."
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


def own_backward(parameters: Iterable[nn.Parameter]) -> None:
    """Gradients before the backward pass: an overridden step has made one itself.

    Raises:
        ValueError: There are some.
    """
    if any(parameter.grad is not None for parameter in parameters):
        raise ValueError(_BACKWARD)


def defined_in(function: Any) -> str:
    """The module in whose text a function stands, whatever `functools.wraps` has put on it; "" of what is none."""
    return str(getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", ""))


def loss_and_outputs(returned: Any) -> tuple[Any, Any]:
    """What a `train_step` or `eval_step` returned, as a loss, of any form, and outputs.

    Raises:
        ValueError: It is no such pair.
    """
    if isinstance(returned, tuple | list) and len(returned) == 2:
        value, outputs = returned
        a_number = isinstance(outputs, int | float) or (isinstance(outputs, torch.Tensor) and not outputs.dim())
        # A network may compute its loss itself, and have no other outputs.
        if not a_number or outputs is value:
            return value, outputs
        found = "a pair whose second part is one number"
    else:
        found = f"{type(returned).__name__}, not a pair"
    raise ValueError(
        f"The step returned {found}, so there are no outputs for the metrics. Write `return loss, outputs`; a loss "
        "that knows its own weight is a pair in it: `return (sum, count), outputs`."
    )


def is_overridden(step: Callable[..., Any]) -> bool:
    """Whether a `train_step` or `eval_step` is the user's own, in place of `Model`'s or of `Stepper`'s like it."""
    return defined_in(step) not in ("hapi.model", "hapi.step")


def why_step_failed(error: Exception, network: nn.Module, size: int, overridden: bool) -> Exception | None:
    """What the failure of a step means in words of the data or of the overridden step, if it is known.

    Args:
        error: What was raised.
        network: The model's.
        size: Samples in the batch.
        overridden: Whether the step is the user's own.
    """
    text = str(error)
    if "Expected more than 1 value per channel" in text:
        return ValueError(
            f"BatchNorm received {size} sample in training, of which it can take no variance. If the last batch of an "
            "epoch is that short, write fit(..., drop_last=True), or drop_last=True in a DataLoader; else a batch_size "
            "of 2 or more per process."
        )
    if overridden and "has no attribute 'backward'" in text:
        return ValueError(_BACKWARD)
    if overridden and "tuple" in text and isinstance(error, TypeError | AttributeError):
        given = _given_to(network, error)
        if given is None or (len(given) == 1 and isinstance(given[0], tuple)):
            return TypeError(
                f"The overridden step failed ({text}). Its inputs are a tuple, or a dict for dict batches, also where "
                "there is one. Write outputs = self.network(*inputs), or x, = inputs."
            )
    return None


def _given_to(network: nn.Module, error: Exception) -> tuple[Any, ...] | None:
    """The arguments of the network's call within which an error was raised; None: it was raised outside."""
    trace = error.__traceback__
    while trace is not None:
        seen = trace.tb_frame.f_locals
        if trace.tb_frame.f_code is nn.Module._call_impl.__code__ and seen.get("self") is network:
            return tuple(seen.get("args", ()))
        trace = trace.tb_next
    return None


def class_labels(labels: Any, outputs: Any) -> None:
    """Labels that are class numbers, against the outputs' number of classes. Reads the labels' values.

    Raises:
        ValueError: Their dtype, shape or range does not fit cross-entropy.
    """
    if not isinstance(outputs, torch.Tensor):
        raise _several_outputs(outputs)
    if not isinstance(labels, torch.Tensor):
        return
    if outputs.dim() < 2 or not labels.dim():
        raise ValueError(
            f"Cross-entropy received outputs of shape {tuple(outputs.shape)} and labels of shape "
            f"{tuple(labels.shape)}, which lack a batch dimension, or that of the classes. Pass batches: a list is "
            "taken as batches, so give a list of samples as "
            "DataLoader(samples, batch_size=32), and columns as a tuple (x, y)."
        )
    shown = f"labels of dtype {str(labels.dtype).removeprefix('torch.')} and shape {tuple(labels.shape)}"
    against = f"outputs of shape {tuple(outputs.shape)}"
    if labels.is_floating_point():
        if labels.shape != outputs.shape:
            raise ValueError(
                f"Cross-entropy received {shown} for {against}: class numbers must be whole numbers. "
                "Write labels.long(), or give class probabilities of the outputs' own shape."
            )
        return
    if labels.dtype != torch.int64 and not (labels.dtype == torch.uint8 and labels.dim() == 1):
        raise ValueError(
            f"Cross-entropy received {shown}: torch takes class numbers as int64 only. Write labels.long()."
        )
    expected = (outputs.shape[0], *outputs.shape[2:])
    if tuple(labels.shape) != expected:
        raise ValueError(
            f"Cross-entropy received {shown} for {against}, where it needs labels of shape {expected}, one class "
            f"number each. {_to_their_shape(labels, outputs)}"
        )


def _several_outputs(outputs: Any) -> ValueError:
    own = (
        # Several outputs are spread.
        f"lambda {', '.join(f'out_{i}' for i in range(len(outputs)))}, labels: cross_entropy(out_0, labels)"
        if isinstance(outputs, tuple | list)
        else "lambda outputs, labels: cross_entropy(outputs['scores'], labels)"
    )
    return ValueError(
        f"Cross-entropy received a {type(outputs).__name__} from the network, not one tensor of scores. Let the "
        f"network return that tensor alone, or give a loss of your own that picks it: loss={own}."
    )


def _to_their_shape(labels: torch.Tensor, outputs: torch.Tensor) -> str:
    """What brings class numbers to the shape that cross-entropy needs."""
    if labels.dim() == 2 and labels.shape[1] == 1:
        return "Write labels.squeeze(1)."
    if labels.shape == outputs.shape:
        return "Write labels.argmax(1) if they are one-hot, labels.float() if they are probabilities."
    if labels.shape == outputs.shape[:-1]:
        return "The classes go second: let the network return outputs.movedim(-1, 1)."
    return "Check the network's last layer and the labels."


def label_range(lowest: int, highest: int, classes: int) -> None:
    """Class numbers must be numbers of outputs.

    Raises:
        ValueError: Some are not.
    """
    if lowest < 0 or highest >= classes:
        cure = (
            f"Give the last layer {highest + 1} outputs, or number the classes from 0."
            if highest >= classes
            else f"Number the classes from 0, or leave such samples out by CrossEntropyLoss(ignore_index={lowest})."
        )
        raise ValueError(
            f"Labels from {lowest} to {highest} arrived for {classes} outputs: class numbers run from 0 to "
            f"{classes - 1}. {cure}"
        )


def element_labels(loss: Any, outputs: Any, labels: Any) -> None:
    """Outputs and labels of a loss that compares elements. Reads the values where they are probabilities.

    Raises:
        ValueError: Their shapes differ, and torch would broadcast them into a wrong number; or probabilities are none.
    """
    both_tensors = isinstance(labels, torch.Tensor) and isinstance(outputs, torch.Tensor)
    kinds = (k for k, function in _ELEMENTWISE.items() if isinstance(loss, getattr(nn, k)) or loss is function)
    kind = next(kinds, None)
    if kind is None or not both_tensors:
        return
    name = getattr(loss, "__name__", type(loss).__name__)
    if outputs.shape != labels.shape:
        raise ValueError(
            f"{name} received outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}: "
            "torch would stretch the smaller one and give a wrong number. "
            "Bring them to one shape, such as labels.unsqueeze(1) or outputs.squeeze(1)."
        )
    if kind not in _OF_PROBABILITIES:
        return
    if not labels.is_floating_point():
        raise ValueError(
            f"{name} received labels of dtype {labels.dtype}, but they are probabilities of class 1 to it. "
            "Write labels.float(); for class numbers of several classes, use CrossEntropyLoss."
        )
    if beyond := _beyond_probabilities(labels):
        raise ValueError(
            f"{name} received labels {beyond}, but they are probabilities of class 1 to it, from 0 to 1. Recode the "
            "two classes as 0 and 1; for class numbers of several classes, use CrossEntropyLoss."
        )
    if kind == "BCELoss" and (beyond := _beyond_probabilities(outputs)):
        raise ValueError(
            f"{name} received outputs {beyond}, but they are probabilities to it, from 0 to 1. Let the network end in "
            "nn.Sigmoid(), or use nn.BCEWithLogitsLoss(), which takes scores as they are."
        )


def _beyond_probabilities(values: torch.Tensor) -> str:
    """The span of values of which some are not from 0 to 1; "" of probabilities."""
    beyond = bool(((values < 0) | (values > 1)).any())
    return f"from {values.min().item():g} to {values.max().item():g}" if beyond else ""


def explained(loss: Callable[..., Any], objective: Objective, outputs: Any, labels: Any) -> Any:
    """Compute a loss; where torch refuses, look for the cause in the labels and say it.

    Args:
        loss: What computes it: the objective, or the one loss that it was made of.
        objective: Knows which label is left out.
        outputs: The network's.
        labels: The batch's.

    Raises:
        ValueError: The labels do not fit the loss, or there are none.
    """
    try:
        return loss(outputs, labels)
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        cause = _label_fault(error, outputs, labels, objective)
        if cause is not None:
            raise cause from error
        raise


def _label_fault(error: Exception, outputs: Any, labels: Any, objective: Objective) -> ValueError | None:
    classifies = objective.classifies
    if labels is None and isinstance(error, TypeError) and (classifies or "missing" in str(error)):
        return ValueError(
            "The loss received no labels: all of the batch went into the network. Give labels as well, by a data set "
            "that yields (x, y) or a tuple of tensors, fit((x, y)); a list, fit([x, y]), is taken as batches, and y in "
            "fit(x, y) as the data to evaluate on. Of dict batches say which are labels: "
            'Model(network, labels=["label"]).'
        )
    if isinstance(labels, int | float | str | bytes):
        return ValueError(
            f"The labels of a batch are {labels!r:.60}, one {type(labels).__name__}, so it looks like a sample: a list "
            "is taken as batches. Write DataLoader(samples, batch_size=32), or give columns as a tuple (x, y)."
        )
    if is_text(labels):
        # Only for a process that fails.
        from hapi import refused

        return refused.text_labels("The loss", labels) if refused.is_of_list(error) else None
    if isinstance(labels, tuple | list) and isinstance(error, TypeError):
        kinds = ", ".join(map(_kind, labels))
        return ValueError(
            f"The loss received {len(labels)} labels ({kinds}), which it does not take ({error}). Say which parts of a "
            'batch are labels, Model(network, labels=["y"]) or labels=1, or give a loss that takes them all.'
        )
    if classifies:
        try:
            class_labels(labels, outputs)
            if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
                _labels_within(labels, outputs, objective.ignored_label)
        except ValueError as fault:
            return fault
    return None


def _kind(label: Any) -> str:
    return "text" if isinstance(label, str | bytes) or is_text(label) else type(label).__name__


def _labels_within(labels: torch.Tensor, outputs: torch.Tensor, ignored: int | None) -> None:
    counted = labels[is_counted(labels, ignored)] if ignored is not None else labels
    if counted.numel():
        label_range(int(counted.min()), int(counted.max()), outputs.shape[1 if outputs.dim() > 1 else 0])


def nothing_to_compute() -> ValueError:
    """The error of an evaluation of a model without a loss and metrics."""
    return ValueError(
        "The evaluation had nothing to compute: the model was prepared with neither a loss nor metrics, and its "
        "outputs hold no loss. Write model.prepare(loss=nn.CrossEntropyLoss(), metrics=hapi.metrics.Accuracy()), "
        "override eval_step as train_step, or use predict."
    )
