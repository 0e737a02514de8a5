"""Deterministic transforms of whole batches have the bits of torchvision's, which work sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torchvision
from made_images import COLOUR, GRAY, MEAN, STD, images, sample_by_sample, v2_float, whole_batch
from torch import Tensor
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from hapi.datasets import CIFAR10, MNIST, FashionMNIST


def v2_to_tensor() -> Any:
    with pytest.warns(UserWarning, match="deprecated"):
        return v2.ToTensor()


# Without chance: crops of the padded image's own size, flips of probability 1.
DETERMINISTIC = {
    "ToTensor": lambda: v1.ToTensor(),
    "ToTensor, Normalize": lambda: v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "one number for all channels": lambda: v1.Compose([v1.ToTensor(), v1.Normalize((0.5,), (0.3,))]),
    "Normalize in place": lambda: v1.Compose([v1.ToTensor(), v1.Normalize([0.5] * 3, STD, inplace=True)]),
    "twice normalized": lambda: v1.Compose(
        [v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)]), v1.Normalize((1, 2, 3), (4, 5, 6))]
    ),
    "v2": lambda: v2.Compose(v2_float()),
    "v2, Normalize": lambda: v2.Compose([*v2_float(), v2.Normalize(MEAN, STD)]),
    "v2 in v1": lambda: v1.Compose([*v2_float(), v1.Normalize(MEAN, STD)]),
    "v1 in v2": lambda: v2.Compose([v1.ToTensor(), v2.Normalize(MEAN, STD)]),
    "v2.ToTensor": lambda: v2.Compose([v2_to_tensor(), v2.Normalize(MEAN, STD)]),
    "padding": lambda: v1.Compose([v1.RandomCrop(40, padding=4), v1.ToTensor()]),
    "padding, two numbers": lambda: v1.Compose([v1.RandomCrop((36, 34), padding=(1, 2)), v1.ToTensor()]),
    "padding, four numbers": lambda: v1.Compose([v1.RandomCrop((38, 36), [1, 2, 3, 4]), v1.ToTensor()]),
    "v2 padding": lambda: v2.Compose([v2.RandomCrop(40, padding=4), *v2_float()]),
    "v2 padding, two numbers": lambda: v2.Compose([v2.RandomCrop((36, 34), padding=(1, 2)), *v2_float()]),
    "v2 padding, four numbers": lambda: v2.Compose([v2.RandomCrop((38, 36), [1, 2, 3, 4]), *v2_float()]),
    "a crop of the whole": lambda: v1.Compose([v1.RandomCrop(32), v1.ToTensor()]),
    "flip": lambda: v1.Compose([v1.RandomHorizontalFlip(1.0), v1.ToTensor()]),
    "no flip": lambda: v1.Compose([v1.RandomHorizontalFlip(0.0), v1.ToTensor()]),
    "v2 flip behind": lambda: v2.Compose([*v2_float(), v2.RandomHorizontalFlip(1.0)]),
    "flipped twice": lambda: v1.Compose([v1.RandomHorizontalFlip(1.0), v1.RandomHorizontalFlip(1.0), v1.ToTensor()]),
    "padded unevenly, then flipped": lambda: v1.Compose(
        [v1.RandomCrop((38, 36), [1, 2, 3, 4]), v1.RandomHorizontalFlip(1.0), v1.ToTensor()]
    ),
    "flipped, then padded unevenly": lambda: v1.Compose(
        [v1.RandomHorizontalFlip(1.0), v1.RandomCrop((38, 36), [1, 2, 3, 4]), v1.ToTensor()]
    ),
    "padded after Normalize": lambda: v1.Compose(
        [v1.ToTensor(), v1.Normalize(MEAN, STD), v1.RandomCrop(40, padding=4)]
    ),
    "padded between uint8 and float": lambda: v2.Compose(
        [v2.ToImage(), v2.RandomCrop(40, padding=4), v2.ToDtype(torch.float32, scale=True)]
    ),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_batch_has_the_bits_of_torchvision(name: str) -> None:
    transform = DETERMINISTIC[name]()
    data = images(transform=transform)
    raw = data.data.clone()
    assert data.batched
    batch = whole_batch(data)
    expected = sample_by_sample(data, transform)
    assert batch.dtype == torch.float32
    assert batch.is_contiguous()
    assert torch.equal(batch, expected)
    assert torch.equal(torch.stack([data[index][0] for index in range(len(data))]), expected)
    assert torch.equal(data.data, raw)


def test_without_a_transform_images_are_as_from_to_tensor() -> None:
    for shape in (GRAY, COLOUR):
        data = images(shape)
        assert data.batched
        assert torch.equal(whole_batch(data), sample_by_sample(data, v1.ToTensor()))
        x, y = data[3]
        assert (x.shape, x.dtype, y, type(y)) == (shape, torch.float32, 3, int)


def test_to_tensor_follows_the_default_dtype() -> None:
    data = images(transform=v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)]))
    torch.set_default_dtype(torch.float64)
    try:
        assert whole_batch(data).dtype == torch.float64
        assert torch.equal(whole_batch(data), sample_by_sample(data, data.transform))
    finally:
        torch.set_default_dtype(torch.float32)
    assert whole_batch(data).dtype == torch.float32


def all_forms(image: Any) -> Tensor:
    """Every deterministic form of one image, one behind the other."""
    mean, std = (0.3,), (0.4,)
    plain = v1.ToTensor()(image)
    scaled = TO_FLOAT(image)
    forms = [plain, v1.Normalize(mean, std)(plain), scaled, v2.Normalize(mean, std)(scaled)]
    return torch.stack([form.as_subclass(Tensor) for form in forms])


TO_FLOAT = v2.Compose(v2_float())
FORMS = (
    v1.ToTensor(),
    v1.Compose([v1.ToTensor(), v1.Normalize((0.3,), (0.4,))]),
    TO_FLOAT,
    v2.Compose([*v2_float(), v2.Normalize((0.3,), (0.4,))]),
)


class Cifar10AsFound(torchvision.datasets.CIFAR10):
    """torchvision's reader for files that need not be the published ones."""

    train_list: ClassVar = [[name, None] for name, _ in torchvision.datasets.CIFAR10.train_list]
    test_list: ClassVar = [[name, None] for name, _ in torchvision.datasets.CIFAR10.test_list]


