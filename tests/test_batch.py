"""What a batch may look like, from its shape alone to real calls of fit, evaluate and predict."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset

import hapi
from hapi.batch import Splitter, leaves, map_tensors, move, size_of, split_positional, tensor_of

X = torch.arange(24.0).reshape(6, 4) / 24
Y = torch.arange(6) % 3


# Walking a nest.


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    x: Any
    note: str = "kept"
    total: int = field(default=7, init=False)


@dataclass(frozen=True)
class FrozenSample:
    x: Any


@dataclass(slots=True)
class SlottedSample:
    x: Any


class Wrapper(MutableMapping):
    """A mapping of its own around a dict, with an attribute beside it."""

    def __init__(self, items: dict[str, Any], source: str = "wrapper") -> None:
        self._items = items
        self.source = source

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class ModelOutput(OrderedDict):
    """As the output classes of a well-known library: entries are attributes too, and `update` is forbidden."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("update is not allowed")


def model_output(**items: Any) -> ModelOutput:
    output = ModelOutput()
    for key, value in items.items():
        output[key] = value
    return output


@pytest.mark.parametrize(
    "nest",
    [
        X,
        (X, Y),
        [X, (Y, {"z": X})],
        {"x": X, "names": ["a", "b"], "nothing": None, "count": 3},
        OrderedDict(x=X, y=Y),
        defaultdict(list, x=X),
        UserDict({"x": X, "y": [Y]}),
        Wrapper({"x": X, "text": "t"}),
        model_output(logits=X, loss=None),
        Pair(X, [Y]),
        Sample(X),
        Sample({"deep": (X, "text")}),
        FrozenSample((X, Y)),
        SlottedSample(X),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_map_keeps_types_and_leaves_the_original_alone(nest: Any) -> None:
    before = list(leaves(nest))
    mapped = map_tensors(lambda tensor: tensor.double() + 1, nest)
    assert type(mapped) is type(nest)
    pairs = list(zip(leaves(mapped), before, strict=True))
    assert pairs
    assert all(new.dtype == torch.float64 and torch.equal(new, old.double() + 1) for new, old in pairs)
    assert all(now is then for now, then in zip(leaves(nest), before, strict=True))


def test_map_keeps_what_is_no_tensor() -> None:
    nest = {"text": "t", "none": None, "numbers": (1, 2.5, True), "names": np.array(["a", "b"])}
    assert map_tensors(torch.zeros_like, nest) == nest
    mapped = map_tensors(torch.neg, Sample(X, note="mine"))
    assert (mapped.note, mapped.total) == ("mine", 7)
    assert map_tensors(torch.neg, Wrapper({"x": X}, source="mine")).source == "mine"
    assert torch.equal(map_tensors(torch.neg, model_output(logits=X)).logits, -X)


def test_read_only_mapping_becomes_a_dict() -> None:
    mapped = map_tensors(torch.neg, MappingProxyType({"x": X}))
    assert type(mapped) is dict
    assert torch.equal(mapped["x"], -X)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool"])
def test_arrays_become_tensors_of_their_dtype(dtype: str) -> None:
    array = np.ones((2, 3), dtype)
    assert map_tensors(lambda tensor: tensor, [array])[0].dtype == getattr(torch, dtype)


def test_double_arrays_become_the_default_dtype() -> None:
    # NumPy makes float64 unasked; a tensor of doubles was meant so.
    assert next(leaves((np.ones(2),))).dtype == torch.float32
    assert next(leaves((torch.ones(2).double(),))).dtype == torch.float64


def packed() -> nn.utils.rnn.PackedSequence:
    return nn.utils.rnn.pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)


def test_packed_sequence() -> None:
    sequence = packed()
    mapped = map_tensors(lambda tensor: tensor.to("meta"), (sequence, Y))[0]
    assert type(mapped) is type(sequence)
    assert mapped.data.is_meta and mapped.sorted_indices.is_meta and mapped.unsorted_indices.is_meta
    assert torch.equal(mapped.batch_sizes, torch.tensor([2, 1, 1]))
    for batch in (sequence, (sequence, Y), {"words": sequence}, [{"words": sequence}]):
        assert size_of(batch) == 2


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, Y[:2]),
        [None, "text", X],
        {"scale": torch.tensor(1.0), "x": X},
        (torch.tensor(1.0), X),
        Pair({"n": 3}, [X]),
        Sample(X),
        FrozenSample([X]),
        UserDict({"x": X}),
        Wrapper({"x": X}),
        X.numpy(),
        ["a", np.ones((6, 2))],
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_size(batch: Any) -> None:
    assert size_of(batch) == 6


