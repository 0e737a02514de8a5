"""Callbacks of extras that are not installed."""

import importlib.machinery
import importlib.util
import sys

import pytest

from hapi import callbacks


@pytest.mark.parametrize(
    ("name", "package"), [("TensorBoard", "tensorboard"), ("WandbCallback", "wandb"), ("MLflowCallback", "mlflow")]
)
@pytest.mark.parametrize("folder", [False, True], ids=["nothing", "a folder of that name"])
def test_without_its_extra(name, package, folder, monkeypatch):
    find = importlib.util.find_spec
    namespace = importlib.machinery.ModuleSpec(package, None, is_package=True) if folder else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: namespace if asked == package else find(asked))
    match = rf'{name} needs.*not installed.*pip install "torch-hapi\[{package}\]".*CSVLogger'
    with pytest.raises(ImportError, match=match):
        getattr(callbacks, name)()


def test_the_names_of_other_libraries():
    with pytest.raises(AttributeError, match=r"Write hapi.callbacks.WandbCallback"):
        _ = callbacks.WandbLogger
    assert "wandb" not in vars(sys.modules["hapi.callbacks"]) or "hapi.callbacks.wandb" in sys.modules
