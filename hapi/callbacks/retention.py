"""Which of its checkpoints a run keeps."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from typing import Any


class Retention:
    """The checkpoints that a run has saved, by name, and which of them are not to be kept.

    Each has the id of its save: another run may write under the same name, in the same folder or in the one that this
    run goes on in, and what it has written is its own.

    Args:
        keep_last: How many of those of epochs and steps, the newest. None: all of epochs, and the newest of a step
            unless an epoch's came after it.
        top_k: How many of the best epochs, where more than one.
        folder: Where they are.
    """

    def __init__(self, keep_last: int | None, top_k: int, folder: str = "") -> None:
        self._keep_last = keep_last
        self._top_k = top_k
        self._folder = folder
        self._periodic: list[str] = []
        self._top: list[tuple[float, str]] = []
        self._outdated: list[str] = []
        self._identities: dict[str, str] = {}

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
        self._identities[name] = uuid.uuid4().hex

    def enters(self, value: float, name: str, rising: bool) -> bool:
        """Whether an epoch is among the best, which then have it."""
        if self._top_k < 2 or math.isnan(value):
            return False
        ranked = sorted([*self._top, (value, name)], key=lambda entry: -entry[0] if rising else entry[0])
        self._outdated += [other for _, other in ranked[self._top_k :] if other != name]
        self._top = ranked[: self._top_k]
        self._outdated = [other for other in self._outdated if all(other != kept for _, kept in self._top)]
        entered = (value, name) in self._top
        if entered:
            self._identities[name] = uuid.uuid4().hex
        return entered

    def identity(self, name: str) -> str | None:
        """The id that the save under this name has, or is to have; None: any, since it is never deleted."""
        return self._identities.get(name)

    def dropped(self) -> dict[str, str]:
        """What is to be deleted once the next save is whole, and the ids.

        It stays listed until a later save is under way: a kill may come before the files are gone.
        """
        outdated = self._outdated
        self._outdated = outdated[-16:]
        dropped = {name: self._identities[name] for name in outdated if name in self._identities}
        listed = {*self._periodic, *self._outdated, *(name for _, name in self._top)}
        self._identities = {name: identity for name, identity in self._identities.items() if name in listed}
        return dropped

    def state_dict(self) -> dict[str, Any]:
        """The names, and what they are known by."""
        top = [[value, name] for value, name in self._top]
        return {
            "periodic": self._periodic, "top": top, "outdated": self._outdated, "ids": self._identities,
            "folder": self._folder,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Of what is in another folder nothing is this run's to delete."""
        # An earlier build kept names alone: they count, and since nothing tells whose they are, they stay.
        same = state.get("folder", self._folder) == self._folder
        self._periodic = list(state.get("periodic", ())) if same else []
        self._top = [(value, name) for value, name in state.get("top", ())] if same else []
        self._outdated = list(state.get("outdated", ())) if same else []
        self._identities = dict(state.get("ids", {})) if same else {}