def test_no_batch_at_all_has_no_samples() -> None:
    assert size_of(None) == 0


@pytest.mark.parametrize("batch", ["text", 3, [], {}, ["a"], torch.tensor(1.0), [[1.0, 2.0]], np.float32(3)])
def test_without_a_batch_dimension_there_is_no_size(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"torch\.tensor\(x\)"):
        size_of(batch)


def test_move_on_the_cpu_copies_nothing() -> None:
    batch = {"x": (X, [Y]), "text": "t"}
    assert move(batch, torch.device("cpu")) is batch
    array = np.ones(3, "float32")
    moved = move((X, array, Pair("t", array)), torch.device("cpu"))
    assert moved[0] is X
    assert moved[1].data_ptr() == moved[2].right.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("batch", [(X, Y), {"x": X}, Pair(X, Y), Sample(X), FrozenSample(X), packed(), X.numpy()])
def test_move_to_another_device(batch: Any) -> None:
    moved = move(batch, torch.device("meta"))
    assert all(tensor.is_meta for tensor in leaves(moved))
    assert type(moved) is type(batch) or isinstance(batch, np.ndarray)


# Splitting, without a network's computation.


@pytest.mark.parametrize(
    ("inputs", "labels", "expected"),
    [
        (None, None, ((0, 1), 2)),
        (1, None, ((0,), (1, 2))),
        (2, None, ((0, 1), 2)),
        (3, None, ((0, 1, 2), None)),
        (None, 1, ((0, 1), 2)),
        (None, 2, ((0,), (1, 2))),
        (None, 0, ((0, 1, 2), None)),
        (1, 1, ((0,), 1)),
        (2, 0, ((0, 1), None)),
    ],
)
def test_positional_split(inputs: int | None, labels: int | None, expected: Any) -> None:
    assert split_positional((0, 1, 2), inputs, labels) == expected
    assert split_positional([0, 1, 2], inputs, labels) == expected


@pytest.mark.parametrize(("inputs", "labels"), [(4, None), (None, 3), (None, 4), (3, 1)])
def test_positional_split_that_does_not_fit(inputs: int | None, labels: int | None) -> None:
    with pytest.raises(ValueError, match="batch of 3 elements"):
        split_positional((0, 1, 2), inputs, labels)


class Takes(nn.Module):
    def forward(self, image: Any, mask: Any = None) -> Any:
        return image


class TakesAnything(nn.Module):
    def forward(self, **fields: Any) -> Any:
        return fields


Named = namedtuple("Named", ["image", "kind"])


@dataclass
class Batch:
    image: Any
    kind: Any


