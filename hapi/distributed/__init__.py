"""Paddle's names for processes that train together, on torch.distributed. Alone they answer 0, 1 and never fail."""

from __future__ import annotations

from hapi.distributed.group import barrier, get_rank, get_world_size, is_initialized
from hapi.distributed.group import start as init_parallel_env

__all__ = [
    "barrier",
    "get_rank",
    "get_world_size",
    "init_parallel_env",
    "is_initialized",
]
