"""What a network, a layer, a loss or a metric has refused, in words. Imported where one fails, not by `import hapi`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, dtype, nn

if TYPE_CHECKING:
    from hapi.batch import Inputs


def inputs(network: nn.Module, given: Inputs, dtypes: Iterable[dtype], message: str) -> Exception | None:
    """What to say where the network was given another number of inputs, or another dtype, than it takes; else None.

    Args:
        network: The network that was called.
        given: What it was called with.
        dtypes: Of its tensors.
        message: Of what its forward raised.
    """
    signature = inspect.signature(network.forward)
    try:
        signature.bind(**given) if isinstance(given, dict) else signature.bind(*given)
    except TypeError as error:
        return TypeError(
            f"The network got {len(given)} inputs, which {type(network).__name__}.forward{signature} does not take "
            f"({error}). {_fewer_or_more(given, signature)}"
        )
    held = [p.dtype for p in network.parameters() if p.is_floating_point()]
    # Whole numbers may well be meant, as tokens are; another float never is.
    strange = sorted((each for each in dtypes if each not in held), key=lambda each: not each.is_floating_point)
    if not held or not strange or "type" not in message:
        return None
    return ValueError(
        f"An input of dtype {strange[0]} arrived, and the network's parameters are {held[0]}: most layers do not mix "
        f"the two. Let the data set yield x.to({held[0]}) (of a NumPy array: "
        f"x.astype({str(held[0]).removeprefix('torch.')!r}))."
    )


def width(network: nn.Module, error: Exception) -> ValueError | None:
    """What to say where a Linear or a convolution was given another width than it takes; None where it is not that.

    Args:
        network: The network that was called.
        error: What its forward raised; its traceback knows the layer and what that was given.
    """
    place = _innermost(error)
    if place is None:
        return None
    layer, given = place.tb_frame.f_locals.get("self"), place.tb_frame.f_locals.get("input")
    names = [name for name, module in network.named_modules() if module is layer]
    # Nested ones have no shape that could be told.
    if not names or not isinstance(given, Tensor) or given.is_nested:
        return None
    where = f"The layer {names[0]!r} ({type(layer).__name__})" if names[0] else f"The network, a {type(layer).__name__}"
    received = f"{where} was given an input of shape {tuple(given.shape)}"
    if place.tb_frame.f_code is nn.Linear.forward.__code__ and isinstance(layer, nn.Linear):
        return _of_linear(received, layer, given)
    # Each convolution has a method of its own in which torch's function is called.
    own = getattr(type(layer), "_conv_forward", None)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and place.tb_frame.f_code is getattr(own, "__code__", 0):
        return _of_convolution(received, layer, given)
    return None


def _of_linear(received: str, layer: nn.Linear, given: Tensor) -> ValueError | None:
    if not given.dim() or given.shape[-1] == layer.in_features:
        return None
    found = given.shape[-1]
    cure = f"Write in_features={found}, or give data of the width {layer.in_features}."
    if given.dim() == 1:
        cure = (
            "Write x.unsqueeze(1)."
            if layer.in_features == 1
            else f"Give a batch of the shape (N, {layer.in_features})."
        )
    elif given[:1].numel() == layer.in_features:
        cure = "Write nn.Flatten() before it."
    return ValueError(
        f"{received}, whose last dimension is {found}, but in_features={layer.in_features} is what it takes. {cure}"
    )


def _of_convolution(received: str, layer: Any, given: Tensor) -> ValueError | None:
    spatial = len(layer.kernel_size)
    if given.dim() not in (spatial + 1, spatial + 2):
        return None
    found = given.shape[-spatial - 1]
    if found == layer.in_channels:
        return None
    took = f"in_channels={layer.in_channels} is what it takes"
    if given.dim() == spatial + 1:
        shape = ", ".join(["N", str(layer.in_channels), *map(str, given.shape[1:])])
        cure = "Write x.unsqueeze(1)." if layer.in_channels == 1 else f"Give a batch of the shape ({shape})."
        return ValueError(f"{received}, in which a batch has no dimension of channels, but {took}. {cure}")
    cure = f"Write in_channels={found}, or give data with as many channels as it takes."
    # A picture as wide as it is high has its channels first.
    if given.shape[-1] == layer.in_channels and (spatial == 1 or given.shape[-1] != given.shape[-2]):
        order = ", ".join(map(str, (0, spatial + 1, *range(1, spatial + 1))))
        cure = f"The channels come last here: let the data set yield them first. Write x.permute({order}) for a batch."
    return ValueError(f"{received}, which has {found} channels (dimension 1), but {took}. {cure}")


def _fewer_or_more(given: Inputs, signature: inspect.Signature) -> str:
    """What to write where the number of inputs is wrong."""
    if isinstance(given, dict):
        return 'Name the keys that it takes: Model(network, inputs=["x"]).'
    wanted = [p for p in signature.parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(given) == 1 and isinstance(given[0], tuple | list):
        return (
            "The one input is itself a tuple: let the data set yield a flat (a, b, label) in place of ((a, b), label)."
        )
    if len(given) > len(wanted):
        return (
            f"Model(network, inputs={len(wanted)}) takes the first {len(wanted)} of a batch as inputs and the rest as "
            "labels; in train_batch and eval_batch labels are an argument of their own, train_batch(x, y)."
        )
    return (
        f"Model(network, inputs={len(wanted)}) takes the first {len(wanted)} of a batch as inputs, which data without "
        "labels needs; elsewhere let the data yield as many, and the label last."
    )


def text_labels(receiver: str, labels: list[Any]) -> ValueError:
    """The error of a loss or metric that compares numbers and got text."""
    return ValueError(
        f"{receiver} received labels that are text, {labels[0]!r:.60} the first of them, where it takes numbers. Let "
        "the data set give numbers in their place, of classes names.index(label), or write one of your own that takes "
        "a list of text."
    )


def is_of_list(error: Exception) -> bool:
    """Whether one of torch's losses and layers has raised it since it got a list and no tensor."""
    place = _innermost(error)
    if place is None or not isinstance(error, TypeError | AttributeError):
        return False
    return "list" in str(error) and str(place.tb_frame.f_globals.get("__name__")).startswith("torch.nn.")


def _innermost(error: Exception) -> TracebackType | None:
    """Where it was raised."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place
