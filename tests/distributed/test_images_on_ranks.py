"""TensorBoard's images: predicted by all ranks, written by rank 0, and the training goes on as without them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from ranks import same
from torch import nn

import hapi
from hapi.callbacks import TensorBoard

pytest.importorskip("tensorboard")


def train(folder: str | None) -> tuple[list[float], dict[str, list[float]]]:
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.rand(11, 1, 3, 2, generator=generator), torch.randint(3, (11,), generator=generator)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 3))
    model = hapi.Model(network).prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    shown = None if folder is None else TensorBoard(folder, graph=True, hparams={}, images=(images, labels))
    history = model.fit((images, labels), batch_size=2, epochs=2, seed=3, verbose=0, callbacks=shown)
    return network[2].weight.flatten().tolist(), history.history


def test_all_ranks_predict_and_rank_0_draws(ranks, tmp_path: Path) -> None:
    shown = same(ranks(2).run(train, str(tmp_path)))
    assert shown == same(ranks(2).run(train, None))
    assert len(list(tmp_path.iterdir())) == 1
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in found.Images("images/wrong")] == [3, 6]
    assert [event.step for event in found.Scalars("epoch/acc")] == [3, 6]


def one_rank_asks(folder: str) -> None:
    images = torch.rand(4, 1, 3, 2)
    labels = torch.tensor([0, 1, 2, 0])
    model = hapi.Model(nn.Sequential(nn.Flatten(), nn.Linear(6, 3))).prepare("adam", nn.CrossEntropyLoss())
    asked = [TensorBoard(folder, images=(images, labels))] if hapi.distributed.get_rank() == 0 else []
    with pytest.raises(ValueError, match="callbacks"):
        model.fit((images, labels), batch_size=2, verbose=0, callbacks=asked)


def test_images_that_one_rank_alone_asks_for_are_refused(ranks, tmp_path: Path) -> None:
    ranks(2).run(one_rank_asks, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
