"""Data sets that differ between ranks, found before the first step: repaired where that is safe, else refused."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torchvision
from closed_form import Ramp, prepared, ramp
from PIL import Image
from ranks import alone, same
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

import hapi
from hapi.data.sameness import same_data
from hapi.datasets import FashionMNIST
from hapi.distributed import group


def rows(n: int = 8, change: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on all ranks, but for one number of one row on the last."""
    x, y = ramp(n)
    if change and group.get_rank() == group.get_world_size() - 1:
        x[n // 2] += 1e-6
    return x, y


def last(value: Any, other: Any) -> Any:
    """Another value on the last rank."""
    return other if group.get_rank() == group.get_world_size() - 1 else value


def shuffled(n: int = 8) -> torch.Tensor:
    """A permutation of its own on each rank: the script seeded nothing."""
    return torch.randperm(n)


def images(kind: Callable[..., Any], **options: Any) -> Any:
    """A data set of a library, of which the last rank's has another label."""
    data = kind(**options)
    if group.get_rank() == group.get_world_size() - 1:
        data.targets[5] = 1 - int(data.targets[5] == 1)
    return data


def fake_cifar() -> Any:
    """torchvision's class, whose labels are a list, without its files."""
    data = torchvision.datasets.CIFAR10.__new__(torchvision.datasets.CIFAR10)
    data.data, data.targets = numpy.zeros((8, 32, 32, 3), "uint8"), [0] * 8
    data.transform = data.target_transform = None
    return data


DIFFERENT: dict[str, Callable[[], Any]] = {
    "a number": lambda: rows(change=True),
    "a number of an array": lambda: tuple(part.numpy() for part in rows(change=True)),
    "a number in a dict": lambda: dict(zip("xy", rows(change=True), strict=True)),
    "a number of a tensor data set": lambda: TensorDataset(*rows(change=True)),
    "a number in a loader": lambda: DataLoader(TensorDataset(*rows(change=True)), batch_size=2),
    "a label of hapi's": lambda: images(FashionMNIST, mode="test", sample=True),
    "a label of torchvision's": lambda: images(fake_cifar),
    "a label in a subset": lambda: Subset(images(FashionMNIST, mode="test", sample=True), range(8)),
    "the order": lambda: tuple(part[torch.arange(8).roll(group.get_rank())] for part in rows()),
    "the dtype": lambda: (rows()[0].to(last(torch.float32, torch.float64)), rows()[1]),
    "the shape": lambda: (rows()[0].reshape(last((8, 1), (8, 1, 1))), rows()[1]),
    "the length": lambda: rows(last(8, 7)),
    "the length of a data set": lambda: Ramp(last(8, 9)),
    "the class": lambda: last(Ramp(8), TensorDataset(*rows())),
    "the length of subsets": lambda: Subset(Ramp(8), range(last(4, 5))),
    "what subsets are of": lambda: Subset(TensorDataset(*rows(change=True)), [1, 2, 3]),
    "the number of columns": lambda: last(rows(), (*rows(), rows()[1])),
}


def refuse(kind: str, call: str) -> str:
    model = prepared()
    data = DIFFERENT[kind]()
    try:
        if call == "fit":
            model.fit(data, verbose=0)
        elif call == "fit's evaluation":
            model.fit(rows(), data, verbose=0)
        else:
            getattr(model, call)(data, verbose=0)
    except ValueError as error:
        assert model.steps_trained == 0
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("kind", DIFFERENT)
def test_data_that_differs_is_refused_before_the_first_step_on_all_ranks(ranks, kind):
    text = same(ranks(3).run(refuse, kind, "fit"))
    assert "train_data differs between the processes" in text
    assert "hapi.seed(0)" in text


@pytest.mark.parametrize("call", ["evaluate", "predict", "fit's evaluation"])
def test_every_call_looks(ranks, call):
    assert "differs between the processes" in same(ranks(2).run(refuse, "a number", call))


SUBSETS: dict[str, Callable[[], Any]] = {
    "random_split": lambda: random_split(Ramp(12), [8, 4])[0],
    "subset of tensors": lambda: Subset(TensorDataset(*rows(12)), shuffled(12)[:8].tolist()),
    "indices as a tensor": lambda: Subset(Ramp(12), shuffled(12)[:8]),
    "indices as an array": lambda: Subset(Ramp(12), numpy.random.permutation(12)[:8]),
    "nested": lambda: Subset(Subset(Ramp(16), shuffled(16)[:12].tolist()), shuffled(12)[:8].tolist()),
    "in a loader": lambda: DataLoader(random_split(Ramp(12), [8, 4])[0], batch_size=3, shuffle=True),
}


def repair(kind: str) -> tuple[list[int], int, int, list[float]]:
    """What this rank trains on, what rank 0 holds, how often it was said, and predictions in the data set's order."""
    data = SUBSETS[kind]()
    dataset = data.dataset if isinstance(data, DataLoader) else data
    own = [int(dataset[row][0]) for row in range(len(dataset))]
    model = prepared()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {} if isinstance(data, DataLoader) else {"batch_size": 3}
        model.fit(data, verbose=0, **options)
        unshuffled = prepared().predict(dataset, batch_size=3, verbose=0).flatten().tolist()
    said = sum("different Subsets" in str(warning.message) for warning in caught)
    return [int(value) for value in model.network.seen], own, said, unshuffled


@pytest.mark.parametrize("kind", SUBSETS)
def test_subsets_that_differ_become_rank_0_s_with_a_warning(ranks, kind):
    results = ranks(2).run(repair, kind)
    (seen, own, said, predicted), (other_seen, other_own, *_) = results
    assert own != other_own
    assert sorted(seen + other_seen) == sorted(own)
    assert same([result[3] for result in results]) == predicted == own
    assert said == 2


class Paths(torchvision.datasets.VisionDataset):
    """What lies under these names are paths, of unlike number a sample."""

    def __init__(self) -> None:
        super().__init__(root=".")
        self.data, self.targets = ["a.png", "b.png"] * 4, [[1], [2, 3]] * 4

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        x, y = ramp(8)
        return x[index], y[index]


ALIKE: dict[str, Callable[[], Any]] = {
    "columns": lambda: rows(),
    "not contiguous": lambda: (rows(16)[0][::2], rows(16)[1].reshape(2, 8).T[:, :1]),
    "paths of a library": Paths,
    "subset": lambda: Subset(Ramp(12), list(range(8))),
    "several": lambda: ConcatDataset([Ramp(3), Ramp(5)]),
    "half precision": lambda: TensorDataset(rows()[0], rows()[1].bfloat16()),
    "no element": lambda: (rows()[0], torch.empty(8, 0)),
    "complex labels": lambda: (rows()[0], torch.complex(*rows())),
}


def accept(kind: str) -> tuple[int, int]:
    model = prepared()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(ALIKE[kind](), batch_size=2, verbose=0)
    return len(model.network.seen), len(caught)


@pytest.mark.parametrize("kind", ALIKE)
def test_data_that_is_alike_passes_without_a_word(ranks, kind):
    assert same(ranks(2).run(accept, kind)) == (4, 0)


def evaluate_one_row() -> float:
    """One sample, whose only dimension may have any stride."""
    return prepared().evaluate((torch.full((1, 1), 3.0), torch.zeros(1, 6)[:, 0]), verbose=0)["loss"]


def test_one_row_of_a_slice_is_looked_at_too(ranks):
    assert same(ranks(2).run(evaluate_one_row)) == 3.0


def to_tensor(image: Image.Image) -> torch.Tensor:
    """What ToTensor() does, in a function that nobody recognises."""
    return torchvision.transforms.functional.to_tensor(image)


def learn_images(own_function: bool) -> tuple[dict[str, float], list[float]]:
    """Values and weights, where the last rank's images may be read one by one, and its labels with them."""
    hapi.seed(0)
    data = FashionMNIST(mode="test", sample=True, transform=last(None, to_tensor) if own_function else None)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    loss, accuracy = torch.nn.CrossEntropyLoss(), hapi.metrics.Accuracy()
    model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.1), loss, accuracy)
    part = Subset(data, range(30))
    model.fit(part, part, global_batch_size=8, verbose=0)
    return model.evaluate(part, batch_size=7, verbose=0), network[1].weight.flatten().tolist()


