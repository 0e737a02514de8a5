"""How many floating point operations a forward pass takes, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hapi import layer_table as table
from hapi.batch import leaves
from hapi.distributed import group

__all__ = ["flops"]

_HEADINGS = ("layer (type)", "output shape", "FLOPs", "part")


def flops(network: Any, input_size: Any = None, dtype: Any = None, inputs: Any = None) -> int:
    """Count the floating point operations of one forward pass, and print them layer by layer.

    Counted are matrix products, convolutions and attention, by torch's own counter, a multiplication and an addition as
    two; what else a network does is little beside them. A layer's row holds all its calls and the layers within it.
    Attention is counted in full, also where a mask lets half of it be left out. The forward runs in eval mode, without
    gradients, on the device where the network lies, and leaves no trace, as that of `Model.summary`. Under a launcher
    every process may call it, and rank 0 alone prints.

    Args:
        network: Any module, or a `hapi.Model`, which knows the shapes of its last batch.
        input_size: The shape of an input with its batch dimension, a list of shapes, or a dict from argument names to
            shapes; as of `Model.summary`.
        dtype: The dtype of the inputs, one or a list (a dict).
        inputs: A tensor, a tuple (positional arguments) or a dict (named arguments) instead of made ones.

    Returns:
        The operations of the whole forward.

    Raises:
        TypeError: It is no network, or no input was given.
        ValueError: A shape is open, or beyond the memory; a network on the meta device takes any.
        RuntimeError: The network's forward failed on this input.
    """
    network, inputs = _as_network(network, input_size, inputs)
    if (inputs is None) == (input_size is None):
        raise TypeError(
            f"flops received {'neither' if inputs is None else 'both'} input_size and inputs; it counts what one "
            "forward pass does. Pass input_size=(1, 3, 32, 32), or inputs=batch."
        )
    if inputs is not None and next(leaves(inputs), None) is None:
        raise TypeError(
            f"flops received inputs={inputs!r:.80}, of type {type(inputs).__name__}, which holds no tensor. Pass what "
            "the network takes, inputs=batch, or input_size=(1, 3, 32, 32)."
        )
    if inputs is None:
        inputs = table.make_inputs(network, input_size, dtype, "flops")
    with table.materialized(network) as network, _decomposed(network):
        counter = FlopCounterMode(display=False)
        trace = _Counts(caller="flops", counter=counter)
        with counter:
            table.run(network, inputs, trace)
    total = int(counter.get_total_flops())
    if group.get_rank() == 0:
        print(_table(network, trace, total))
    return total


def _as_network(given: Any, input_size: Any, inputs: Any) -> tuple[nn.Module, Any]:
    if isinstance(given, nn.Module):
        return given, inputs
    if not hasattr(given, "network"):
        raise TypeError(
            f"flops received {given!r:.80}, of type {type(given).__name__}, which is no network. Write "
            "hapi.flops(network, input_size=(1, 3, 32, 32))."
        )
    known = given._engine.example() if input_size is None and inputs is None else inputs
    return given.network, known


@dataclass
class _Counts(table.Trace):
    """The operations of each layer, read off the running total."""

    counter: Any = None
    flops: dict[nn.Module, int] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)

    def enter(self, module: nn.Module, args: Any) -> None:
        super().enter(module, args)
        self.before.append(self.counter.get_total_flops())

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        super().leave(module, args, output)
        done = self.counter.get_total_flops() - self.before.pop()
        self.flops[module] = self.flops.get(module, 0) + done


@contextmanager
def _decomposed(network: nn.Module) -> Iterator[None]:
    """Within, layers compute by the operations that are counted, instead of by one kernel of which nothing is known."""
    libraries: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    fast, used = torch.backends.mha.get_fastpath_enabled(), [library.enabled for library in libraries]
    recurrent = any(isinstance(module, nn.RNNBase) for module in network.modules())
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for library, enabled in zip(libraries, used, strict=True):
            library.enabled = enabled and not recurrent
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for library, enabled in zip(libraries, used, strict=True):
            library.enabled = enabled


def _table(network: nn.Module, trace: _Counts, total: int) -> str:
    rows = [_HEADINGS]
    for name, module in network.named_modules():
        count = trace.flops.get(module)
        part = f"{100 * count / total:.1f}%" if count and total else ""
        shape = trace.shapes.get(module, "-")
        rows.append((table.label(name, module), shape, "-" if count is None else f"{count:,}", part))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}".rstrip() for a, b, c, d in rows]
    rule = "-" * len(lines[0])
    return "\n".join((lines[0], rule, *lines[1:], rule, f"FLOPs of one forward: {total:,}"))
