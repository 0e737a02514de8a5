"""CPU threads: processes that share cores share them out, where neither the launcher nor the user has."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch

_DECIDE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

Place = tuple[str, tuple[int, ...]]
"""A process's host, and the cores on which it may run there."""


def share_out(gather: Callable[[Any], Sequence[Place]]) -> int | None:
    """Compute with this process's part of the cores; torch takes all of them, in each process.

    Called on every rank. `OMP_NUM_THREADS`, which torchrun and hapirun set, decides otherwise; so does a later
    `torch.set_num_threads`.

    Args:
        gather: Brings every rank's value to all.

    Returns:
        The number of threads; None: it stays as it was.
    """
    own = place()
    fair = fair_share(gather(own), own)
    if any(name in os.environ for name in _DECIDE) or torch.get_num_threads() <= fair:
        return None
    torch.set_num_threads(fair)
    return fair


def place() -> Place:
    """Where this process may run."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return socket.gethostname(), tuple(sorted(cores))


def fair_share(ranks: Sequence[Place], own: Place) -> int:
    """How many threads keep the cores of one of these processes busy, and no more."""
    host, cores = own
    sharing = sum(theirs == host and not set(cores).isdisjoint(those) for theirs, those in ranks)
    return max(1, len(cores) // max(1, sharing))
