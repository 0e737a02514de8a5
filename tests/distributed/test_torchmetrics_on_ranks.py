"""Objects of torchmetrics over ranks: states of every kind, lists of unequal length, ranks that saw nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from closed_form import Line, mean_output
from ranks import alone, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hapi
from hapi.distributed import group


def makers() -> dict[str, Any]:
    """By the kind of their states."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchmetrics as tm

    class Widest(tm.Metric):
        """A reduction of the user's own, a state reduced by min, and a list beside them."""

        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("widest", torch.tensor(0.0), dist_reduce_fx=lambda stacked: stacked.max(0).values)
            self.add_state("lowest", torch.tensor(torch.inf), dist_reduce_fx="min")
            self.add_state("pieces", [], dist_reduce_fx=None)

        def update(self, outputs: Tensor, labels: Tensor) -> None:
            self.widest = torch.maximum(self.widest, outputs.abs().max())
            self.lowest = torch.minimum(self.lowest, outputs.min())
            self.pieces.append(outputs.flatten())

        def compute(self) -> Tensor:
            return self.widest + 10 * self.lowest + 100 * torch.cat(self.pieces).median()

    return {
        "sums": lambda: tm.MeanSquaredError(),
        # Tensors that are gathered, and put together by the metric itself.
        "gathered tensors": lambda: tm.PearsonCorrCoef(),
        "lists": lambda: tm.SpearmanCorrCoef(),
        "own": Widest,
        "max within": lambda: tm.MetricCollection({"r2": tm.R2Score(), "mae": tm.MeanAbsoluteError()}),
        "groups": lambda: tm.MetricCollection(
            [tm.MeanAbsoluteError(), tm.MeanSquaredError(), tm.SpearmanCorrCoef(), tm.PearsonCorrCoef()]
        ),
        "prefix": lambda: tm.MetricCollection({"spearman": tm.SpearmanCorrCoef()}, prefix="my_"),
        "min and max": lambda: tm.MinMaxMetric(tm.MeanAbsoluteError()),
        "nested": lambda: tm.MultioutputWrapper(tm.SpearmanCorrCoef(), num_outputs=1),
    }


class Stream(IterableDataset):
    """Shards itself: so many rows on each rank."""

    sharded = True

    def __init__(self, x: Tensor, y: Tensor, lengths: list[int] | None) -> None:
        self.x, self.y = x, y
        lengths = lengths or [len(x)]
        first = sum(lengths[: group.get_rank()])
        self.rows = range(first, first + lengths[group.get_rank()])

    def __iter__(self) -> Any:
        return ((self.x[row], self.y[row]) for row in self.rows)


def measure(kind: str, n: int, batch: int, lengths: list[int] | None) -> list[dict[str, Any]]:
    """What evaluate and two epochs of fit give, weights standing still; batches that DataLoaders make, or ours."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 1, generator=generator)
    y = x + torch.randn(n, 1, generator=generator)
    net = Line()
    with warnings.catch_warnings():
        # torchmetrics warns of few samples, and of lists that grow.
        warnings.simplefilter("ignore")
        metric = makers()[kind]()
        model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), mean_output, metric)
        if lengths is None:
            data, options = (x, y), {"batch_size": batch}
        else:
            data, options = DataLoader(Stream(x, y, lengths if group.get_world_size() > 1 else None), batch), {}
        evaluated = model.evaluate(data, verbose=0, **options)
        history = model.fit(data, data, epochs=2, verbose=0, **options).history
        again = model.evaluate(data, verbose=0, **options)
    return [evaluated, history, again]


KINDS = ("sums", "gathered tensors", "lists", "own", "max within", "groups", "prefix", "min and max", "nested")


@pytest.mark.parametrize("lengths", [None, [9, 0, 2], [0, 0, 11], [1, 7, 3]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_unequal_length_come_together(ranks, kind, lengths):
    wanted = alone(measure, kind, 11, 2, lengths)
    assert all(value == value for value in wanted[0].values()), "a test of nan shows nothing"
    got = same([repr(result) for result in ranks(3).run(measure, kind, 11, 2, lengths)])
    for values, alike in zip(eval(got), wanted, strict=True):
        assert values.keys() == alike.keys()
        for name, value in values.items():
            assert value == pytest.approx(alike[name], rel=1e-5, abs=1e-6), name


def test_every_kind_is_measured():
    assert tuple(makers()) == KINDS


def several_outputs(n: int) -> dict[str, float]:
    """Two outputs and two labels, several metrics and functions that look at one of them each."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            nn.init.constant_(self.layer.weight, 0.5)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return self.layer(x), {"twice": 2 * self.layer(x)}

    def loss(first, second, y, z):
        return (first - y).abs().mean() + (second["twice"] - z).square().mean()

    def first_error(outputs, labels):
        return (outputs[0] - labels[0]).abs()[:, 0]

    def second_output(outputs, labels):
        return outputs[1]["twice"]

    net = Two()
    model = hapi.Model(net, inputs=1, labels=2).prepare(
        torch.optim.SGD(net.parameters(), lr=0.0), loss, [first_error, second_output]
    )
    x = torch.arange(float(n))[:, None]
    data = x, 0 * x, 0 * x
    history = model.fit(data, data, global_batch_size=6, verbose=0).history
    return model.evaluate(data, batch_size=2, verbose=0) | {name: values[0] for name, values in history.items()}


@pytest.mark.parametrize("n", [1, 2, 5, 14])
def test_several_outputs_and_labels(ranks, n):
    mean, squares = (n - 1) / 2, sum(k * k for k in range(n)) / n
    wanted = {"loss": 0.5 * mean + squares, "first_error": 0.5 * mean, "second_output": mean}
    wanted |= {"lr": 0.0} | {f"val_{name}": value for name, value in wanted.items()}
    for got in [*ranks(3).run(several_outputs, n), alone(several_outputs, n)]:
        assert got == pytest.approx(wanted, rel=1e-6)
