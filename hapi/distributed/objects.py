"""Plain Python values between the ranks: a small one by one exchange, where torch's own functions make two.

With many processes on few cores each costs tens of milliseconds, and an epoch ends with several. Imported by a process
among others.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

_SMALL = 1 << 12
"""Bytes of the first exchange. They begin with how many there are in all: if that is more, all go by a second one."""
_LENGTH = 8


def gather(value: Any, group: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank; copies, its own too.

    Args:
        value: This rank's. It is pickled.
        group: Of all ranks, on the CPU.
    """
    pickled = pickle.dumps(value)
    received = _all_gathered(_written(pickled, _SMALL), group)
    longest = max(map(_size, received))
    if longest > _SMALL:
        sent = _written(pickled, longest)
        del pickled
        received = _all_gathered(sent, group)
        del sent
    received.reverse()
    # One after the other, so that not all are held twice.
    return [_read(received.pop()) for _ in range(len(received))]


def broadcast(value: Any, group: Any) -> Any:
    """Rank 0's value on every rank: there the value itself, elsewhere a copy.

    Args:
        value: Rank 0's is pickled.
        group: As of `gather`.
    """
    is_first = dist.get_rank() == 0
    pickled = pickle.dumps(value) if is_first else b""
    received = _written(pickled, _SMALL)
    dist.broadcast(received, src=0, group=group)
    if (size := _size(received)) > _SMALL:
        received = _written(pickled, size)
        dist.broadcast(received, src=0, group=group)
    return value if is_first else _read(received)


def _written(pickled: bytes, room: int) -> torch.Tensor:
    """(room,) uint8: the length of all that is to be read, and as much of it as there is room for."""
    written = bytearray(room)
    written[:_LENGTH] = (_LENGTH + len(pickled)).to_bytes(_LENGTH, "little")
    kept = pickled[: room - _LENGTH]
    written[_LENGTH : _LENGTH + len(kept)] = kept
    return torch.frombuffer(written, dtype=torch.uint8)


def _size(written: torch.Tensor) -> int:
    return int.from_bytes(written[:_LENGTH].numpy().tobytes(), "little")


def _read(written: torch.Tensor) -> Any:
    return pickle.loads(written[_LENGTH : _size(written)].numpy().data)


def _all_gathered(sent: torch.Tensor, group: Any) -> list[torch.Tensor]:
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent, group=group)
    return received
