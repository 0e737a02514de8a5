"""How a network is wrapped, and where gradients meet: torch's DistributedDataParallel around network and loss.

DDP wraps a small module that holds the network *and* what computes the loss from it, so that a loss that uses
parameters of its own, or calls methods of the network, is reduced rightly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hapi.distributed import group


class Replica(nn.Module):
    """The network together with the computation of its loss: one forward pass of training.

    Args:
        network: The user's network.
        companions: Modules besides the network that hold parameters or buffers (a loss), or None.
        compute: What the forward pass calls. It gets the forward's arguments and returns any nest of tensors.
    """

    probe: nn.Parameter
    """A scalar, zero, whose gradient is the weight of what was summed: it travels in the same all-reduce as the
    gradients, for losses whose weight is known only after the forward."""

    def __init__(self, network: nn.Module, companions: nn.Module | None, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.network = network
        self.companions = companions
        self._compute = compute
        self.zero_reaches_probe_alone = False
        first = next((p for p in network.parameters()), None)
        # Sums of weights grow beyond what half precision counts.
        dtype = torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32
        self.probe = nn.Parameter(torch.zeros((), dtype=dtype, device=first.device if first is not None else None))

    def forward(self, *arguments: Any) -> Any:
        """The computation, or without arguments a zero that reaches the parameters, for a rank without samples."""
        return self._compute(*arguments) if arguments else self._zero()

    def trained(self) -> list[nn.Parameter]:
        """The parameters whose gradients are shared, the probe aside."""
        return [p for p in self.parameters() if p.requires_grad and p is not self.probe]

    def _zero(self) -> torch.Tensor:
        return zero_of([self.probe] if self.zero_reaches_probe_alone else [*self.trained(), self.probe])


def zero_of(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Zero that depends on every parameter: its backward gives each a gradient of zeros, without a forward."""
    device = parameters[0].device
    elements = [parameter.reshape(-1)[:1].sum().to(device) for parameter in parameters]
    real = [element.abs() if element.is_complex() else element.float() for element in elements]
    return torch.stack(real).sum() * 0


class GradientExchange:
    """Runs a replica's forward passes so that after the last backward of a window its gradients are the ranks' mean.

    The first window is reduced by hand. It shows which parameters the loss does not reach; only then is the replica
    wrapped, so that no flag is ever asked of the user. Alone, it is the replica itself.

    Args:
        replica: What to run.
        options: Further options of DistributedDataParallel, or None.
    """

    accumulates = False
    """Whether windows hold several passes. A parameter that only the last of them does not reach then has a
    gradient all the same, and DDP alone can tell, by searching for it."""

    def __init__(self, replica: Replica, options: dict[str, Any] | None = None) -> None:
        self.replica = replica
        self._options = dict(options or {})
        self._alone = group.get_world_size() == 1
        self._wrapped: DistributedDataParallel | None = None
        self._searches_unused = False
        self._layout: tuple[bool, ...] = ()

    def begin(self) -> None:
        """Start anew: the next window is reduced by hand. Called on every rank or on none."""
        if self._wrapped is not None:
            self._wrapped = None
            # The reducer lets go of its hooks on the parameters when it is collected.
            gc.collect()
        self.replica.zero_reaches_probe_alone = False
        if not self._alone and self._has_sparse_gradients():
            self._wrap(searches_unused=True)

    def begin_window(self) -> None:
        """Called before each window: a parameter that was frozen or freed meanwhile needs a new wrap."""
        if self._wrapped is not None and self._layout != self._current_layout():
            self.begin()

    def forward(self, *arguments: Any) -> Any:
        """One forward pass; without arguments, the part of a rank that has no samples."""
        return (self._wrapped or self.replica)(*arguments)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """The context of a forward and backward pass: gradients are exchanged in the last one of a window only."""
        if last or self._wrapped is None:
            return nullcontext()
        return self._wrapped.no_sync()

    def needs_turn(self, last: bool) -> bool:
        """Whether a rank without samples has to run the zero pass here, for the others' sake."""
        return last and self._wrapped is not None

    def complete(self) -> None:
        """Called after the last backward of each window, on every rank."""
        if self._alone:
            return
        if self._wrapped is None:
            self._reduce_by_hand()
        elif not self._searches_unused:
            self._finish_unreached()

    def _reduce_by_hand(self) -> None:
        parameters = self.replica.trained()
        reached = group.gather_objects([parameter.grad is not None for parameter in parameters])
        anywhere = [any(flags) for flags in zip(*reached, strict=True)]
        used = [parameter for parameter, is_used in zip(parameters, anywhere, strict=True) if is_used]
        for parameter in (*used, self.replica.probe):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in (*used, self.replica.probe) if p.grad is not None]
        group.sum_tensors(gradients)
        torch._foreach_div_(gradients, group.get_world_size())
        self._wrap(searches_unused=len(used) < len(parameters))

    def _wrap(self, searches_unused: bool) -> None:
        options = {
            "find_unused_parameters": searches_unused or self.accumulates,
            "gradient_as_bucket_view": True,
            **self._options,
        }
        self._searches_unused = bool(options["find_unused_parameters"])
        # Under a search, a parameter that no rank reaches keeps no gradient at all; the zero pass must not give it one.
        self.replica.zero_reaches_probe_alone = self._searches_unused
        self._wrapped = DistributedDataParallel(self.replica, **options)
        self._layout = self._current_layout()

    def _finish_unreached(self) -> None:
        """A parameter that this step alone did not reach still holds DDP's bucket open: close it with zeros.

        Without this the step's gradients would silently stay this rank's own.
        """
        missing = [parameter for parameter in self.replica.trained() if parameter.grad is None]
        if missing:
            zero_of(missing).backward()  # type: ignore[no-untyped-call]

    def _current_layout(self) -> tuple[bool, ...]:
        return tuple([parameter.requires_grad for parameter in self.replica.parameters()])

    def _has_sparse_gradients(self) -> bool:
        return any(getattr(module, "sparse", False) for module in self.replica.modules())
