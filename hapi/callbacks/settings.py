"""What a run was set to, for the tables in which runs are compared. Imported by the callbacks that write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hapi.distributed import get_world_size

Setting = bool | int | float | str


def known(model: Any, params: Mapping[str, Any]) -> dict[str, Setting]:
    """The hyper-parameters that a fit knows of.

    Args:
        model: The `hapi.Model`.
        params: Those of the callback.

    Returns:
        Name -> value; what was not set is left out.
    """
    prepared = model._engine.prepared
    group = model.optimizer.param_groups[0]
    precision = prepared.precision.dtype
    named: dict[str, Any] = {
        "network": type(model.network).__name__,
        "parameters": sum(parameter.numel() for parameter in model.network.parameters()),
        "loss": None if model.loss is None else getattr(model.loss, "__name__", type(model.loss).__name__),
        "optimizer": type(model.optimizer).__name__,
        # Where a scheduler moves it: that which it began with.
        "lr": group.get("initial_lr", group["lr"]),
        **{name: group.get(name) or None for name in ("momentum", "weight_decay")},
        "scheduler": None if model.scheduler is None else type(model.scheduler).__name__,
        "precision": None if precision is None else str(precision).removeprefix("torch."),
        "clip_grad_norm": params.get("clip_grad_norm"),
        "batch_size": params.get("batch_size"),
        "epochs": params.get("last_epoch"),
        "seed": model._engine.seed,
    }
    # What is one unless somebody asks for more.
    for name, value in (
        ("accumulate_grad_batches", params.get("accumulate_grad_batches")),
        ("processes", get_world_size()),
    ):
        named[name] = None if value == 1 else value
    return {name: _plain(value) for name, value in named.items() if value is not None}


def checked(owner: str, argument: str, given: Mapping[str, Any] | None) -> dict[str, Setting]:
    """Hyper-parameters of the user's, seen to be values that a table can hold.

    Args:
        owner: The callback's name, for messages.
        argument: Its argument's name.
        given: What it received; None: nothing.

    Raises:
        TypeError: It is no dict of names to plain values.
    """
    example = f'Write {argument}={{"width": 128}}.'
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{owner} received {argument}={given!r}, which has no names for its values. {example}")
    settings = dict(given or {})
    for name, value in settings.items():
        if not isinstance(name, str) or not isinstance(value, Setting):
            raise TypeError(
                f"{owner} received {argument} with {name!r}: {value!r}. A table of runs holds names with numbers, "
                f"truth values and texts. {example}"
            )
    return settings


def _plain(value: Any) -> Setting:
    if isinstance(value, Tensor):
        return float(value)
    return value if isinstance(value, Setting) else str(value)
