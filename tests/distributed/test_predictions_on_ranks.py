"""Predictions that fit together or not: rows of other lengths, other structures, ranks without any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closed_form import ramp
from ranks import alone
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hapi


class Odd(nn.Module):
    """Outputs that depend on the number of the first sample of a batch; x: (N, 1)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Any:
        first = int(x[0])
        makers = {
            # Rows of one length within a rank's batches, of another on other ranks.
            "between ranks": lambda: x.expand(-1, 1 + first // 2 % 2),
            # The last batch alone is longer.
            "last batch": lambda: x.expand(-1, 1 + (first >= 6)),
            "in a dict": lambda: {"fits": x, "odd": x.expand(-1, 1 + (first >= 4))},
            "dimensions": lambda: x if first < 4 else x.flatten(),
            "fewer tensors": lambda: (x, x) if first < 4 else (x,),
            "other keys": lambda: {"a": x, "b": 2 * x} if first < 4 else {"a": x, "c": 2 * x},
            "no rows": lambda: x.mean(),
            "no tensor": lambda: "text",
        }
        return makers[self.kind]()


def predict(kind: str, n: int, stacked: bool) -> Any:
    try:
        return hapi.Model(Odd(kind)).predict(ramp(n)[0], batch_size=2, stack_outputs=stacked, verbose=0)
    except ValueError as error:
        return str(error)


REFUSED = {
    "between ranks": "Rows differ in shape",
    "last batch": "Rows differ in shape",
    "in a dict": "Rows differ in shape",
    "dimensions": "Rows differ in shape",
    "fewer tensors": "structure",
    "other keys": "structure",
    "no rows": "not one row each",
    "no tensor": "without any tensor",
}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", REFUSED)
def test_rows_that_do_not_fit_are_refused_alike_on_all_ranks_with_the_way_out(ranks, kind, world):
    # 4 batches of 2: on 3 ranks one has two, on 4 ranks each has one.
    texts = ranks(world).run(predict, kind, 8, True) if world > 1 else [alone(predict, kind, 8, True)]
    for text in texts:
        assert isinstance(text, str), f"nothing was refused, but {text} predicted"
        assert REFUSED[kind] in text
        assert "stack_outputs=False" in text


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind not in ("no rows", "no tensor")])
def test_as_a_list_of_batches_they_are_given(ranks, kind, world):
    x = ramp(8)[0]
    wanted = [Odd(kind)(batch) for batch in x.split(2)]
    for got in ranks(world).run(predict, kind, 8, False):
        assert repr(got) == repr(wanted)


class Wider(nn.Module):
    """float64 in the third batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 2.0**-40 if int(x[0]) != 4 else x.double() + 2.0**-40


def predict_wider() -> Tensor:
    return hapi.Model(Wider()).predict(ramp(7)[0], batch_size=2, verbose=0)


def test_dtypes_that_differ_become_one_that_holds_all(ranks):
    x = ramp(7)[0]
    wanted = torch.cat([Wider()(batch) for batch in x.split(2)])
    for got in [*ranks(2).run(predict_wider), *ranks(4).run(predict_wider), alone(predict_wider)]:
        assert got.dtype == torch.float64
        assert torch.equal(got, wanted)


class Swapped(nn.Module):
    """A dict whose keys come in another order from the third batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        entries = {"minus": -x, "plus": x}
        return entries if int(x[0]) < 4 else dict(reversed(entries.items()))


def predict_swapped() -> dict[str, list[float]]:
    outputs = hapi.Model(Swapped()).predict(ramp(7)[0], batch_size=2, verbose=0)
    return {name: values.flatten().tolist() for name, values in outputs.items()}


def test_the_order_of_a_dict_s_keys_says_nothing(ranks):
    numbers = [float(n) for n in range(7)]
    for got in [*ranks(3).run(predict_swapped), alone(predict_swapped)]:
        assert got == {"minus": [-n for n in numbers], "plus": numbers}


class Labelled(Dataset):
    """Yields labels too, and in a loader of the user's own order."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), index


class Filtered(IterableDataset):
    """Rows that each rank keeps are of very unequal number: it keeps the first seven of thirty."""

    def __iter__(self) -> Any:
        return (torch.tensor([float(n)]) for n in range(30) if n < 7)


def predict_data(kind: str) -> list[float]:
    data, options = {
        "labelled": (Labelled(), {"batch_size": 2}),
        "reversed loader": (DataLoader(Labelled(), 2, sampler=range(8, -1, -1)), {}),
        "unequal batches": (DataLoader(Labelled(), batch_sampler=[[0], [1, 2, 3, 4, 5], [6, 7], [8]]), {}),
        "filtered": (Filtered(), {"batch_size": 2}),
        "filtered by workers": (Filtered(), {"batch_size": 2, "num_workers": 2}),
        "list": ([ramp(n + 1, first)[0] for n, first in ((0, 0), (3, 1), (1, 5))], {}),
    }[kind]

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    return hapi.Model(Double()).predict(data, verbose=0, **options).flatten().tolist()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("labelled", range(9)),
        ("reversed loader", range(8, -1, -1)),
        ("unequal batches", range(9)),
        ("filtered", range(7)),
        ("filtered by workers", range(7)),
        ("list", range(7)),
    ],
)
def test_all_rows_come_in_order_on_every_rank(ranks, kind, rows, world):
    for got in ranks(world).run(predict_data, kind):
        assert got == [2.0 * n for n in rows]
