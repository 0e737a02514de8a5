"""Uses that are not the usual ones, on several ranks: the numbers of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import alone, same
from test_odd_uses import Masked, X, Y, changed, grow, prepared, replace
from torch import nn
from torch.utils.data import ChainDataset, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import hapi
from hapi.distributed import group


def weights(net: Any) -> list[float]:
    return [value for parameter in net.parameters() for value in parameter.flatten().tolist()]


def masked() -> tuple[list[float], float]:
    subject = prepared(kind=Masked)
    subject.fit((X, Y), global_batch_size=12, accumulate_grad_batches=2, shuffle=False, verbose=0)
    return weights(subject.network), subject.evaluate((X, Y), batch_size=5, verbose=0)["loss"]


def test_labels_that_a_step_masks(ranks):
    wanted, loss = alone(masked)
    got, other = same(ranks(3).run(masked))
    assert got == pytest.approx(wanted, abs=1e-5)
    assert other == pytest.approx(loss, rel=1e-5)


def change_on_ranks(change: Callable[..., None]) -> list[float]:
    return weights(changed(change))


@pytest.mark.parametrize("change", [grow, replace])
def test_layers_added_or_replaced_while_training(ranks, change):
    wanted = alone(change_on_ranks, change)
    assert same(ranks(3).run(change_on_ranks, change)) == pytest.approx(wanted, abs=1e-5)


class Part(IterableDataset[Any]):
    def __init__(self, first: int, stop: int) -> None:
        self.rows = range(first, stop)

    def __iter__(self) -> Iterator[Any]:
        return ((X[row], Y[row]) for row in self.rows)


class Promises(Part):
    """Says another length on each rank, which plays no part."""

    def __len__(self) -> int:
        return 53 + group.get_rank()


class Everything(Sampler[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(53))


def evaluated(kind: str) -> float:
    data = {
        "reversed arrays": lambda: (X.numpy()[::-1], Y.numpy()[::-1]),
        "a chain": lambda: ChainDataset([Part(0, 20), Part(20, 53)]),
        "another length": lambda: Promises(0, 53),
        "a sampler without a length": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, sampler=Everything()),
    }[kind]()
    return prepared().evaluate(data, verbose=0)["loss"]


@pytest.mark.parametrize("kind", ["reversed arrays", "a chain", "another length", "a sampler without a length"])
def test_data_that_only_several_ranks_look_at_more_closely(ranks, kind):
    with torch.no_grad():
        expected = float(torch.nn.functional.cross_entropy(prepared().network(X), Y))
    assert same(ranks(2).run(evaluated, kind)) == pytest.approx(expected)


class Captions(Dataset[Any]):
    """Five captions of 1 to 5 words, each beside a number."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        return torch.tensor([float(index), 1.0]), "word " * (index + 1)


def train_on_text(batch_size: int) -> list[float]:
    """Weights and evaluation after an epoch whose loss counts the words of the captions."""

    def loss(outputs: torch.Tensor, captions: list[str]) -> torch.Tensor:
        words = torch.tensor([float(len(caption.split())) for caption in captions])
        return (outputs[:, 0] - words).square().mean()

    network = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(network.weight)
    model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.05), loss)
    model.fit(Captions(), global_batch_size=batch_size, shuffle=False, verbose=0)
    return [*network.weight.flatten().tolist(), model.evaluate(Captions(), batch_size=2, verbose=0)["loss"]]


# Of three and four ranks some have one caption in a step, or none.
@pytest.mark.parametrize("world", [2, 3, 4])
def test_captions_are_labels_at_any_world_size(ranks, world):
    for batch_size in (3, 5):
        assert same(ranks(world).run(train_on_text, batch_size)) == pytest.approx(
            alone(train_on_text, batch_size), rel=1e-5
        )
