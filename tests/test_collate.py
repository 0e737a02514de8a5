"""Samples as batches: what NumPy and Python make float64 unasked, dataclasses, and what cannot be stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

import hapi
from hapi.data.collate import Collate
from hapi.data.sources import as_batch_source

X = np.linspace(-1, 1, 24).reshape(8, 3)
Y = np.linspace(0, 1, 8)[:, None]


class Made(Dataset[Any]):
    """Samples as a function makes them."""

    def __init__(self, make: Callable[[int], Any], length: int = len(X)) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((X[i], Y[i]) for i in range(len(X)))


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Record:
    input: Any
    label: Any


def model(dtype: torch.dtype = torch.float32) -> hapi.Model:
    network = nn.Linear(3, 1, dtype=dtype)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[0.3, -0.2, 0.7]]))
        network.bias.fill_(0.1)
    return hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.5), nn.MSELoss())


def row(index: int) -> Any:
    return X[index], Y[index]


DATA: dict[str, Callable[[], Any]] = {
    "columns": lambda: (X, Y),
    "reversed columns": lambda: (X[::-1][::-1], Y),
    "a data set": lambda: Made(row),
    "named tuples": lambda: Made(lambda i: Pair(X[i], Y[i])),
    "dicts": lambda: Made(lambda i: {"input": X[i], "label": Y[i]}),
    "read-only mappings": lambda: Made(lambda i: MappingProxyType({"input": X[i], "label": Y[i]})),
    "dataclasses": lambda: Made(lambda i: Record(X[i], Y[i])),
    "an iterable": Stream,
    "a loader": lambda: DataLoader(Made(row), batch_size=8),
    "a loader of an iterable": lambda: DataLoader(Stream(), batch_size=8),
    "a loader of batches": lambda: DataLoader([(X, Y)], batch_size=None),
    "a loader with workers": lambda: DataLoader(Made(row), batch_size=8, num_workers=1),
    "batches": lambda: [(X, Y)],
    "batches as dicts": lambda: [{"input": X, "label": Y}],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", DATA)
def test_float64_that_numpy_makes_unasked_takes_the_networks_dtype_from_any_data(kind: str, dtype: torch.dtype) -> None:
    subject, plain = model(dtype), model(dtype)
    x, y = torch.tensor(X, dtype=dtype), torch.tensor(Y, dtype=dtype)
    nn.functional.mse_loss(plain.network(x), y).backward()
    plain.optimizer.step()
    options = {} if "loader" in kind or "batches" in kind or kind == "an iterable" else {"shuffle": False}
    subject.fit(DATA[kind](), verbose=0, **options)
    assert all(map(torch.equal, subject.network.parameters(), plain.network.parameters()))
    with torch.no_grad():
        expected = float(nn.functional.mse_loss(plain.network(x), y))
    assert subject.evaluate(DATA[kind](), verbose=0)["loss"] == expected


@pytest.mark.parametrize(
    "wrap", [lambda r: (r, 1), lambda r: {"r": [r], "n": 1.5}, lambda r: Pair(r, "text"), lambda r: Record({"r": r}, 1)]
)
def test_dataclasses_within_other_containers(wrap: Callable[[Any], Any]) -> None:
    """As torch collates the container, with the record's fields stacked."""
    rows = [Record(X[i], float(Y[i, 0])) for i in range(8)]
    batch = Collate(torch.float32)([wrap(row) for row in rows])
    if isinstance(batch, Record):
        assert batch.label.tolist() == [1] * 8
        batch = (batch.input["r"],)
    else:
        plain = default_collate([wrap({"input": row.input, "label": row.label}) for row in rows])
        assert type(batch) is type(plain)
    record = batch["r"][0] if isinstance(batch, dict) else batch[0]
    assert type(record) is Record and record.label.dtype == torch.float32
    assert torch.equal(record.input, torch.tensor(X, dtype=torch.float32))
    assert record.label.tolist() == pytest.approx(Y[:, 0].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_batch_of_arrays_takes_the_networks_dtype(dtype: torch.dtype) -> None:
    subject = model(dtype)
    with torch.no_grad():
        outputs = subject.network(torch.tensor(X, dtype=dtype))
        expected = float(nn.functional.mse_loss(outputs, torch.tensor(Y, dtype=dtype)))
    assert subject.eval_batch(X, Y)["loss"] == subject.train_batch(X, Y)["loss"] == expected
    assert subject.predict_batch(X).dtype == dtype


def test_numbers_of_python_are_float32_and_a_list_of_one_is_no_list() -> None:
    """default_collate makes float64 of them, and a list of one column: (8,) beside outputs of (8, 1)."""
    with pytest.raises(ValueError, match=r"\(8, 1\) and labels of shape \(8,\).*labels\.unsqueeze\(1\)"):
        model().fit(Made(lambda i: (X[i], [float(Y[i, 0])])), verbose=0)
    network = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    seen = []

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels)
        return nn.functional.mse_loss(outputs, labels)

    subject = hapi.Model(network).prepare("sgd", loss)
    for make in (lambda i: (X[i], float(Y[i, 0])), lambda i: (X[i], [float(Y[i, 0])]), lambda i: (X[i], Y[i, 0])):
        subject.fit(Made(make), shuffle=False, verbose=0)
        assert seen[-1].dtype == torch.float32
        assert seen[-1].tolist() == pytest.approx(Y[:, 0].tolist())


