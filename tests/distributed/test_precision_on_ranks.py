"""Half precision, clipping and weights of one's own, together: the step of all ranks is the step of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import alone, same
from torch import Tensor, nn

import hapi
from hapi.distributed import group


def tokens(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that knows its weight: squared errors of those rows alone whose label is not negative."""
    counted = labels >= 0
    return ((outputs - labels).square() * counted).sum(), counted.sum()


LOSSES: dict[str, Any] = {"mean": nn.MSELoss(), "tokens": tokens}
PRECISIONS: dict[str, Any] = {
    "full": None,
    "bf16": "bf16",
    # A scale that a fixed number of steps does not move.
    "fp16": {"dtype": "float16", "init_loss_scaling": 1024.0, "use_dynamic_loss_scaling": False},
}


def norms_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The gradient's norm in each step of the optimizer, noted as it steps."""
    norms: list[float] = []

    def note(*_: Any) -> None:
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None)))

    optimizer.register_step_pre_hook(note)
    return norms


def data_of(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    # Numbers that half precision holds exactly, so that rounding alone differs.
    x = torch.randint(-8, 9, (n, 3), generator=generator) / 4
    return x, torch.randint(-3, 6, (n, 1), generator=generator) / 2


def network() -> nn.Module:
    net = nn.Linear(3, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.5, -0.25, 0.125]]))
        net.bias.fill_(0.25)
    return net


def train(n: int, loss: str, precision: str, accumulate: int, clip: float | None) -> tuple[list[float], ...]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    norms = norms_of(net, optimizer)
    model = hapi.Model(net).prepare(optimizer, LOSSES[loss], amp_configs=PRECISIONS[precision], clip_grad_norm=clip)
    history = model.fit(
        data_of(n), global_batch_size=4, accumulate_grad_batches=accumulate, epochs=2, shuffle=False, verbose=0
    )
    weights = [float(value) for parameter in net.parameters() for value in parameter.detach().flatten()]
    return weights, norms, history.history["loss"]


def by_hand(n: int, loss: str, accumulate: int, clip: float | None) -> tuple[list[float], ...]:
    """Plain torch in full precision, a window at a time."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    norms = norms_of(net, optimizer)
    x, y = data_of(n)
    losses = []
    for _ in range(2):
        total, weight = 0.0, 0.0
        for rows in torch.arange(n).split(4 * accumulate):
            outputs = net(x[rows])
            if loss == "mean":
                value, count = (outputs - y[rows]).square().sum(), torch.tensor(float(len(rows)))
            else:
                value, count = tokens(outputs, y[rows])
            optimizer.zero_grad()
            (value / count if count else value).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            total, weight = total + float(value.detach()), weight + float(count)
        losses.append(total / weight)
    weights = [float(value) for parameter in net.parameters() for value in parameter.detach().flatten()]
    return weights, norms, losses


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(("n", "accumulate"), [(13, 1), (14, 3), (2, 1)])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_those_of_plain_torch(ranks, loss, precision, n, accumulate, clip):
    wanted = by_hand(n, loss, accumulate, clip)
    tolerance = {"full": 1e-5, "fp16": 2e-2, "bf16": 4e-2}[precision]
    for run in (lambda *a: alone(train, *a), lambda *a: same(ranks(2).run(train, *a)),
                lambda *a: same(ranks(4).run(train, *a))):  # fmt: skip
        got = run(n, loss, precision, accumulate, clip)
        for values, alike in zip(got, wanted, strict=True):
            assert values == pytest.approx(alike, rel=tolerance, abs=tolerance)
        if clip is not None:
            assert max(got[1]) <= clip * 1.0001


def dynamic_scale(n: int) -> tuple[float, list[float], int]:
    """The scale that the ranks agree on while one of them overflows at the third step."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    taken: list[int] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    amp = {"dtype": "float16", "init_loss_scaling": 8.0, "incr_every_n_steps": 2, "incr_ratio": 2.0, "decr_ratio": 0.5}
    steps = [0]

    class Count(hapi.callbacks.Callback):
        def on_train_batch_begin(self, step, logs=None):
            steps[0] = step

    spoilt = group.get_world_size() - 1
    net.weight.register_hook(lambda g: g * math.inf if steps[0] == 2 and group.get_rank() == spoilt else g)
    model = hapi.Model(net).prepare(optimizer, tokens, amp_configs=amp)
    model.fit(data_of(n), global_batch_size=4, shuffle=False, callbacks=Count(), verbose=0)
    weights = [float(value) for parameter in net.parameters() for value in parameter.detach().flatten()]
    return model._engine.prepared.scaler.get_scale(), weights, len(taken)


def test_the_scale_moves_alike_on_all_ranks(ranks):
    # Steps 1 and 2 double it, 3 halves it, 4 and 5 double it again.
    scale, weights, taken = alone(dynamic_scale, 20)
    assert (scale, taken) == (16.0, 4)
    got = same(ranks(2).run(dynamic_scale, 20))
    assert (got[0], got[2]) == (scale, taken)
    assert got[1] == pytest.approx(weights, rel=4e-3, abs=4e-3)
