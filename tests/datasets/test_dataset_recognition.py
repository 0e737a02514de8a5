"""Which transforms are done per batch, and that all others are called per sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_images import MEAN, STD, images, sample_by_sample, v2_float, whole_batch
from torch import nn
from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from hapi.datasets.recognise import as_pil


class Doubled(v1.ToTensor):
    def __call__(self, pic: Any) -> Any:
        return super().__call__(pic) * 2


def with_hook() -> Any:
    normalize = v1.Normalize(MEAN, STD)
    normalize.register_forward_hook(lambda module, inputs, output: output + 1)
    return v1.Compose([v1.ToTensor(), normalize])


def with_own_forward() -> Any:
    normalize = v2.Normalize(MEAN, STD)
    normalize.forward = lambda x: x + 2
    return v1.Compose([v1.ToTensor(), normalize])


def crop_with_hook() -> Any:
    crop = v1.RandomCrop(40, padding=4)
    crop.register_forward_pre_hook(lambda module, inputs: (inputs[0].rotate(180),))
    return crop


def flip_with_own_forward() -> Any:
    flip = v2.RandomHorizontalFlip(1.0)
    flip.forward = lambda image: image.rotate(90)
    return flip


def to_tensor_and(*parts: Any) -> Any:
    return v1.Compose([*parts, v1.ToTensor()])


UNRECOGNISED = {
    "a function": lambda: lambda image: F.to_tensor(image).sqrt(),
    "a subclass": Doubled,
    "a forward hook": with_hook,
    "an instance's own forward": with_own_forward,
    "a crop with a hook": lambda: to_tensor_and(crop_with_hook()),
    "a flip's own forward": lambda: to_tensor_and(flip_with_own_forward()),
    "nn.Sequential": lambda: nn.Sequential(*v2_float()),
    "an unknown part": lambda: to_tensor_and(v1.Pad(2)),
    "Lambda": lambda: to_tensor_and(v1.Lambda(lambda image: image.rotate(90))),
    "fill": lambda: to_tensor_and(v1.RandomCrop(40, padding=4, fill=7)),
    "reflected": lambda: to_tensor_and(v1.RandomCrop(40, padding=4, padding_mode="reflect")),
    "padded if needed": lambda: to_tensor_and(v1.RandomCrop(36, pad_if_needed=True, padding=2)),
    "not scaled": lambda: v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32)]),
    "doubles": lambda: v2.Compose([v2.ToImage(), v2.ToDtype(torch.float64, scale=True)]),
    "dtypes by kind": lambda: v2.Compose([v2.ToImage(), v2.ToDtype({"others": torch.float32}, scale=True)]),
    "ends in uint8": lambda: v2.ToImage(),
    "tensor mean": lambda: v1.Compose([v1.ToTensor(), v1.Normalize(torch.tensor(MEAN), torch.tensor(STD))]),
}


@pytest.mark.parametrize("name", UNRECOGNISED)
def test_other_transforms_are_called_per_sample(name: str) -> None:
    transform = UNRECOGNISED[name]()
    data = images(transform=transform, count=6)
    assert not data.batched
    assert torch.equal(whole_batch(data), sample_by_sample(data, transform))
    assert torch.equal(torch.as_tensor(data[4][0]), torch.as_tensor(transform(as_pil(data.data[4]))))


@pytest.mark.parametrize(
    ("transform", "error", "match"),
    [
        (v1.Compose([v1.RandomCrop(33), v1.ToTensor()]), ValueError, "larger than input image size"),
        (v1.Compose([v1.Normalize(MEAN, STD), v1.ToTensor()]), TypeError, "img should be Tensor"),
        (v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, (0, 1, 1))]), ValueError, "zero"),
        (v1.RandomHorizontalFlip(), TypeError, r"gives Image, of which no batch.*end in a tensor: Compose"),
    ],
)
def test_transforms_that_cannot_work_fail_as_torchvision_fails(transform: Any, error: type, match: str) -> None:
    data = images(transform=transform, count=2)
    assert not data.batched
    with pytest.raises(error, match=match):
        data.fetch_batch(torch.arange(2))


def test_what_is_patched_at_run_time_is_not_imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    original = v1.ToTensor.__call__
    monkeypatch.setattr(v1.ToTensor, "__call__", lambda self, pic: original(self, pic) * 0.5)
    data = images(transform=v1.ToTensor(), count=4)
    assert not data.batched
    assert torch.equal(data[0][0], data.data[0].float().div(255) * 0.5)


def test_a_transform_may_be_replaced_or_changed_in_place() -> None:
    compose = v1.Compose([v1.ToTensor()])
    data = images(transform=compose, count=4)
    plain = whole_batch(data)
    compose.transforms.append(v1.Normalize(MEAN, STD))
    assert data.batched
    assert torch.equal(whole_batch(data), v1.Normalize(MEAN, STD)(plain))
    assert torch.equal(data[1][0], v1.Normalize(MEAN, STD)(plain[1]))
    compose.transforms.append(lambda x: x + 1)
    assert not data.batched
    data.transform = None
    assert data.batched
    assert torch.equal(whole_batch(data), plain)
    with pytest.raises(TypeError, match="cannot be called"):
        data.transform = 3
