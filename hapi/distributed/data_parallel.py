"""`DataParallel`: a network whose gradients are the mean over the processes, for loops of the user's own.

`Model` does not use it: it wraps network and loss together (see `parallel.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hapi import kinds
from hapi.distributed import group


class DataParallel(nn.Module):
    """Wraps a network in DistributedDataParallel; in one process it only passes calls on.

    Weights and buffers are rank 0's from the start. The state dict is the network's own, without a prefix, and
    attributes of the network are found on the wrapper.

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
            wrapped = DistributedDataParallel(network, find_unused_parameters=find_unused_parameters, **options)
            # In a list, so that it is no submodule: the network's parameters must not appear twice.
            self._wrapped.append(wrapped)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's forward."""
        return (self._wrapped[0] if self._wrapped else self.network)(*args, **kwargs)

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

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "network":
                raise
            return getattr(self.network, name)
