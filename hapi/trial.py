"""Training a model for a look, and putting everything back: what `hapi.find_lr` and the like stand on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hapi import restore, rng
from hapi.data import make

_PLAIN = (bool, int, float, str, type(None))
# What an engine and a stepper know of past calls; a later checkpoint would tell of them.
_OF_ENGINE = ("seed", "begun", "cursor", "fits", "left", "_shapes", "_shapes_known", "_label_span")
_OF_STEPPER = ("_form", "_last_rate")


@contextmanager
def untouched(model: Any, steps: int | None = None, repeat: bool = False) -> Iterator[None]:
    """Within, a `hapi.Model` may train; afterwards it, its data and the script's random state are as they were.

    Put back are parameters, buffers, modes, plain attributes and extra states of all modules (those of the loss, and
    beside the network, too), the state of optimizer, scheduler and loss scaler, counters, and the generators and
    samplers of data loaders. Copies lie in the CPU's memory meanwhile. Gradients are dropped, as by each fit.

    Args:
        model: The model.
        steps: After how many steps a pass over data ends; None: at the data's end.
        repeat: Give in each pass the batches of the first.

    Raises:
        ValueError: A lazy layer has no parameters yet that could be put back.
    """
    engine = model._engine
    stepper = engine.ready()
    _refuse_lazy(model.network)
    with rng.isolated(stepper.device), make.trial(steps, repeat):
        kept = _Kept(model)
        try:
            yield
        finally:
            restore.in_full([stepper.clear, kept.restore])


def _refuse_lazy(network: nn.Module) -> None:
    lazy = [name for name, parameter in network.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"The parameters {', '.join(lazy)} have no shape yet, so that they could not be put back after a trial. "
            "Run one batch through the network before: network(x[:2])."
        )


class _Kept:
    """All that training changes about a model."""

    def __init__(self, model: Any) -> None:
        engine, prepared = model._engine, model._engine.prepared
        self._optimizer = prepared.optimizer
        self._schedule, self._scaler = prepared.schedule, prepared.scaler
        roots = [model.network, prepared.objective.module, *vars(model).values()]
        modules = {id(m): m for root in roots if isinstance(root, nn.Module) for m in root.modules()}
        self._modules = [_KeptModule(module) for module in modules.values()]
        tensors = {id(t): t for module in modules.values() for t in _own_tensors(module)}
        self._tensors = [_KeptTensor(tensor) for tensor in tensors.values()]
        if self._optimizer is not None:
            self._optimized = _KeptOptimizer(self._optimizer)
        if self._schedule is not None:
            self._scheduled = copy.deepcopy(self._schedule.scheduler.state_dict())
        self._scaled = None if self._scaler is None else copy.deepcopy(self._scaler.state_dict())
        objects = [model, engine, prepared, prepared.objective, engine._stepper]
        chosen = [None, _OF_ENGINE, tuple(vars(prepared)), None, _OF_STEPPER]
        self._attributes = [_KeptAttributes(one, names) for one, names in zip(objects, chosen, strict=True)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put it back: all that can be, before the first error is raised."""
        parts: list[Any] = [*self._modules, *self._tensors, *self._attributes]
        calls: list[Callable[[], Any]] = [part.restore for part in parts]
        if self._schedule is not None:
            calls.append(partial(self._schedule.scheduler.load_state_dict, self._scheduled))
        if self._scaler is not None:
            calls.append(partial(self._scaler.load_state_dict, self._scaled))
        # After the scheduler, which sets rates when it is loaded.
        if self._optimizer is not None:
            calls.append(self._optimized.restore)
        restore.in_full(calls)


class _KeptTensor:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._value = tensor.detach().to("cpu", copy=True)
        self._trained = tensor.requires_grad

    def restore(self) -> Tensor:
        restore.put_back(self.tensor, self._value)
        if self.tensor.is_leaf and self.tensor.requires_grad != self._trained:
            self.tensor.requires_grad_(self._trained)
        return self.tensor


class _KeptAttributes:
    """Attributes of an object: those that are named, or all that are plain numbers, texts and flags."""

    def __init__(self, owner: Any, names: tuple[str, ...] | None = None) -> None:
        self._owner, self._names = owner, names
        self._values = self._now()

    def _now(self) -> dict[str, Any]:
        held = {} if self._owner is None else vars(self._owner)
        if self._names is not None:
            return {name: held[name] for name in self._names if name in held}
        return {name: value for name, value in held.items() if isinstance(value, _PLAIN)}

    def restore(self) -> None:
        for name in self._now().keys() - self._values.keys():
            del vars(self._owner)[name]
        if self._owner is not None:
            vars(self._owner).update(self._values)


class _KeptModule:
    """Which tensors and modules a module has, and what else it keeps. The tensors' values are kept beside."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = _KeptAttributes(module)
        members: list[dict[str, Any]] = [module._parameters, module._buffers, module._modules]
        self._members = [(held, dict(held)) for held in members]
        tells = type(module).get_extra_state is not nn.Module.get_extra_state
        self._extra = [copy.deepcopy(module.get_extra_state())] if tells else []

    def restore(self) -> None:
        # By way of the user's code last.
        for held, before in self._members:
            held.clear()
            held.update(before)
        self._attributes.restore()
        for state in self._extra:
            self._module.set_extra_state(state)


class _KeptOptimizer:
    """The state and the settings of any optimizer that has them where torch's have: tensors stay the same objects."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = _KeptAttributes(optimizer)
        self._groups = [(entry, _kept(entry), list(entry["params"])) for entry in optimizer.param_groups]
        self._state = {key: _kept(value) for key, value in optimizer.state.items()}

    def restore(self) -> None:
        self._attributes.restore()
        self._optimizer.param_groups[:] = [entry for entry, *_ in self._groups]
        for entry, before, parameters in self._groups:
            entry.clear()
            entry.update(_restored(before), params=parameters)
        self._optimizer.state.clear()
        restore.in_full(partial(self._restore_state, key) for key in self._state)

    def _restore_state(self, key: Any) -> None:
        self._optimizer.state[key] = _restored(self._state[key])


def _kept(value: Any) -> Any:
    """A nest whose tensors are kept."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else _KeptTensor(value)
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_kept(item) for item in value]
    return copy.deepcopy(value)


def _restored(value: Any) -> Any:
    if isinstance(value, _KeptTensor):
        return value.restore()
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (p for p in module._parameters.values() if p is not None)
    yield from (b for b in module._buffers.values() if b is not None)
