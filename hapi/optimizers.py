"""Optimizers by name, fused where torch has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hapi import checks

_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
# torch's own list of devices with fused kernels for these three.
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def make_optimizer(optimizer: Any, network: nn.Module, loss: nn.Module | None) -> torch.optim.Optimizer | None:
    """The optimizer that `prepare` was given, made if it is a name or a callable, and seen to hold these parameters.

    Args:
        optimizer: None, an optimizer, "sgd", "adam" or "adamw" (learning rate 1e-3), or a callable that makes one
            from the parameters.
        network: Whose trainable parameters it gets.
        loss: A loss with parameters of its own, which it gets too, or None.

    Raises:
        ValueError: The name is unknown, nothing can be trained, or it is of another network.
        TypeError: It is none of these.
    """
    if optimizer is None:
        return None
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _made(optimizer, network, loss)
    checks.optimizer_parameters(made, network, loss)
    return made


def _made(optimizer: Any, network: nn.Module, loss: nn.Module | None) -> torch.optim.Optimizer:
    if isinstance(optimizer, nn.Module) or checks.defined_in(optimizer) == "torch.nn.functional":
        shown = getattr(optimizer, "__name__", repr(optimizer))
        raise TypeError(
            f"optimizer received {shown:.100}, which changes no parameters; a loss is the second argument. Write "
            'prepare("adam", loss), or prepare(torch.optim.Adam(network.parameters(), lr=1e-3), loss); to evaluate '
            "alone, prepare(loss=loss)."
        )
    modules = [network] if loss is None else [network, loss]
    # One that both hold is one.
    parameters = [*dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)]
    if not parameters:
        raise ValueError(
            f"An optimizer was asked for ({optimizer!r:.100}), but {type(network).__name__} has no parameter that "
            "requires a gradient. Set requires_grad_(True) on the layers that are to be trained."
        )
    if isinstance(optimizer, str):
        name = optimizer.lower()
        if name not in _BY_NAME:
            raise ValueError(
                f"optimizer received {optimizer!r}, which names none of {', '.join(map(repr, _BY_NAME))}. "
                "Use one of these, or an object such as torch.optim.RMSprop(network.parameters())."
            )
        return _BY_NAME[name](parameters, lr=1e-3, fused=_can_fuse(parameters))
    if isinstance(optimizer, list | tuple):
        kinds = ", ".join(type(each).__name__ for each in optimizer)
        raise TypeError(
            f"optimizer received {len(optimizer)} at once ({kinds}), but a step has one. Write one with a group of "
            'parameters each, torch.optim.SGD([{"params": a, "lr": 0.1}, {"params": b}], lr=0.01); networks that are '
            "trained in turn, such as a GAN's, get a Model each, and alternate by train_batch."
        )
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


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put a saved state into an optimizer, on whatever device its parameters are.

    Raises:
        ValueError: It is of an optimizer with other parameters, or of another class.
    """
    before = optimizer.state_dict()
    # Before: loading adds names to the defaults that no group has, in classes that do not know them.
    settings = [*optimizer.defaults]
    try:
        optimizer.load_state_dict(state)
        # torch takes the state of another class without a word, and fails in the next step.
        absent = [name for name in settings if any(name not in group for group in optimizer.param_groups)]
        if absent:
            raise ValueError(f"it has no {', '.join(absent)}")
    except (ValueError, KeyError) as error:
        optimizer.load_state_dict(before)
        more = len(state["param_groups"]) - len(optimizer.param_groups)
        added = f" {more} groups more were saved: add those that training adds before it goes on." if more > 0 else ""
        raise ValueError(
            f"The saved optimizer state does not fit this {type(optimizer).__name__} ({error}).{added} "
            "Make the optimizer as it was when saved. Or load the weights alone and fit without resume: "
            "model.load(path, reset_optimizer=True)."
        ) from error
    for group, was in zip(optimizer.param_groups, before["param_groups"], strict=True):
        # What a scheduler has put there that the saved run did not have, and counts on.
        group.update({name: value for name, value in was.items() if name not in group})
    # torch casts the state to the parameters' dtype: float32 moments of a bfloat16 parameter would lose bits.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, saved in state["state"].items():
        if not isinstance(index, int) or not isinstance(saved, Mapping):
            continue  # what an optimizer of somebody's own keeps beside the parameters
        for name, value in saved.items():
            current = optimizer.state[parameters[index]].get(name)
            if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) and current.dtype != value.dtype:
                optimizer.state[parameters[index]][name] = value.to(current.device)
