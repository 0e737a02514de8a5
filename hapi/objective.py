"""The loss, and how much a batch's loss weighs: what makes means over batches the mean over samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hapi import checks
from hapi.batch import as_arguments, is_counted

# Functions that are one of the modules whose weights we know.
_AS_MODULES: dict[Any, type[nn.Module]] = {
    nn.functional.cross_entropy: nn.CrossEntropyLoss,
    nn.functional.nll_loss: nn.NLLLoss,
}

_ONE_CALLABLE = "Give one callable instead: loss=lambda out_a, out_b, label_a, label_b: ..., a mean or (sum, count)."


@dataclasses.dataclass(eq=False, slots=True)
class Loss:
    """A batch's loss in one of two forms.

    An overridden `train_step` gets it from `super().train_step(...)`. Adding to it and scaling it mean what they do to
    a mean: `loss + 0.01 * penalty`. Two that were summed over equally much add up too, as of two calls of
    `super().train_step`; whether they were is read from both, which waits for an accelerator.
    """

    value: torch.Tensor
    """The mean over the batch's samples where `weight` is None; else the sum over what is counted."""
    weight: torch.Tensor | None
    """What the loss was summed over (tokens, weights of classes), a 0-dim tensor."""

    def __add__(self, other: Any) -> Loss:
        if not isinstance(other, Loss):
            return Loss(self.value + (other if self.weight is None else other * self.weight), self.weight)
        if other.weight is None:
            return self + other.value
        if self.weight is None:
            return other + self.value
        if float(self.weight) != float(other.weight):
            raise ValueError(
                f"A loss that was summed over {float(self.weight):g} and one that was summed over "
                f"{float(other.weight):g} (labels that are not ignored, or their class weights) were added, but each "
                "weighs its batch differently, so that their sum is no mean. Write first + second.mean, which weighs "
                "the batch as the first does."
            )
        return Loss(self.value + other.value, self.weight)

    def __radd__(self, other: Any) -> Loss:
        return self.__add__(other)

    def __sub__(self, other: Any) -> Loss:
        return self.__add__(-1 * other)

    def __rsub__(self, other: Any) -> Loss:
        return self.__mul__(-1).__add__(other)

    def __neg__(self) -> Loss:
        return self.__mul__(-1)

    def __mul__(self, factor: Any) -> Loss:
        return Loss(self.value * _factor(factor), self.weight)

    def __rmul__(self, factor: Any) -> Loss:
        return self.__mul__(factor)

    def __truediv__(self, divisor: Any) -> Loss:
        return Loss(self.value / _factor(divisor), self.weight)

    @property
    def mean(self) -> torch.Tensor:
        """The batch's own mean, which has lost its weight."""
        return self.value if self.weight is None else self.value / self.weight

    def detach(self) -> torch.Tensor:
        """The batch's own mean, without a graph."""
        return self.mean.detach()

    def item(self) -> float:
        """The batch's own mean as a number; waits for the device."""
        return float(self.detach())

    def __float__(self) -> float:
        return self.item()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(
            f"{getattr(function, '__name__', function)} received the loss of super().train_step, which knows over how "
            "much it was summed (ignored labels, class weights): what is left of it would not. Add to it and scale it "
            "by + - * /, or look at loss.mean, which is an ordinary tensor."
        )


def _factor(factor: Any) -> Any:
    """What a loss may be scaled by."""
    if isinstance(factor, Loss):
        raise TypeError(
            "The loss of super().train_step was multiplied with, or divided by, another one: of how much it was summed "
            "over (ignored labels, class weights) the result would say nothing. Scale it by a number or an ordinary "
            "tensor, such as loss * other.mean."
        )
    return factor


