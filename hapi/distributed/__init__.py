"""Paddle's names for processes that train together, on torch.distributed. Alone they answer 0, 1 and never fail."""

from __future__ import annotations

from hapi.distributed import fleet
from hapi.distributed.data_parallel import DataParallel
from hapi.distributed.env import ParallelEnv
from hapi.distributed.group import barrier, get_rank, get_world_size, is_initialized
from hapi.distributed.group import start as init_parallel_env
from hapi.distributed.sampler import DistributedBatchSampler
from hapi.distributed.spawn import spawn

__all__ = [
    "DataParallel",
    "DistributedBatchSampler",
    "ParallelEnv",
    "barrier",
    "fleet",
    "get_rank",
    "get_world_size",
    "init_parallel_env",
    "is_initialized",
    "spawn",
]
