"""Samples and batches, by index, through loaders and processes."""

from __future__ import annotations

import pickle

import pytest
import torch
from made_images import AUGMENT, GRAY, MEAN, STD, images, whole_batch
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision.transforms import transforms as v1


def test_indices() -> None:
    data = images(GRAY, count=5)
    assert torch.equal(data[-1][0], data[4][0])
    assert data[torch.tensor(2)][1] == 2
    assert [y for _, y in data] == [0, 1, 2, 3, 4]
    assert [y for _, y in data.__getitems__([4, -5, 4])] == [4, 0, 4]
    for index in (5, -6):
        with pytest.raises(IndexError, match=r"index -?\d, but it holds 5 samples. Use 0 to 4"):
            data[index]
    with pytest.raises(TypeError):
        data[1.5]
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        data.fetch_batch(torch.tensor([5]))


def test_an_empty_batch_keeps_its_shape() -> None:
    data = images(transform=AUGMENT)
    x, y = data.finish_batch(data.fetch_batch(torch.empty(0, dtype=torch.int64)))
    assert (x.shape, x.dtype, y.shape) == ((0, 3, 32, 32), torch.float32, (0,))


def test_a_batch_is_finished_where_it_lies() -> None:
    # The meta device refuses whatever would read values back, as a device would be made to wait for it.
    data = images(transform=AUGMENT)
    batch = tuple(part.to("meta") for part in data.fetch_batch(torch.arange(8)))
    x, _ = data.finish_batch(batch)
    assert (x.device.type, x.shape, x.dtype) == ("meta", (8, 3, 32, 32), torch.float32)


def test_a_fetched_batch_is_not_changed_by_finishing_it() -> None:
    data = images(transform=AUGMENT)
    batch = data.fetch_batch(torch.arange(8))
    raw = batch[0].clone()
    data.finish_batch(batch)
    assert batch[0].dtype == torch.uint8
    assert torch.equal(batch[0], raw)
    assert torch.equal(data.data[:8], raw)


def test_data_that_the_user_filtered_is_what_is_indexed() -> None:
    data = images(transform=v1.ToTensor())
    keep = data.targets < 3
    data.data, data.targets = data.data[keep], data.targets[keep]
    assert len(data) == 12
    assert whole_batch(data).shape == (12, 3, 32, 32)


def test_inference_mode_does_not_leak_into_training() -> None:
    data = images(transform=v1.Compose([v1.ToTensor(), v1.Normalize((0.11,), (0.77,))]))
    with torch.inference_mode():
        inferred = whole_batch(data).clone()
    batch = whole_batch(data)
    assert torch.equal(batch, inferred)
    layer = nn.Conv2d(3, 1, 3)
    layer(batch).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_plain_data_loader_reads_it(workers: int) -> None:
    data = images(transform=v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)]))
    loader = DataLoader(Subset(data, range(30)), batch_size=8, num_workers=workers)
    batches = list(loader)
    assert [len(y) for _, y in batches] == [8, 8, 8, 6]
    assert torch.equal(torch.cat([x for x, _ in batches]), whole_batch(data)[:30])
    assert torch.cat([y for _, y in batches]).tolist() == data.targets[:30].tolist()


def test_it_survives_pickling() -> None:
    data = images(transform=AUGMENT, count=6)
    whole_batch(data)
    copy = pickle.loads(pickle.dumps(data))
    assert copy.batched
    assert torch.equal(copy.data, data.data)
    torch.manual_seed(1)
    first = whole_batch(data)
    torch.manual_seed(1)
    assert torch.equal(whole_batch(copy), first)