def test_ranks_that_read_alike_data_in_their_own_ways_count_alike(ranks):
    values, weights = same(ranks(2).run(learn_images, True))
    wanted, wanted_weights = alone(learn_images, False)
    assert values == pytest.approx(wanted, rel=1e-6)
    assert weights == pytest.approx(wanted_weights, rel=1e-5, abs=1e-7)


class Stream(IterableDataset[Any]):
    """Six samples on each rank."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded

    def __iter__(self) -> Any:
        return iter([Ramp(6)[number] for number in range(6)])


def read_kinds(call: str, of_all: str, of_last: str) -> str:
    """What is said where the last rank has another kind of data than the others."""
    x, y = ramp(6)
    made = {
        "columns": (x, y),
        "batches": list(zip(x.split(2), y.split(2), strict=True)),
        "loader": DataLoader(TensorDataset(x, y), batch_size=2),
        "loader of samples": DataLoader(TensorDataset(x, y), batch_size=None),
        "stream": Stream(False),
        "stream in parts": Stream(True),
        "loader of a stream": DataLoader(Stream(False), batch_size=2),
        "loader of a stream in parts": DataLoader(Stream(True), batch_size=2),
    }
    model = prepared()
    with warnings.catch_warnings():
        # Of parts it is said that they come rank by rank.
        warnings.simplefilter("ignore")
        try:
            getattr(model, call)(made[last(of_all, of_last)], verbose=0)
        except ValueError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(("call", "name"), [("fit", "train_data"), ("evaluate", "eval_data"), ("predict", "test_data")])
@pytest.mark.parametrize(
    "kinds",
    [
        ("columns", "batches"),
        ("batches", "loader"),
        ("loader", "columns"),
        ("loader", "loader of samples"),
        ("stream", "stream in parts"),
        ("loader of a stream in parts", "loader of a stream"),
    ],
)
def test_other_kinds_of_data_are_refused_by_all(ranks, call, name, kinds):
    said = same(ranks(2).run(read_kinds, call, *kinds))
    assert f"{call} was called with {name}='" in said and "on rank 1" in said
    assert same(ranks(2).run(read_kinds, call, kinds[0], kinds[0])) == "nothing"


class Named(Dataset[Any]):
    """Samples that have names in place of numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, name: str) -> Any:
        x, y = ramp(8)
        return x["abcdefgh".index(name)], y["abcdefgh".index(name)]