class Objective:
    """The user's loss in a form that knows its weight.

    Args:
        loss: None (the outputs hold the loss), a callable, or a list of callables, one for each pair of output and
            label, whose values are added.

    Raises:
        ValueError: A loss of torch's is set to give a sum, or a value for each sample.
    """

    def __init__(self, loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None) -> None:
        self.module = loss if isinstance(loss, nn.Module) else None
        self.single: Any = None if isinstance(loss, Sequence) else loss
        """The loss itself, where it is one callable."""
        self.missing = loss is None
        """Whether none was given."""
        if isinstance(loss, Sequence):
            self.module = nn.ModuleList([part for part in loss if isinstance(part, nn.Module)])
            for part in loss:
                checks.reduction(part)
            loss = _Sum(loss)
        checks.reduction(loss)
        buffers = () if self.module is None else self.module.named_buffers()
        self._given = {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers}
        self._loss = loss
        self._known = _known_form(loss)
        # Counting costs two small kernels a step; a pass over labels that hold no ignored one turns it off.
        self.counts = self._known is not None

    def to(self, device: torch.device) -> None:
        """Move what the loss holds, such as class weights, to a device."""
        if self.module is not None:
            self.module.to(device)

    def learned(self) -> dict[str, torch.Tensor]:
        """What training has made of the loss: its parameters, and buffers that are no longer what the script gave.

        Class weights, say, are the script's, which may well give others when it goes on.
        """
        if self.module is None:
            return {}
        changed = {
            name: buffer.detach()
            for name, buffer in self.module.named_buffers()
            if name not in self._given or not torch.equal(buffer.detach().cpu(), self._given[name])
        }
        return {name: p.detach() for name, p in self.module.named_parameters()} | changed

    def restore(self, learned: dict[str, torch.Tensor] | None) -> None:
        """Put back what `learned` gave, where this loss has it too."""
        if self.module is None or not learned:
            return
        with torch.no_grad():
            for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
                if name in learned and learned[name].shape == tensor.shape:
                    tensor.copy_(learned[name])

    def described(self) -> str:
        """What the loss computes, to be compared between ranks: its name, and the settings of torch's losses."""
        return " + ".join(map(_described, self.losses))

    @property
    def losses(self) -> list[Any]:
        """The losses whose values are added; None where there is none."""
        return list(self._loss.losses) if isinstance(self._loss, _Sum) else [self._loss]

    @property
    def ignored_label(self) -> int | None:
        """The label that a classifying loss leaves out."""
        return None if self._known is None else int(self._known.ignore_index)

    @property
    def weighs_classes(self) -> bool:
        """Whether samples of different classes weigh differently."""
        return self._known is not None and self._known.weight is not None

    @property
    def classifies(self) -> bool:
        """Whether labels are class numbers, to be checked against the number of outputs."""
        return self._known is not None

    def pairs(self, outputs: Any, labels: Any) -> list[tuple[Any, Any, Any]]:
        """Each loss with the output and the label that it compares; empty where their numbers do not fit."""
        if not isinstance(self._loss, _Sum):
            return [(self._loss, outputs, labels)]
        losses, values = self._loss.losses, [*_spread(outputs), *as_arguments(labels)]
        both = values[: len(losses)], values[len(losses) :]
        return list(zip(losses, *both, strict=True)) if len(values) == 2 * len(losses) else []

    def __call__(self, outputs: Any, labels: Any) -> Loss:
        """The loss of a batch.

        Raises:
            ValueError: It is neither a scalar nor `(sum, count)`, or there is none.
        """
        if self._loss is None:
            return as_loss(_loss_of_outputs(outputs))
        if self._known is not None and self.counts:
            return Loss(_sum_of(self._known, outputs, labels), _weight(self._known, labels))
        if isinstance(outputs, torch.Tensor) and isinstance(labels, torch.Tensor):
            return as_loss(self._loss(outputs, labels))
        return as_loss(self._loss(*_spread(outputs), *as_arguments(labels)))


def as_loss(value: Any) -> Loss:
    """What a loss function or a `train_step` returned, checked.

    Raises:
        ValueError: It is neither a scalar nor `(sum, count)`.
    """
    if isinstance(value, Loss):
        # A penalty that was added to it may have given it a shape.
        return value if value.value.dim() == 0 else Loss(as_loss(value.value).value, value.weight)
    if isinstance(value, torch.Tensor) and (value.dim() == 0 or value.numel() == 1):
        return Loss(value if value.dim() == 0 else value.reshape(()), None)
    if isinstance(value, tuple | list) and len(value) == 2:
        total, count = value
        if isinstance(total, torch.Tensor) and total.numel() == 1:
            if isinstance(count, torch.Tensor) and count.requires_grad:
                raise ValueError(
                    "The loss gave a pair whose second part has a gradient, but a pair is taken as (sum, count): what "
                    "was summed, and over how much. Of two losses write their sum, `loss_a + loss_b`; of a count that "
                    "was computed with parameters, count.detach()."
                )
            if isinstance(count, int | float) and not count >= 0:
                raise wrong_count(count)
            count = torch.as_tensor(count, device=total.device)
            # Half precision counts no further than 256 or 2048.
            dtype = torch.promote_types(total.dtype, torch.float32)
            if count.numel() == 1:
                return Loss(total.reshape(()), count.detach().reshape(()).to(dtype))
    raise _not_one_number(value)


def wrong_count(count: float) -> ValueError:
    """The error of a loss that was summed over less than nothing."""
    return ValueError(
        f"The loss gave (sum, count) with a count of {count:g}, but nothing can be summed over so many: the mean of "
        "all batches is the sum of the sums divided by that of the counts. Give what the sum was taken over, such as "
        "the number of tokens or the sum of their weights."
    )


def _not_one_number(value: Any) -> ValueError:
    if value is None or isinstance(value, int | float):
        return ValueError(
            f"The loss gave {value!r}, of type {type(value).__name__}, which holds no gradient to train with. "
            "Let it return the tensor that it computed: a return statement, without .item() or float()."
        )
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.80}"
    return ValueError(
        f"The loss gave {shown}, which is not one number to minimize. Let it return the mean over the samples "
        '(reduction="mean", or .mean()), or a pair (sum, count) if samples weigh differently.'
    )


