"""Memory that the C library keeps in pieces between a training's tensors, handed back to the system.

torch asks for memory that is aligned, and glibc (seen with 2.36) does not find a hole of just the size that is asked
for: it wants some bytes more, to align it. Where something small that lives for some steps has come to lie behind such
a hole, the heap grows instead, by megabytes over some hundred epochs, though nothing is held that was not held before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache

_STEPS = 50
"""Training steps between two times: to hand memory back, and to be given it anew, costs about what one step does."""


class Heap:
    """Hands back what is free at the ends of epochs.

    Args:
        steps: Training steps taken before.
    """

    def __init__(self, steps: int) -> None:
        self._trimmed = steps

    def end_epoch(self, steps: int) -> None:
        """Called where nothing of an epoch is held any more.

        Args:
            steps: Training steps taken so far.
        """
        if steps - self._trimmed >= _STEPS:
            self._trimmed = steps
            _trim()(0)


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], int]:
    """Glibc's `malloc_trim`; nothing where there is none, as with musl, on macOS and on Windows."""
    if sys.platform == "linux":
        import ctypes

        found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if found is not None:
            return found
    return lambda keep: 0
