"""Bad input: each fault is found before it costs anything, and the message says what to write instead."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

import hapi
from hapi.callbacks import Callback, EarlyStopping, LRScheduler, ModelCheckpoint, ReduceLROnPlateau
from hapi.metrics import Accuracy

X = torch.arange(40.0).reshape(10, 4) / 40
Y = torch.arange(10) % 3
SAMPLES = TensorDataset(X, Y)


def model(loss: Any = None, network: nn.Module | None = None, **options: Any) -> hapi.Model:
    network = network if network is not None else nn.Linear(4, 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return hapi.Model(network).prepare(optimizer, loss if loss is not None else nn.CrossEntropyLoss(), **options)


def regression(loss: nn.Module) -> hapi.Model:
    return model(loss, nn.Linear(4, 1))


def weights(network: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in network.state_dict().values()]


Refused = Callable[..., None]


@pytest.fixture
def refused(tmp_path: Path) -> Refused:
    """Calls fit, which must raise, move no weight and write nothing."""

    def check(error: type[Exception], cure: str, subject: hapi.Model, data: Any = (X, Y), **options: Any) -> None:
        before = weights(subject.network)
        options = {"save_dir": tmp_path / "out", "verbose": 0, **options}
        with pytest.raises(error, match=cure):
            subject.fit(data, **options)
        assert all(map(torch.equal, before, weights(subject.network)))
        assert not (tmp_path / "out").exists()

    return check


class Rows(Dataset):
    """A map-style data set that hapi has to read sample by sample."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(column[index] for column in self.columns)


class Stream(IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


# What prepare has to bring.


def test_fit_without_an_optimizer(refused: Refused) -> None:
    network = nn.Linear(4, 3)
    refused(ValueError, r"model\.prepare\(.*Adam", hapi.Model(network).prepare(loss=nn.CrossEntropyLoss()))
    refused(ValueError, r"model\.prepare\(", hapi.Model(network))


def test_train_batch_without_an_optimizer() -> None:
    with pytest.raises(ValueError, match=r"train_batch.*model\.prepare\(.*Adam"):
        hapi.Model(nn.Linear(4, 3)).prepare(loss=nn.CrossEntropyLoss()).train_batch(X, Y)


def test_fit_without_a_loss(refused: Refused) -> None:
    refused(ValueError, r"loss=nn\.CrossEntropyLoss\(\).*dict with 'loss'", hapi.Model(nn.Linear(4, 3)).prepare("sgd"))


class TwoOutputs(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": super().forward(x)}


def test_outputs_without_a_loss_are_named(refused: Refused) -> None:
    refused(ValueError, r"\['logits'\]", hapi.Model(TwoOutputs(4, 3)).prepare("sgd"))


@pytest.mark.parametrize(
    ("arguments", "error", "cure"),
    [
        ({"loss": nn.CrossEntropyLoss}, TypeError, r"loss=nn\.CrossEntropyLoss\(\)"),
        ({"loss": [nn.MSELoss(), nn.MSELoss]}, TypeError, r"loss=nn\.MSELoss\(\)"),
        ({"loss": "mse"}, TypeError, r"nn\.CrossEntropyLoss\(\), or a function"),
        ({"loss": []}, ValueError, r"holds no loss.*leave it out"),
        ({"loss": torch.optim.SGD([X])}, TypeError, r"an optimizer, SGD, .*prepare\(optimizer, loss, metrics\)"),
        ({"optimizer": nn.MSELoss()}, TypeError, r"MSELoss\(\), .*the second argument.*prepare\(loss=loss\)"),
        ({"optimizer": nn.functional.mse_loss}, TypeError, r"mse_loss, .*the second argument"),
        ({"optimizer": "adamx"}, ValueError, "'sgd', 'adam', 'adamw'"),
        ({"optimizer": 3}, TypeError, r'or "adam"'),
        ({"optimizer": lambda parameters: parameters}, TypeError, r'or "adam"'),
        ({"optimizer": torch.optim.SGD(nn.Linear(4, 3).parameters())}, ValueError, r"Adam\(model\.parameters\(\)"),
        ({"optimizer": torch.optim.LBFGS}, ValueError, "needs no closure"),
        ({"strategy": "fsdpx"}, ValueError, '"auto" or "ddp"'),
        ({"amp_configs": "fp8"}, ValueError, 'amp_configs="bf16"'),
        ({"amp_configs": "O3"}, ValueError, 'amp_configs="bf16"'),
        ({"amp_configs": 3}, TypeError, 'amp_configs="bf16"'),
        ({"amp_configs": {"dtyp": "bf16"}}, ValueError, "Known ones: level, dtype"),
        ({"amp_configs": {"level": "O9"}}, ValueError, 'amp_configs="bf16"'),
        ({"amp_configs": {"dtype": "int8"}}, ValueError, 'amp_configs="bf16"'),
        ({"amp_configs": {"dtype": ["bf16"]}}, ValueError, 'amp_configs="bf16"'),
        ({"amp_configs": {"level": "O0", "dtype": "int8"}}, ValueError, 'amp_configs="bf16"'),
        ({"amp_configs": {"dtype": "fp16", "init_loss_scaling": -1}}, ValueError, '"init_loss_scaling": 1024'),
        ({"scheduler": "cosine", "optimizer": "sgd"}, TypeError, "lambda optimizer: StepLR"),
        ({"scheduler": lambda optimizer: 3, "optimizer": "sgd"}, TypeError, "lambda optimizer: StepLR"),
        ({"scheduler": lambda optimizer: 3}, ValueError, r"prepare\(optimizer, loss, scheduler="),
        ({"scheduler_interval": "batch"}, ValueError, '"step" or "epoch"'),
        ({"clip_grad_norm": 0}, ValueError, r"clip_grad_norm=1\.0"),
        ({"clip_grad_norm": float("nan")}, ValueError, r"clip_grad_norm=1\.0"),
        ({"clip_grad_norm": "1"}, TypeError, r"clip_grad_norm=1\.0"),
        ({"clip_grad_norm": True}, TypeError, r"clip_grad_norm=1\.0"),
        ({"metrics": "acc"}, TypeError, r"hapi\.metrics\.Accuracy\(\)"),
        ({"metrics": Accuracy}, TypeError, r"Accuracy\(\)"),
        ({"metrics": 3}, TypeError, r"hapi\.metrics\.Metric"),
        ({"metrics": [Accuracy(), Accuracy()]}, ValueError, r'Accuracy\(name="acc_2"\)'),
        ({"metrics": Accuracy(name="loss")}, ValueError, 'name="my_metric"'),
    ],
)
def test_prepare(arguments: dict[str, Any], error: type[Exception], cure: str) -> None:
    with pytest.raises(error, match=cure):
        hapi.Model(nn.Linear(4, 3)).prepare(**arguments)


def test_scheduler_of_another_optimizer() -> None:
    strange = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters()), 1)
    with pytest.raises(ValueError, match="same optimizer object"):
        model(scheduler=strange)