@pytest.mark.parametrize(
    ("network", "spec", "batch", "inputs", "labels"),
    [
        (Takes(), {}, X, (X,), None),
        (Takes(), {}, (X,), (X,), None),
        (Takes(), {}, (X, Y), (X,), Y),
        (Takes(), {}, [X, Y], (X,), Y),
        (Takes(), {}, (X, X, Y), (X, X), Y),
        (Takes(), {"inputs": 1}, [X, Y, Y], (X,), (Y, Y)),
        (Takes(), {"labels": 2}, [X, Y, Y], (X,), (Y, Y)),
        (Takes(), {}, Named(X, Y), (X,), Y),
        (Takes(), {}, {"image": X, "kind": Y}, {"image": X}, Y),
        (Takes(), {}, {"kind": Y, "image": X, "mask": X}, {"image": X, "mask": X}, Y),
        (Takes(), {}, {"b": Y, "image": X, "a": X}, {"image": X}, (Y, X)),
        (Takes(), {}, {"image": X}, {"image": X}, None),
        (Takes(), {}, Batch(X, Y), {"image": X}, Y),
        (Takes(), {}, UserDict({"image": X, "kind": Y}), {"image": X}, Y),
        (Takes(), {"inputs": ["a"]}, {"a": X, "kind": Y}, (X,), Y),
        (Takes(), {"inputs": ["b", "a"]}, {"a": X, "b": Y}, (Y, X), None),
        (Takes(), {"labels": ["a", "kind"]}, {"image": X, "kind": Y, "a": X, "rest": Y}, {"image": X}, (X, Y)),
        (TakesAnything(), {}, {"a": X, "b": Y}, {"a": X, "b": Y}, None),
        (TakesAnything(), {"labels": ["b"]}, {"a": X, "b": Y}, {"a": X}, Y),
        (TakesAnything(), {"inputs": ["a"]}, {"a": X, "b": Y}, {"a": X}, Y),
    ],
)
def test_split(network: nn.Module, spec: dict[str, Any], batch: Any, inputs: Any, labels: Any) -> None:
    found_inputs, found_labels = Splitter(network, spec.get("inputs"), spec.get("labels"))(batch)
    assert type(found_inputs) is type(inputs)
    assert same(found_inputs, inputs)
    assert same(found_labels, labels)


def same(found: Any, expected: Any) -> bool:
    """The same objects in the same nest."""
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found is expected


def test_a_packed_sequence_is_one_input() -> None:
    splitter = Splitter(nn.LSTM(2, 2), None, None)
    sequence = packed()
    assert same(splitter(sequence), ((sequence,), None))
    assert same(splitter((sequence, Y)), ((sequence,), Y))
    assert same(splitter.as_inputs(sequence), (sequence,))
    assert splitter.as_labels(sequence) is sequence


# Real calls. Each network below computes `linear(x)` in some guise, so that one reference serves them all.


