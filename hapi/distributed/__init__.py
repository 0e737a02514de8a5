"""Paddle's names for processes that train together, on torch.distributed. Alone they answer 0, 1 and never fail."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hapi.distributed.group import barrier, get_rank, get_world_size, is_initialized
from hapi.distributed.group import start as init_parallel_env
from hapi.distributed.spawn import spawn

if TYPE_CHECKING:
    from hapi.distributed import fleet
    from hapi.distributed.data_parallel import DataParallel
    from hapi.distributed.env import ParallelEnv
    from hapi.distributed.sampler import DistributedBatchSampler

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

# For loops of one's own: imported when asked for, so that `import hapi` stays light.
_ON_DEMAND = {
    "DataParallel": "hapi.distributed.data_parallel",
    "DistributedBatchSampler": "hapi.distributed.sampler",
    "ParallelEnv": "hapi.distributed.env",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "fleet":
        return importlib.import_module("hapi.distributed.fleet")
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(_ON_DEMAND[name]), name)
    elsewhere = importlib.import_module("hapi.elsewhere")  # which only an error needs
    raise elsewhere.package_attribute(name, __all__, "hapi.distributed")