@pytest.mark.parametrize(
    ("network", "cure"),
    [(nn.Linear, r"Model\(Linear\(\)\)"), ("net", r"nn\.Sequential"), (lambda x: x, r"nn\.Sequential")],
)
def test_what_is_no_network(network: Any, cure: str) -> None:
    with pytest.raises(TypeError, match=cure):
        hapi.Model(network)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "x", []])
def test_what_says_no_inputs(bad: Any) -> None:
    with pytest.raises(TypeError, match=r'inputs=1.*inputs=\["x"\]'):
        hapi.Model(nn.Linear(4, 3), inputs=bad)


def test_sync_batchnorm_on_the_cpu(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hapi.device, "_chosen", torch.device("cpu"))
    refused(ValueError, "Leave it out", model(sync_batchnorm=True))


# The arguments of fit, evaluate and predict.

COUNTS = ("batch_size", "epochs", "eval_freq", "log_freq", "save_freq", "accumulate_grad_batches", "num_iters")


@pytest.mark.parametrize("name", [*COUNTS, "global_batch_size"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_counts(refused: Refused, name: str, value: Any, error: type[Exception]) -> None:
    refused(error, rf"{name} received {value}.*Write {name}=\d", model(), **{name: value})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("2", r"'2', of type str, which is not a whole number\. Write epochs=2\.$"),
        (" 20 ", r"' 20 ', of type str, .*Write epochs=20\.$"),
        (3.0, r"3\.0, of type float, .*Write epochs=3\.$"),
        ("0", r"'0', of type str, .*Write epochs=1\d*\.$"),
        (1e30, r"1e\+30, of type float, .*Write epochs=1\d*\.$"),
        ("ten", r"'ten', of type str, .*Write epochs=1\d*\.$"),
        (float("nan"), r"nan, of type float, .*Write epochs=1\d*\.$"),
    ],
)
def test_a_number_in_another_form_is_what_the_error_writes(refused: Refused, value: Any, shown: str) -> None:
    refused(TypeError, rf"^epochs received {shown}", model(), epochs=value)


@pytest.mark.parametrize("labels", [Y, Y.numpy(), Y.float()])
def test_labels_in_place_of_a_number_are_named_by_their_shape(labels: Any) -> None:
    kind = type(labels).__name__
    said = rf"^batch_size received {kind} of shape \(10,\), which is not a whole number\. .*one tuple \(x, y\)\.$"
    with pytest.raises(TypeError, match=said):
        model().evaluate(X, labels)


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ({"batch_size": [8, 0]}, ValueError, "batch_size=32"),
        ({"batch_size": [8, 8, 8]}, ValueError, r"batch_size=\[32, 256\]"),
        ({"batch_size": 4, "global_batch_size": 4}, ValueError, "Leave one of them out"),
        ({"shuffle": "yes"}, TypeError, "shuffle=True"),
        ({"drop_last": "no"}, TypeError, "drop_last=True"),
        ({"num_workers": -1}, ValueError, "num_workers=2"),
        ({"num_workers": 1.5}, TypeError, "num_workers=2"),
        ({"verbose": 3}, ValueError, r"0 \(silent\)"),
        ({"seed": 1.5}, TypeError, "seed=0"),
        ({"nan_policy": "skip"}, ValueError, '"stop" or "ignore"'),
        ({"save_dir": 3}, TypeError, 'save_dir="checkpoints"'),
        ({"save_dir": ""}, TypeError, 'save_dir="checkpoints"'),
    ],
)
def test_options_of_fit(refused: Refused, options: dict[str, Any], error: type[Exception], cure: str) -> None:
    refused(error, cure, model(), **options)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_batch_size_of_a_pass(method: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Write batch_size=32"):
        getattr(model(), method)((X, Y), batch_size=value, verbose=0)


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ({"log_freq": 0}, ValueError, "log_freq=10"),
        ({"log_freq": 1.5}, TypeError, "log_freq=10"),
        ({"num_iters": 0}, ValueError, "num_iters=100"),
        ({"num_workers": -1}, ValueError, "num_workers=2"),
        ({"verbose": 5}, ValueError, r"0 \(silent\)"),
    ],
)
def test_options_of_evaluate(options: dict[str, Any], error: type[Exception], cure: str) -> None:
    with pytest.raises(error, match=cure):
        model().evaluate((X, Y), **{"verbose": 0, **options})


@pytest.mark.parametrize(
    "option",
    [
        {"batch_size": 4},
        {"global_batch_size": 4},
        {"shuffle": False},
        {"drop_last": False},
        {"num_workers": 0},
    ],
)
@pytest.mark.parametrize("data", [DataLoader(SAMPLES, 4), [(X, Y)]])
def test_options_that_the_data_has_decided(refused: Refused, option: dict[str, Any], data: Any) -> None:
    ((name, value),) = option.items()
    refused(ValueError, f"{name}={value}.*Leave it out", model(), data, **option)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_options_of_a_pass_that_the_loader_has_decided(method: str) -> None:
    with pytest.raises(ValueError, match="batch_size=4.*Leave it out"):
        getattr(model(), method)(DataLoader(SAMPLES, 4), batch_size=4, verbose=0)


def test_shuffle_with_an_iterable_data_set(refused: Refused) -> None:
    refused(ValueError, "Leave shuffle out", model(), Stream(list(zip(X, Y, strict=True))), shuffle=True)


