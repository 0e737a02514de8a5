"""From which generators anybody may draw in a step: those alone are set before each.

To set all of them takes as long as a small layer, two thirds of it for Python's own. Imported with the first pass, not
by `import hapi`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.optim import optimizer as of_all_optimizers

from hapi import checks, rng
from hapi.callbacks.base import CallbackList
from hapi.data import Feed
from hapi.metrics.base import Metric
from hapi.step import Prepared, Stepper, is_overridden

_TORCHS = "torch.nn."
_LAYERS = (_TORCHS, "torchvision.models.", "torchvision.ops.")
# Torch's only layers that draw in eval mode too.
_DRAWING = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_CALLS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"

Setter = Callable[[int, torch.device], None]


def setter(kind: str, feed: Feed, stepper: Stepper, metrics: list[Metric], callbacks: CallbackList) -> Setter | None:
    """What sets the generators before each step of a pass, by `rng`.

    Args:
        kind: "train", "eval" or "predict"; in the last two the network is in eval mode.
        feed: The data.
        stepper: Network, loss and optimizer.
        metrics: Those of the pass.
        callbacks: Likewise.

    Returns:
        What sets all, where the user's own code is called and may draw from any; what sets torch's, where torch's and
        ours may draw; None where nobody draws.
    """
    losses = [] if kind == "predict" else stepper.prepared.objective.losses
    called_by_others = (
        feed.draws == "all"
        or not _are_ours(callbacks, kind)
        or not _is_torchs(stepper.network)
        or not all(map(_is_torchs_loss, losses))
        or any(getattr(of_all_modules, f"_global{hooks}") for hooks in _CALLS)
        or (kind == "train" and not _trains_by_torch(stepper.prepared, stepper.network))
        or (kind != "predict" and (is_overridden(stepper.computes[kind]) or not all(map(_is_ours, metrics))))
    )
    if called_by_others:
        return rng.set_streams
    modules = [
        module for part in (stepper.network, *losses) if isinstance(part, nn.Module) for module in part.modules()
    ]
    return rng.set_torch if feed.draws == "torch" or any(map(_may_draw, modules)) else None


def _may_draw(module: nn.Module) -> bool:
    return module.training or isinstance(module, _DRAWING) or not type(module).__module__.startswith(_TORCHS)


def _are_ours(callbacks: CallbackList, kind: str) -> bool:
    """Whether nothing of the user's is called in such steps; what stands in an object itself may be."""
    hooks = f"on_{kind}_batch_begin", f"on_{kind}_batch_end"
    called = [(callback, hook) for hook in hooks for callback in callbacks.batch_hooks[hook]]
    if kind == "train":
        called += [(callback, "batch_values") for callback in callbacks.adding]
    written = [getattr(code, "__module__", None) or "" for cb, name in called for code in (cb, getattr(cb, name))]
    return all([name.startswith("hapi.") for name in written])


def _trains_by_torch(prepared: Prepared, network: nn.Module) -> bool:
    """Whether no code of anybody else's is called between the backward pass and the next step."""
    optimizer, schedule = prepared.optimizer, prepared.schedule
    hooks: list[Any] = [getattr(optimizer, f"_optimizer_step_{edge}_hooks", None) for edge in ("pre", "post")]
    hooks += [getattr(of_all_optimizers, f"_global_optimizer_{edge}_hooks", None) for edge in ("pre", "post")]
    for parameter in network.parameters():
        hooks += [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
    called = [*vars(optimizer).values(), *(hook for held in hooks if held for hook in held.values())]
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and not any(map(_is_others_function, called))
        # Of a schedule by epochs none is called within one.
        and (schedule is None or schedule.interval == "epoch")
    )


def _is_torchs_loss(loss: Any) -> bool:
    return _is_torchs(loss) if isinstance(loss, nn.Module) else loss is None or _is_torchs_function(loss)


def _is_torchs_function(loss: Any) -> bool:
    """Whether a function is one of torch's losses; others in the same place draw, such as dropout."""
    name = getattr(loss, "__name__", "")
    is_loss = name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"
    return is_loss and checks.defined_in(loss) == nn.functional.__name__


def _is_torchs(network: nn.Module) -> bool:
    """Whether all layers are torch's own, with nothing of anybody else's hung on them or put into them."""
    return all(
        type(module).__module__.startswith(_LAYERS)
        and checks.defined_in(type(module).forward).startswith(_LAYERS)
        and not any(vars(module)[hooks] for hooks in _CALLS)
        and not any(map(_is_others_function, vars(module).values()))
        for module in network.modules()
    )


def _is_others_function(value: Any) -> bool:
    """Whether something is a function that is neither torch's nor ours, such as a layer's activation."""
    return callable(value) and not f"{_origin(value)}.".startswith(("torch.", "hapi."))


def _origin(value: Any) -> str:
    """Where a function, a class or an object's class comes from; torch's functions in C say nothing of it."""
    if isinstance(value, BuiltinFunctionType) and getattr(torch, value.__name__, None) is value:
        return torch.__name__
    return checks.defined_in(value) or getattr(value, "__module__", None) or ""


def _is_ours(metric: Metric) -> bool:
    # The adapters call functions and metrics of others.
    kind = type(metric).__module__
    is_built_in = kind.startswith("hapi.metrics.") and kind != "hapi.metrics.adapters"
    return is_built_in and not any(map(callable, vars(metric).values()))
