"""Which of torchvision's transforms can be done per batch: exact types, in orders whose meaning is known.

Whatever is not recognised is called per sample, as torchvision would. torchvision is never imported here: a
transform of its can only be met where it already is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hapi.datasets.pipeline import Normalize, Pipeline, Scale, Step, Window

_PIXELS, _BYTES, _FLOATS = "PIL image", "uint8 tensor", "floating tensor"


def recognise(transform: Any, shape: Sequence[int], known: Pipeline | None) -> Pipeline | None:
    """Turn a transform into a pipeline for batches.

    Args:
        transform: What the user passed; None means `ToTensor`.
        shape: (C, H, W) of the images.
        known: What this function made of the transform before; returned again if nothing has changed.

    Returns:
        The pipeline, or None where the transform must be called per sample.
    """
    if transform is None:
        return known if known is not None and known.steps == (Scale(),) else Pipeline((Scale(),))
    parts = _flat(transform)
    if parts is None:
        return None
    steps = _parse(parts, tuple(shape))
    if steps is None:
        return None
    if known is not None and known.steps == steps:
        return known
    return Pipeline(steps) if _agrees(parts, steps, shape[0]) else None


class _Part(NamedTuple):
    kind: str
    version: int
    transform: Any


class _State(NamedTuple):
    """What a sample is between two transforms."""

    form: str
    channels: int
    height: int
    width: int


def _flat(transform: Any) -> list[_Part] | None:
    kinds = _kinds()
    found = kinds.get(type(transform))
    if found is None or _altered(transform):
        return None
    kind, version = found
    if kind != "Compose":
        return [_Part(kind, version, transform)]
    parts: list[_Part] = []
    for inner in transform.transforms:
        flat = _flat(inner)
        if flat is None:
            return None
        parts += flat
    return parts


def _kinds() -> dict[type, tuple[str, int]]:
    names = ("Compose", "ToTensor", "ToImage", "ToDtype", "Normalize", "RandomCrop", "RandomHorizontalFlip")
    modules = ("torchvision.transforms.transforms", "torchvision.transforms.v2")
    return {
        getattr(sys.modules[module], name): (name, version)
        for version, module in enumerate(modules, 1)
        if module in sys.modules
        for name in names
        if hasattr(sys.modules[module], name)
    }


def _altered(transform: Any) -> bool:
    """Whether this one object does something else than its class says."""
    if "forward" in vars(transform) or "__call__" in vars(transform):
        return True
    return isinstance(transform, nn.Module) and bool(transform._forward_hooks or transform._forward_pre_hooks)


def _parse(parts: list[_Part], shape: tuple[int, ...]) -> tuple[Step, ...] | None:
    state = _State(_PIXELS, *shape)
    steps: list[Step] = []
    for part in parts:
        parsed = _PARSERS[part.kind](part, state)
        if parsed is None:
            return None
        step, state = parsed
        if step is None:
            continue
        if steps and part.kind == "RandomHorizontalFlip":
            step = _joined(steps, step)
        steps.append(step)
    return tuple(steps) if state.form == _FLOATS else None


def _joined(steps: list[Step], flip: Step) -> Step:
    """The flip together with a crop right before it, which is taken off the steps; otherwise the flip."""
    crop = steps[-1]
    if isinstance(crop, Window) and isinstance(flip, Window) and not crop.flip:
        steps.pop()
        return replace(crop, flip=flip.flip)
    return flip


_Parsed = tuple[Step | None, _State] | None


def _to_tensor(part: _Part, state: _State) -> _Parsed:
    return (Scale(), state._replace(form=_FLOATS)) if state.form == _PIXELS else None


def _to_image(part: _Part, state: _State) -> _Parsed:
    return (None, state._replace(form=_BYTES)) if state.form == _PIXELS else None


def _to_dtype(part: _Part, state: _State) -> _Parsed:
    transform = part.transform
    if state.form != _BYTES or transform.dtype is not torch.float32 or transform.scale is not True:
        return None
    return Scale(torch.float32, divide=False), state._replace(form=_FLOATS)


def _normalize(part: _Part, state: _State) -> _Parsed:
    mean, std = _numbers(part.transform.mean), _numbers(part.transform.std)
    lengths = (1, state.channels)
    if state.form != _FLOATS or len(mean) not in lengths or len(std) not in lengths or not all(std):
        return None
    return Normalize(mean, std), state


def _numbers(values: Any) -> tuple[float, ...]:
    values = values if isinstance(values, (list, tuple)) else [values]
    return tuple(values) if all(type(value) in (int, float) for value in values) else ()


def _random_crop(part: _Part, state: _State) -> _Parsed:
    transform = part.transform
    padding = _padding(transform.padding, part.version)
    plain = transform.padding_mode == "constant" and transform.pad_if_needed is False
    black = type(transform.fill) in (int, float) and transform.fill == 0
    if padding is None or not plain or not black:
        return None
    left, top, right, bottom = padding
    height, width = transform.size
    if height > state.height + top + bottom or width > state.width + left + right:
        return None
    return Window(padding, (height, width)), state._replace(height=height, width=width)


def _padding(value: Any, version: int) -> tuple[int, int, int, int] | None:
    """Left, top, right, bottom; v2 keeps left, right, top, bottom."""
    values = [0] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(type(entry) is int and entry >= 0 for entry in values) or len(values) not in (1, 2, 4):
        return None
    if len(values) < 4:
        return values[0], values[-1], values[0], values[-1]
    left, second, third, bottom = values
    return (left, second, third, bottom) if version == 1 else (left, third, second, bottom)


def _random_flip(part: _Part, state: _State) -> _Parsed:
    probability = part.transform.p
    if type(probability) not in (int, float):
        return None
    whole = Window((0, 0, 0, 0), (state.height, state.width), float(probability))
    return (whole if probability > 0 else None), state


_PARSERS = {
    "ToTensor": _to_tensor,
    "ToImage": _to_image,
    "ToDtype": _to_dtype,
    "Normalize": _normalize,
    "RandomCrop": _random_crop,
    "RandomHorizontalFlip": _random_flip,
}


def _agrees(parts: list[_Part], steps: tuple[Step, ...], channels: int) -> bool:
    """Whether the deterministic transforms, called on an image of all byte values, give the steps' very bits.

    They do with the torchvision that this was written for. One that computes otherwise, or a class that was
    patched at run time, is then called per sample instead of being imitated wrongly.
    """
    ramp = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(channels, 1, 1)
    sample: Any = as_pil(ramp)
    for part in parts:
        if part.kind not in ("RandomCrop", "RandomHorizontalFlip"):
            sample = part.transform(sample)
    ours = Pipeline(tuple(step for step in steps if not step.random)).transform(ramp[None])[0]
    if not isinstance(sample, Tensor):
        return False
    theirs = sample.as_subclass(Tensor)
    return theirs.dtype == ours.dtype and torch.equal(theirs, ours)


def as_pil(image: Tensor) -> Any:
    """The PIL image (mode L or RGB) of a (C, H, W) uint8 tensor, as torchvision hands it to a transform."""
    from PIL import Image

    array = (image[0] if image.shape[0] == 1 else image.permute(1, 2, 0)).numpy()
    return Image.fromarray(array)
