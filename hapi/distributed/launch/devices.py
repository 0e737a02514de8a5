"""Which cards the workers of this host see, and how many workers there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from hapi.distributed.launch.options import Options, UsageError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Placement(NamedTuple):
    """The workers of one host."""

    processes: int
    environment: Mapping[str, str]
    devices: str
    """For the start table."""


def place(options: Options, count: int | None = None) -> Placement:
    """Decide on the number of workers and on the cards that all of them see. LOCAL_RANK indexes these.

    Args:
        options: What was asked for.
        count: How many accelerators this host shows now; None: ask torch.

    Raises:
        UsageError: A card is not there, or workers and cards do not go together.
    """
    count = _accelerators() if count is None else count
    asked = options.devices
    if asked == () or count == 0:
        return _on_cpu(options, count)
    shown = os.environ.get(_VISIBLE, "").split(",") if os.environ.get(_VISIBLE) else [str(i) for i in range(count)]
    cards = list(range(count)) if asked is None else [int(card) for card in asked]
    missing = [card for card in cards if card >= min(count, len(shown))]
    if missing:
        within = f" within {_VISIBLE}={os.environ[_VISIBLE]}" if os.environ.get(_VISIBLE) else ""
        raise UsageError(
            f"--gpus {','.join(map(str, cards))} names card {missing[0]}, but this host shows {count} card(s), "
            f"numbered from 0{within}. "
            f"Write numbers up to {count - 1}, or --gpus cpu."
        )
    processes = options.processes or len(cards)
    # One process may drive several cards (model parallelism).
    if processes not in (1, len(cards)):
        raise UsageError(
            f"--nproc_per_node {processes} does not go with {len(cards)} card(s): each process has one of its own. "
            f"Write --nproc_per_node {len(cards)}, name other cards by --gpus, or write --gpus cpu."
        )
    environment = {} if asked is None else {_VISIBLE: ",".join(shown[card] for card in cards)}
    return Placement(processes, environment, "cards " + ",".join(map(str, cards)))


def _on_cpu(options: Options, count: int) -> Placement:
    asked = options.devices or ()
    processes = options.processes or len(asked) or 1
    environment = {_VISIBLE: ""} if count else {}
    absent = f" (--gpus {','.join(asked)}: this host shows no card)" if asked else ""
    return Placement(processes, environment, f"CPU{absent}")


def _accelerators() -> int:
    import torch

    available = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if available is not None else 0


def threads_for(processes: int) -> int:
    """CPU threads for each of so many workers of this host, so that together they have a thread a core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)