class _Sum:
    """Several losses, one for each pair of output and label, added. Each is a mean over all samples.

    Raises:
        ValueError: One of them weighs samples by their class.
    """

    def __init__(self, losses: Sequence[Callable[..., Any]]) -> None:
        self.losses = losses
        self._known = [_known_form(loss) for loss in losses]
        self._looks = True
        weighed = next((loss for loss in losses if getattr(_known_form(loss), "weight", None) is not None), None)
        if weighed is not None:
            raise ValueError(
                f"loss received a list with {weighed!r}, whose class weights make its batches weigh differently from "
                f"those of the others, so that their sum is no mean. {_ONE_CALLABLE}"
            )

    def __call__(self, *values: Any) -> torch.Tensor:
        count = len(self.losses)
        if len(values) != 2 * count:
            raise ValueError(
                f"{count} losses were given for {len(values)} outputs and labels together, but each takes one output "
                "and one label. Give one loss for each output, or one callable loss(*outputs, *labels)."
            )
        for known, label in zip(self._known, values[count:], strict=True):
            if known is not None and isinstance(label, torch.Tensor) and not label.is_floating_point():
                self._refuse_ignored(known, label)
        parts = [as_loss(loss(values[i], values[count + i])) for i, loss in enumerate(self.losses)]
        if any(part.weight is not None for part in parts):
            raise ValueError(
                "A loss of a list gave (sum, count): its batches weigh differently from those of the others, so that "
                f"their sum is no mean. {_ONE_CALLABLE}"
            )
        return torch.stack([part.value for part in parts]).sum()

    def _refuse_ignored(self, loss: Any, labels: torch.Tensor) -> None:
        # On an accelerator a look at each batch would wait for it.
        if not self._looks and labels.device.type != "cpu":
            return
        self._looks = False
        if not bool(is_counted(labels, loss.ignore_index).all()):
            raise ValueError(
                f"{loss!r}, one of a list of losses, received labels {loss.ignore_index}, which it leaves out: its "
                f"batches weigh differently from those of the others, so that their sum is no mean. {_ONE_CALLABLE}"
            )


def _described(loss: Any) -> str:
    if isinstance(loss, partial):
        options = loss.keywords
    else:
        # Of somebody's own class, an attribute may well be the rank's.
        options = vars(loss) if type(loss).__module__.startswith("torch.nn.") else {}
    function = loss.func if isinstance(loss, partial) else loss
    name = getattr(function, "__qualname__", type(function).__name__)
    plain = [f"{k}={v!r}" for k, v in sorted(options.items()) if isinstance(v, bool | int | float | str)]
    return f"{name}({', '.join(part for part in plain if not part.startswith(('_', 'training=')))})"


def _known_form(loss: Any) -> Any:
    """A cross-entropy or NLL module, or None: the mean that it gives divides by weights which a batch mean hides.

    Not a copy: what a callback changes on it, such as its label smoothing, holds from there on.
    """
    function, options = (loss.func, loss.keywords) if isinstance(loss, partial) and not loss.args else (loss, {})
    # By identity: a loss need not have a hash.
    module = next((module for known, module in _AS_MODULES.items() if known is function), None)
    if module is not None:
        loss = module(**options)
    # A subclass that computes otherwise is somebody's own loss.
    kept = any(isinstance(loss, kind) and type(loss).forward is kind.forward for kind in _AS_MODULES.values())
    return loss if kept and loss.reduction == "mean" else None


def _sum_of(loss: Any, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What a loss of `_known_form` gives in place of the mean."""
    loss.reduction = "sum"
    try:
        total: torch.Tensor = loss(outputs, labels)
        return total
    finally:
        loss.reduction = "mean"


def _weight(loss: Any, labels: torch.Tensor) -> torch.Tensor:
    """What torch divides by in the mean of this loss."""
    if labels.is_floating_point():
        # Class probabilities: every position counts once.
        classes = labels.shape[1 if labels.dim() > 1 else 0]
        return torch.tensor(float(labels.numel() // classes), device=labels.device)
    counted = is_counted(labels, loss.ignore_index)
    if loss.weight is None:
        weights: torch.Tensor = counted.float()
    else:
        # Ignored labels may be no numbers of classes at all.
        weights = loss.weight[labels.long().clamp(0, len(loss.weight) - 1)] * counted
    return weights.sum()


def _spread(outputs: Any) -> tuple[Any, ...]:
    # Unlike missing labels, an output None is an argument.
    return (None,) if outputs is None else as_arguments(outputs)


def holds_loss(outputs: Any) -> bool:
    """Whether the network computed the loss itself: a mapping or object with `loss`."""
    return _held_loss(outputs) is not None


def _held_loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def _loss_of_outputs(outputs: Any) -> Any:
    found = _held_loss(outputs)
    if found is None:
        fields = (
            list(outputs)
            if isinstance(outputs, Mapping)
            else [field.name for field in dataclasses.fields(outputs)]
            if dataclasses.is_dataclass(outputs)
            else type(outputs).__name__
        )
        raise ValueError(
            f"No loss was prepared, and the network's output ({fields}) holds none under the name 'loss'. "
            "Write model.prepare(optimizer, loss=nn.CrossEntropyLoss()), or let the network return a dict with 'loss'."
        )
    return found
