"""`DataParallel` and `fleet` in loops of the user's own, on ranks as in one process."""

from __future__ import annotations

import pytest
import torch
from ranks import alone, same
from test_odd_tensors_on_ranks import Holding
from torch import Tensor, nn

from hapi.distributed import DataParallel, fleet, group


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


def train(net: nn.Module, steps: int) -> None:
    """Steps in which each rank has its share of the samples."""
    x, y = data()
    own = slice(group.get_rank(), None, group.get_world_size())
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        nn.functional.mse_loss(net(x[own]), y[own].expand(-1, net(x[own]).shape[1])).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_and_evaluate_on_the_first() -> tuple[list[float], list[float]]:
    """What rank 0 alone finds between the epochs, and the weights in the end."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    network[1].running_mean.fill_(0.5)
    net = DataParallel(network)
    x, y = data()
    found = []
    for _ in range(3):
        train(net.eval(), 2)  # Running statistics normalise, so that N processes equal one.
        for evaluate in (torch.no_grad, torch.inference_mode):
            if group.get_rank() == 0:
                with evaluate():
                    found.append(float(nn.functional.mse_loss(net(x), y)))
    return group.broadcast_object(found), [float(v) for p in net.parameters() for v in p.detach().flatten()]


def test_one_rank_may_evaluate_on_its_own(ranks):
    found, weights = same(ranks(2).run(train_and_evaluate_on_the_first))
    wanted = alone(train_and_evaluate_on_the_first)
    assert found == pytest.approx(wanted[0], rel=1e-4)
    assert weights == pytest.approx(wanted[1], rel=1e-4, abs=1e-6)


def buffers_of_each() -> list[float]:
    """How many batches have been counted after forward passes of this rank's own, and after one of training."""
    net = DataParallel(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
    with torch.no_grad():
        for _ in range(1 + group.get_rank()):
            net(torch.zeros(2, 1))
    own = float(net.network[0].num_batches_tracked)
    net(torch.zeros(2, 1)).sum().backward()
    return [own, float(net.network[0].num_batches_tracked)]


def test_buffers_are_each_ranks_own_where_no_gradients_are_computed(ranks):
    # The forward pass of training takes rank 0's first, whatever was called in between.
    assert ranks(2).run(buffers_of_each) == [[1.0, 2.0], [2.0, 2.0]]


def hold(kind: str, frozen: bool) -> list[float]:
    net = DataParallel(Holding(kind, frozen, False))
    train(net, 2)
    assert not hasattr(net.network, "_ddp_params_and_buffers_to_ignore")
    return [*net.numbers().flatten().tolist(), *net.layer.weight.flatten().tolist()]


@pytest.mark.parametrize(
    ("kind", "frozen"), [("sparse", False), ("columns expanded", False), ("rows expanded", True), ("torch.int16", True)]
)
def test_networks_that_hold_odd_tensors_are_wrapped(ranks, kind, frozen):
    assert same(ranks(2).run(hold, kind, frozen)) == pytest.approx(alone(hold, kind, frozen), rel=1e-5, abs=1e-6)


class Around(nn.Module):
    """Has a wrapped network, one of whose parts has the name that the wrapper has for it."""

    def __init__(self, wrap: bool) -> None:
        super().__init__()
        inner = nn.Sequential()
        inner.add_module("network", nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        self.wrapped, self.last = DataParallel(inner) if wrap else inner, nn.Linear(2, 1)


def load_around() -> bool:
    """A state goes from a wrapped network into a bare one, and back, and into another wrapped one."""
    first, bare, other = Around(True), Around(False), Around(True)
    nested = nn.Sequential(DataParallel(nn.Sequential(DataParallel(first))))
    for target in (bare, other, nested[0].network[0].network):
        target.load_state_dict(first.state_dict())
    again = nn.Sequential(DataParallel(nn.Sequential(DataParallel(Around(False)))))
    again.load_state_dict(nested.state_dict())
    assert list(first.state_dict()) == list(bare.state_dict())
    wanted = first.state_dict()
    states = [bare.state_dict(), other.state_dict(), again[0].network[0].network.state_dict()]
    return all(torch.equal(wanted[name], state[name]) for state in states for name in wanted)


def test_a_module_around_a_wrapped_network_loads_what_it_saves(ranks):
    assert alone(load_around)
    assert ranks(2).run(load_around) == [True] * 2


def test_a_module_around_a_wrapped_network_is_told_of_entries_that_do_not_fit():
    state = Around(True).state_dict()
    state["wrapped.spare"] = state.pop("wrapped.network.0.bias")
    with pytest.raises(RuntimeError, match=r"Missing key.*network\.0\.bias(?s:.*)Unexpected key.*spare"):
        Around(True).load_state_dict(state)
    assert "wrapped.spare" in state


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("gradient_merge", True, "accumulate_grad_batches"),
        ("amp_configs", {"use_pure_fp16": True}, "Model.prepare"),
        ("sharding", True, "whole network"),
        ("find_unused_parameter", True, "Write find_unused_parameters."),
        ("somewhat", False, "The options are: find_unused_parameters, sync_batch_norm"),
    ],
)
def test_a_strategy_refuses_options_that_nobody_reads(name, value, instead):
    strategy = fleet.DistributedStrategy()
    with pytest.raises(ValueError, match=name) as caught:
        setattr(strategy, name, value)
    assert instead in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("sync_batch_norm", "yes"), ("fuse_grad_size_in_MB", "25")])
def test_a_strategy_refuses_values_of_another_kind(name, value):
    strategy = fleet.DistributedStrategy()
    with pytest.raises(TypeError, match=name):
        setattr(strategy, name, value)
    assert strategy == fleet.DistributedStrategy()


def test_a_strategy_takes_what_it_knows_and_what_is_switched_off():
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = strategy.amp = False
    strategy.find_unused_parameters, strategy.fuse_grad_size_in_MB = True, 4
    assert strategy == fleet.DistributedStrategy(True, False, 4)


def strategy_of_the_optimizer() -> bool:
    """Whether the wrapped network has the option that the optimizer was given."""
    fleet.init(strategy=fleet.DistributedStrategy())
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy(True)) is optimizer
    assert fleet.distributed_optimizer(optimizer) is optimizer
    wrapped = fleet.distributed_model(net)._wrapped[0]
    fleet.init()
    return wrapped.find_unused_parameters


def test_the_optimizers_strategy_takes_the_place_of_the_first(ranks):
    assert same(ranks(2).run(strategy_of_the_optimizer)) is True
    with pytest.raises(TypeError, match="distributed_optimizer received strategy=3"):
        fleet.distributed_optimizer(torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1), 3)