@pytest.mark.parametrize(
    ("callbacks", "cure"),
    [(EarlyStopping, r"EarlyStopping\(\)"), ([lambda: None], r"hapi\.callbacks\.Callback"), (3, r"hapi\.callbacks")],
)
def test_what_is_no_callback(refused: Refused, callbacks: Any, cure: str) -> None:
    refused(TypeError, cure, model(), callbacks=callbacks)


@pytest.mark.parametrize(
    ("callback", "cure"),
    [
        (EarlyStopping("val_loss"), "'loss', 'acc', 'lr'.*pass fit an eval_data"),
        (EarlyStopping("accuracy"), "'loss', 'acc', 'lr'"),
        (ModelCheckpoint(monitor="val_acc"), "'loss', 'acc', 'lr'.*pass fit an eval_data"),
        (ReduceLROnPlateau("los", mode="min"), "'loss', 'acc', 'lr'"),
    ],
)
def test_monitor_that_no_log_has(refused: Refused, callback: Callback, cure: str) -> None:
    refused(ValueError, cure, model(metrics=Accuracy()), callbacks=callback)


def test_scheduler_without_the_value_that_it_watches(refused: Refused) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    refused(ValueError, r"fit\(train_data, eval_data\)", model(scheduler=plateau))


def test_lr_callback_without_a_scheduler(refused: Refused) -> None:
    refused(ValueError, r"scheduler=", model(), callbacks=LRScheduler(by_step=True))


# Data.


@pytest.mark.parametrize(
    "empty",
    [
        (X[:0], Y[:0]),
        [],
        Subset(SAMPLES, []),
        Rows(X[:0], Y[:0]),
        DataLoader(Rows(X[:0], Y[:0]), 4),
    ],
)
def test_empty_data(refused: Refused, empty: Any) -> None:
    refused(ValueError, "train_data is empty.*at least one sample", model(), empty)
    refused(ValueError, "eval_data is empty.*at least one sample", model(), eval_data=empty)
    with pytest.raises(ValueError, match="eval_data is empty.*at least one sample"):
        model().evaluate(empty, verbose=0)


def test_empty_stream(refused: Refused) -> None:
    refused(ValueError, "no batch in epoch 1.*at least one sample", model(), Stream([]))


@pytest.mark.parametrize("data", [(X, Y), SAMPLES, Rows(X, Y)])
def test_drop_last_leaves_none(refused: Refused, data: Any) -> None:
    refused(ValueError, "10 samples.*batch of 32.*Make batch_size smaller", model(), data, drop_last=True)


def test_drop_last_of_a_loader_leaves_none(refused: Refused) -> None:
    refused(ValueError, "drop_last=True.*batch_size smaller", model(), DataLoader(SAMPLES, 32, drop_last=True))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield X, Y


@pytest.mark.parametrize("make", [batches, lambda: iter([(X, Y)]), lambda: map(tuple, [(X, Y)])])
def test_data_that_can_be_iterated_once(refused: Refused, make: Callable[[], Any]) -> None:
    refused(TypeError, "list of batches.*starts anew", model(), make(), epochs=2)
    refused(TypeError, "list of batches.*starts anew", model(), eval_data=make())


@pytest.mark.parametrize("data", [3, 1.5, "mnist", b"x", None, object(), {"x": 1}, {}, lambda: None])
def test_what_is_no_data(refused: Refused, data: Any) -> None:
    refused(TypeError, r"Pass a Dataset, a DataLoader, tensors such as \(x, y\)", model(), data)


def test_columns_of_unequal_length(refused: Refused) -> None:
    refused(ValueError, r"\[10, 5\].*len\(x\) == len\(y\)", model(), (X, Y[:5]))


def test_lists_of_numbers(refused: Refused) -> None:
    refused(TypeError, r"torch\.tensor\(x\)", model(), (X.tolist(), Y.tolist()))


def test_a_list_of_columns(refused: Refused) -> None:
    refused(ValueError, r"fit\(\(x, y\)\)", model(), [X, Y])


def test_a_list_of_samples(refused: Refused) -> None:
    refused(ValueError, r"DataLoader\(samples, batch_size=32\)", model(), list(zip(X, Y, strict=True)))


@pytest.mark.parametrize("data", [X, Rows(X), DataLoader(TensorDataset(X), 5)])
def test_data_without_labels(refused: Refused, data: Any) -> None:
    refused(ValueError, r"no labels.*yields \(x, y\).*fit\(x, y\) as the data to evaluate on", model(), data)
    refused(ValueError, r"no labels.*yields \(x, y\)", model(lambda outputs, labels: outputs.mean()), data)


def test_dict_whose_keys_fit_nothing(refused: Refused) -> None:
    refused(ValueError, r"Model\(network, inputs=\['image'\], labels=\['kind'\]\)", model(), {"image": X, "kind": Y})


def test_named_keys_that_are_missing(refused: Refused) -> None:
    subject = model()
    subject = hapi.Model(subject.network, inputs=["pixels"]).prepare(subject.optimizer, nn.CrossEntropyLoss())
    refused(ValueError, r"\['pixels'\] are not in the batch.*Name the keys", subject, {"input": X, "kind": Y})
    refused(TypeError, r"Model\(network, inputs=1, labels=1\)", subject)


def test_numbers_for_a_dict(refused: Refused) -> None:
    subject = model()
    subject = hapi.Model(subject.network, labels=1).prepare(subject.optimizer, nn.CrossEntropyLoss())
    refused(TypeError, r"Model\(network, inputs=\['input'\], labels=\['kind'\]\)", subject, {"input": X, "kind": Y})


def test_too_many_elements(refused: Refused) -> None:
    refused(TypeError, r"got 2 inputs.*Linear\.forward.*Model\(network, inputs=1\)", model(), (X, X, Y))
    subject = hapi.Model(nn.Linear(4, 3), inputs=5).prepare("sgd", nn.CrossEntropyLoss())
    refused(ValueError, "such as inputs=1, labels=1", subject)


