"""From which generators anybody may draw in a step: those alone are set before each.

To set all of them takes as long as a small layer, two thirds of it for Python's own. Imported with the first pass, not
by `import hapi`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.optim import optimizer as of_all_optimizers

from hapi import checks, rng
from hapi.callbacks.base import CallbackList
from hapi.data import Feed
from hapi.distributed import group
from hapi.metrics.base import Metric
from hapi.step import Prepared, Stepper

_TORCHS = "torch.nn."
_LAYERS = (_TORCHS, "torchvision.models.", "torchvision.ops.")
# Whose code draws from torch's generators alone. What a decorator of contextlib's is put around is looked at too.
_KNOWN = ("torch.", "torchvision.", "hapi.", "contextlib.")
# Torch's only layers that draw in eval mode too, and what names its functions that draw.
_DRAWING = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_DRAWS = ("dropout", "rand", "normal", "bernoulli", "multinomial", "poisson", "rrelu", "gumbel", "fractional")
# Schedulers of torch's that call functions which they were given.
_CALLING = ("LambdaLR", "MultiplicativeLR", "CyclicLR")
_CALLS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"

Setter = Callable[[int, torch.device], None]


def setter(kind: str, feed: Feed, stepper: Stepper, metrics: list[Metric], callbacks: CallbackList) -> Setter | None:
    """What sets the generators before each step of a pass, by `rng`.

    Not seen are code that is hung on nodes of the graph of gradients, and functions of torch's that were exchanged in
    torch itself.

    Args:
        kind: "train", "eval" or "predict"; in the last two the network is in eval mode.
        feed: The data.
        stepper: Network, loss and optimizer.
        metrics: Those of the pass.
        callbacks: Likewise.

    Returns:
        What sets all, where the user's own code is called and may draw from any; what sets torch's, where torch's and
        ours may draw; None where nobody draws, which in training is never counted on.
    """
    losses = [] if kind == "predict" else stepper.prepared.objective.losses
    called_by_others = (
        feed.draws == "all"
        or not _are_ours(callbacks, kind)
        or not _is_torchs(stepper.network)
        or not all(map(_is_torchs_loss, losses))
        or any(getattr(of_all_modules, f"_global{hooks}") for hooks in _CALLS)
        or (kind == "train" and not _trains_by_torch(stepper.prepared, stepper.network))
        or (kind != "predict" and (checks.is_overridden(stepper.computes[kind]) or not all(map(_is_ours, metrics))))
    )
    if called_by_others:
        return rng.set_streams
    modules = [
        module for part in (stepper.network, *losses) if isinstance(part, nn.Module) for module in part.modules()
    ]
    draws = kind == "train" or feed.draws == "torch" or any(map(_may_draw, modules))
    return rng.set_torch if draws else None


def beginner(
    feed: Feed, stepper: Stepper, metrics: list[Metric], callbacks: CallbackList, stream: int
) -> Callable[[int], None]:
    """What is done in training before the batch of a number is placed: generators are set, and hooks called.

    Args:
        feed: As of `setter`, like the next three.
        stepper: Likewise.
        metrics: Likewise.
        callbacks: Likewise.
        stream: What the generators are set by, besides the batch and the rank.
    """
    set_streams, rank, device = setter("train", feed, stepper, metrics, callbacks), group.get_rank(), stepper.device
    assert set_streams is not None, "in training somebody may always draw"
    begins = callbacks.batch_hooks["on_train_batch_begin"]

    def begin(step: int) -> None:
        # Before the hooks, so that what a callback draws has its place in the run too.
        set_streams(rng.mix(step, rank, after=stream), device)
        if begins:
            callbacks.call("on_train_batch_begin", step)

    return begin


def before_update(stepper: Stepper, stream: int) -> Callable[[int], None] | None:
    """What is done before the optimizer step after the batch of a number: generators are set; None: it draws nothing.

    Args:
        stepper: Whose optimizer.
        stream: What the generators are set by, besides the batch.
    """
    if not _updates_by_others(stepper.prepared):
        return None

    def set_streams(step: int) -> None:
        # Not by the rank: what the optimizer draws moves the weights alike on all of them.
        rng.set_streams(rng.mix(step, after=stream), stepper.device)

    return set_streams


def _may_draw(module: nn.Module) -> bool:
    """Whether a layer of torch's may draw from torch's generators."""
    return (
        module.training
        or isinstance(module, _DRAWING)
        or not type(module).__module__.startswith(_TORCHS)
        or any(
            word in getattr(held, "__name__", "") for held in vars(module).values() if callable(held) for word in _DRAWS
        )
    )


def _are_ours(callbacks: CallbackList, kind: str) -> bool:
    """Whether nothing of the user's is called in such steps; what stands in an object itself may be."""
    hooks = f"on_{kind}_batch_begin", f"on_{kind}_batch_end"
    called = [(callback, hook) for hook in hooks for callback in callbacks.batch_hooks[hook]]
    if kind == "train":
        called += [(callback, "batch_values") for callback in callbacks.adding]
        called += [(saver, name) for saver in callbacks.savers for name in ("saves_at", "wants_save")]
    return all([_is_known(type(callback)) and _is_known(getattr(callback, name)) for callback, name in called])


