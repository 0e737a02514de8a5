"""What stands around the network, or in it: compilation, normalisation over ranks, devices, losses that reach in.

torch's SyncBatchNorm refuses the CPU. `OverRanks` is one that does not, with the same exchanges: it waits for every
rank in its forward and in its backward pass.
"""

from __future__ import annotations

from functools import partialmethod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closed_form import Line, mean_output, ramp
from ranks import alone, same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import hapi
from hapi import setup
from hapi.distributed import group

# DDP refuses such a layer on the CPU before it has seen what it does.
on_the_cpu = mock.patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda self, module: None)


class SumOverRanks(torch.autograd.Function):
    """A sum over ranks whose gradient is that of all ranks' losses."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class OverRanks(nn.SyncBatchNorm):
    """Normalises by mean and variance over all ranks' samples."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        OverRanks.calls += 1
        sums = torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([len(x)])])
        if dist.is_initialized():
            sums = SumOverRanks.apply(sums)
        count = sums[-1].detach()
        mean = sums[: self.num_features] / count
        variance = sums[self.num_features : -1] / count - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), self.momentum)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class Normalised(nn.Module):
    """x: (N, 3) -> (N, 2), and a dict beside it, as networks have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.norm, self.last = nn.Linear(3, 4), OverRanks(4), nn.Linear(4, 2)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.first(x)).tanh())


class Stream(IterableDataset):
    """Rows in order."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Any:
        return iter(zip(self.x, self.y, strict=True))


LOSSES = {
    "mean": nn.MSELoss(),
    "pair": lambda o, y: ((o - y).square().sum(), torch.tensor(float(o.numel()))),
}


@on_the_cpu
def normalise(n: int, batch: int, kind: str, loss: str, accumulate: int) -> tuple[list[float], list[float], float, int]:
    """Train in global batches; losses, state, what evaluate gives then, and the forward passes of the normalisation."""
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)
    net = Normalised()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1), LOSSES[loss])
    each = batch // group.get_world_size()
    data, options = {
        "tensors": ((x, y), {"global_batch_size": batch, "shuffle": False}),
        "iterable": (Stream(x, y), {"batch_size": each}),
        "loader": (DataLoader(torch.utils.data.TensorDataset(x, y), each), {}),
    }[kind]
    OverRanks.calls = 0
    losses = model.fit(data, epochs=2, accumulate_grad_batches=accumulate, verbose=0, **options).history["loss"]
    calls = OverRanks.calls
    state = [float(value) for tensor in net.state_dict().values() for value in tensor.flatten()]
    return losses, state, model.evaluate((x, y), batch_size=each, verbose=0)["loss"], calls


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["tensors", "iterable", "loader"])
@pytest.mark.parametrize(("n", "accumulate"), [(13, 1), (3, 1), (18, 3)])
def test_normalisation_over_ranks_is_that_of_one_process(ranks, n, accumulate, kind, loss):
    # Steps of 4 samples on 4 ranks: the last one leaves ranks without any; of 3 samples there is no other step.
    wanted = alone(normalise, n, 4, "tensors", loss, accumulate)
    losses, state, evaluated, calls = same(ranks(4).run(normalise, n, 4, kind, loss, accumulate))
    assert calls == wanted[3] == 2 * -(-n // 4)
    assert losses == pytest.approx(wanted[0], rel=1e-4)
    assert state == pytest.approx(wanted[1], rel=1e-3, abs=1e-5)
    assert evaluated == pytest.approx(wanted[2], rel=1e-4)


def test_batchnorm_becomes_one_over_all_ranks_by_a_flag(monkeypatch):
    # On a device that computes nothing: torch has SyncBatchNorm for accelerators alone.
    monkeypatch.setattr(setup, "current_device", lambda: torch.device("meta"))
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()))
    names = list(net.state_dict())
    hapi.Model(net).prepare(sync_batchnorm=True)._engine.ready()
    assert [type(module) for module in (net[1], net[2][0])] == [nn.SyncBatchNorm] * 2
    assert list(net.state_dict()) == names