def test_inputs_of_another_dtype(refused: Refused) -> None:
    cure = r"dtype torch\.{}.*x\.to\(torch\.float32\)"
    refused(ValueError, cure.format("float64"), model(), (X.double(), Y))
    refused(ValueError, cure.format("uint8"), model(), (X.byte(), Y))
    refused(ValueError, cure.format("float64") + r".*x\.astype\('float32'\)", model(), Rows(X.double(), Y))


def test_inputs_of_another_width(refused: Refused) -> None:
    refused(ValueError, "in_features=4 is what it takes. Write in_features=3", model(), (X[:, :3], Y))


def test_a_fault_of_the_network_itself_is_shown_as_it_is() -> None:
    class Faulty(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ x

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(network=Faulty(4, 3)).fit((X, Y), verbose=0)


# The loss and its labels.


@pytest.mark.parametrize(
    ("loss", "cure"),
    [
        (
            lambda outputs, labels: nn.functional.mse_loss(outputs, outputs, reduction="none"),
            r'shape \(10, 3\).*reduction="mean"',
        ),
        (lambda outputs, labels: outputs, r"shape \(10, 3\).*\(sum, count\)"),
        (lambda outputs, labels: None, "gave None.*a return statement"),
        (lambda outputs, labels: 1.0, r"gave 1\.0.*without \.item\(\)"),
        (lambda outputs, labels: outputs.sum().item(), r"without \.item\(\)"),
        (lambda outputs, labels: outputs.mean().detach(), r"keep \.item\(\), \.detach\(\)"),
        (lambda outputs, labels: (outputs.argmax(1) == labels).sum(), r"keep \.item\(\), \.detach\(\)"),
        ([nn.CrossEntropyLoss(), nn.CrossEntropyLoss()], "one loss for each output"),
    ],
)
def test_what_is_no_loss(refused: Refused, loss: Any, cure: str) -> None:
    refused(ValueError, cure, model(loss))


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(
    "make",
    [
        lambda reduction: nn.MSELoss(reduction=reduction),
        lambda reduction: nn.CrossEntropyLoss(reduction=reduction),
        lambda reduction: [nn.MSELoss(), nn.L1Loss(reduction=reduction)],
        lambda reduction: partial(nn.functional.cross_entropy, reduction=reduction),
    ],
)
def test_losses_of_torch_that_give_no_mean(make: Any, reduction: str) -> None:
    with pytest.raises(ValueError, match=rf"reduction='{reduction}'.*reduction=\"mean\".*\(sum, count\)"):
        model(make(reduction))


class OwnSum(nn.MSELoss):
    """A loss of the user's own, which divides by itself what it has summed."""

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(outputs, labels) / len(outputs)


def test_a_reduction_of_ones_own_is_left_alone() -> None:
    def own(outputs: Any, labels: Any, reduction: str) -> Any:
        assert reduction == "sum"
        return nn.functional.cross_entropy(outputs, labels, reduction=reduction), len(labels)

    network = nn.Linear(4, 3)
    losses = (partial(own, reduction="sum"), nn.CrossEntropyLoss())
    first, second = (model(loss, network).evaluate((X, Y), verbose=0)["loss"] for loss in losses)
    assert first == pytest.approx(second)
    summed = regression(OwnSum(reduction="sum")).eval_batch(X, torch.zeros(10, 1))
    assert summed["loss"] > 0


@pytest.mark.parametrize("count", [-1, -2.0, torch.tensor(-3)])
def test_a_negative_count(refused: Refused, count: Any) -> None:
    loss = lambda outputs, labels: (outputs.sum(), count)  # noqa: E731
    refused(ValueError, rf"\(sum, count\) with a count of {float(count):g}.*number of tokens", model(loss))


def test_a_list_of_losses_looks_at_the_shapes_of_each(refused: Refused) -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), super().forward(x)

    network = Twice(4, 1)
    subject = hapi.Model(network, inputs=1, labels=2).prepare("sgd", [nn.MSELoss(), nn.functional.l1_loss])
    one, other = torch.zeros(10, 1), torch.zeros(10)
    refused(ValueError, r"l1_loss received outputs of shape \(10, 1\) and labels of shape \(10,\)", subject,
            (X, one, other))  # fmt: skip


def test_frozen_network(refused: Refused) -> None:
    frozen = nn.Linear(4, 3).requires_grad_(False)
    refused(ValueError, r"frozen.*requires_grad_\(True\)", model(network=frozen))
    with pytest.raises(ValueError, match=r"requires_grad_\(True\)"):
        hapi.Model(frozen).prepare("sgd", nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"requires_grad_\(True\)"):
        hapi.Model(nn.Flatten()).prepare(torch.optim.Adam, nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("labels", "cure"),
    [
        (Y.float(), r"labels\.long\(\)"),
        (Y.int(), r"labels\.long\(\)"),
        (Y.bool(), r"labels\.long\(\)"),
        (Y[:, None], r"labels\.squeeze\(1\)"),
        (torch.stack([Y, Y], 1), "last layer"),
        (Y + 1, "last layer 4 outputs"),
        (Y - 1, r"ignore_index=-1"),
    ],
)
def test_class_labels(refused: Refused, labels: torch.Tensor, cure: str) -> None:
    refused(ValueError, cure, model(), (X, labels))
    refused(ValueError, cure, model(nn.CrossEntropyLoss(weight=torch.ones(3))), (X, labels))
    refused(ValueError, cure, model(), [(X, labels)])
    with pytest.raises(ValueError, match=cure):
        model().evaluate((X, labels), verbose=0)


LATE = torch.where(torch.arange(10) == 9, 7, Y)


@pytest.mark.parametrize("data", [(X, LATE), TensorDataset(X, LATE), Subset(TensorDataset(X, LATE), range(10))])
def test_a_late_label_out_of_range_is_found_before_the_first_step(refused: Refused, data: Any) -> None:
    cure = "from 0 to 7 .*last layer 8 outputs"
    refused(ValueError, cure, model(), data, batch_size=2, shuffle=False)
    refused(ValueError, cure, model(), eval_data=data, batch_size=2)


def test_a_late_label_out_of_range_that_is_not_in_memory() -> None:
    with pytest.raises(ValueError, match="last layer 8 outputs"):
        model().fit(Rows(X, LATE), batch_size=2, shuffle=False, verbose=0)


