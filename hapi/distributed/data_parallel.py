"""`DataParallel`: a network whose gradients are the mean over the processes, for loops of the user's own.

`Model` does not use it: it wraps network and loss together (see `parallel.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hapi import kinds
from hapi.distributed import group, parallel

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Where DDP reads what it leaves alone."""


class DataParallel(nn.Module):
    """Wraps a network in DistributedDataParallel; in one process it only passes calls on.

    Weights and buffers are rank 0's from the start. Where no gradients are computed (`torch.no_grad`) each rank may
    call it on its own, with the buffers that it has. The state dict is the network's own, without a prefix, within
    a module around it too, and attributes of the network are found on the wrapper.

    Args:
        network: On its device.
        find_unused_parameters: Search in each step for parameters that the loss does not reach.
        options: Further options of DistributedDataParallel.

    Raises:
        TypeError: The network is no module, or an argument of another kind.
    """

    def __init__(self, network: nn.Module, find_unused_parameters: bool = False, **options: Any) -> None:
        super().__init__()
        kinds.check(DataParallel, locals())
        if not isinstance(network, nn.Module):
            raise TypeError(
                f"DataParallel received {network!r:.100}, of type {type(network).__name__}, which is no "
                "torch.nn.Module. Write DataParallel(network), with the object and not its class."
            )
        group.start()
        self.network = network
        self._wrapped: list[DistributedDataParallel] = []
        if group.is_initialized() and any(p.requires_grad for p in network.parameters()):
            with _leaving_to_us(network):
                wrapped = DistributedDataParallel(network, find_unused_parameters=find_unused_parameters, **options)
            # In a list, so that it is no submodule: the network's parameters must not appear twice.
            self._wrapped.append(wrapped)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's forward."""
        if not self._wrapped:
            return self.network(*args, **kwargs)
        wrapped = self._wrapped[0]
        if torch.is_grad_enabled():
            return wrapped(*args, **kwargs)
        # DDP exchanges buffers before each forward pass, these too: a rank that evaluates on its own would leave the
        # others' next exchange with one too few. DDP still moves inputs to its device and the like.
        before, wrapped.require_forward_param_sync = wrapped.require_forward_param_sync, False
        try:
            return wrapped(*args, **kwargs)
        finally:
            wrapped.require_forward_param_sync = before

    def no_sync(self) -> AbstractContextManager[Any]:
        """Within this context backward passes accumulate gradients without exchanging them."""
        return self._wrapped[0].no_sync() if self._wrapped else nullcontext()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it is: gradients are averaged in the backward pass. Accepted for Paddle's scripts."""
        return loss

    def apply_collective_grads(self) -> None:
        """Nothing: gradients were exchanged in the backward pass. Accepted for Paddle's scripts."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The network's state dict."""
        return self.network.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the network's state dict."""
        return self.network.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Called where a module around this one loads; what was left of its state dict for the network is next.
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}network.{name[len(prefix) :]}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "network":
                raise
            return getattr(self.network, name)


@contextmanager
def _leaving_to_us(network: nn.Module) -> Iterator[None]:
    """Within, DDP passes by what it fails on; that is sent here."""
    ours = parallel.left_to_us(network)
    group.broadcast_tensors(ours.values())
    before = vars(network).get(_IGNORED)
    setattr(network, _IGNORED, [*(before or ()), *ours])
    try:
        yield
    finally:
        # DDP has read it. The network may be wrapped anew once a parameter is no longer frozen.
        if before is None:
            delattr(network, _IGNORED)
        else:
            setattr(network, _IGNORED, before)
