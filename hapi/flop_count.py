"""How many floating point operations a forward pass takes, layer by layer."""

from __future__ import annotations

import math
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

    Counted are products of matrices and vectors, convolutions and attention, by torch's own counter, a multiplication
    and an addition as two; what else a network does is little beside them. A layer's row holds all its calls and the
    layers within it. Attention is counted in full, also where a mask lets half of it be left out. The forward runs in
    eval mode, without gradients, on the device where the network lies, and leaves no trace, as that of `Model.summary`.
    Under a launcher every process may call it, and rank 0 alone prints.

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
        counter = FlopCounterMode(display=False, custom_mapping=_FURTHER)
        trace = _Counts(caller="flops", counter=counter)
        with counter:
            table.run(network, inputs, trace)
    total = int(counter.get_total_flops())
    if group.get_rank() == 0:
        print(_table(network, trace, total))
    return total


def _of_vectors(*shapes: Any, out_shape: Any = None, **options: Any) -> int:
    """The product of a matrix, or a vector, and a vector, the last two operands: each number meets one other."""
    return 2 * math.prod(map(int, shapes[-2]))


def _of_summed_batches(added: Any, first: Any, second: Any, out_shape: Any = None, **options: Any) -> int:
    """The products of the matrices of two batches; those of a batch are added up."""
    return 2 * math.prod(map(int, first)) * int(second[-1])


def _of_three(*arguments: Any, out_shape: Any = None, **options: Any) -> int:
    """The products of a bilinear layer, as torch takes them: of the first two operands, then of that and the third.

    What is summed and has no place in the third is gone by then.
    """
    shapes, places, summed = arguments[:3], arguments[3:6], arguments[6]
    first, second, third = (_expanded(shape, where) for shape, where in zip(shapes, places, strict=True))
    inner = _broadcast(first, second)
    kept = [1 if place in summed and place in places[2] else size for place, size in enumerate(inner)]
    return 2 * (math.prod(inner) + math.prod(_broadcast(kept, third)))


def _expanded(shape: Any, places: Any) -> list[int]:
    sizes = list(shape)
    for place in sorted(places):
        sizes.insert(place, 1)
    return sizes


def _broadcast(first: list[int], second: list[int]) -> list[int]:
    return [b if a == 1 else a for a, b in zip(first, second, strict=True)]


# What torch's counter leaves out: it knows products of two matrices alone.
_OP = torch.ops.aten
_FURTHER = dict[Any, Any].fromkeys((_OP.mv, _OP.addmv, _OP.addmv_, _OP.dot, _OP.vdot), _of_vectors) | {
    _OP.addbmm: _of_summed_batches,
    _OP._trilinear: _of_three,
}


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
