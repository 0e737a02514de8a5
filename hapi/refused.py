"""What a layer has refused, in words. Imported where a forward pass has failed, not by `import hapi`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def width(network: nn.Module, error: Exception) -> ValueError | None:
    """What to say where a Linear or a convolution was given another width than it takes; None where it is not that.

    Args:
        network: The network that was called.
        error: What its forward raised; its traceback knows the layer and what that was given.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
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