def test_tensors_of_float64_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.float64 arrived.*x\.to\(torch\.float32\)"):
        model().fit(Made(lambda i: (torch.tensor(X[i]), Y[i])), verbose=0)


CANNOT: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "None": (lambda i: (X[i], Y[i], None), TypeError, "None, of type NoneType at position 2.*collate_fn"),
    "None in a dict": (lambda i: {"input": X[i], "y": None}, TypeError, "None, of type NoneType at 'y'"),
    "None in a dataclass": (lambda i: Record(X[i], None), TypeError, "None, of type NoneType.*leave it out"),
    "an object": (lambda i: (X[i], (Y[i], Made)), TypeError, "of type type at position 1"),
    "text in an array": (lambda i: (X[i], np.array(["a"])), TypeError, "of type ndarray at position 1"),
    "an order of bytes": (lambda i: (X[i].astype(">f8"), Y[i]), TypeError, r'position 0.*x\.astype\("float64"\)'),
    "shapes": (lambda i: (torch.ones(3 + i), Y[i]), ValueError, r"\[\(3,\), \(1,\)\] and, 1 further on.*\(4,\).*pad"),
    "a picture": (lambda i: (Image.new("L", (2, 2)), 1), TypeError, r"type Image at position 0.*ToTensor\(\)"),
}


@pytest.mark.parametrize("kind", CANNOT)
@pytest.mark.parametrize("in_loader", [False, True])
def test_what_cannot_be_stacked_is_said_with_its_place(kind: str, in_loader: bool) -> None:
    make, error, text = CANNOT[kind]
    data = DataLoader(Made(make), batch_size=2) if in_loader else Made(make)
    with pytest.raises(error, match=text):
        model().fit(data, verbose=0, **({} if in_loader else {"shuffle": False}))


def test_it_is_said_from_a_worker_too() -> None:
    with pytest.raises(TypeError, match="None, of type NoneType at position 2.*collate_fn"):
        model().fit(Made(CANNOT["None"][0]), num_workers=1, verbose=0)


@pytest.mark.parametrize("array", [np.array([["a"], ["b"]]), np.array([[1.0], [2.0]], dtype=object)])
def test_arrays_that_hold_no_numbers(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r'dtype .* and shape \(2, 1\).*astype\("float32"\)'):
        model().fit((X[:2], array), verbose=0)


def test_labels_that_a_loss_does_not_take_are_counted() -> None:
    subject = model()
    with pytest.raises(ValueError, match=r'2 labels \(Tensor, text\).*Model\(network, labels=\["y"\]\)'):
        subject.fit(Made(lambda i: {"input": X[i], "y": Y[i], "name": "a"}), verbose=0)
    with pytest.raises(ValueError, match=r"one float.*looks like a sample.*DataLoader\(samples"):
        subject.fit([(torch.ones(3), 1.0), (torch.ones(3), 2.0)], verbose=0)


class Smoothed(nn.CrossEntropyLoss):
    """The user's name for it."""


