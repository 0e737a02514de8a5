"""From which generators anybody may draw in an evaluation: those alone are set before each of its batches.

To set all of them takes as long as a small layer. Imported with the first evaluation or prediction, not by
`import hapi`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

from hapi import rng
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
    """Whether nobody else's code computes the loss or a metric."""
    losses = stepper.prepared.objective.losses
    return (
        not is_overridden(stepper.eval_step)
        and all(_is_torchs(loss) if isinstance(loss, nn.Module) else _is_function(loss) for loss in losses)
        and all(map(_is_ours, metrics))
    )


def _is_function(loss: Any) -> bool:
    """Whether a loss is one of torch's functions, or none at all."""
    return loss is None or getattr(loss, "__module__", None) == nn.functional.__name__


def _is_torchs(network: nn.Module) -> bool:
    """Whether all layers are torch's own, with nothing hung on them."""
    for module in network.modules():
        held = vars(module)
        if not type(module).__module__.startswith(_LAYERS) or "forward" in held or any(held[c] for c in _CALLS):
            return False
    return True


def _is_ours(metric: Metric) -> bool:
    # The adapters call functions and metrics of others.
    return type(metric).__module__.startswith("hapi.metrics.") and type(metric).__module__ != "hapi.metrics.adapters"
