"""Paddle's `fleet` for data-parallel training with a loop of one's own."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
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

    Raises:
        TypeError: An option is set to a value of another kind.
        ValueError: An option is set that is not among these.
    """

    find_unused_parameters: bool = False
    sync_batch_norm: bool = False
    fuse_grad_size_in_MB: float = 25
    ddp_options: dict[str, Any] = field(default_factory=dict)

    def __setattr__(self, name: str, value: Any) -> None:
        known = [option.name for option in fields(self)]
        if name in known:
            kinds.check(DistributedStrategy, {name: value})
            super().__setattr__(name, value)
        # Scripts switch off what Paddle has and hapi has not: nothing is asked for.
        elif name not in _PADDLES or value is not False:
            raise _unknown(name, value, known)


def _unknown(name: str, value: Any, known: list[str]) -> ValueError:
    similar = difflib.get_close_matches(name, known, 1)
    instead = _PADDLES.get(name) or (f"Write {similar[0]}." if similar else "Leave it out.")
    return ValueError(
        f"DistributedStrategy received {name}={value!r:.60}, which is no option that is read: it would change "
        f"nothing. {instead} The options are: {', '.join(known)}."
    )


_ACCUMULATE = "Write accumulate_grad_batches=4 in Model.fit, or no_sync() in a loop of your own."
_AMP = 'Write amp_configs="O1" in Model.prepare, or torch.autocast in a loop of your own.'
_RECOMPUTE = "Write torch.utils.checkpoint.checkpoint in the network's forward."
_DATA_ONLY = "Leave it out: every process has the whole network, and a share of the data."
_OPTIMIZER = "Leave it out, and write an optimizer that does this."
_BUCKETS = "Write fuse_grad_size_in_MB=25, the size of all buckets."
_PADDLES = {
    **dict.fromkeys(("gradient_merge", "gradient_merge_configs"), _ACCUMULATE),
    **dict.fromkeys(("amp", "amp_configs"), _AMP),
    **dict.fromkeys(("recompute", "recompute_configs"), _RECOMPUTE),
    **dict.fromkeys(("sharding", "sharding_configs", "pipeline", "pipeline_configs", "tensor_parallel"), _DATA_ONLY),
    **dict.fromkeys(("tensor_parallel_configs", "hybrid_configs", "a_sync", "a_sync_configs"), _DATA_ONLY),
    **dict.fromkeys(("lars", "lars_configs", "lamb", "lamb_configs", "dgc", "dgc_configs"), _OPTIMIZER),
    **dict.fromkeys(("localsgd", "localsgd_configs", "adaptive_localsgd"), _OPTIMIZER),
    **dict.fromkeys(("last_comm_group_size_MB", "fuse_all_reduce_ops"), _BUCKETS),
}
"""Options of Paddle's own -> what to write instead."""


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
    kinds.check(init, locals())
    _check_strategy("init", strategy)
    if not is_collective:
        raise ValueError(
            "fleet.init received is_collective=False, which asks for parameter servers, and hapi has none. "
            "Write fleet.init(is_collective=True)."
        )
    _take(strategy or DistributedStrategy())
    group.start()


def _check_strategy(name: str, strategy: Any) -> None:
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise TypeError(
            f"fleet.{name} received strategy={strategy!r:.60}, of type {type(strategy).__name__}, which has none of "
            "the options that are read. Write fleet.DistributedStrategy(), or leave it out."
        )


def _take(strategy: DistributedStrategy) -> None:
    global _strategy
    _strategy = strategy


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

    Args:
        optimizer: Over the network's parameters.
        strategy: Takes the place of that of `init`, for the models that `distributed_model` wraps from now on.

    Raises:
        TypeError: It is no optimizer, or the strategy is none.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"fleet.distributed_optimizer received {optimizer!r:.60}, of type {type(optimizer).__name__}, which is no "
            "optimizer. Write fleet.distributed_optimizer(torch.optim.Adam(network.parameters()))."
        )
    _check_strategy("distributed_optimizer", strategy)
    if strategy is not None:
        _take(strategy)
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