class Rows(Dataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(4, 3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def reference(steps: int = 3, loss: Any = cross_entropy) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses of training on the first and second half of X and Y in turn."""
    network = Net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        half = slice(0, 3) if step % 2 == 0 else slice(3, 6)
        value = loss(network(X[half]), Y[half])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return network.state_dict(), losses


def trained(network: nn.Module, data: Any, loss: Any = cross_entropy, epochs: int = 1, **spec: Any) -> hapi.Model:
    model = hapi.Model(network, **spec).prepare(torch.optim.SGD(network.parameters(), lr=0.5), loss)
    own_batches = isinstance(data, DataLoader | list)
    model.fit(data, epochs=epochs, verbose=0, **({} if own_batches else {"batch_size": 3, "shuffle": False}))
    return model


def assert_trained_as_reference(model: hapi.Model, steps: int = 2) -> None:
    expected, _ = reference(steps)
    for key, value in model.network.state_dict().items():
        assert torch.allclose(value, expected[key], rtol=1e-5, atol=1e-7)


class SumOfTwo(Net):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return super().forward(a + b)


class Fields(Net):
    def forward(self, **fields: torch.Tensor) -> torch.Tensor:
        return super().forward(fields["x"])


class OfPair(Net):
    def forward(self, pair: Pair) -> torch.Tensor:
        return super().forward(pair.left + pair.right)


class OfDict(Net):
    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(features["a"] + features["b"])


HALF = X / 2
COLUMNS = [
    (Net, (X, Y), {}),
    (Net, (X.numpy(), Y.numpy()), {}),
    (Net, {"x": X, "y": Y}, {}),
    (Net, Rows(list(zip(X, Y, strict=True))), {}),
    (Net, Rows([(x.numpy(), int(y)) for x, y in zip(X, Y, strict=True)]), {}),
    (Net, Rows([Pair(x, y) for x, y in zip(X, Y, strict=True)]), {}),
    (Net, Rows([{"x": x, "kind": y} for x, y in zip(X, Y, strict=True)]), {}),
    (Net, Rows([{"image": x, "kind": y} for x, y in zip(X, Y, strict=True)]), {"inputs": ["image"]}),
    (Net, DataLoader(Rows(list(zip(X, Y, strict=True))), 3), {}),
    (Net, DataLoader(Rows(list(range(6))), 3, collate_fn=lambda rows: Wrapper({"x": X[rows], "y": Y[rows]})), {}),
    (Net, [(X[:3], Y[:3]), (X[3:], Y[3:])], {}),
    (Net, [[X[:3], Y[:3]], [X[3:], Y[3:]]], {}),
    (Net, [Pair(X[:3], Y[:3]), Pair(X[3:], Y[3:])], {}),
    (Net, [{"x": X[:3], "y": Y[:3]}, {"x": X[3:], "y": Y[3:]}], {}),
    (Net, [(X[:3], Y[:3]), (X[3:].numpy(), Y[3:].numpy())], {}),
    (SumOfTwo, (HALF, HALF, Y), {}),
    (SumOfTwo, {"b": HALF, "a": HALF, "y": Y}, {}),
    (SumOfTwo, {"left": HALF, "right": HALF, "y": Y}, {"inputs": ["left", "right"]}),
    (SumOfTwo, {"left": HALF, "right": HALF, "y": Y}, {"inputs": ["left", "right"], "labels": ["y"]}),
    (Fields, {"x": X, "y": Y}, {"labels": ["y"]}),
    (OfPair, Rows([(Pair(x, x), y) for x, y in zip(HALF, Y, strict=True)]), {}),
    (OfDict, Rows([({"a": x, "b": x}, y) for x, y in zip(HALF, Y, strict=True)]), {}),
    (OfDict, [({"a": HALF[:3], "b": HALF[:3]}, Y[:3]), ({"a": HALF[3:], "b": HALF[3:]}, Y[3:])], {}),
]


@pytest.mark.parametrize(("make", "data", "spec"), COLUMNS)
def test_every_shape_of_batch_trains_evaluates_and_predicts(make: Any, data: Any, spec: dict[str, Any]) -> None:
    network = make()
    before = network.linear(X).detach()
    model = hapi.Model(network, **spec).prepare(loss=nn.CrossEntropyLoss())
    evaluated = model.evaluate(data, verbose=0)["loss"]
    assert evaluated == pytest.approx(cross_entropy(before, Y).item(), rel=1e-6)
    assert torch.allclose(model.predict(data, verbose=0), before)
    assert_trained_as_reference(trained(make(), data, nn.CrossEntropyLoss(), **spec))


@dataclass
class Labelled:
    x: torch.Tensor
    y: torch.Tensor


def test_batches_that_are_dataclasses() -> None:
    halves = [Labelled(X[:3], Y[:3]), Labelled(X[3:], Y[3:])]
    assert_trained_as_reference(trained(Net(), halves))
    loader = DataLoader(Rows(list(range(6))), 3, collate_fn=lambda rows: Labelled(X[rows], Y[rows]))
    assert_trained_as_reference(trained(Net(), loader))


def test_the_users_own_batches_are_not_changed() -> None:
    batches = [Wrapper({"x": X[:3].clone(), "y": Y[:3]}), Wrapper({"x": X[3:].clone(), "y": Y[3:]})]
    model = trained(Net(), batches)
    model.evaluate(batches, verbose=0)
    assert torch.equal(torch.cat([batch["x"] for batch in batches]), X)


def test_inputs_and_labels_of_train_batch() -> None:
    for make, inputs in [
        (Net, X[:3]),
        (Net, [X[:3]]),
        (Net, X[:3].numpy()),
        (Net, X[:3].double().numpy()),
        (Net, {"x": X[:3]}),
        (SumOfTwo, (HALF[:3], HALF[:3])),
        (SumOfTwo, {"b": HALF[:3], "a": HALF[:3]}),
    ]:
        network = make()
        model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.5), cross_entropy)
        for labels in (Y[:3], [Y[:3]], Y[:3].numpy()):
            assert model.eval_batch(inputs, labels)["loss"] == pytest.approx(reference(1)[1][0], rel=1e-6)
        model.train_batch(inputs, Y[:3])
        assert_trained_as_reference(model, steps=1)
        assert torch.allclose(model.predict_batch(inputs), network.linear(X[:3]))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lstm = nn.LSTM(2, 3)

    def forward(self, words: nn.utils.rnn.PackedSequence) -> torch.Tensor:
        return self.lstm(words)[1][0][0]


def test_packed_sequences_train() -> None:
    batches = [(packed(), Y[:2]), (packed(), Y[1:3])]
    network, twin = Words(), Words()
    model = trained(network, batches)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for words, labels in batches:
        optimizer.zero_grad()
        cross_entropy(twin(words), labels).backward()
        optimizer.step()
    assert all(map(torch.equal, network.state_dict().values(), twin.state_dict().values()))
    assert model.predict([packed()], verbose=0).shape == (2, 3)


# Several outputs, labels and losses.


class TwoHeads(Net):
    def forward(self, x: torch.Tensor) -> Any:
        logits = super().forward(x)
        return logits, logits.sum(1)


class NamedHeads(TwoHeads):
    def forward(self, x: torch.Tensor) -> Any:
        logits, total = super().forward(x)
        return {"logits": logits, "deep": (total, None)}


T = torch.linspace(0, 1, 6)


def both(logits: torch.Tensor, total: torch.Tensor, kind: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, kind) + mse_loss(total, target)


def of_dict(outputs: dict[str, Any], kind: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return both(outputs["logits"], outputs["deep"][0], kind, target)


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (TwoHeads, both),
        (TwoHeads, [cross_entropy, mse_loss]),
        (TwoHeads, (nn.CrossEntropyLoss(), nn.MSELoss())),
        (NamedHeads, of_dict),
    ],
)
@pytest.mark.parametrize(
    ("data", "spec"),
    [
        ((X, Y, T), {"inputs": 1}),
        ((X, Y, T), {"labels": 2}),
        ({"x": X, "kind": Y, "target": T}, {}),
        ({"target": T, "x": X, "kind": Y}, {"labels": ["kind", "target"]}),
    ],
)
def test_several_outputs_and_labels(make: Any, loss: Any, data: Any, spec: dict[str, Any]) -> None:
    network, twin = make(), TwoHeads()
    model = trained(network, data, loss, **spec)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for half in (slice(0, 3), slice(3, 6)):
        optimizer.zero_grad()
        both(*twin(X[half]), Y[half], T[half]).backward()
        optimizer.step()
    assert all(map(torch.allclose, network.state_dict().values(), twin.state_dict().values()))
    expected = both(*twin(X), Y, T).item()
    assert model.evaluate(data, batch_size=4, verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)


def test_predictions_have_the_outputs_structure() -> None:
    logits = Net()(X).detach()
    found = hapi.Model(TwoHeads()).predict(X, batch_size=4, verbose=0)
    assert type(found) is tuple
    assert torch.allclose(found[0], logits) and torch.allclose(found[1], logits.sum(1))
    found = hapi.Model(NamedHeads()).predict(X, batch_size=4, verbose=0)
    assert list(found) == ["logits", "deep"]
    assert torch.allclose(found["logits"], logits)
    assert torch.allclose(found["deep"][0], logits.sum(1)) and found["deep"][1] is None
    parts = hapi.Model(TwoHeads()).predict(X, batch_size=4, stack_outputs=False, verbose=0)
    assert [len(part[0]) for part in parts] == [4, 2]
    assert torch.allclose(torch.cat([part[0] for part in parts]), logits)


# Outputs that hold the loss.


@dataclass
class WithLoss:
    loss: torch.Tensor | None
    logits: torch.Tensor


def as_dict(loss: Any, logits: torch.Tensor) -> dict[str, Any]:
    return {"loss": loss, "logits": logits}


def as_model_output(loss: Any, logits: torch.Tensor) -> Any:
    return model_output(loss=loss, logits=logits)


class OwnLoss(Net):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(x)
        return self.form(None if labels is None else cross_entropy(logits, labels), logits)


def of_outputs(outputs: Any, labels: Any) -> torch.Tensor:
    assert labels is None
    return (outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits).argmax(1).eq(0).float()


@pytest.mark.parametrize("form", [as_dict, as_model_output, WithLoss])
def test_outputs_that_hold_the_loss(form: Any) -> None:
    network = OwnLoss(form)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    model = hapi.Model(network).prepare(optimizer, metrics=of_outputs)
    data = {"x": X, "labels": Y}
    logits = Net()(X).detach()
    evaluated = model.evaluate(data, batch_size=4, verbose=0)
    assert evaluated["loss"] == pytest.approx(cross_entropy(logits, Y).item(), rel=1e-6)
    assert evaluated["of_outputs"] == pytest.approx(logits.argmax(1).eq(0).float().mean().item())
    model.fit(data, batch_size=3, shuffle=False, verbose=0)
    assert_trained_as_reference(model)
    assert model.eval_batch(data)["loss"] == pytest.approx(cross_entropy(network.linear(X), Y).item(), rel=1e-6)
    predicted = model.predict({"x": X}, batch_size=4, verbose=0)
    logits = predicted.logits if isinstance(predicted, WithLoss) else predicted["logits"]
    assert torch.allclose(logits, network.linear(X))


# Overridden steps.


class Doubled(hapi.Model):
    """Its loss is twice the cross-entropy, in the form that it is told."""

    def __init__(self, form: str) -> None:
        super().__init__(Net())
        self.form = form
        self.prepare(torch.optim.SGD(self.network.parameters(), lr=0.25))

    def train_step(self, inputs: Any, labels: Any) -> Any:
        outputs = self.network(*inputs)
        if self.form == "mean":
            return 2 * cross_entropy(outputs, labels), outputs
        count = len(labels) if self.form == "number" else torch.tensor(len(labels))
        return (2 * cross_entropy(outputs, labels, reduction="sum"), count), outputs

    eval_step = train_step


@pytest.mark.parametrize("form", ["mean", "number", "tensor"])
def test_overridden_steps(form: str) -> None:
    model = Doubled(form)
    logits = Net()(X).detach()
    assert model.evaluate((X, Y), batch_size=4, verbose=0)["loss"] == pytest.approx(2 * cross_entropy(logits, Y).item())
    model.fit((X, Y), batch_size=3, shuffle=False, verbose=0)
    assert_trained_as_reference(model)


@pytest.mark.parametrize("form", ["mean", "number", "tensor"])
def test_overridden_train_step_accumulates(form: str) -> None:
    whole, parts = Doubled(form), Doubled(form)
    whole.fit((X, Y), batch_size=6, shuffle=False, verbose=0)
    parts.fit((X, Y), batch_size=4, shuffle=False, accumulate_grad_batches=2, verbose=0)
    for one, other in zip(whole.network.parameters(), parts.network.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


class Tokens(hapi.Model):
    """A mean over tokens, of which samples hold unequal numbers."""

    def train_step(self, inputs: Any, labels: Any) -> Any:
        outputs = self.network(*inputs)
        counted = labels >= 0
        return (mse_loss(outputs[counted], labels[counted], reduction="sum"), counted.sum()), outputs

    eval_step = train_step


def test_sum_and_count_weigh_batches() -> None:
    labels = torch.rand(6, 3)
    labels[:5, 1:] = -1
    counted = labels >= 0
    networks = Net(), Net()
    models = [Tokens(network).prepare(torch.optim.SGD(network.parameters(), lr=0.5)) for network in networks]
    expected = mse_loss(Net()(X)[counted], labels[counted]).item()
    for model in models:
        assert model.evaluate((X, labels), batch_size=4, verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)
    models[0].fit((X, labels), batch_size=6, shuffle=False, verbose=0)
    models[1].fit((X, labels), batch_size=2, shuffle=False, accumulate_grad_batches=3, verbose=0)
    assert all(map(torch.allclose, networks[0].parameters(), networks[1].parameters()))
    twin = Net()
    mse_loss(twin(X)[counted], labels[counted]).backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter -= 0.5 * parameter.grad
    assert all(map(torch.allclose, networks[0].parameters(), twin.parameters()))


def test_arrays_that_may_not_be_written_to_are_copied():
    array = np.arange(4.0, dtype="float32")
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_of(array)
    tensor += 1
    assert array.tolist() == [0, 1, 2, 3] and tensor.tolist() == [1, 2, 3, 4]
    assert tensor_of(np.float32(2.5)).item() == 2.5
    writable = np.arange(4.0, dtype="float32")
    assert tensor_of(writable).data_ptr() == writable.ctypes.data, "what may be written to is shared"
