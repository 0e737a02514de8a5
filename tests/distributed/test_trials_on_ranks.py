"""Trials that every rank calls: the same values on each, as in one process, and nothing left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi import sizing

X = torch.randn(45, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


def trials(*, by_loader: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters(), lr=0.02), nn.CrossEntropyLoss())
    model.fit((X, Y), global_batch_size=12, verbose=0, seed=3)
    before = [value.clone() for value in (*net.state_dict().values(), *model.optimizer.state[net[0].weight].values())]
    hapi.seed(4)
    sweep = hapi.find_lr(model, (X, Y), global_batch_size=12, min_lr=1e-4, max_lr=10.0, steps=25)
    world = hapi.distributed.get_world_size()
    learnt = hapi.debug.overfit_batches(model, (X, Y), 2, 40, 12 // world, verbose=0)
    data: Any = (X, Y)
    if by_loader:
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 12 // world, shuffle=True)
    sizes = {} if by_loader else {"batch_size": 12 // world}
    values = hapi.debug.fast_dev_run(model, data, data, verbose=0, **sizes)
    after = [*net.state_dict().values(), *model.optimizer.state[net[0].weight].values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return {"losses": sweep.losses, "rates": sweep.rates, "learnt": learnt.history["loss"], "values": values}


def refuse() -> str:
    net = nn.Linear(6, 3)
    model = hapi.Model(net).prepare("sgd", nn.CrossEntropyLoss())
    known, sizing._runs_out = sizing._runs_out, lambda device: True
    try:
        hapi.find_batch_size(model, (X, Y))
    except RuntimeError as error:
        return str(error)
    finally:
        sizing._runs_out = known
    return ""


def loader_trials() -> dict[str, Any]:
    return trials(by_loader=True)


def test_as_in_one_process(ranks):
    alone = trials()
    each = ranks(2).run(trials)
    assert each[0] == each[1]
    for name in ("losses", "rates", "learnt"):
        assert each[0][name] == pytest.approx(alone[name], rel=1e-3), name
    assert each[0]["values"] == pytest.approx(alone["values"], rel=1e-4)
    assert each[0]["learnt"][-1] < each[0]["learnt"][0] / 2
    one, other = ranks(2).run(loader_trials)
    assert one == other
    for text in ranks(2).run(refuse):
        assert "was called in 2 processes" in text and "in one process" in text
