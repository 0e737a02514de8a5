"""Whether a state dict fits a network, by names and shapes. Imported by a process that loads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch.nn.parameter import is_lazy

# What DDP and torch.compile put before, or into, the names of a state dict.
_WRAPPER_NAMES = ("module", "_orig_mod")


def unwrapped_names(state: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """The entries without the names of wrappers, unless the network itself has such names."""

    def bare(key: str) -> str:
        parts = key.split(".")
        wrappers = [place for place, part in enumerate(parts) if part in _WRAPPER_NAMES]
        for count in range(len(wrappers) + 1):
            for left_out in combinations(wrappers, count):
                name = ".".join(part for place, part in enumerate(parts) if place not in left_out)
                if name in expected:
                    return name
        return key

    return {bare(key): value for key, value in state.items()}


def fits(value: Any, expected: Any) -> bool:
    """Whether an entry of a file can be put in the place of one of the network."""
    if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
        # A lazy module has no shape yet, and takes any.
        return is_lazy(expected) or value.shape == expected.shape
    return not isinstance(value, torch.Tensor) and not isinstance(expected, torch.Tensor)


def differences(state: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What of a file does not fit the network, one line a kind."""
    missing = [key for key in expected if key not in state]
    unexpected = [key for key in state if key not in expected]
    shapes = [
        f"{key} ({_shape(state[key])} in the file, {_shape(expected[key])} in the network)"
        for key in state
        if key in expected and not fits(state[key], expected[key])
    ]
    named = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    return [f"{kind}: {', '.join(keys)}" for kind, keys in named.items() if keys]


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