def train_on_names(of_all: str, of_last: str) -> list[int]:
    model = prepared()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(Subset(Named(), list(last(of_all, of_last))), global_batch_size=2, verbose=0)
    return [int(value) for value in model.network.seen]


@pytest.mark.parametrize("of_last", ["abcdef", "fedcba"])
def test_subsets_by_name(ranks, of_last):
    seen = ranks(2).run(train_on_names, "abcdef", of_last)
    assert sorted(seen[0] + seen[1]) == sorted(alone(train_on_names, "abcdef", "abcdef")) == [0, 1, 2, 3, 4, 5]


class Shuffled(Dataset[Any]):
    """Reads its samples from where its unseeded order says, through a file that it opens at first use."""

    def __init__(self, n: int = 8, alike: bool = False) -> None:
        self.order = list(range(n))
        if not alike:
            random.shuffle(self.order)
        self.file: Any = None

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = "open, as one of HDF5"
        return torch.tensor([float(self.order[index])]), torch.zeros(1)


class Scrambled(Dataset[Any]):
    """Of other kinds of samples, from a seed that is the rank's."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        number = random.Random(f"{self.seed} {index}").random()
        return {
            "arrays": lambda: numpy.array([number]),
            "whole numbers": lambda: torch.tensor([int(1000 * number)], dtype=torch.int16),
            "text": lambda: (torch.zeros(1), str(number)),
            "a dict": lambda: {"x": torch.zeros(1), "y": [number]},
            "an image": lambda: Image.new("L", (2, 2), int(255 * number)),
            "another length": lambda: torch.zeros(int(1000 * number)),
            "complex numbers": lambda: torch.tensor([number + 0j]),
        }[self.kind]()


class Awkward(Dataset[Any]):
    """Differs between ranks in a way that proves nothing."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.own = random.Random(group.get_rank())

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if self.kind == "raises before it is told the epoch" and not hasattr(self, "epoch"):
            raise RuntimeError(self.kind)
        noise = {
            "is random by itself": self.own.random,
            "is random in the last bits": lambda: 1e-7 * group.get_rank(),
            "draws from the global generators": random.random,
        }.get(self.kind, lambda: 0.0)()
        return torch.tensor([index + noise]), torch.zeros(1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


ORDERS: dict[str, Callable[[], Any]] = {
    "a data set": Shuffled,
    "in a loader": lambda: DataLoader(Shuffled(), batch_size=2),
    "in a subset": lambda: Subset(Shuffled(), range(6)),
    "in an unseeded subset": lambda: random_split(Shuffled(), [6, 2])[0],
    "in others": lambda: ConcatDataset([Shuffled(), Shuffled()]),
    **{
        kind: functools.partial(lambda kind: Scrambled(kind, group.get_rank()), kind)
        for kind in ("arrays", "whole numbers", "text", "a dict", "an image", "another length", "complex numbers")
    },
}


def look_at_samples() -> dict[str, Any]:
    """What is said of each of ORDERS."""
    found = {}
    for kind, make in ORDERS.items():
        try:
            same_data(make(), "train_data")
            found[kind] = "nothing was refused"
        except ValueError as error:
            found[kind] = str(error)
    return found


def test_samples_that_differ_are_refused_where_nothing_in_memory_can_be_compared(ranks):
    for kind, text in same(ranks(3).run(look_at_samples)).items():
        assert "train_data differs between the processes: process 0 has a" in text, kind
        assert "another sample" in text and "hapi.seed(0)" in text, kind


def evaluate_shuffled() -> str:
    with pytest.raises(ValueError) as caught:
        prepared().evaluate(Shuffled(), batch_size=2, verbose=0)
    return str(caught.value)


def test_an_evaluation_of_data_in_another_order_is_refused(ranks):
    assert "eval_data differs between the processes" in same(ranks(2).run(evaluate_shuffled))


def accept_samples() -> tuple[bool, list[bool]]:
    states = random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()
    kinds = (
        "is random by itself", "is random in the last bits", "raises before it is told the epoch",
        "draws from the global generators",
    )  # fmt: skip
    for kind in kinds:
        data = Awkward(kind)
        assert same_data(data, "train_data") is data
    within = [Shuffled(alike=True), Shuffled(alike=True)]
    for data in (within[0], ConcatDataset(within), Subset(within[1], range(4)), Shuffled(n=0)):
        assert same_data(data, "train_data") is data
    after = random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()
    return states == after, [data.file is None for data in within]


def test_samples_that_prove_nothing_pass_and_leave_no_trace(ranks):
    assert same(ranks(2).run(accept_samples)) == (True, [True, True])


@pytest.mark.parametrize("data", [numpy.array(["a", "b"] * 8), torch.tensor(3.0)], ids=["text", "a number"])
def test_what_cannot_be_data_is_said_in_the_same_words_on_ranks(ranks, data):
    assert same(ranks(2).run(refusal, data)) == alone(refusal, data)


def refusal(data: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as refused:
        hapi.Model(torch.nn.Linear(1, 1)).predict(data, verbose=0)
    return str(refused.value)
