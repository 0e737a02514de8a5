"""Data sets of made images, and the transforms of whole batches against those sample by sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from hapi.datasets.files import Loaded
from hapi.datasets.images import ImageDataset
from hapi.datasets.recognise import as_pil

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
COLOUR, GRAY = (3, 32, 32), (1, 28, 28)


def images(shape: tuple[int, int, int] = COLOUR, count: int = 40, transform: Any = None) -> ImageDataset:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    loaded = Loaded(data, torch.arange(count) % 10, [str(label) for label in range(10)], [])
    return ImageDataset(loaded, "train", None, transform)


def whole_batch(data: ImageDataset) -> Tensor:
    batch = data.finish_batch(data.fetch_batch(torch.arange(len(data))))
    assert torch.equal(batch[1], data.targets)
    return batch[0]


def sample_by_sample(data: ImageDataset, transform: Any) -> Tensor:
    return torch.stack([transform(as_pil(image)) for image in data.data]).as_subclass(Tensor)


def v2_float() -> list[Any]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


AUGMENT = v1.Compose([v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)])