@pytest.mark.parametrize("loss", [
    nn.CrossEntropyLoss(), nn.MSELoss(), nn.functional.mse_loss, Smoothed(),
    partial(nn.functional.cross_entropy, label_smoothing=0.1), lambda outputs, labels: nn.L1Loss()(outputs, labels),
])  # fmt: skip
@pytest.mark.parametrize("label", ["a", b"a"])
def test_torchs_losses_and_our_metrics_take_no_text(loss: Any, label: str | bytes) -> None:
    subject = model().prepare("sgd", loss)
    with pytest.raises(ValueError, match=r"The loss received labels that are text, b?'a' the.*names\.index\(label\)"):
        subject.fit(Made(lambda i: (X[i], label)), verbose=0)
    subject.prepare("sgd", metrics=hapi.metrics.Accuracy())
    with pytest.raises(ValueError, match=r"Accuracy \('acc'\) received labels that are text, b?'a' the"):
        subject.evaluate(Made(lambda i: (X[i], label)), verbose=0)


class Words(hapi.Model):
    """Counts the words of captions in a step of its own."""

    seen: list[Any]

    def train_step(self, inputs: Any, labels: Any) -> Any:
        self.seen.append(labels)
        counts = torch.tensor([float(len(caption.split())) for caption in labels], dtype=torch.float64)
        outputs = self.network(**inputs) if isinstance(inputs, dict) else self.network(*inputs)
        return (outputs[:, 0] - counts).square().mean(), outputs


CAPTIONS = ["a dog", "two small cats", "snow", "a", "the end of it"]


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_column_of_text_is_one_label(batch_size: int) -> None:
    """Of whichever batch, a batch of one included, and however it is given: each caption to the sample beside it."""
    counts = torch.tensor([float(len(caption.split())) for caption in CAPTIONS], dtype=torch.float64)
    seen: list[Any] = []

    def long_ones(outputs: torch.Tensor, captions: list[str]) -> torch.Tensor:
        return torch.tensor([len(caption.split()) > 1 for caption in captions])

    def own_loss(outputs: torch.Tensor, captions: list[str]) -> torch.Tensor:
        seen.append(captions)
        counts = [float(len(caption.split())) for caption in captions]
        return (outputs[:, 0] - torch.tensor(counts, dtype=torch.float64)).square().mean()

    def weights(subject: hapi.Model, data: Any) -> torch.Tensor:
        torch.manual_seed(0)
        subject.network.reset_parameters()
        sized = {"shuffle": False, "batch_size": batch_size}
        subject.fit(data, verbose=0, **({} if data is loader or data is arrays else sized))
        return subject.network.weight.detach().clone()

    def linear() -> nn.Module:
        return nn.Linear(3, 1, dtype=torch.float64)

    samples = [(torch.as_tensor(X[i], dtype=torch.float64), caption) for i, caption in enumerate(CAPTIONS)]
    numbers = TensorDataset(torch.stack([x for x, _ in samples]), counts[:, None])
    batches = [CAPTIONS[i : i + batch_size] for i in range(0, len(CAPTIONS), batch_size)]

    pairs = Made(lambda i: samples[i], len(samples))
    named = Made(lambda i: {"input": samples[i][0], "caption": samples[i][1]}, len(samples))
    nested = Made(lambda i: (samples[i][0], [samples[i][1]]), len(samples))
    loader = DataLoader(pairs, batch_size=batch_size)
    arrays = [(x, np.array(texts)) for (x, _), texts in zip(DataLoader(numbers, batch_size), batches, strict=True)]
    expected = weights(hapi.Model(linear()).prepare("sgd", nn.MSELoss()), numbers)
    for data in (pairs, named, nested, loader, arrays):
        seen.clear()
        torch.testing.assert_close(weights(hapi.Model(linear()).prepare("sgd", own_loss), data), expected)
        assert seen == batches
        stepping = Words(linear()).prepare("sgd")
        stepping.seen = []
        torch.testing.assert_close(weights(stepping, data), expected)
        assert stepping.seen == batches
    one = hapi.Model(linear()).prepare("sgd", own_loss)
    for given in (CAPTIONS[:batch_size], tuple(CAPTIONS[:batch_size])):
        seen.clear()
        one.train_batch(numbers.tensors[0][:batch_size], given)
        one.eval_batch(numbers.tensors[0][:batch_size], given)
        assert seen == [CAPTIONS[:batch_size]] * 2
    one.prepare(loss=own_loss, metrics=long_ones)
    assert one.evaluate(pairs, batch_size=batch_size, verbose=0)["long_ones"] == 0.6


