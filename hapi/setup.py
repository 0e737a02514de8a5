"""Getting a network ready for its first step: process group, device, BatchNorm, layout, compilation."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from hapi.device import current_device
from hapi.distributed import group
from hapi.step import Prepared

_laid_out_here: WeakSet[nn.Module] = WeakSet()


def start(network: nn.Module, prepared: Prepared) -> torch.device:
    """Join the process group and bring everything onto this process's device.

    Returns:
        The device of the inputs.

    Raises:
        ValueError: SyncBatchNorm was asked for on a device without it.
    """
    group.start()
    _refuse_lazy(network)
    device = _place(network, prepared)
    if prepared.switches.sync_batchnorm:
        if device.type == "cpu":
            raise ValueError(
                "sync_batchnorm=True was given, but the network is on the CPU, where torch has no SyncBatchNorm. "
                "Leave it out, or run on an accelerator."
            )
        if any(isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in network.modules()):
            nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    _lay_out(network, prepared.switches.channels_last)
    if prepared.switches.compile or network._compiled_call_impl is not None:
        # Only for a process that compiles.
        from hapi import compiling

        compiling.set_up(network, prepared.switches.compile)
    return device


def _refuse_lazy(network: nn.Module) -> None:
    lazy = [name for name, parameter in network.named_parameters() if is_lazy(parameter)]
    if lazy and group.get_world_size() > 1:
        raise ValueError(
            f"The parameters {', '.join(lazy)} have no shape yet, and {group.get_world_size()} processes would each "
            "make their own. Run one batch through the network before Model gets it: network(x[:2])."
        )


def _place(network: nn.Module, prepared: Prepared) -> torch.device:
    devices = list(dict.fromkeys(t.device for t in (*network.parameters(), *network.buffers())))
    if len({p.device for p in network.parameters()}) > 1:
        # Model parallel: the user has placed it, and its first layer says where inputs go.
        prepared.objective.to(devices[-1])
        return devices[0]
    device = current_device()
    if devices != [device]:
        network.to(device)
        _move_optimizer_state(prepared.optimizer)
    prepared.objective.to(device)
    return device


def _move_optimizer_state(optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is None:
        return
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # 0-dim step counters stay where the optimizer has put them.
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(parameter.device)


def _lay_out(network: nn.Module, channels_last: bool) -> None:
    """The layout of convolutions' weights; values and names are the same in either."""
    if channels_last:
        network.to(memory_format=torch.channels_last)
        _laid_out_here.add(network)
    elif network in _laid_out_here:
        network.to(memory_format=torch.contiguous_format)
        _laid_out_here.discard(network)