def compiled(wanted: bool) -> tuple[list[float], list[float], list[str]]:
    """Three windows of two static batches, and one of a single batch."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(28, 3, generator=generator), torch.randn(28, 2, generator=generator)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = hapi.Model(net).prepare(optimizer, nn.MSELoss(), compile=wanted)
    history = model.fit((x, y), global_batch_size=4, epochs=2, shuffle=False, accumulate_grad_batches=2, verbose=0)
    assert (net._compiled_call_impl is not None) == wanted
    weights = [float(value) for parameter in net.parameters() for value in parameter.detach().flatten()]
    return history.history["loss"], weights, list(net.state_dict())


@pytest.mark.slow
def test_a_compiled_network_trains_on_ranks_as_an_eager_one(ranks):
    eager = alone(compiled, False)
    # Where several processes compile on a busy machine it takes its time.
    losses, weights, names = same(ranks(2).run(compiled, True, timeout=240.0))
    assert names == eager[2]
    assert losses == pytest.approx(eager[0], rel=1e-5)
    assert weights == pytest.approx(eager[1], rel=1e-4, abs=1e-6)


def counted(wanted: bool, global_batch: int, accumulate: int, amp: str | None) -> tuple[list[float], list[int], int]:
    """Losses of 2 epochs over 22 samples, the rows of what this rank has compiled, and the rows of its full batches."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(22, 3, generator=generator), torch.randn(22, 2, generator=generator)
    rows: list[int] = []

    def backend(graph: Any, examples: Any) -> Any:
        rows.extend(len(e) for e in examples if isinstance(e, Tensor) and not isinstance(e, nn.Parameter))
        return graph.forward

    torch._dynamo.reset()
    with mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = hapi.Model(net).prepare(optimizer, nn.MSELoss(), amp_configs=amp, compile=wanted)
        history = model.fit(
            (x, y), (x, y), global_batch_size=global_batch, epochs=2, shuffle=False, verbose=0,
            accumulate_grad_batches=accumulate,
        ).history  # fmt: skip
    base, extra = divmod(global_batch, group.get_world_size())
    return history["loss"] + history["val_loss"], rows, base + (group.get_rank() < extra)


@pytest.mark.parametrize("amp", [None, "bf16"])
@pytest.mark.parametrize(("global_batch", "accumulate"), [(8, 1), (8, 2), (7, 1), (5, 2)])
def test_each_rank_compiles_its_full_batches_alone(ranks, global_batch, accumulate, amp):
    """Also where ranks have parts of several sizes: each of them is full, and what is cut of the end is not."""
    eager, *_ = alone(counted, False, global_batch, accumulate, amp)
    results = ranks(2).run(counted, True, global_batch, accumulate, amp)
    for losses, rows, full in results:
        assert rows == [full, full], "once in training, once in evaluation"
        assert losses == pytest.approx(eager, rel=1e-5 if amp is None else 1e-2)


