"""Collate functions that leave out samples or whole batches, or make rows; loaders that iterate in their own way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from closed_form import Ramp, prepared
from ranks import alone, same
from test_sampling_on_ranks import Stream, of_ranks, seen_in
from torch.utils.data import DataLoader, default_collate

LEFT_OUT = {10, 11, 26, 27, 40, 41, 42, 43}
"""Batches 5, 13, 20 and 21 of two samples each: on two ranks, one rank's alone, and a round of both."""


def kept(items: list[Any]) -> list[Any]:
    return [item for item in items if int(item[0]) not in LEFT_OUT]


def none(items: list[Any]) -> Any:
    return default_collate(kept(items)) if kept(items) else None


def no_rows(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return (x, y) if kept(items) else (x[:0], y[:0])


class Repeatable:
    """Batches that are no DataLoader's."""

    def __init__(self, collate: Callable[..., Any]) -> None:
        self.collate = collate

    def __iter__(self) -> Iterator[Any]:
        return iter([self.collate([Ramp(n + 2)[n], Ramp(n + 2)[n + 1]]) for n in range(0, 400, 2)])


def left_out_of(kind: str, collate: Callable[..., Any]) -> list[list[int]]:
    options: dict[str, Any] = {"batch_size": 2, "collate_fn": collate}
    data = {
        "loader": lambda: DataLoader(Ramp(400), **options),
        "workers": lambda: DataLoader(Ramp(400), num_workers=1, **options),
        "shuffled": lambda: DataLoader(Ramp(400), shuffle=True, **options),
        "iterable": lambda: DataLoader(Stream(400), **options),
        "batches": lambda: Repeatable(collate),
        "list": lambda: list(Repeatable(collate)),
    }[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Many rounds: what the ranks tell each other for several at once must come in the same place on each.
        return seen_in(data, epochs=2, accumulate_grad_batches=3)


@pytest.mark.parametrize("collate", [none, pytest.param(no_rows, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    ["loader", "iterable", "batches", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("workers", "list"))],
)
def test_each_other_sample_is_trained_on(ranks, kind, collate):
    wanted = [sorted({*range(400)} - LEFT_OUT)] * 2
    assert of_ranks([alone(left_out_of, kind, collate)]) == wanted
    assert of_ranks(ranks(2).run(left_out_of, kind, collate)) == wanted


def test_of_a_drawn_order_some_batches_may_be_left_out(ranks):
    """A batch is left out whole only if all of it is: how many samples are trained on depends on the order."""
    own = of_ranks([alone(left_out_of, "shuffled", none)])
    assert [set(range(400)) - set(epoch) for epoch in own] == [LEFT_OUT] * 2
    assert of_ranks(ranks(3).run(left_out_of, "shuffled", none)) == own


def without_some(items: list[Any]) -> Any:
    numbers = [x for x, _ in items]
    return torch.stack([x for x in numbers if int(x) % 5 not in (2, 3)]) if int(numbers[0]) != 16 else None


def doubled(items: list[Any]) -> Any:
    return torch.stack([x + half for x, _ in items for half in (0, 0.5)])


def predicted(collate: Callable[..., Any], workers: int) -> list[float]:
    loader = DataLoader(Stream(30), batch_size=4, collate_fn=collate, num_workers=workers)
    return prepared().predict(loader, verbose=0).flatten().tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_predictions_are_of_the_rows_that_a_collate_function_has_made(ranks, workers):
    left = [n for n in map(float, range(30)) if n % 5 not in (2, 3) and n not in (16, 19)]
    twice = [n + half for n in range(30) for half in (0, 0.5)]
    for collate, wanted in ((without_some, left), (doubled, twice)):
        assert alone(predicted, collate, 0) == wanted
        assert same(ranks(2).run(predicted, collate, workers)) == wanted
        assert same(ranks(3).run(predicted, collate, workers)) == wanted


class Shifted(DataLoader[Any]):
    """Changes batches as it gives them."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield x + 100, y


def of_shifted(workers: int) -> list[list[int]]:
    return seen_in(Shifted(Stream(10), batch_size=2, num_workers=workers), epochs=2)


def refused() -> str:
    with pytest.raises(TypeError) as caught:
        of_shifted(0)
    return str(caught.value)


def test_a_loader_that_iterates_in_its_own_way_over_an_iterable_gives_what_it_makes(ranks):
    for workers in (0, 2):
        assert of_ranks([alone(of_shifted, workers)]) == [list(range(100, 110))] * 2
    text = same(ranks(2).run(refused))
    assert "A Shifted arrived" in text and "2 processes" in text and "sharded = True" in text
