"""Which cards the workers of this host see, and how many workers there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hapi.distributed.launch.options import UsageError, as_option

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Placement(NamedTuple):
    """The workers of one host."""

    processes: int
    environment: Mapping[str, str]
    devices: str
    """For the start table."""


def place(
    asked: Sequence[str] | None,
    processes: int | None,
    *,
    count: int | None = None,
    default: int = 1,
    write: Callable[[str, object], str] = as_option,
) -> Placement:
    """Decide on the number of workers and on the cards that all of them see. LOCAL_RANK indexes these.

    Args:
        asked: The cards, () for none; None: all that there are.
        processes: How many workers; None: one a card.
        count: How many accelerators this host shows now; None: ask torch.
        default: The number of workers where nothing was asked for and there is no card.
        write: How the caller's user writes a setting.

    Raises:
        UsageError: A card is not there, or workers and cards do not go together.
    """
    count = _accelerators() if count is None else count
    if count == 0 or (asked is not None and not asked):
        return _on_cpu(asked or (), processes or len(asked or ()) or default, count)
    shown = os.environ.get(_VISIBLE, "").split(",") if os.environ.get(_VISIBLE) else [str(i) for i in range(count)]
    cards = list(range(count)) if asked is None else [int(card) for card in asked]
    missing = [card for card in cards if card >= min(count, len(shown))]
    if missing:
        within = f" within {_VISIBLE}={os.environ[_VISIBLE]}" if os.environ.get(_VISIBLE) else ""
        raise UsageError(
            f"{write('gpus', ','.join(map(str, cards)))}, where card {missing[0]} is not there: this host shows "
            f"{count} card(s), numbered from 0{within}. Write numbers up to {count - 1}, or {write('gpus', 'cpu')}."
        )
    processes = processes or len(cards)
    # One process may drive several cards (model parallelism).
    if processes not in (1, len(cards)):
        raise UsageError(
            f"{write('nproc_per_node', processes)}, which does not go with {len(cards)} card(s): each process has one "
            f"of its own. Write {write('nproc_per_node', len(cards))}, name other cards, or write "
            f"{write('gpus', 'cpu')}."
        )
    environment = {} if asked is None else {_VISIBLE: ",".join(shown[card] for card in cards)}
    return Placement(processes, environment, "cards " + ",".join(map(str, cards)))


def _on_cpu(asked: Sequence[str], processes: int, count: int) -> Placement:
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