def _updates_by_others(prepared: Prepared) -> bool:
    """Whether an optimizer step calls the user's own code."""
    optimizer = prepared.optimizer
    hooks: list[Any] = [getattr(optimizer, f"_optimizer_step_{edge}_hooks", None) for edge in ("pre", "post")]
    hooks += [getattr(of_all_optimizers, f"_global_optimizer_{edge}_hooks", None) for edge in ("pre", "post")]
    return optimizer is not None and (
        not type(optimizer).__module__.startswith("torch.optim.")
        or not _is_known(type(optimizer).step)
        or any(map(_is_others, vars(optimizer).values()))
        or _hold_others(hooks)
    )


def _hold_others(hooks: list[Any]) -> bool:
    return any([_is_others(hook) for held in hooks if held for hook in held.values()])


def _trains_by_torch(prepared: Prepared, network: nn.Module) -> bool:
    """Whether no code of anybody else's is called between the backward pass and the next step."""
    schedule, hooks = prepared.schedule, list[Any]()
    for parameter in network.parameters():
        hooks += [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
    return (
        not _updates_by_others(prepared)
        and not _hold_others(hooks)
        # Of a schedule by epochs none is called within one.
        and (schedule is None or schedule.interval == "epoch" or _is_torchs_schedule(schedule.scheduler))
    )


def _is_torchs_schedule(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", [])
    return (
        type(scheduler).__module__ == "torch.optim.lr_scheduler"
        and type(scheduler).__name__ not in _CALLING
        and not any(map(_is_others, vars(scheduler).values()))
        and all(map(_is_torchs_schedule, parts))
    )


def _is_torchs_loss(loss: Any) -> bool:
    if isinstance(loss, nn.Module):
        return _is_torchs(loss)
    if isinstance(loss, partial):
        return not loss.args and not any(map(callable, loss.keywords.values())) and _is_torchs_loss(loss.func)
    return loss is None or _is_torchs_function(loss)


def _is_torchs_function(loss: Any) -> bool:
    """Whether a function is one of torch's losses; others in the same place draw, such as dropout."""
    name = getattr(loss, "__name__", "")
    is_loss = name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"
    return is_loss and checks.defined_in(loss) == nn.functional.__name__ and _is_known(loss)


def _is_torchs(network: nn.Module) -> bool:
    """Whether all layers are torch's own, with nothing of anybody else's hung on them or put into them."""
    return all(
        type(module).__module__.startswith(_LAYERS)
        and checks.defined_in(type(module).forward).startswith(_LAYERS)
        and _is_known(type(module).forward)
        and not any(vars(module)[hooks] for hooks in _CALLS)
        and not any(map(_is_others, vars(module).values()))
        # A tensor of a class of its own may compute with code of its own.
        and all(f"{type(held).__module__}.".startswith("torch.") for held in _tensors_of(module))
        for module in network.modules()
    )


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [held for held in (*module._parameters.values(), *module._buffers.values()) if held is not None]


def _is_others(value: Any) -> bool:
    """Whether something may be called, such as a layer's activation, and is neither torch's nor ours."""
    return callable(value) and not _is_known(value)


def _is_known(called: Any) -> bool:
    """Whether a function or a class is torch's or ours, with all that a function is wrapped around.

    A wrapper bears the name of what it wraps, so names say nothing: told is in which module's text each stands.
    """
    if isinstance(called, type):
        return f"{called.__module__}.".startswith(_KNOWN)
    while called is not None:
        if isinstance(called, BuiltinFunctionType):
            # Torch's functions in C say nothing of where they come from.
            return f"{called.__module__}.".startswith("torch.") or getattr(torch, called.__name__, None) is called
        of_a_kind_that_tells = isinstance(called, FunctionType | MethodType)
        if not of_a_kind_that_tells or not f"{checks.defined_in(called)}.".startswith(_KNOWN):
            return False
        called = getattr(called, "__wrapped__", None)
    return True


def _is_ours(metric: Metric) -> bool:
    # The adapters call functions and metrics of others.
    kind = type(metric).__module__
    is_built_in = kind.startswith("hapi.metrics.") and kind != "hapi.metrics.adapters"
    return is_built_in and _is_known(type(metric).update) and not any(map(callable, vars(metric).values()))
