"""The gradient's norm in the logs: against a plain loop, and training as if nobody had looked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi.callbacks import Callback, GradientNorm

X = torch.randn(22, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)
STEPS = 6  # of an epoch


def model(net: nn.Module | None = None, fused: bool = False, **options: Any) -> hapi.Model:
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return hapi.Model(net).prepare(
        torch.optim.AdamW(net.parameters(), 0.05, fused=fused), nn.CrossEntropyLoss(), **options
    )


class Logged(Callback):
    """What the logs of each step hold, by the step's number over all epochs."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, Any]]] = []
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.seen.append((self.epoch * STEPS + step + 1, dict(logs)))

    def norms(self) -> dict[int, float]:
        return {step: float(logs["grad_norm"]) for step, logs in self.seen if "grad_norm" in logs}


def fit(subject: hapi.Model, *callbacks: Callback, epochs: int = 2, **options: Any) -> dict[int, float]:
    logged = Logged()
    options = {"log_freq": 1, "batch_size": 4, "seed": 7, "verbose": 0, "shuffle": False, **options}
    subject.fit((X, Y), epochs=epochs, callbacks=[logged, *callbacks], **options)
    return logged.norms()


def by_hand(accumulate: int, clip: float | None) -> tuple[nn.Module, dict[int, float]]:
    """A plain loop; the norm before clipping at each optimizer step."""
    net = model().network
    optimizer, norms = torch.optim.AdamW(net.parameters(), 0.05), {}
    for epoch in range(2):
        batches = list(zip(X.split(4), Y.split(4), strict=True))
        for first in range(0, STEPS, accumulate):
            x, y = (torch.cat(part) for part in zip(*batches[first : first + accumulate], strict=True))
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
            norms[epoch * STEPS + min(first + accumulate, STEPS)] = float(norm)
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return net, norms


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_it_is_the_norm_before_clipping(accumulate: int, clip: float | None) -> None:
    plain, subject = model(clip_grad_norm=clip), model(clip_grad_norm=clip)
    options = {"accumulate_grad_batches": accumulate}
    assert fit(plain, **options) == {}
    norms = fit(subject, GradientNorm(), **options)
    # Training has the same bits.
    for one, other in zip(plain.parameters(), subject.parameters(), strict=True):
        assert torch.equal(one, other)
    net, expected = by_hand(accumulate, clip)
    for one, other in zip(net.parameters(), subject.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    # Between two optimizer steps it is that of the last one.
    filled = {step: expected[max(s for s in expected if s <= step)] for step in range(min(expected), 2 * STEPS + 1)}
    assert norms == pytest.approx(filled, rel=1e-5)
    assert clip is None or min(expected.values()) > clip
    assert subject._engine.prepared.clip_grad_norm == clip and not subject.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_it_is_computed_at_log_points_alone(monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    calls, compute = [], nn.utils.get_total_norm
    monkeypatch.setattr(nn.utils, "get_total_norm", lambda *given: calls.append(1) or compute(*given))
    options = {"accumulate_grad_batches": accumulate}
    every = fit(model(), GradientNorm(), **options)
    calls.clear()
    # Lines and bars look at step 5 of each epoch, at which the update of step 4 or 5 is the last.
    norms = fit(model(), GradientNorm(), **options, log_freq=5)
    assert norms == {step: every[step] for step in (5, 11)} and len(calls) == 2
    assert fit(model(), GradientNorm(log_freq=3, name="grad_norm"), **options, log_freq=5) == {
        step: every[step] for step in (3, 6, 9, 12) if step in every
    }


def test_own_name_and_a_printed_line(capsys: pytest.CaptureFixture[str]) -> None:
    fit(model(), GradientNorm(name="steepness"), epochs=1, log_freq=3, verbose=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "step 3/6" in line]
    assert len(lines) == 1 and "steepness" in lines[0]


class Overflows(Callback):
    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        if step == 3:
            self.model._engine.prepared.scaler.update(2.0**60)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("fused", [False, True])
def test_under_fp16_it_is_unscaled(fused: bool, clip: float | None) -> None:
    def made() -> hapi.Model:
        return model(fused=fused, clip_grad_norm=clip, amp_configs={"dtype": "fp16", "init_loss_scaling": 1024.0})

    plain, subject = made(), made()
    fit(plain, Overflows(), epochs=1)
    norms = fit(subject, Overflows(), GradientNorm(), epochs=1)
    for one, other in zip(plain.parameters(), subject.parameters(), strict=True):
        assert torch.equal(one, other)
    _, expected = by_hand(1, clip)
    assert [norms[step] for step in (1, 2, 3)] == pytest.approx([expected[step] for step in (1, 2, 3)], rel=2e-2)
    # Of steps that are skipped: the last one that was taken; a fused optimizer is called for them too.
    assert not math.isfinite(norms[6]) if fused else norms[6] == norms[3]


def test_own_hooks_come_after_it_and_the_error_leaves_clipping() -> None:
    class Fails(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise KeyError

    subject, seen = model(clip_grad_norm=0.3), []
    subject.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(nn.utils.get_total_norm([p.grad for p in subject.parameters()])))
    )
    with pytest.raises(KeyError):
        fit(subject, GradientNorm(), Fails())
    assert seen == pytest.approx([0.3] * STEPS, rel=1e-4)
    assert subject._engine.prepared.clip_grad_norm == 0.3 and len(subject.optimizer._optimizer_step_pre_hooks) == 1


def test_two_of_them_leave_clipping_as_it_was() -> None:
    plain, subject = model(clip_grad_norm=0.3), model(clip_grad_norm=0.3)
    logged = Logged()
    fit(plain)
    fit(subject, GradientNorm(), GradientNorm(name="again"), logged)
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), subject.parameters(), strict=True))
    assert all(logs["grad_norm"] == logs["again"] for _, logs in logged.seen) and len(logged.seen) == 2 * STEPS
    assert subject._engine.prepared.clip_grad_norm == 0.3 and not subject.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_gradients(sparse: bool) -> None:
    torch.manual_seed(0)
    net = nn.EmbeddingBag(10, 3, sparse=sparse, mode="sum")
    subject = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
    gradient = -net.weight.detach().clone()
    logged = Logged()
    # Token 1 comes twice: its two parts have to be added up before they are squared.
    subject.fit(
        (torch.tensor([[1, 1, 4]]), torch.tensor([1])), verbose=0, log_freq=1, callbacks=[GradientNorm(), logged]
    )
    gradient = (gradient + net.weight.detach()) / -0.1
    assert logged.norms() == {1: pytest.approx(float(gradient.norm()), rel=1e-5)}


@pytest.mark.parametrize(("log_freq", "written"), [(0, 10), (-1, 10), (2.0, 2), (2.5, 10), (True, 10)])
def test_a_log_freq_that_counts_nothing(log_freq: Any, written: int) -> None:
    error, why = (ValueError, "it counts steps from 1") if type(log_freq) is int else (TypeError, "not a whole number")
    with pytest.raises(error, match=rf"log_freq=.*{why}.*Write log_freq={written}\."):
        GradientNorm(log_freq=log_freq)


@pytest.mark.parametrize("names", [("loss",), ("lr",), ("norm", "norm")])
def test_a_name_that_the_logs_have_already(names: tuple[str, ...]) -> None:
    subject = model(clip_grad_norm=0.1)
    with pytest.raises(ValueError, match=rf"GradientNorm received name='{names[0]}'.*would hide the other. Write name"):
        fit(subject, *(GradientNorm(name=name) for name in names))
    assert subject._engine.prepared.clip_grad_norm == 0.1
