"""Weights as a `.safetensors` file (the extra `safetensors`): names and tensors, and nothing else.

The format has no checksum: a file that was cut short is refused, a flipped bit in a tensor is not noticed. A checkpoint
of torch's own format (`path.pt`) is verified to the last byte; prefer it where nothing else asks for this one.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hapi import files

# The versions of the modules, by which a module knows a state dict that it wrote itself.
_VERSIONS = "hapi.versions"


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state dict, whole or not at all.

    Tensors that share memory are stored under each of their names, and each as a contiguous copy where it is not one.

    Raises:
        ImportError: The extra is not installed.
        TypeError: An entry is no tensor, or of a kind that the format has not.
        OSError: The file cannot be written.
    """
    save_file = _library("save to", path).save_file
    tensors = _separate(path, state)
    metadata = {"format": "pt", _VERSIONS: json.dumps(_versions(state))}

    def write_to(place: Path) -> None:
        try:
            save_file(tensors, place, metadata)
        except KeyError as error:  # of its table of dtypes
            dtype = error.args[0]
            keys = [key for key, tensor in tensors.items() if tensor.dtype == dtype]
            raise TypeError(
                f"network[{', '.join(map(repr, keys))}] is of {dtype}, which {path.name} cannot hold. "
                "Save to a path without .safetensors."
            ) from error
        except Exception as error:
            # The library reports a full disk as an error of its own.
            raise error if isinstance(error, OSError) else OSError(str(error)) from error

    with files.draft(path, write_to) as new:
        files.rename(new, path)


def read(path: Path) -> Mapping[str, torch.Tensor]:
    """Read a state dict, with every tensor on the CPU.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It was cut short, or is no such file.
        ImportError: The extra is not installed.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist, so nothing can be loaded from it. "
            "Give the path of the file, .safetensors included, and check the folder."
        )
    open_file = _library("load", path).safe_open
    try:
        with open_file(path, framework="pt", device="cpu") as file:
            entries = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            versions = json.loads((file.metadata() or {}).get(_VERSIONS, "{}"))
    except Exception as error:  # Damage shows as several types; each means the same to the user.
        raise ValueError(
            f"{path} is not a whole safetensors file ({error!s:.200}), so nothing was loaded from it. "
            "Load another file, or write it anew by model.save."
        ) from error
    known = versions if isinstance(versions, dict) else {}
    return files.state_dict_of(entries, {name: {"version": version} for name, version in known.items()})


def _library(purpose: str, path: Path) -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            f"{purpose} {path} needs safetensors, which is not installed. "
            'Run `pip install "torch-hapi[safetensors]"`, or use a path without .safetensors.'
        ) from error


def _separate(path: Path, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Contiguous tensors, of which no two share memory."""
    seen: set[int] = set()
    tensors = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
            kind = type(value).__name__ if not isinstance(value, torch.Tensor) else "a sparse or quantized tensor"
            raise TypeError(
                f"network[{key!r}] is {kind}, and {path.name} can hold only dense tensors. "
                "Save to a path without .safetensors."
            )
        tensor = value.detach().resolve_conj().resolve_neg().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        tensors[key] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return tensors


def _versions(state: Mapping[str, Any]) -> dict[str, Any]:
    metadata = getattr(state, "_metadata", None) or {}
    return {name: entry["version"] for name, entry in metadata.items() if "version" in entry}