@pytest.mark.parametrize("sample", [
    lambda x, i: (x, f"left {i}", f"right {i}"), lambda x, i: (x, [f"left {i}", f"right {i}"]),
    lambda x, i: {"input": x, "one": f"left {i}", "other": f"right {i}"},
    lambda x, i: (x, Pair(f"left {i}", f"right {i}")),
])  # fmt: skip
@pytest.mark.parametrize("batch_size", [1, 3])
def test_two_columns_of_text_are_two_labels(sample: Callable[[Any, int], Any], batch_size: int) -> None:
    seen: list[Any] = []

    def loss(outputs: torch.Tensor, left: list[str], right: list[str]) -> torch.Tensor:
        seen.append((left, right))
        return outputs.square().mean()

    splits_first = isinstance(sample(0, 0), tuple)
    subject = hapi.Model(nn.Linear(3, 1), inputs=1 if splits_first else None).prepare("sgd", loss)
    data = Made(lambda i: sample(torch.as_tensor(X[i], dtype=torch.float32), i), 4)
    subject.evaluate(data, batch_size=batch_size, verbose=0)
    batches = [range(4)[i : i + batch_size] for i in range(0, 4, batch_size)]
    assert seen == [([f"left {i}" for i in batch], [f"right {i}" for i in batch]) for batch in batches]


def test_a_function_compares_texts_with_texts() -> None:
    class Echo(hapi.Model):
        def eval_step(self, inputs: Any, labels: Any) -> Any:
            return None, ["a" if float(x[0]) < 0 else "b" for x in inputs[0]]

    def right(outputs: list[str], labels: list[str]) -> torch.Tensor:
        return torch.tensor([ours == theirs for ours, theirs in zip(outputs, labels, strict=True)])

    subject = Echo(nn.Linear(3, 1)).prepare(metrics=right)
    said = subject.evaluate(Made(lambda i: (torch.tensor([i - 1.5, 0, 0]), "aaba"[i]), 4), batch_size=3, verbose=0)
    assert said == {"right": 0.75}


def test_outputs_that_are_text_are_not_taken_for_labels() -> None:
    class Talking(hapi.Model):
        def eval_step(self, inputs: Any, labels: Any) -> Any:
            return None, ["yes"] * len(labels)

    subject = Talking(nn.Linear(3, 1)).prepare(metrics=hapi.metrics.Accuracy())
    with pytest.raises(TypeError, match="received outputs of type list"):
        subject.evaluate((torch.rand(4, 3), torch.zeros(4, dtype=torch.int64)), verbose=0)


def test_errors_of_a_loss_over_text_are_its_own() -> None:
    @partial(torch.compile, backend="eager")
    def too_long(outputs: torch.Tensor, captions: list[str]) -> torch.Tensor:
        raise ValueError(f"{captions[0]!r} has more than 77 words")

    network = nn.Linear(3, 1, dtype=torch.float64)
    subject = hapi.Model(network).prepare("sgd", too_long)
    with pytest.raises(ValueError, match="^'a dog' has more than 77 words$"):
        subject.fit(Made(lambda i: (X[i], "a dog")), verbose=0)


@pytest.mark.parametrize("writeable", [False, True])
def test_fields_of_a_packed_record(writeable: bool) -> None:
    record = np.dtype([("y", "u1"), ("x", "<f4", (3,))])
    whole = np.frombuffer(bytearray(4 * record.itemsize), dtype=record)
    whole["x"], whole["y"] = X[:4], np.arange(4)
    whole.flags.writeable = writeable
    source = as_batch_source((whole["x"], whole["y"]), torch.float32)
    assert source is not None
    images, labels = source.fetch_batch(torch.tensor([3, 1]))
    assert torch.equal(images, torch.tensor(X[[3, 1]], dtype=torch.float32))
    assert labels.tolist() == [3, 1]


@pytest.mark.parametrize("writeable", [False, True])
def test_arrays_in_another_order_of_bytes(writeable: bool) -> None:
    x, y = np.arange(4, dtype=">f8")[::-1].reshape(2, 2), np.arange(2, dtype=">i2")
    y.flags.writeable = writeable
    source = as_batch_source((x, y), torch.float32)
    assert source is not None
    images, labels = source.fetch_batch(range(2))
    assert (images.tolist(), images.dtype) == ([[3.0, 2.0], [1.0, 0.0]], torch.float32)
    assert (labels.tolist(), labels.dtype) == ([0, 1], torch.int16)
