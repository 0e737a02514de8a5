"""The table of a network's layers: names, output shapes and parameters. It leaves no trace on the network."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from hapi import restore
from hapi.distributed import group
from hapi.rng import isolated

__all__ = ["Trace", "label", "make_inputs", "materialized", "run", "summary"]

_HEADINGS = ("layer (type)", "output shape", "parameters")


def summary(
    network: nn.Module,
    input_size: Any = None,
    dtype: Any = None,
    inputs: Any = None,
) -> dict[str, int]:
    """Print a table with a row a layer: its name and type, the shape of what it returns, its parameters.

    The shapes come from one forward pass in eval mode, without gradients, on the device where the network
    lies. Module modes, buffers and the random state are as before afterwards. A layer's row counts the
    parameters that it holds itself, each shared parameter where it is met first, so that the column adds up
    to the total. A layer that is called several times has one row, with the shape of its first call; one that
    is never called shows ``-``. Under a launcher only rank 0 prints.

    Args:
        network: Any module.
        input_size: The shape of an input with its batch dimension, ``(1, 3, 32, 32)`` (None or -1 as the
            batch dimension stand for 1); for several inputs a list of shapes, or a dict from argument names
            to shapes.
        dtype: The dtype of the inputs, a `torch.dtype` or its name, or a list (a dict) of them, one an input.
            By default that of the network's parameters.
        inputs: A tensor, a tuple (positional arguments) or a dict (named arguments) to run instead of inputs
            made from `input_size`. Without either, the table has no shapes.

    Returns:
        ``total_params`` and ``trainable_params``, numbers of elements.

    Raises:
        TypeError: `input_size` is not a shape, `dtype` is not a dtype, or both `input_size` and `inputs` are
            given.
        ValueError: A size is open, negative or beyond the memory, the dtypes are not as many as the inputs, or a
            lazy layer's parameters were asked for without an input.
        RuntimeError: The network's forward failed on this input.
    """
    if input_size is not None and inputs is not None:
        raise TypeError(
            "summary received both input_size and inputs, and would not know which to run. "
            "Pass input_size=(1, 3, 32, 32) or inputs=batch, not both."
        )
    for kind in dtype if isinstance(dtype, list | tuple) else dtype.values() if isinstance(dtype, Mapping) else [dtype]:
        if kind is not None:
            _as_dtype(kind)
    if inputs is None and input_size is not None:
        inputs = make_inputs(network, input_size, dtype)
    trace = Trace()
    with materialized(network) as network:
        if inputs is not None:
            run(network, inputs, trace)
        rows, counts = _rows(network, trace.shapes)
    if group.get_rank() == 0:
        print(_table(rows, counts))
        if inputs is None:
            print("For output shapes pass the shape of an input: summary(input_size=(1, 3, 32, 32)).")
    return counts


# What the network is run on

_SMALLER = (
    "Write a smaller batch, in whose size all else is counted, or give the network without its memory, "
    'copy.deepcopy(network).to("meta").'
)


def make_inputs(network: nn.Module, input_size: Any, dtype: Any, caller: str = "summary") -> Any:
    """Inputs of the shapes and dtypes that `summary` was given; see there. Messages name the caller."""
    example = next((p for p in network.parameters() if p.is_floating_point()), None)
    default = example.dtype if example is not None else torch.get_default_dtype()
    if isinstance(input_size, Mapping):
        named = dtype if isinstance(dtype, Mapping) else dict.fromkeys(input_size, dtype)
        return {
            name: _make_input(size, named.get(name) or default, network, caller) for name, size in input_size.items()
        }
    sizes = [input_size] if _is_shape(input_size) else input_size
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise TypeError(
            f"{caller} received input_size={input_size!r}, which is neither a shape nor a list of shapes. "
            "Write input_size=(1, 3, 32, 32), or [(1, 3, 32, 32), (1, 10)] for two inputs."
        )
    dtypes = list(dtype) if isinstance(dtype, (list, tuple)) else [dtype] * len(sizes)
    if len(dtypes) != len(sizes):
        raise ValueError(
            f"{caller} received {len(dtypes)} dtypes for {len(sizes)} inputs, so some input has none. "
            'Pass one dtype for all, or a list with one an input: dtype=["int64", "float32"].'
        )
    pairs = zip(sizes, dtypes, strict=True)
    return tuple(_make_input(size, kind or default, network, caller) for size, kind in pairs)


def _is_shape(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return bool(value) and all(size is None or isinstance(size, int) for size in value)


def _make_input(size: Any, dtype: Any, network: nn.Module, caller: str) -> torch.Tensor:
    if not _is_shape(size):
        raise TypeError(
            f"{caller} received {size!r} as the shape of an input, but a shape is a tuple of whole numbers. "
            "Write (1, 3, 32, 32): the batch dimension first."
        )
    batch, *rest = size
    shape = [1 if batch in (None, -1) else batch, *rest]
    if any(length is None or length < 0 for length in shape):
        raise ValueError(
            f"{caller} received the shape {tuple(size)}, but a forward pass needs every size: only the first, "
            "the batch dimension, may be None or -1. Write the sizes of a real batch, tuple(batch.shape)."
        )
    kind = _as_dtype(dtype, caller)
    # Zeros are valid indices for an embedding; ones keep a logarithm or a division finite.
    fill = 1 if kind.is_floating_point or kind.is_complex else 0
    device = _device(network)
    try:
        return torch.full(shape, fill, dtype=kind, device=device)
    except (RuntimeError, MemoryError, TypeError) as error:
        if not _is_of_memory(error):
            raise
        raise ValueError(
            f"{caller} received the shape {tuple(size)}, which as {kind} takes {math.prod(shape) * kind.itemsize:,} "
            f"bytes: there is no memory for it on the device {str(device)!r}. {_SMALLER}"
        ) from error


def _as_dtype(dtype: Any, caller: str = "summary") -> torch.dtype:
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype):
        raise TypeError(
            f"{caller} received {dtype!r} as a dtype, which torch does not know. "
            'Write a torch.dtype or its name: torch.int64 or "int64".'
        )
    return kind


def _device(network: nn.Module) -> torch.device:
    for tensors in (network.parameters(), network.buffers()):
        for tensor in tensors:
            return tensor.device
    return torch.device("cpu")


# The forward pass


@dataclass
class Trace:
    """What the hooks of one forward pass note down."""

    shapes: dict[nn.Module, str] = field(default_factory=dict)
    running: list[nn.Module] = field(default_factory=list)
    caller: str = "summary"
    """Whose forward pass it is, for messages."""

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before a layer's forward."""
        self.running.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it."""
        self.running.pop()
        self.shapes.setdefault(module, _describe(output))


def run(network: nn.Module, inputs: Any, trace: Trace) -> None:
    """One forward pass that leaves no trace on the network.

    Args:
        network: Any module.
        inputs: A tensor, a tuple or a dict.
        trace: Is told of each layer.

    Raises:
        RuntimeError: It failed; the message names the layer.
    """
    device = _device(network)
    args = inputs if isinstance(inputs, (tuple, list)) else () if isinstance(inputs, Mapping) else (inputs,)
    kwargs = inputs if isinstance(inputs, Mapping) else {}
    # Nothing is drawn on the meta device, which has no generator.
    drawing = torch.device("cpu") if device.type == "meta" else device
    with torch.no_grad(), _untouched(network), isolated(drawing), _hooked(network, trace), _eagerly(network):
        try:
            output = network(*(_to(value, device) for value in args), **{k: _to(v, device) for k, v in kwargs.items()})
        except Exception as error:
            raise RuntimeError(_failure(network, trace, inputs, error)) from error
    trace.shapes.setdefault(network, _describe(output))


def _eagerly(network: nn.Module) -> AbstractContextManager[Any]:
    """A context in which compiled networks call their layers one by one."""
    compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in network.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@contextmanager
def materialized(network: nn.Module) -> Iterator[nn.Module]:
    """The network; of one with lazy layers, which a forward pass makes real, a copy."""
    lazy = [tensor for tensor in (*network.parameters(), *network.buffers()) if is_lazy(tensor)]
    # torch copies lazy parameters, and has no copy of lazy buffers.
    new: Any = UninitializedBuffer
    copied = {id(t): new(device=t.device, dtype=t.dtype) for t in lazy if not isinstance(t, nn.Parameter)}
    yield copy.deepcopy(network, copied) if lazy else network


@contextmanager
def _hooked(network: nn.Module, trace: Trace) -> Iterator[None]:
    handles = []
    try:
        for module in network.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks
            handles.append(module.register_forward_pre_hook(trace.enter))
            handles.append(module.register_forward_hook(trace.leave))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _untouched(network: nn.Module) -> Iterator[None]:
    # Eval mode alone is not enough: some networks refuse it in part, or count their calls in a buffer.
    modes = [(module, module.training) for module in network.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in network.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not isinstance(buffer, UninitializedBuffer)
    ]
    try:
        network.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
        for module, name, buffer, _ in buffers:
            setattr(module, name, buffer)
        # One that cannot be written to keeps no other from being put back.
        restore.in_full(partial(restore.put_back, buffer, value) for *_, buffer, value in buffers)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _failure(network: nn.Module, trace: Trace, inputs: Any, error: Exception) -> str:
    names = {module: name for name, module in network.named_modules()}
    layer = trace.running[-1] if trace.running else network
    where = f"its layer {names[layer]!r} ({type(layer).__name__})" if names.get(layer) else "its forward"
    given = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
    received = f"{trace.caller} gave the network {_describe(given)}"
    if _is_of_memory(error):
        return f"{received}, and {where} had no memory for it. {_SMALLER}"
    return (
        f"{received}, and {where} failed: {type(error).__name__}: {error}. "
        "Pass the shape and dtype of a real batch, input_size=tuple(batch.shape), or itself, inputs=batch."
    )


def _is_of_memory(error: Exception) -> bool:
    # torch has a type of error for each way in which a size is too large, and none of its own on the CPU.
    words = ("can't allocate memory", "not enough memory", "bad_alloc", "calculation overflowed", "Overflow when")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def _describe(value: Any) -> str:
    """The shapes in a value of any nesting, as text."""
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_describe(item) for item in value) + ")"
    return "None" if value is None else type(value).__name__


# The table


def _rows(network: nn.Module, shapes: Mapping[nn.Module, str]) -> tuple[list[tuple[str, str, str]], dict[str, int]]:
    rows = []
    counts = {"total_params": 0, "trainable_params": 0}
    counted: set[nn.Parameter] = set()
    for name, module in network.named_modules():
        own = list(module.parameters(recurse=False))
        new = [parameter for parameter in own if parameter not in counted]
        counted.update(new)
        _refuse_uninitialized(name, new)
        size = sum(parameter.numel() for parameter in new)
        counts["total_params"] += size
        counts["trainable_params"] += sum(p.numel() for p in new if p.requires_grad)
        cell = f"{size:,}" if new or not own else ""
        if len(new) < len(own):
            cell = f"{cell} + shared".removeprefix(" + ")
        rows.append((label(name, module), shapes.get(module, "-"), cell if own else "-"))
    return rows, counts


def _refuse_uninitialized(name: str, parameters: Sequence[nn.Parameter]) -> None:
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        raise ValueError(
            f"The layer {name!r} is a lazy one: its parameters have no size before it has seen an input. "
            "Pass the shape of an input: summary(input_size=(1, 3, 32, 32))."
        )


def label(name: str, module: nn.Module) -> str:
    """A row's first cell: the layer's own name and its type, indented by depth."""
    kind = type(module).__name__
    if not name:
        return kind
    depth = name.count(".") + 1
    return f"{'  ' * depth}{name.rpartition('.')[2]} ({kind})"


def _table(rows: Sequence[tuple[str, str, str]], counts: Mapping[str, int]) -> str:
    layer, shape, number = (max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True))
    lines = [f"{a:<{layer}}  {b:<{shape}}  {c:>{number}}" for a, b, c in (_HEADINGS, *rows)]
    rule = "-" * len(lines[0])
    total, trainable = counts["total_params"], counts["trainable_params"]
    totals = (("total", total), ("trainable", trainable), ("not trainable", total - trainable))
    closing = [f"{name + ' parameters:':<26}{count:,}" for name, count in totals]
    return "\n".join((lines[0], rule, *lines[1:], rule, *closing))
