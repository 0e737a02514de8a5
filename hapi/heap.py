"""Memory that the C library keeps in pieces between a training's tensors, handed back to the system.

torch asks for memory that is aligned, and glibc (seen with 2.36) does not find a hole of just the size that is asked
for: it wants some bytes more, to align it. Where something small that lives for some steps has come to lie behind such
a hole, the heap grows instead, by megabytes over some hundred epochs, though nothing is held that was not held before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import lru_cache

_SHARE = 0.01
"""Of the time, at most, goes into it: what one call takes grows with the number of pieces, whoever has made them."""


class Heap:
    """Hands back what is free at the ends of epochs."""

    def __init__(self) -> None:
        self._ended = self._took = 0.0

    def end_epoch(self) -> None:
        """Called where nothing of an epoch is held any more."""
        began = time.perf_counter()
        if self._took <= _SHARE * (began - self._ended):
            _trim()(0)
            self._ended = time.perf_counter()
            self._took = self._ended - began


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], int]:
    """Glibc's `malloc_trim`; what does nothing where there is none, as with musl, on macOS and on Windows."""
    # Who has set how much the heap keeps has it so.
    if sys.platform == "linux" and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        import ctypes

        try:
            found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError):
            # No such function, or a sandbox that lets nobody look for it.
            return _nothing
        return found
    return _nothing


def _nothing(_: int) -> int:
    return 0


of_process = Heap()
"""One for all fits: a short one must not begin by paying again."""
