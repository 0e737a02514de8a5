"""Inference programs: the network written so that it runs without its Python source."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_unflatten

from hapi import files, kinds, modes
from hapi.batch import Inputs, leaves, map_tensors


def export(network: nn.Module, path: str | Path, inputs: Inputs | None) -> None:
    """Write the network as a program whose batch size is free.

    Args:
        network: In any mode; it is written in eval mode, from the device where it lies.
        path: `x.pt2` for torch.export, `x.onnx` for ONNX (the extra `onnx`).
        inputs: Example inputs, a tuple or a dict, whose first dimension is the batch.

    Raises:
        ValueError: The ending is unknown, or there are no example inputs.
        RuntimeError: The network cannot be traced.
        ImportError: ONNX was asked for without its extra.
    """
    kinds.check(export, {"path": path})
    target = Path(path)
    if target.suffix not in (".pt2", ".onnx"):
        raise ValueError(
            f"export received the path {str(path)!r}, whose ending names no format. "
            'Write "x.pt2" for torch.export or "x.onnx" for ONNX.'
        )
    if target.suffix == ".onnx":
        _check_extra(target)
    if inputs is None:
        raise ValueError(
            "export has no inputs to trace the network with: none were given, and no batch was seen yet. "
            "Write model.export(path, example_inputs=batch), or call it after fit, evaluate or predict."
        )
    inputs = _two_rows(inputs, next((p.device for p in network.parameters()), torch.device("cpu")))
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with modes.evaluating(network), torch.no_grad():
        shapes = _free_batch(args, kwargs)
        program = _traced(network, target, args, kwargs, shapes)
        if target.suffix == ".onnx":
            _write_onnx(program, target, shapes)
        else:
            _write_program(program, target)


def _check_extra(target: Path) -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"export to {target.name} needs {' and '.join(missing)}, which is not installed. "
            'Run `pip install "torch-hapi[onnx]"`, or export to a .pt2 file.'
        )


def _traced(
    network: nn.Module, target: Path, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> ExportedProgram:
    try:
        return torch.export.export(network, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RuntimeError(
            f"{type(network).__name__} could not be exported to {target.name} ({reason:.300}): torch.export follows "
            "forward once, for any batch size and any values. Write what depends on values with torch.where or "
            "torch.cond, or save the weights alone with model.save."
        ) from error


def _write_program(program: ExportedProgram, target: Path) -> None:
    # torch takes a path that ends in .pt2, which no temporary name does, or one of Python's own files.
    archive = io.BytesIO()
    torch.export.save(program, archive)

    def write_to(place: Path) -> None:
        with files.opened(place) as file:
            file.write(archive.getbuffer())

    with files.draft(target, write_to) as new:
        files.rename(new, target)


def _write_onnx(program: ExportedProgram, target: Path, shapes: Any) -> None:
    inputs, outputs = _names(program)
    with warnings.catch_warnings():
        # Several inputs share the batch dimension, as they should.
        warnings.filterwarnings("ignore", ".*axis name", UserWarning)
        converted = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=inputs, output_names=outputs, dynamic_shapes=shapes
        )
    assert converted is not None  # as it is where no path is given
    with files.draft(target, lambda place: converted.save(place, external_data=False), ".onnx") as new:
        files.rename(new, target)


def _names(program: ExportedProgram) -> tuple[list[str], list[str]]:
    """What the tensors are called in ONNX: inputs as in forward or the dict, outputs by their keys or places."""
    inputs = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
    spec = program.call_spec.out_spec
    structure = tree_unflatten(range(spec.num_leaves), spec)
    outputs = [path.strip("_") or "output" for path in _paths(structure, "")]
    return inputs, [f"{name}_output" if name in inputs else name for name in outputs]


def _paths(structure: Any, path: str) -> Iterator[str]:
    if isinstance(structure, Mapping):
        for key, value in structure.items():
            yield from _paths(value, f"{path}_{key}")
    elif isinstance(structure, tuple | list):
        for place, value in enumerate(structure):
            yield from _paths(value, f"{path or 'output'}_{place}")
    else:
        yield path


def _free_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    batch = torch.export.Dim("batch")

    def free(tensor: torch.Tensor) -> dict[int, Any]:
        return {0: batch} if tensor.dim() else {}

    if kwargs:
        return {name: map_tensors(free, value) for name, value in kwargs.items()}
    return tuple(map_tensors(free, value) for value in args)


def _two_rows(inputs: Inputs, device: torch.device) -> Inputs:
    """The inputs with exactly two rows: torch.export takes a batch of one for a constant."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().to(device)
        return torch.cat([tensor[:1], tensor[:1]]) if tensor.dim() else tensor

    sized: Inputs = map_tensors(rows, inputs)
    if not list(leaves(sized)):
        raise ValueError(
            f"export received inputs without any tensor ({inputs!r:.80}), so nothing can be traced. "
            "Pass a batch as the network's forward takes it."
        )
    return sized
