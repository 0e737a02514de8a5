"""The order of the user's own DataLoader: how it is drawn, what it is drawn from, how long it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler


class OrderState:
    """What decides the order of later epochs: generators that a loader and its samplers were given, and their states.

    A sampler with `state_dict` and `load_state_dict`, such as one that counts its own epochs, is asked between two
    epochs and before an order is drawn, which is then drawn anew. One with `set_epoch` is told all that it has to know;
    torchdata's says how much of the order it has given, which is counted here.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        samplers = _samplers_of(loader)
        found = [loader.generator, *(value for sampler in samplers for value in vars(sampler).values())]
        # One may be in several places.
        self._generators = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
        self._samplers = [sampler for sampler in samplers if _tells_its_state(sampler)]
        self._before: list[Any] = []

    def begin(self, before: Any) -> None:
        """An epoch's order is about to be drawn; anew, if it is one that an earlier process had begun."""
        self.restore(before)
        self._before = self._now()

    def state(self, within: bool) -> list[Any] | None:
        """The states before the order of the epoch under way was drawn, or between two epochs."""
        return (self._before if within else self._now()) or None

    def _now(self) -> list[Any]:
        generators = [generator.get_state() for generator in self._generators]
        return [*generators, *(copy.deepcopy(sampler.state_dict()) for sampler in self._samplers)]

    def restore(self, states: Any) -> None:
        """Set them to what `state` gave."""
        setters = [generator.set_state for generator in self._generators]
        for setter, state in zip([*setters, *(s.load_state_dict for s in self._samplers)], states or (), strict=False):
            setter(state)


def _samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """The samplers of a loader, those that others are made of too."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [loader.batch_sampler, loader.sampler]
    while waiting:
        sampler = waiting.pop(0)
        if id(sampler) in found or not hasattr(sampler, "__dict__"):
            continue
        found[id(sampler)] = sampler
        for value in vars(sampler).values():
            several = isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Sampler)
            waiting += value if several else [value] if isinstance(value, Sampler) else []
    return list(found.values())


def _tells_its_state(sampler: Any) -> bool:
    return hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict") and not hasattr(sampler, "set_epoch")


class Order:
    """The order of a loader, as it would draw it itself."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        # A pass over a DataLoader draws its workers' base seed first; with a generator that the sampler shares, the
        # order comes after it.
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        return iter(self._loader.sampler if self._loader.batch_sampler is None else self._loader.batch_sampler)


def length(loader: DataLoader[Any]) -> int | None:
    """How many batches a pass has, where that is known."""
    order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return known_length(order)


def known_length(order: Any) -> int | None:
    """How long a sampler says that it is; a batch sampler over one that does not know has a length that raises."""
    try:
        return len(order)
    except (TypeError, NotImplementedError):
        return None
