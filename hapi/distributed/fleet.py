"""Paddle's `fleet` for data-parallel training with a loop of one's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hapi import kinds
from hapi.distributed import group
from hapi.distributed.data_parallel import DataParallel


@dataclass
class DistributedStrategy:
    """Options of `distributed_model`.

    Attributes:
        find_unused_parameters: Search in each step for parameters that the loss does not reach.
        sync_batch_norm: Let BatchNorm see the batches of all ranks. Needs an accelerator.
        fuse_grad_size_in_MB: The size of a bucket of gradients.
        ddp_options: Further options of DistributedDataParallel.
    """

    find_unused_parameters: bool = False
    sync_batch_norm: bool = False
    fuse_grad_size_in_MB: float = 25
    ddp_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds.check(DistributedStrategy, vars(self))


_strategy = DistributedStrategy()


def init(is_collective: bool = True, strategy: DistributedStrategy | None = None) -> None:
    """Join the process group.

    Args:
        is_collective: Must be True: there are no parameter servers.
        strategy: For the models that `distributed_model` wraps from now on.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: Parameter servers were asked for.
    """
    global _strategy
    kinds.check(init, locals())
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise TypeError(
            f"fleet.init received strategy={strategy!r:.60}, of type {type(strategy).__name__}, which has none of the "
            "options that are read. Write fleet.DistributedStrategy(), or leave it out."
        )
    if not is_collective:
        raise ValueError(
            "fleet.init received is_collective=False, which asks for parameter servers, and hapi has none. "
            "Write fleet.init(is_collective=True)."
        )
    _strategy = strategy or DistributedStrategy()
    group.start()


def distributed_model(network: nn.Module) -> DataParallel:
    """The network with gradients averaged over the processes, as the strategy of `init` says.

    Raises:
        TypeError: The network is no module.
        ValueError: SyncBatchNorm was asked for on the CPU.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(
            f"fleet.distributed_model received {network!r:.100}, of type {type(network).__name__}, which is no "
            "torch.nn.Module. Write fleet.distributed_model(network), with the object and not its class."
        )
    if _strategy.sync_batch_norm:
        if next((p.device.type for p in network.parameters()), "cpu") == "cpu":
            raise ValueError(
                "The strategy has sync_batch_norm=True, but the network is on the CPU, where torch has no "
                "SyncBatchNorm. Move the network to an accelerator first, or leave it out."
            )
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    return DataParallel(
        network,
        find_unused_parameters=_strategy.find_unused_parameters,
        bucket_cap_mb=_strategy.fuse_grad_size_in_MB,
        **_strategy.ddp_options,
    )


def distributed_optimizer(
    optimizer: torch.optim.Optimizer, strategy: DistributedStrategy | None = None
) -> torch.optim.Optimizer:
    """The optimizer as it is: gradients are averaged before it sees them.

    Raises:
        TypeError: It is no optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"fleet.distributed_optimizer received {optimizer!r:.60}, of type {type(optimizer).__name__}, which is no "
            "optimizer. Write fleet.distributed_optimizer(torch.optim.Adam(network.parameters()))."
        )
    return optimizer


def worker_index() -> int:
    """This process's number among all, from 0."""
    return group.get_rank()


def worker_num() -> int:
    """How many processes there are."""
    return group.get_world_size()


def is_first_worker() -> bool:
    """Whether this is rank 0."""
    return group.get_rank() == 0


def barrier_worker() -> None:
    """Wait until every process has come here."""
    group.barrier()
