"""Parameters that the loss reaches in some steps, on some ranks, in some batches of a window, or never."""

from __future__ import annotations

from typing import Any

import pytest
import routed_cases as routed
import torch
from ranks import alone, same
from torch import nn

import hapi
from hapi.distributed import parallel

CASES = 120
PER_TEST = 30


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(PER_TEST, CASES, PER_TEST))]
)
def test_a_part_of_the_network_trains_as_in_one_process_whoever_reaches_it(ranks, first):
    failures = []
    for number in range(first, first + PER_TEST):
        case = routed.draw(1, number)
        wanted = routed.follow(case)
        results = ranks(case.world).run(routed.train, case)
        for rank, weights in enumerate([*results, alone(routed.train, case)]):
            off = max(float((got - want).abs().max()) for got, want in zip(weights, wanted, strict=True))
            if off > 2e-5:
                failures.append(f"rank {rank} is off by {off:.2g}: {case}")
        if any(not torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True)):
            failures.append(f"ranks differ: {case}")
    assert not failures, "\n".join(failures)


class Apart(nn.Module):
    """Layers of which one is never used and one by the first rank alone, in dtypes of their own."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.never, self.now_and_then, self.last = (nn.Linear(4, 4, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [self.first] + [self.now_and_then] * bool(x[0, 0] > 0) + [self.last]:
            x = layer(x.to(layer.weight.dtype))
        return x


def train_apart(dtypes: list[torch.dtype]) -> tuple[Any, ...]:
    """Two steps, in which only the first rank uses all layers but one; weights, and what the optimizer keeps."""
    net = Apart(dtypes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    x = torch.ones(8, 4)
    x[[2, 3, 6, 7], 0] = -1
    model = hapi.Model(net).prepare(optimizer, lambda outputs, _: outputs.float().mean())
    model.fit((x, torch.zeros(8)), global_batch_size=4, shuffle=False, verbose=0)
    kept = [name for name, parameter in net.named_parameters() if optimizer.state.get(parameter)]
    return [parameter.tolist() for parameter in net.parameters()], kept


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    "dtypes",
    [
        [SINGLE] * 4,
        [DOUBLE] * 4,
        [HALF] * 4,
        [SINGLE, HALF, HALF, SINGLE],
        [HALF, SINGLE, SINGLE, HALF],
        [DOUBLE, SINGLE, HALF, SINGLE],
    ],
)
def test_what_no_rank_reaches_has_no_gradient_whatever_the_dtypes(ranks, dtypes):
    weights, kept = same(ranks(2).run(train_apart, dtypes))
    untouched = Apart(dtypes).never
    assert kept == [f"{layer}.{part}" for layer in ("first", "now_and_then", "last") for part in ("weight", "bias")]
    assert weights[2:4] == [untouched.weight.tolist(), untouched.bias.tolist()]


class Behind(nn.Module):
    """A parameter of its own, which is never used, before a layer of some size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.never = nn.Parameter(torch.ones(4))
        self.layer = nn.Linear(1, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def train_behind(size: int) -> tuple[list[float], float]:
    net = Behind(size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    model = hapi.Model(net).prepare(optimizer, lambda outputs, _: outputs.mean())
    model.fit((torch.ones(8, 1), torch.zeros(8)), global_batch_size=4, verbose=0)
    return net.never.tolist(), net.layer.weight.detach().double().sum().item()


class Sizes(nn.Module):
    def __init__(self, sizes: list[tuple[int, torch.dtype]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(size, dtype=dtype)) for size, dtype in sizes)


def buckets_of(sizes: list[tuple[int, torch.dtype]], options: dict[str, Any] | None) -> tuple[Any, Any, bool]:
    """The sizes in each bucket as they are foreseen, as torch has them, and whether the marks go with a backward."""
    exchange = parallel.GradientExchange(parallel.Replica(Sizes(sizes), None, lambda x: x), options)
    exchange.begin()
    exchange.begin_window()
    wrapped = exchange._wrapped
    there = [[len(p) for p in bucket.parameters()] for bucket in wrapped.reducer._get_zeros_like_grad_buckets()]
    return [[len(p) for p in bucket] for bucket in wrapped.buckets()], there, exchange._marks_along


@pytest.mark.parametrize(
    "sizes, options, along",
    [
        ([(4, SINGLE), (262144, SINGLE)], None, True),
        ([(4, SINGLE), (262141, SINGLE)], None, False),
        ([(5, SINGLE), (9 * 10**6, SINGLE), (7, SINGLE)], None, True),
        ([(100, SINGLE)] * 50, {"bucket_cap_mb": 0.001}, True),
        ([(4, HALF), (6, HALF)], None, False),
        ([(4, DOUBLE), (5, SINGLE), (6, HALF), (300000, SINGLE), (7, HALF)], {"bucket_cap_mb": 1}, False),
    ],
)
def test_the_buckets_are_foreseen(ranks, sizes, options, along):
    foreseen, there, goes_along = same(ranks(2).run(buckets_of, sizes, options))
    assert foreseen == there and goes_along == along


# DDP's first bucket takes 1 MiB: full with the layer, with the marks behind it (3 numbers), not full.
@pytest.mark.parametrize("size", [262144, 262141, 262140])
def test_what_no_rank_reaches_is_left_alone_wherever_a_bucket_ends(ranks, size):
    never, total = same(ranks(2).run(train_behind, size))
    assert never == [1.0] * 4
    assert total == pytest.approx(alone(train_behind, size)[1])
