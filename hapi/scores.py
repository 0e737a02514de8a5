"""Whether outputs are what a classifying loss takes: scores, or their log-softmax. What is not trains, but badly."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

from hapi.distributed import group

# How far a sum over the classes may be off by rounding. Only what is surely another form is told of.
_ROUNDING, _ROUNDING_OF_HALVES = 1e-4, 0.02


def tell_of_another_form(loss: Any, outputs: Any) -> None:
    """Warn, on one rank, if the first batch's outputs are probabilities to cross-entropy, or no logarithms to NLL.

    Args:
        loss: As the user gave it; another one than these two is left alone.
        outputs: (N, C, ...). Values are read.
    """
    function = loss.func if isinstance(loss, partial) else loss
    takes_scores = function is nn.functional.cross_entropy or type(function) is nn.CrossEntropyLoss
    takes_logarithms = function is nn.functional.nll_loss or type(function) is nn.NLLLoss
    if not (takes_scores or takes_logarithms) or not isinstance(outputs, torch.Tensor) or not group.speaks_for_all():
        return
    if outputs.dim() < 2 or outputs.shape[1] < 2 or not outputs.numel():
        return
    values = outputs.detach().float()
    # Of equal rows, as of one, it may be chance: weights that were all set to one number.
    if not bool((values != values[:1]).any()):
        return
    rounding = _ROUNDING if outputs.dtype in (torch.float32, torch.float64) else _ROUNDING_OF_HALVES
    probable = bool((values >= 0).all()) and _is_near(values.sum(1), 1.0, rounding)
    if takes_scores and probable:
        warnings.warn(
            "CrossEntropyLoss received probabilities: each sample's outputs add up to 1. It takes the softmax itself, "
            "and of what went through one it can tell classes apart only little, so that training is slow and stays "
            "poor. Leave the Softmax at the network's end out; of what predict then gives, take .softmax(1).",
            stacklevel=_users_level(),
        )
    elif takes_logarithms and not _is_near(values.logsumexp(1), 0.0, _ROUNDING_OF_HALVES):
        what = "probabilities" if probable else "scores"
        cure = "its Softmax by nn.LogSoftmax(1)" if probable else "NLLLoss by CrossEntropyLoss"
        warnings.warn(
            f"NLLLoss received {what}: the exponentials of a sample's outputs do not add up to 1, as those of "
            f"log-probabilities do, and without that the loss falls for ever and teaches nothing. Replace {cure}, or "
            "let the network end with nn.LogSoftmax(1).",
            stacklevel=_users_level(),
        )


def _is_near(sums: torch.Tensor, value: float, rounding: float) -> bool:
    return bool((sums - value).abs().le(rounding).all())


def _users_level() -> int:
    """The stacklevel, for the caller's warning, of the nearest line that is neither ours nor torch's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("hapi", "torch", "contextlib")
