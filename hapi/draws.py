"""From which generators anybody may draw in an evaluation: those alone are set before each of its batches.

To set all of them takes as long as a small layer. Imported with the first evaluation or prediction, not by
`import hapi`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

from hapi import checks, rng
from hapi.callbacks.base import CallbackList
from hapi.data import Feed
from hapi.metrics.base import Metric
from hapi.step import Stepper, is_overridden

_TORCHS = "torch.nn."
_LAYERS = (_TORCHS, "torchvision.models.", "torchvision.ops.")
# Torch's only layers that draw in eval mode too.
_DRAWING = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_CALLS = "_forward_pre_hooks", "_forward_hooks"

Setter = Callable[[int, torch.device], None]


def setter(kind: str, feed: Feed, stepper: Stepper, metrics: list[Metric], callbacks: CallbackList) -> Setter | None:
    """What sets the generators before each batch of a pass in eval mode, by `rng`.

    Args:
        kind: "eval" or "predict".
        feed: The data.
        stepper: Network and loss.
        metrics: Those of the pass.
        callbacks: Likewise.

    Returns:
        What sets all, where the user's own code is called and may draw from any; what sets torch's, where torch's and
        ours may draw; None where nobody draws.
    """
    called_by_others = (
        feed.draws == "all"
        or callbacks.has_others_in_steps(kind)
        or not _is_torchs(stepper.network)
        or any(getattr(of_all_modules, f"_global{hooks}") for hooks in _CALLS)
        or (kind == "eval" and not _computes_plainly(stepper, metrics))
    )
    if called_by_others:
        return rng.set_streams
    return rng.set_torch if feed.draws == "torch" or any(map(_may_draw, stepper.network.modules())) else None


def _may_draw(module: nn.Module) -> bool:
    return module.training or isinstance(module, _DRAWING) or not type(module).__module__.startswith(_TORCHS)


def _computes_plainly(stepper: Stepper, metrics: list[Metric]) -> bool:
    """Whether nobody else's code computes the loss or a metric, and the loss draws nothing."""
    losses = stepper.prepared.objective.losses
    modules = [loss for loss in losses if isinstance(loss, nn.Module)]
    return (
        not is_overridden(stepper.eval_step)
        and all(_is_torchs(loss) and not any(map(_may_draw, loss.modules())) for loss in modules)
        and all(loss is None or _is_torchs_function(loss) for loss in losses if not isinstance(loss, nn.Module))
        and all(map(_is_ours, metrics))
    )


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
    """Whether a layer's attribute is a function that is not torch's, such as an activation."""
    return callable(value) and not _origin(value).startswith("torch")


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
