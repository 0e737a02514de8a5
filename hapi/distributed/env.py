"""`ParallelEnv`: where this process stands among the others."""

from __future__ import annotations

from hapi.device import current_device, get_device
from hapi.distributed import group


class ParallelEnv:
    """What the launcher told this process, read anew at each access. Alone it answers 0, 1 and "none"."""

    @property
    def rank(self) -> int:
        """This process's number among all, from 0."""
        return group.get_rank()

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return group.get_world_size()

    @property
    def local_rank(self) -> int:
        """This process's number among those of its host, from 0; in Paddle an alias of `rank`."""
        launch = group.launch_info()
        # In a process group of the script's own, which has chosen the card.
        return launch.local_rank if launch is not None else current_device().index or 0

    @property
    def local_world_size(self) -> int:
        """How many processes this host has."""
        launch = group.launch_info()
        return launch.local_world_size if launch is not None else 1

    @property
    def node_rank(self) -> int:
        """This host's number among all, from 0."""
        launch = group.launch_info()
        return launch.node_rank if launch is not None else 0

    @property
    def device(self) -> str:
        """The device of this process: ``"cpu"``, ``"gpu:0"``."""
        return get_device()

    @property
    def backend(self) -> str:
        """The process group's backend: ``"gloo"``, ``"cpu:gloo,cuda:nccl"``; ``"none"`` before it is started."""
        return group.backend_name()

    @property
    def launcher(self) -> str:
        """Who started this process: ``"torchrun"``, ``"slurm"`` and others, or ``"none"``."""
        return group.launcher_name()

    def __repr__(self) -> str:
        names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "device", "backend", "launcher")
        return f"ParallelEnv({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