@pytest.mark.filterwarnings("ignore:.*byte for byte")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (MNIST, torchvision.datasets.MNIST),
        pytest.param(FashionMNIST, torchvision.datasets.FashionMNIST, marks=pytest.mark.slow),
        (CIFAR10, Cifar10AsFound),
    ],
)
def test_whole_test_parts_have_the_bits_of_torchvision(data_home: Path, ours: Any, theirs: Any) -> None:
    reference = theirs(data_home, train=False, transform=all_forms)
    data = ours(data_home, mode="test", download=False)
    assert len(data) == len(reference) == 10_000
    assert data.classes == reference.classes
    assert data.targets.tolist() == [int(target) for target in reference.targets]
    for part in torch.arange(10_000).split(2_000):
        expected = torch.stack([reference[index][0] for index in part.tolist()], dim=1)
        for form, values in zip(FORMS, expected, strict=True):
            data.transform = form
            assert data.batched
            assert torch.equal(data.finish_batch(data.fetch_batch(part))[0], values)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("name", ["ToTensor, Normalize", "v2, Normalize", "padded unevenly, then flipped"])
def test_a_batch_has_the_same_bits_on_any_device(device: str, name: str) -> None:
    data = images(transform=DETERMINISTIC[name]())
    x, y = data.fetch_batch(torch.arange(len(data)))
    finished = data.finish_batch((x.to(device), y.to(device)))
    assert finished[0].device.type == finished[1].device.type == device
    assert torch.equal(finished[0].cpu(), sample_by_sample(data, data.transform))