def test_label_that_the_loss_ignores_is_in_range() -> None:
    ignored = torch.where(torch.arange(10) == 9, -100, Y)
    assert model().fit((X, ignored), batch_size=2, verbose=0).history["loss"][0] > 0


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss(), nn.functional.mse_loss],
)
def test_shapes_that_torch_would_broadcast(refused: Refused, loss: nn.Module) -> None:
    refused(ValueError, r"\(10, 1\).*\(10,\).*labels\.unsqueeze\(1\)", regression(loss), (X, torch.zeros(10)))
    with pytest.raises(ValueError, match=r"labels\.unsqueeze\(1\)"):
        regression(loss).evaluate((X, torch.zeros(10)), verbose=0)


def test_labels_that_are_no_probabilities(refused: Refused) -> None:
    subject = regression(nn.BCEWithLogitsLoss())
    refused(ValueError, r"labels\.float\(\)", subject, (X, torch.zeros(10, 1, dtype=torch.int64)))
    refused(ValueError, "from 0 to 2.*Recode the two classes", subject, (X, Y[:, None].float()))


@pytest.mark.parametrize("loss", [nn.BCELoss(), nn.functional.binary_cross_entropy])
def test_scores_that_are_no_probabilities(refused: Refused, loss: Any) -> None:
    halves = (X, (Y > 0)[:, None].float())
    network = nn.Linear(4, 1)
    nn.init.constant_(network.bias, 3.0)
    said = r"received outputs from .* to .*nn\.Sigmoid\(\).*nn\.BCEWithLogitsLoss"
    refused(ValueError, said, model(loss, network), halves)
    assert model(loss, nn.Sequential(network, nn.Sigmoid())).fit(halves, verbose=0).epoch == [1]


# Overridden steps.


class CallsBackward(hapi.Model):
    def train_step(self, inputs: Any, labels: Any) -> Any:
        outputs = self.network(*inputs)
        loss = nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        return loss, outputs


class WholeStep(hapi.Model):
    def train_step(self, inputs: Any, labels: Any) -> Any:
        loss, outputs = super().train_step(inputs, labels)
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach(), outputs


class PassesTheTuple(hapi.Model):
    def train_step(self, inputs: Any, labels: Any) -> Any:
        return self._engine.loss_of(self.network(inputs), labels), None


class OneArgument(hapi.Model):
    def eval_step(self, batch: Any) -> Any:
        return batch


class LightningsArguments(hapi.Model):
    def train_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("kind", "error", "cure"),
    [
        (CallsBackward, ValueError, r"called backward\(\) itself.*return loss, outputs"),
        (WholeStep, ValueError, r"called backward\(\) itself.*zero_grad\(\)"),
        (PassesTheTuple, TypeError, r"inputs are a tuple.*self\.network\(\*inputs\)"),
    ],
)
def test_an_overridden_step_that_does_too_much(kind: Any, error: Any, cure: str) -> None:
    network = nn.Linear(4, 3)
    before = weights(network)
    subject = kind(network).prepare(torch.optim.SGD(network.parameters(), lr=0.1), nn.CrossEntropyLoss())
    with pytest.raises(error, match=cure):
        subject.fit((X, Y), verbose=0)
    assert all(map(torch.equal, before, weights(network)))


@pytest.mark.parametrize(
    ("kind", "shown"),
    [(OneArgument, r"eval_step\(batch\)"), (LightningsArguments, r"train_step\(batch, batch_idx: 'int'\)")],
)
def test_an_overridden_step_of_other_arguments(kind: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}\.{shown.split(chr(92))[0]}.*self, inputs, labels"):
        kind(nn.Linear(4, 3))


@pytest.mark.parametrize(("name", "ours"), [("training_step", "train_step"), ("validation_step", "eval_step")])
def test_steps_of_lightning_would_never_be_called(name: str, ours: str) -> None:
    kind = type("Mine", (hapi.Model,), {name: lambda self, batch, batch_idx: None})
    with pytest.raises(TypeError, match=rf"Mine has a method {name}, which is never called.*def {ours}\(self, inputs"):
        kind(nn.Linear(4, 3))


def test_hooks_of_keras_and_lightning_are_translated() -> None:
    kind = type("Mine", (Callback,), {"on_train_epoch_end": lambda self, epoch: None})
    with pytest.raises(TypeError, match="no hook and would never be called.*on_epoch_end is meant"):
        model().fit((X, Y), callbacks=kind(), verbose=0)


def test_a_scheduler_class_that_needs_more() -> None:
    with pytest.raises(TypeError, match=r"class StepLR.*step_size.*lambda optimizer: StepLR\(optimizer, \.\.\.\)"):
        model(scheduler=torch.optim.lr_scheduler.StepLR)


def test_keys_are_suggested_that_fit_the_network() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(a + b)

    net = Two()
    subject = hapi.Model(net, labels=["target"]).prepare("sgd", nn.CrossEntropyLoss())
    batch = {"a": X, "b": X, "y": Y, "id": ["text"] * 10}
    with pytest.raises(ValueError, match=r"Model\(network, inputs=\['a', 'b'\], labels=\['y'\]\)"):
        subject.fit([batch], verbose=0)
    hapi.Model(net, inputs=["a", "b"], labels=["y"]).prepare("sgd", nn.CrossEntropyLoss()).fit([batch], verbose=0)


def test_batchnorm_on_a_last_batch_of_one_sample() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"BatchNorm received 1 sample.*drop_last=True"):
        model(network=network).fit((X, Y), batch_size=3, verbose=0)
    assert model(network=network).fit((X, Y), batch_size=3, drop_last=True, verbose=0).history["loss"][0] > 0
    with pytest.raises(ValueError, match=r"BatchNorm received 1 sample.*else a batch_size of 2 or more"):
        model(network=network).fit((X, Y), batch_size=1, verbose=0)


