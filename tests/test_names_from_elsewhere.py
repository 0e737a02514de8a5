"""Names that users bring from other libraries, or misspell: the error names the one that is meant."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi import elsewhere

DATA = torch.rand(8, 2), torch.randint(2, (8,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def freeze(self) -> None:
        self.requires_grad_(False)


@pytest.fixture
def model() -> hapi.Model:
    return hapi.Model(Net()).prepare("sgd", nn.CrossEntropyLoss())


def said_for_attribute(owner: Any, name: str) -> str:
    with pytest.raises(AttributeError) as caught:
        getattr(owner, name)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("eval", "model.network.eval()"),
        ("train", "model.network.train()"),
        ("to", 'hapi.set_device("gpu:0")'),
        ("cpu", 'hapi.set_device("cpu")'),
        ("state_dict", "model.network.state_dict()"),
        ("save_weights", 'model.save("mnist")'),
        ("compile", "model.prepare(optimizer, loss, metrics)"),
        ("train_dataloader", "model.fit(train_data, eval_data)"),
        ("log", "metrics=[f]"),
        ("train_on_batch", "model.train_batch(inputs, labels)"),
        ("head", "model.network.head."),
        ("freeze", "model.network.freeze()."),
        ("named_buffers", "model.network.named_buffers()."),
        ("evalute", "model.evaluate,"),
    ],
)
def test_attributes_of_a_model(model: hapi.Model, name: str, written: str) -> None:
    assert written in said_for_attribute(model, name)
    # Nobody who asks takes a Model for a module.
    assert not hasattr(model, name) and not hasattr(hapi.Model, name) and name not in dir(model)


def test_attributes_that_nobody_means(model: hapi.Model) -> None:
    for name in ("zzz", "_private", "__array__"):
        assert said_for_attribute(model, name) == f"'Model' object has no attribute {name!r}"


def test_a_step_that_logs(model: hapi.Model) -> None:
    class Logs(hapi.Model):
        def train_step(self, inputs: Any, labels: Any) -> Any:
            loss, outputs = super().train_step(inputs, labels)
            self.log("train_loss", loss)
            return loss, outputs

    with pytest.raises(AttributeError, match=r"'Logs' object has no attribute 'log': .*metrics=\[f\]"):
        Logs(Net()).prepare("sgd", nn.CrossEntropyLoss()).fit(DATA, verbose=0)


def test_a_property_that_fails_says_so_itself() -> None:
    class Own(hapi.Model):
        @property
        def rate(self) -> float:
            return self.optimizer.no_such_thing

    assert "no_such_thing" in said_for_attribute(Own(Net()).prepare("sgd", nn.CrossEntropyLoss()), "rate")


def test_a_model_is_copied_and_pickled_as_before(model: hapi.Model) -> None:
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, twin.parameters(), model.parameters()))


def test_calling_a_model(model: hapi.Model) -> None:
    with pytest.raises(TypeError, match=r"model\.network\(x\).*model\.predict_batch\(x\)"):
        model(DATA[0])


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("metric", "hapi.metrics"),
        ("callback", "hapi.callbacks"),
        ("dataset", "hapi.datasets"),
        ("Trainer", "hapi.Model(network).prepare(optimizer, loss).fit(data)"),
        ("Accelerator", "hapi.Model(network).prepare(optimizer, loss).fit(data)"),
        ("seed_everything", "hapi.seed(0)"),
        ("Modle", "hapi.Model"),
    ],
)
def test_attributes_of_the_package(name: str, written: str) -> None:
    assert written in said_for_attribute(hapi, name)
    with pytest.raises(ImportError):
        exec(f"from hapi import {name}")


@pytest.mark.parametrize(
    ("method", "keyword", "written"),
    [
        ("fit", "validation_data", "Write eval_data= in place of validation_data=."),
        ("fit", "max_epochs", "Write epochs= in place"),
        ("fit", "num_epochs", "Write epochs= in place"),
        ("fit", "callback", "Write callbacks= in place"),
        ("fit", "batchsize", "Write batch_size= in place"),
        ("fit", "max_steps", "Write num_iters= in place"),
        # Of each epoch, or of evaluation: num_iters would cut the training short.
        ("fit", "steps_per_epoch", "An epoch is all of the data: pass fewer samples"),
        ("fit", "limit_train_batches", "An epoch is all of the data: pass fewer samples"),
        ("fit", "validation_steps", "All of eval_data is evaluated: pass fewer samples"),
        ("fit", "limit_val_batches", "All of eval_data is evaluated: pass fewer samples"),
        ("fit", "epohcs", "Write epochs=, if that is meant."),
        ("fit", "lr", "model.prepare(torch.optim.Adam("),
        ("fit", "y", "(x, y)"),
        ("fit", "optimizer", "model.prepare(..., optimizer=...)"),
        ("fit", "criterion", "model.prepare(..., loss=...)"),
        ("fit", "collate_fn", "DataLoader("),
        ("fit", "nonsense", "It takes train_data, eval_data, batch_size,"),
        ("evaluate", "val_data", "Write eval_data= in place"),
        ("evaluate", "epochs", "model.fit(..., epochs=...)"),
        ("predict", "loader", "Write test_data= in place"),
        ("prepare", "criterion", "Write loss= in place"),
        ("prepare", "lr_scheduler", "Write scheduler= in place"),
        ("prepare", "epochs", "model.fit(..., epochs=...)"),
        ("load", "strict", "skip_mismatch=True"),
    ],
)
def test_keywords(model: hapi.Model, method: str, keyword: str, written: str) -> None:
    given = () if method == "prepare" else (DATA,)
    before = vars(model)["optimizer"]
    with pytest.raises(TypeError) as caught:
        getattr(model, method)(*given, **{keyword: 7})
    text = str(caught.value)
    assert text.startswith(f"{method} received {keyword}=7, which is no argument of it. ") and written in text
    assert model.steps_trained == 0 and model.optimizer is before


def test_keywords_of_the_constructor() -> None:
    with pytest.raises(TypeError, match=r"^Model received optimizer='adam', .*model\.prepare\(\.\.\., optimizer="):
        hapi.Model(Net(), optimizer="adam")


def test_several_keywords_at_once(model: hapi.Model) -> None:
    with pytest.raises(TypeError, match=r"lr=1, max_epochs=2, which are no arguments.*lr=1e-3.*Write epochs="):
        model.fit(DATA, lr=1, max_epochs=2)


def test_a_subclass_with_a_fit_of_its_own_is_told_of_models_arguments() -> None:
    class Own(hapi.Model):
        def fit(self, *args: Any, **options: Any) -> Any:
            return super().fit(*args, **options)

    with pytest.raises(TypeError, match="Write epochs= in place of max_epochs="):
        Own(Net()).prepare("sgd", nn.CrossEntropyLoss()).fit(DATA, max_epochs=1)


def test_what_is_written_instead_is_there() -> None:
    known = {
        name for method in elsewhere._METHODS for name in inspect.signature(getattr(hapi.Model, method)).parameters
    }
    assert elsewhere._RENAMED.keys() <= known
    assert not known & {name for names in elsewhere._RENAMED.values() for name in names.split()} - {
        "train_data", "eval_data", "test_data", "inputs"
    }  # fmt: skip
    # What is there can be asked for, and needs no hint.
    assert not [name for name in elsewhere._MODEL_NAMES if hasattr(hapi.Model, name)]
    assert not [name for name in elsewhere._OF_PACKAGE if hasattr(hapi, name)]


@pytest.mark.parametrize("ending", [".pth", ".ckpt", ".h5", ".onnx"])
def test_a_path_with_an_ending_of_elsewhere(model: hapi.Model, tmp_path: Path, ending: str) -> None:
    given = f"{tmp_path}/m{ending}"
    with pytest.warns(UserWarning, match="whose endings are added") as said:
        model.save(given)
    assert said[0].filename == __file__
    assert f"weights are in {given}.pt," in str(said[0].message) and f"save('{tmp_path}/m')" in str(said[0].message)
    assert {path.name for path in tmp_path.iterdir()} == {f"m{ending}.pt", f"m{ending}.opt.pt"}
    # Only told: what was saved is found by the name that it was saved by.
    model.load(given)


def test_a_path_without_an_ending_of_elsewhere(model: hapi.Model, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("m", "v1.2", "m.pt"):
            model.save(tmp_path / name)


@pytest.mark.parametrize(
    ("make", "given", "cure"),
    [
        (hapi.callbacks.EarlyStopping, {"restore_best_weights": True}, 'model.load("checkpoints/best_model")'),
        (hapi.callbacks.EarlyStopping, {"patiense": 3}, "Write patience=, if that is meant."),
        (hapi.callbacks.ModelCheckpoint, {"save_best_only": True}, 'Write monitor="val_loss"'),
        (hapi.callbacks.ModelCheckpoint, {"dirpath": "a"}, "Write save_dir= in place of dirpath=."),
        (hapi.callbacks.ModelCheckpoint, {"zzz": 1}, "It takes save_freq, save_dir, monitor"),
        (hapi.datasets.MNIST, {"train": True}, 'Write mode="train" or mode="test".'),
        (hapi.datasets.FashionMNIST, {"train": False, "sample": True}, 'Write mode="train" or mode="test".'),
        (hapi.datasets.CIFAR10, {"split": "train"}, 'Write mode="train" or mode="test".'),
    ],
)
def test_constructors_of_callbacks_and_data_sets(make: type, given: dict[str, Any], cure: str) -> None:
    class Own(make):  # type: ignore[misc]
        def __init__(self, **rest: Any) -> None:
            super().__init__(**rest)

    for each in (make, Own):
        with pytest.raises(TypeError, match="argument of it") as error:
            each(**given)
        name = next(name for name in given if name != "sample")
        assert str(error.value).startswith(f"{each.__name__} received {name}={given[name]!r}, which is no argument")
        assert cure in str(error.value)
