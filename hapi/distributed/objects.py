"""Plain Python values between the ranks: a small one by one exchange, where torch's own functions make two.

With many processes on few cores each costs tens of milliseconds, and an epoch ends with several. Imported by a process
among others.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

_HEAD = 1 << 12
"""Bytes of the first exchange. They begin with how many there are in all, so that all ranks know what is to follow."""
_LENGTH = 8


def gather(value: Any, group: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank; copies, its own too.

    Args:
        value: This rank's. It is pickled.
        group: Of all ranks, on the CPU.
    """
    written = _written(value)
    heads = _all_gathered(written[:_HEAD], _HEAD, group)
    longest = max(map(_size, heads))
    rests = _all_gathered(written[_HEAD:], longest - _HEAD, group) if longest > _HEAD else [b""] * len(heads)
    return [_read(head + rest) for head, rest in zip(heads, rests, strict=True)]


def broadcast(value: Any, group: Any) -> Any:
    """Rank 0's value on every rank: there the value itself, elsewhere a copy.

    Args:
        value: Rank 0's is pickled.
        group: As of `gather`.
    """
    is_first = dist.get_rank() == 0
    written = _written(value) if is_first else b""
    received = _from_first(written[:_HEAD], _HEAD, group)
    if (size := _size(received)) > _HEAD:
        received += _from_first(written[_HEAD:], size - _HEAD, group)
    return value if is_first else _read(received)


def _written(value: Any) -> bytes:
    pickled = pickle.dumps(value)
    return len(pickled).to_bytes(_LENGTH, "little") + pickled


def _size(written: bytes) -> int:
    return _LENGTH + int.from_bytes(written[:_LENGTH], "little")


def _read(written: bytes) -> Any:
    return pickle.loads(written[_LENGTH : _size(written)])


def _all_gathered(own: bytes, room: int, group: Any) -> list[bytes]:
    sent = _tensor(own, room)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent, group=group)
    return [tensor.numpy().tobytes() for tensor in received]


def _from_first(own: bytes, room: int, group: Any) -> bytes:
    tensor = _tensor(own, room)
    dist.broadcast(tensor, src=0, group=group)
    return tensor.numpy().tobytes()


def _tensor(own: bytes, room: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(own.ljust(room, b"\0")), dtype=torch.uint8)