class OwnTuple(nn.Module):
    """Fails of a tuple that it makes itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x, x).flatten(1)  # type: ignore[attr-defined]


def test_a_tuple_of_the_networks_own_is_not_taken_for_the_inputs() -> None:
    class Own(hapi.Model):
        def train_step(self, inputs: Any, labels: Any) -> Any:
            return super().train_step(inputs, labels)

    with pytest.raises(AttributeError, match=r"^'tuple' object has no attribute 'flatten'$"):
        Own(OwnTuple()).prepare(None, nn.CrossEntropyLoss())._engine.ready().backward((X,), Y, 4, 4, True)


def test_an_overridden_evaluation_that_passes_the_tuple_is_told() -> None:
    class Own(hapi.Model):
        def eval_step(self, inputs: Any, labels: Any) -> Any:
            return None, self.network(inputs)

    with pytest.raises(TypeError, match=r"inputs are a tuple.*self\.network\(\*inputs\)"):
        Own(nn.Linear(4, 3)).prepare(None, nn.CrossEntropyLoss()).evaluate((X, Y), verbose=0)


@pytest.mark.parametrize("trained", [True, False])
def test_the_first_batch_of_an_evaluation_within_fit_is_looked_at(trained: bool) -> None:
    """torch would stretch its labels, and give a wrong number without a word."""
    subject = hapi.Model(nn.Linear(4, 1))
    subject.prepare(torch.optim.SGD(subject.parameters(), lr=0.1), nn.MSELoss())
    good, bad = (X, torch.zeros(len(X), 1)), (X, torch.zeros(len(X)))
    with pytest.raises(ValueError, match=r"outputs of shape .* and labels of shape .*one shape"):
        subject.fit(*((good, bad) if trained else (bad, good)), verbose=0)


# A loss that is no longer a number.


class Breaks:
    """A loss that is infinite at its n-th call."""

    def __init__(self, call: int) -> None:
        self.call = call
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(outputs, labels)
        return loss * torch.inf if self.calls == self.call else loss


@pytest.mark.parametrize("accumulate", [1, 2, 5])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_nonfinite_loss_stops_with_epoch_and_step(tmp_path: Path, accumulate: int, step: int) -> None:
    subject = model(Breaks(5 + step))
    with pytest.raises(RuntimeError, match=rf"epoch 2, step {step}:.*clip_grad_norm=1\.0"):
        subject.fit(
            (X, Y), batch_size=2, epochs=3, log_freq=1000, accumulate_grad_batches=accumulate, verbose=0,
            save_dir=tmp_path,
        )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.opt.pt", "1.pt"]
    assert subject.epochs_trained == 1


def test_the_first_of_several_nonfinite_losses_is_named() -> None:
    spoilt = X.clone()
    spoilt[5:] = torch.nan
    with pytest.raises(RuntimeError, match="epoch 1, step 3:"):
        model().fit((spoilt, Y), batch_size=2, shuffle=False, verbose=0)


def test_nan_policy_ignore_goes_on(tmp_path: Path) -> None:
    spoilt = X.clone()
    spoilt[0, 0] = torch.nan
    history = model().fit((spoilt, Y), epochs=2, verbose=0, nan_policy="ignore", save_dir=tmp_path)
    assert np.isnan(history.history["loss"]).tolist() == [True, True]
    assert (tmp_path / "final.pt").exists()


# Devices.


@pytest.mark.parametrize("name", ["tpux", "0", "gpu:x", ""])
def test_unknown_device(name: str) -> None:
    with pytest.raises(ValueError, match='"cpu", "gpu", "gpu:1" or "mps"'):
        hapi.set_device(name)


# Files.


def test_save_dir_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("mine")
    for save_dir in (blocked, blocked / "below", str(blocked / "far" / "below")):
        subject = model()
        before = weights(subject.network)
        with pytest.raises(ValueError, match="blocked is a file.*leave save_dir out"):
            subject.fit((X, Y), save_dir=save_dir, verbose=0)
        assert all(map(torch.equal, before, weights(subject.network)))
    assert blocked.read_text() == "mine"
    with pytest.raises(OSError, match="blocked.*save to another place"):
        model().save(blocked / "below")


@pytest.mark.parametrize("path", ["", "checkpoints/"])
def test_paths_that_name_no_file(path: str) -> None:
    for call in (model().save, model().load):
        with pytest.raises(ValueError, match='"checkpoints/mnist"'):
            call(path)
    with pytest.raises(TypeError, match='"checkpoints/mnist"'):
        model().save(3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A whole checkpoint of another model with the same network."""
    model().save(tmp_path / "net")
    return tmp_path / "net.pt"


def loading_fails(path: Path, error: type[Exception], cure: str) -> None:
    subject = model()
    before = weights(subject.network)
    with pytest.raises(error, match=cure):
        subject.load(path)
    assert all(map(torch.equal, before, weights(subject.network)))


def test_missing_checkpoint(tmp_path: Path) -> None:
    loading_fails(tmp_path / "none", FileNotFoundError, r"none\.pt does not exist.*was given to save")


def test_checkpoint_cut_short(saved: Path) -> None:
    whole = saved.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:size])
        loading_fails(saved, ValueError, "not a whole checkpoint.*Load another")


def test_flipped_bits_are_found_or_harmless(saved: Path) -> None:
    expected = torch.load(saved, weights_only=True)
    whole = saved.read_bytes()
    flips = [(place, place % 8) for place in range(0, len(whole), 9)]
    found = 0
    for place, bit in flips:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        saved.write_bytes(damaged)
        try:
            loaded = hapi.checkpoint.read_weights(saved).state
        except ValueError:
            found += 1
        else:
            assert list(loaded) == list(expected)
            assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    assert found > len(flips) / 4


def test_member_that_is_marked_as_a_folder(saved: Path) -> None:
    # The one bit whose flip no checksum shows: torch would take uninitialized memory for the weights.
    damaged = bytearray(saved.read_bytes())
    name = b"archive/data/0"
    entry = damaged.rindex(name) - 46
    assert damaged[entry : entry + 4] == b"PK\x01\x02"
    damaged[entry + 38] ^= 0x10
    saved.write_bytes(damaged)
    loading_fails(saved, ValueError, "marked as a folder.*Load another")


