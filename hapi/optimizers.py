"""Optimizers by name, fused where torch has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
# torch's own list of devices with fused kernels for these three.
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def make_optimizer(optimizer: Any, network: nn.Module, loss: nn.Module | None) -> torch.optim.Optimizer | None:
    """The optimizer that `prepare` was given, made if it is a name or a callable.

    Args:
        optimizer: None, an optimizer, "sgd", "adam" or "adamw" (learning rate 1e-3), or a callable that makes one
            from the parameters.
        network: Whose trainable parameters it gets.
        loss: A loss with parameters of its own, which it gets too, or None.

    Raises:
        ValueError: The name is unknown, or nothing can be trained.
        TypeError: It is none of these.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    modules = [network] if loss is None else [network, loss]
    # One that both hold is one.
    parameters = [*dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)]
    if not parameters:
        raise ValueError(
            f"An optimizer was asked for ({optimizer!r:.100}), but {type(network).__name__} has no parameter that "
            "requires a gradient. Set requires_grad_(True) on the layers that are to be trained."
        )
    if isinstance(optimizer, str):
        if optimizer not in _BY_NAME:
            raise ValueError(
                f"optimizer received {optimizer!r}, which names none of {', '.join(map(repr, _BY_NAME))}. "
                "Use one of these, or an object such as torch.optim.RMSprop(network.parameters())."
            )
        return _BY_NAME[optimizer](parameters, lr=1e-3, fused=_can_fuse(parameters))
    if callable(optimizer):
        made = optimizer(parameters)
        if isinstance(made, torch.optim.Optimizer):
            return made
        optimizer = made
    raise TypeError(
        f"optimizer received {optimizer!r:.100}, which is neither a torch.optim.Optimizer, nor a name, nor a callable "
        'that makes one from the parameters. Write torch.optim.Adam(network.parameters(), lr=1e-3) or "adam".'
    )


def _can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    return all(p.is_floating_point() and p.device.type in _FUSED_DEVICES for p in parameters)
