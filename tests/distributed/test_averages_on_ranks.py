"""The average of the weights, and the gradient's norm, at any number of ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_within import Ended
from torch import nn

import hapi
from hapi.callbacks import EMA, Callback, GradientNorm, ModelCheckpoint

X = torch.randn(45, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


class Norms(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if "grad_norm" in logs:  # from the first optimizer step on
            self.seen.append(float(logs["grad_norm"]))


class Cut(Callback):
    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        if self.model.steps_trained == 6:
            raise Ended


def made(norm: bool) -> hapi.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    return hapi.Model(net).prepare(optimizer, nn.CrossEntropyLoss(), clip_grad_norm=0.5)


def trained(norm: bool, folder: Path | None, epochs: int, cut: bool = False, **options: Any) -> dict[str, Any]:
    model, ema, norms = made(norm), EMA(0.8), Norms()
    callbacks = [
        ema,
        GradientNorm(),
        norms,
        *([ModelCheckpoint(every_n_steps=2)] if folder else []),
        *([Cut()] if cut else []),
    ]
    history = model.fit(
        (X, Y), (X, Y), epochs=epochs, global_batch_size=12, accumulate_grad_batches=2, seed=3, verbose=0, log_freq=1,
        callbacks=callbacks, save_dir=folder, **options,
    ).history  # fmt: skip
    value = model.evaluate((X, Y), batch_size=8, verbose=0, callbacks=ema)["loss"]
    with ema.applied():
        averages = {name: tensor.tolist() for name, tensor in model.network.state_dict().items()}
    return {"history": history, "averages": averages, "value": value, "norms": norms.seen, "updates": ema.updates}


def check_resumed(folder: Path) -> None:
    straight = trained(True, folder / "straight", 3)
    with contextlib.suppress(Ended):
        trained(True, folder / "cut", 3, cut=True)
    resumed = trained(True, folder / "cut", 3, resume=True)
    assert resumed.pop("norms") == straight.pop("norms")[6:]
    assert resumed == straight


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_as_in_one_process(ranks, world):
    alone = trained(False, None, 2)
    assert alone["updates"] == 4 and len(alone["norms"]) == 7
    for each in ranks(world).run(trained, False, None, 2):
        assert each["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert each["value"] == pytest.approx(alone["value"], rel=1e-5)
        for name, rows in alone["averages"].items():
            torch.testing.assert_close(torch.tensor(each["averages"][name]), torch.tensor(rows), msg=name)


def test_statistics_are_rank_0s_and_a_resumed_run_has_the_same_bits(ranks, tmp_path):
    one, other = ranks(2).run(trained, True, None, 2)
    assert one == other
    ranks(2).run(check_resumed, tmp_path)
