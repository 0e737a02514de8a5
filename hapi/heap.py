"""Memory that the C library keeps in pieces between a training's tensors, handed back to the system.

torch asks for memory that is aligned, and glibc (seen with 2.36) does not find a hole of just the size that is asked
for: it wants some bytes more, to align it. Where something small that lives for some steps has come to lie behind such
a hole, the heap grows instead, by megabytes over some hundred epochs, though nothing is held that was not held before.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

_SHARE = 0.01
"""Of the time, at most, goes into it: what one call takes grows with the number of pieces, whoever has made them."""
_GROWN = 1 << 18
"""Bytes. What is handed back is asked for again in the next epoch, so it stays where the process has not grown."""
_STATUS = Path("/proc/self/statm")


class Heap:
    """Hands back what is free after a fit's first epoch, and after later ones at whose end more of it is held."""

    def __init__(self) -> None:
        self._ended = self._took = 0.0
        self._floor: int | None = None
        """Bytes that were held when what was free had been handed back."""
        self._most = math.inf
        """So many may be held at the end of an epoch: little more than at that of another one."""

    def end_epoch(self, first: bool) -> None:
        """Called where nothing of an epoch is held any more.

        Args:
            first: Whether it was the first one of a fit, which may need more than those of the fit before.
        """
        trim = _trim()
        if trim is None:
            return
        held, floor = _held(), self._floor
        if first:
            self._floor = floor = None
            self._most = math.inf
        elif floor is not None:
            self._most = min(self._most, held + _GROWN)
        if floor is not None and held <= self._most:
            return
        began = time.perf_counter()
        if self._took <= _SHARE * (began - self._ended):
            trim(0)
            self._floor = _held()
            if floor is not None:
                # What is in use may grow.
                self._most += self._floor - floor
            self._ended = time.perf_counter()
            self._took = self._ended - began


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], int] | None:
    """Glibc's `malloc_trim`; None where there is none, as with musl and on macOS, or nothing tells of growth."""
    # Who has set how much the heap keeps has it so.
    if sys.platform != "linux" or "MALLOC_TRIM_THRESHOLD_" in os.environ or not _STATUS.exists():
        return None
    import ctypes

    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        # No such function, or a sandbox that lets nobody look for it.
        return None
    return found


def _held() -> int:
    """Bytes of this process that lie in memory, without those of files and what it shares."""
    _, resident, shared, *_ = map(int, _STATUS.read_bytes().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


of_process = Heap()
"""One for all fits: a short one must not begin by paying again."""