def test_training_state_with_a_flipped_bit(saved: Path) -> None:
    training = saved.with_name("net.opt.pt")
    damaged = bytearray(training.read_bytes())
    damaged[damaged.index(b"epochs_trained")] ^= 1
    training.write_bytes(damaged)
    loading_fails(saved, ValueError, r"net\.opt\.pt is not a whole checkpoint")


def test_checkpoint_of_another_network(saved: Path) -> None:
    subject = model(network=nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
    with pytest.raises(ValueError, match=r"missing: 0\.weight.*unexpected: weight, bias.*skip_mismatch=True"):
        subject.load(saved)
    wider = model(network=nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"weight \(\(3, 4\) in the file, \(3, 5\) in the network\)"):
        wider.load(saved)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    text = tmp_path / "text.pt"
    text.write_text("weights: 3")
    loading_fails(text, ValueError, r"torch\.save\(network\.state_dict\(\), path\)")
    a_list = tmp_path / "list.pt"
    torch.save([torch.zeros(3)], a_list)
    loading_fails(a_list, ValueError, r"holds a list.*torch\.save\(network\.state_dict\(\), path\)")
    whole_network = tmp_path / "network.pt"
    torch.save(nn.Linear(4, 3), whole_network)
    loading_fails(whole_network, ValueError, r"torch\.save\(network\.state_dict\(\), path\)")


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    plain, archive, legacy = (tmp_path / f"{name}.pt" for name in ("plain", "archive", "legacy"))
    plain.write_bytes(pickle.dumps(Runs(trap)))
    torch.save({"weight": Runs(trap)}, archive)
    torch.save({"weight": Runs(trap)}, legacy, _use_new_zipfile_serialization=False)
    for path in (plain, archive, legacy):
        loading_fails(path, ValueError, "Load another checkpoint")
    assert not trap.exists()
    torch.load(archive, weights_only=False)  # The trap would have worked.
    assert trap.exists()


def test_compressed_members(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(saved, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    loading_fails(saved, ValueError, "compressed members.*save it anew")


def test_legacy_format(tmp_path: Path) -> None:
    path = tmp_path / "legacy.pt"
    torch.save(nn.Linear(4, 3).state_dict(), path, _use_new_zipfile_serialization=False)
    loading_fails(path, ValueError, "save it anew with torch.save")


# Names from elsewhere.


@pytest.mark.parametrize(
    ("module", "name", "cure"),
    [
        (hapi, "InputSpec", r"hapi\.Model\(network\).*summary\(input_size="),
        (hapi, "vision", r"hapi\.datasets"),
        (hapi.callbacks, "VisualDL", r"Write hapi\.callbacks\.TensorBoard\."),
        (hapi.callbacks, "TerminateOnNaN", r'Write fit\(nan_policy="stop"\)'),
        (hapi.callbacks, "LRFinder", r"Write hapi\.find_lr\(model, data\)"),
        (hapi.metrics, "F1Score", r"Write hapi\.metrics\.F1\.$"),
        (hapi.metrics, "ConfusionMatrix", r"Write torchmetrics\.ConfusionMatrix\(\.\.\.\): "),
        (hapi.distributed, "all_reduce", r"Write torch\.distributed\.all_reduce\(\.\.\.\) after"),
        (hapi, "Zebra", "^module 'hapi' has no attribute 'Zebra'$"),
        (hapi.metrics, "Zebra", r"^module 'hapi\.metrics' has no attribute 'Zebra'$"),
        (hapi.metrics, "Acuracy", r"Write hapi\.metrics\.Accuracy, if that is meant\.$"),
        (hapi.callbacks, "EarlyStoping", r"Write hapi\.callbacks\.EarlyStopping, if that is meant\.$"),
        (hapi.distributed, "get_word_size", r"Write hapi\.distributed\.get_world_size, if that is meant\.$"),
    ],
)
def test_names_that_scripts_come_with(module: Any, name: str, cure: str) -> None:
    with pytest.raises(AttributeError, match=cure):
        getattr(module, name)


@pytest.mark.parametrize("module", [hapi, hapi.callbacks, hapi.distributed])
def test_names_imported_on_demand_are_listed(module: Any) -> None:
    assert set(module.__all__) <= set(dir(module))
    assert all(getattr(module, name) is not None for name in dir(module))


# What newcomers write.


def test_two_losses_are_no_sum_and_count() -> None:
    def both(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(outputs, labels), outputs.square().mean()

    with pytest.raises(ValueError, match=r"second part has a gradient.*loss_a \+ loss_b"):
        model(both).fit((X, Y), verbose=0)


def test_modules_beside_the_network_are_told(recwarn: pytest.WarningsRecorder) -> None:
    class Pair(hapi.Model):
        other: nn.Module

    subject = Pair(nn.Linear(4, 3))
    subject.prepare("sgd", nn.CrossEntropyLoss())
    subject.other = nn.Linear(4, 3).requires_grad_(False)
    subject.shared = nn.Sequential(subject.network)
    subject.fit((X, Y), verbose=0)
    assert not recwarn.list
    subject.other.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"Pair\.other holds parameters.*one nn\.Module that holds both") as said:
        subject.fit((X, Y), verbose=0)
    assert said[0].filename == __file__


def test_a_subclass_that_forgets_models_init() -> None:
    class Forgets(hapi.Model):
        def __init__(self) -> None:
            self.own = 1

    with pytest.raises(AttributeError, match=r"Forgets\.__init__ did not call.*super\(\).__init__\(network\)"):
        Forgets().prepare("adam", nn.MSELoss())


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        (TensorDataset, r"received the class TensorDataset.*Write TensorDataset\(\.\.\.\)"),
        (((X, X), Y), r"tuple of containers and tensors.*\(a, b, y\)"),
        (([X, X], Y), r"tuple of containers and tensors.*\(a, b, y\)"),
        ((X, [0] * len(X)), r"column is a list of numbers.*torch\.tensor\(numbers\)"),
        (Subset(TensorDataset(X, Y), torch.ones(len(X), dtype=torch.bool)), r"a mask.*numpy\.flatnonzero\(mask\)"),
        (Subset(TensorDataset(X, Y), np.ones(len(X), dtype=bool)), r"a mask.*numpy\.flatnonzero\(mask\)"),
        (Subset(TensorDataset(X, Y), torch.arange(6).reshape(6, 1)), r"have the shape \(6, 1\).*indices\.flatten\(\)"),
        (Subset(TensorDataset(X, Y), np.where(np.ones(6))), r"have the shape \(1, 6\).*numpy\.flatnonzero\(mask\)"),
        ((X, list(np.zeros(len(X)))), r"column is a list of numbers.*torch\.tensor\(numbers\)"),
        (Subset(Subset(TensorDataset(X, Y), [True] * len(X)), [0]), r"a mask.*numpy\.flatnonzero\(mask\)"),
    ],
)
def test_data_that_is_mistaken_for_batches(refused: Refused, data: Any, cure: str) -> None:
    refused(TypeError, cure, model(), data)


@pytest.mark.parametrize(
    "sample", [lambda x: (x, x[:1]), lambda x: (x.numpy(), x[0]), lambda x: {"input": x, "y": x[0]}]
)
def test_a_list_of_samples_is_told_from_batches(sample: Callable[[torch.Tensor], Any]) -> None:
    subject = hapi.Model(nn.Linear(4, 1)).prepare("sgd", lambda outputs, labels: (outputs - labels).square().mean())
    said = r"train_data is a list of 10 batches.*shape \(4,\), is taken for 4 samples.*DataLoader\(train_data, batch"
    with pytest.warns(UserWarning, match=said):
        subject.fit([sample(x) for x in X], verbose=0)
    with pytest.warns(UserWarning, match=r"test_data is a list of 10 batches.*taken for 4 samples"):
        hapi.Model(nn.ReLU()).predict([x.numpy() for x in X], verbose=0)


def test_lists_of_batches_are_not_told_of() -> None:
    one, numbers = X[:1], X[:, 0]
    for data in ([X, X], [(X, Y)] * 2, [(one, one[:, :1])] * 2, [(X, numbers)] * 2, [numbers.long()] * 2, [numbers]):
        hapi.Model(First()).predict(data, verbose=0)


class First(nn.Module):
    """Its first input."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("several", [list, tuple])
def test_several_optimizers_at_once(several: Any) -> None:
    network = nn.Linear(4, 3)
    both = several(torch.optim.SGD([p], lr=0.1) for p in network.parameters())
    with pytest.raises(TypeError, match=r"received 2 at once \(SGD, SGD\).*Model each, and alternate by train_batch"):
        hapi.Model(network).prepare(both, nn.CrossEntropyLoss())


class Returns(nn.Module):
    """Gives its scores in some form."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(4, 3), form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.layer(x))


@pytest.mark.parametrize(
    ("form", "labels", "cure"),
    [
        (lambda s: (s, s), Y, r"loss=lambda out_0, out_1, labels: cross_entropy\(out_0, labels\)"),
        (lambda s: {"logits": s}, Y, r"outputs\['scores'\]"),
        (lambda s: s, nn.functional.one_hot(Y, 3), r"labels\.argmax\(1\) if they are one-hot"),
        (lambda s: s[:, None].expand(-1, 5, -1), Y[:, None].expand(-1, 5), r"outputs\.movedim\(-1, 1\)"),
    ],
)
def test_cross_entropy_of_other_forms(form: Any, labels: torch.Tensor, cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        model(network=Returns(form)).fit((X, labels), verbose=0)


def test_the_cure_for_several_outputs_works() -> None:
    def own(out_0: Any, out_1: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(out_0, labels)

    assert model(own, Returns(lambda s: (s, s))).fit((X, Y), verbose=0).history["loss"][0] > 0


def test_a_list_of_samples_with_numpys_labels() -> None:
    samples = [(x.numpy(), np.int64(y)) for x, y in zip(X, Y, strict=True)]
    with pytest.raises(ValueError, match=r"a list is taken as batches"):
        model().fit(samples, verbose=0)


def test_an_evaluation_that_computes_nothing_is_refused_in_fit_too() -> None:
    class Own(hapi.Model):
        def train_step(self, inputs: Any, labels: Any) -> Any:
            outputs = self.network(*inputs)
            return nn.functional.cross_entropy(outputs, labels), outputs

    subject = Own(nn.Linear(4, 3)).prepare("sgd")
    assert subject.fit((X, Y), verbose=0).history["loss"][0] > 0
    with pytest.raises(ValueError, match=r"nothing to compute.*override eval_step as train_step"):
        subject.fit((X, Y), (X, Y), verbose=0)


def test_one_cycle_that_ends_before_the_training() -> None:
    subject = model()
    cycle = torch.optim.lr_scheduler.OneCycleLR(subject.optimizer, max_lr=0.1, total_steps=5)
    subject.prepare(subject.optimizer, nn.CrossEntropyLoss(), scheduler=cycle)
    subject.fit((X, Y), batch_size=5, epochs=2, verbose=0)
    with pytest.raises(ValueError, match=r"made for 5 steps, of which 4 are taken, but 2 .*total_steps=6"):
        subject.fit((X, Y), batch_size=5, verbose=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shuffle": True}, r"RandomSampler: its rows come in the order that the sampler"),
        ({"drop_last": True}, r"drop_last=True leaves out 1 of 10 samples"),
        ({"sampler": DistributedSampler(range(10), 3, 0)}, r"DistributedSampler repeats 2 of 10 samples"),
        ({"sampler": DistributedSampler(range(10), 3, 0, drop_last=True)}, r"DistributedSampler leaves out 1 of 10"),
    ],
)
def test_loaders_that_do_not_give_each_sample_once_in_order(options: Any, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        model().predict(DataLoader(TensorDataset(X), batch_size=3, **options), verbose=0)


def test_names_of_optimizers_in_any_case() -> None:
    assert type(hapi.Model(nn.Linear(4, 3)).prepare("AdamW").optimizer) is torch.optim.AdamW


def test_a_whole_pickled_network_is_refused_in_plain_text(tmp_path: Path) -> None:
    torch.save(nn.Linear(4, 3), tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"is not a whole checkpoint") as error:
        model().load(tmp_path / "net")
    assert "\x1b" not in str(error.value)
