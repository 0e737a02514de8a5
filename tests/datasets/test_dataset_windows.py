"""Random crops and flips of whole batches: torchvision's pixels for the same draws, drawn anew for each sample."""

from __future__ import annotations

import itertools

import pytest
import torch
from made_images import AUGMENT, MEAN, STD, images, whole_batch
from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1

from hapi.datasets.pipeline import Window


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_windows_hold_the_pixels_of_torchvisions_crops_and_flips(dtype: torch.dtype) -> None:
    window = Window((4, 4, 4, 4), (32, 32), 0.5)
    draws = list(itertools.product(range(9), range(9), (False, True)))
    batch = images(count=len(draws)).data.to(dtype)
    padded = F.pad(batch, [4])
    expected = [F.crop(image, top, left, 32, 32) for image, (top, left, _) in zip(padded, draws, strict=True)]
    expected = [F.hflip(image) if draw[2] else image for image, draw in zip(expected, draws, strict=True)]
    rows, columns, mirrored = (torch.tensor(values) for values in zip(*draws, strict=True))
    assert torch.equal(window.cut(batch, rows, columns, mirrored), torch.stack(expected))


@pytest.mark.parametrize(
    ("padding", "size", "flip"),
    [
        ((0, 0, 0, 0), (20, 25), 0.0),
        ((0, 0, 0, 0), (20, 25), 0.5),
        ((3, 0, 1, 2), (33, 34), 0.5),
        ((3, 0, 1, 2), (33, 34), 0.0),
        ((0, 5, 2, 0), (1, 1), 0.5),
        ((0, 0, 0, 0), (32, 32), 0.5),
    ],
)
def test_windows_of_other_sizes(
    padding: tuple[int, int, int, int], size: tuple[int, int], flip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Window(padding, size, flip)
    batch = images(count=60).data
    padded = F.pad(batch, list(padding))
    places = padded.shape[2] - size[0] + 1, padded.shape[3] - size[1] + 1
    rows, columns, mirrored = window.draw(batch.shape)
    for drawn, count in zip((rows, columns), places, strict=True):
        assert 0 <= int(drawn.min()) <= int(drawn.max()) < count
    expected = []
    for index in range(60):
        image = F.crop(padded[index], int(rows[index]), int(columns[index]), *size)
        expected.append(F.hflip(image) if mirrored[index] else image)
    assert bool(mirrored.any()) == (flip > 0)
    monkeypatch.setattr(Window, "draw", lambda self, shape: (rows, columns, mirrored))
    assert torch.equal(window(batch), torch.stack(expected))


def test_random_windows_are_drawn_evenly_and_anew_for_each_sample() -> None:
    torch.manual_seed(3)
    rows, columns, mirrored = Window((4, 4, 4, 4), (32, 32), 0.25).draw(torch.Size((16_200, 3, 32, 32)))
    counts = (rows * 9 + columns).bincount(minlength=81)
    assert counts.shape == (81,)
    assert 120 < int(counts.min()) <= int(counts.max()) < 290  # 200 on average, standard deviation 14
    assert 0.23 < float(mirrored.float().mean()) < 0.27
    assert (rows != columns).any()


def test_chance_comes_from_the_global_generator_alone() -> None:
    data = images(transform=AUGMENT)
    data.data[:] = data.data[:1]
    torch.manual_seed(5)
    first = whole_batch(data)
    second = whole_batch(data)
    torch.manual_seed(5)
    assert torch.equal(whole_batch(data), first)
    assert not torch.equal(first, second)
    # One image, forty draws of 162 possible outcomes.
    assert len({bytes(image.flatten().view(torch.uint8).tolist()) for image in first}) > 20
    torch.manual_seed(5)
    assert torch.equal(torch.stack([x for x, _ in data.__getitems__(list(range(40)))]), first)


def test_an_augmented_sample_is_one_of_torchvisions_possible_ones() -> None:
    data = images(transform=AUGMENT, count=4)
    padded = F.pad(data.data[2], [4])
    possible = [
        v1.Normalize(MEAN, STD)(crop.float().div(255))
        for top, left in itertools.product(range(9), range(9))
        for crop in (F.crop(padded, top, left, 32, 32), F.hflip(F.crop(padded, top, left, 32, 32)))
    ]
    for _ in range(20):
        x, y = data[2]
        assert y == 2
        assert any(torch.equal(x, candidate) for candidate in possible)