class Placed(nn.Module):
    """A user has put one part elsewhere, and sees to the way there."""

    def __init__(self, elsewhere: str) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False, device=elsewhere)
        nn.init.constant_(self.here.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.here(x)


def test_a_network_that_lies_on_several_devices_is_moved_nowhere():
    net = Placed("meta")
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = hapi.Model(net).prepare(optimizer, mean_output)
    model.fit(ramp(4), batch_size=4, verbose=0)
    assert [parameter.device.type for parameter in net.parameters()] == ["cpu", "meta"]
    assert float(net.here.weight.detach()) == 1 - 1.5
    assert model.evaluate(ramp(4), verbose=0)["loss"] == -0.5 * 1.5


def test_the_first_layer_of_several_devices_says_where_inputs_go():
    net = nn.Sequential(nn.Linear(1, 1, device="meta"), nn.Linear(1, 1))
    model = hapi.Model(net).prepare()
    assert model._engine.ready().device == torch.device("meta")
    assert [parameter.device.type for parameter in net.parameters()] == ["meta"] * 2 + ["cpu"] * 2


class Methods(Line):
    """Has more than a forward."""

    def penalty(self) -> Tensor:
        return self.layer.weight.square().sum()


def loss_with_methods() -> float:
    net = Methods()
    model = hapi.Model(net).prepare(
        torch.optim.SGD(net.parameters(), lr=0.5), lambda outputs, _: outputs.mean() + net.penalty()
    )
    model.fit(ramp(3), global_batch_size=4, verbose=0)
    return net.value


def test_a_loss_may_call_methods_of_the_network(ranks):
    # 3 samples on 4 ranks: 1 - 0.5 (mean(x) + 2 w).
    for world in (2, 4):
        assert same(ranks(world).run(loss_with_methods)) == 1 - 0.5 * 3
    assert alone(loss_with_methods) == 1 - 0.5 * 3


def with_spare_layer() -> tuple[float, list[float], bool]:
    """A layer that the loss never reaches, under momentum and weight decay."""

    class Spare(Line):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(1, 1)

    net = Spare()
    nn.init.constant_(net.spare.weight, 3.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5, weight_decay=0.25)
    hapi.Model(net).prepare(optimizer, mean_output).fit(ramp(4), global_batch_size=4, epochs=3, verbose=0)
    return net.value, [float(net.spare.weight.detach())], net.spare.weight.grad is None


def test_a_layer_that_the_loss_does_not_reach_is_left_alone_without_a_flag(ranks):
    wanted = alone(with_spare_layer)
    assert wanted[1:] == ([3.0], True)
    assert same(ranks(2).run(with_spare_layer)) == wanted


def test_ranks_that_normalise_together_need_no_batch_to_evaluate(ranks):
    # One sample on four ranks: three have none, and evaluation exchanges nothing on the way.
    first, *others = ranks(4).run(evaluate_one_sample)
    assert others == [first] * 3


def evaluate_one_sample() -> float:
    net = Normalised()
    model = hapi.Model(net).prepare(loss=nn.MSELoss())
    return model.evaluate((torch.ones(1, 3), torch.ones(1, 2)), batch_size=1, verbose=0)["loss"]


@on_the_cpu
def two_inputs() -> list[float]:
    """A network of two inputs, whose outputs are not all of floating point; one batch an epoch, for the first rank."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.last = OverRanks(1), nn.Linear(1, 1)

        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"sum": self.last(self.norm(a + b)), "rows": torch.arange(len(a))}

    net = Two()
    model = hapi.Model(net).prepare(
        torch.optim.SGD(net.parameters(), lr=0.1), lambda outputs, y: (outputs["sum"] - y).square().mean()
    )
    x, y = ramp(3)
    model.fit([(x, x, y)], epochs=3, verbose=0)
    return [float(value) for tensor in net.state_dict().values() for value in tensor.flatten()]


def test_a_rank_that_never_has_a_sample_takes_part_in_normalisation(ranks):
    assert same(ranks(2).run(two_inputs)) == pytest.approx(alone(two_inputs), rel=1e-5)


@on_the_cpu
def behind_a_frozen_layer() -> list[float]:
    net = Normalised()
    net.first.requires_grad_(False)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.last.parameters(), lr=0.1), nn.MSELoss())
    model.fit((torch.ones(3, 3), torch.ones(3, 2)), global_batch_size=4, epochs=2, verbose=0)
    return [float(value) for tensor in net.state_dict().values() for value in tensor.flatten()]


def test_normalisation_over_ranks_behind_a_frozen_layer(ranks):
    assert same(ranks(4).run(behind_a_frozen_layer)) == pytest.approx(alone(behind_a_frozen_layer), rel=1e-4, abs=1e-6)


@on_the_cpu
def batches_of_no_fit() -> list[list[float]]:
    """Three batches in a loop of the user's own, of which the first rank has all samples, or each one a share."""
    net = Normalised()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss())
    x, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.ones(5, 2)
    found = []
    for first in (5, 3, 0):
        bounds = [0, first, 5] if group.get_world_size() > 1 else [0, 5]
        own = slice(*bounds[group.get_rank() :][:2])
        model.train_batch(x[own], y[own])
        found.append([float(value) for tensor in net.state_dict().values() for value in tensor.flatten()])
    return found


def test_train_batch_needs_no_fit_before_it_to_normalise_over_ranks(ranks):
    for found, wanted in zip(same(ranks(2).run(batches_of_no_fit)), alone(batches_of_no_fit), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
