"""Which of its checkpoints a run keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Retention:
    """The checkpoints that a run has saved, by name, and which of them are not to be kept.

    Args:
        keep_last: How many of those of epochs and steps, the newest. None: all of epochs, and the newest of a step
            unless an epoch's came after it.
        top_k: How many of the best epochs, where more than one.
    """

    def __init__(self, keep_last: int | None, top_k: int) -> None:
        self._keep_last = keep_last
        self._top_k = top_k
        self._periodic: list[str] = []
        self._top: list[tuple[float, str]] = []
        self._outdated: list[str] = []

    def add(self, name: str) -> None:
        """A checkpoint of an epoch or a step is about to be written."""
        self._periodic = [other for other in self._periodic if other != name] + [name]
        self._outdated = [other for other in self._outdated if other != name]
        if self._keep_last is not None:
            kept = self._periodic[-self._keep_last :]
        else:
            kept = [other for other in self._periodic if not other.startswith("step_") or other == name]
        self._outdated += [other for other in self._periodic if other not in kept]
        self._periodic = kept

    def enters(self, value: float, name: str, rising: bool) -> bool:
        """Whether an epoch is among the best, which then have it."""
        if self._top_k < 2 or math.isnan(value):
            return False
        ranked = sorted([*self._top, (value, name)], key=lambda entry: -entry[0] if rising else entry[0])
        self._outdated += [other for _, other in ranked[self._top_k :] if other != name]
        self._top = ranked[: self._top_k]
        self._outdated = [other for other in self._outdated if all(other != kept for _, kept in self._top)]
        return (value, name) in self._top

    def dropped(self) -> list[str]:
        """What is to be deleted once the next save is whole.

        It stays listed until a later save is under way: a kill may come before the files are gone.
        """
        outdated = self._outdated
        self._outdated = outdated[-16:]
        return outdated

    def state_dict(self) -> dict[str, Any]:
        """The names."""
        top = [[value, name] for value, name in self._top]
        return {"periodic": self._periodic, "top": top, "outdated": self._outdated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._periodic = list(state.get("periodic", ()))
        self._top = [(value, name) for value, name in state.get("top", ())]
        self._outdated = list(state.get("outdated", ()))
