"""An epoch is saved under several names, one after the other: a kill in between loses none, nor does a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi import files
from hapi.callbacks import Callback, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from hapi.callbacks.base import callbacks_alike

X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 2


class Killed(Exception):
    pass


class Cut(ModelCheckpoint):
    """Is killed before it saves under a name."""

    before = ""

    def _save(self, name: str) -> bool:
        if name == self.before:
            raise Killed
        return super()._save(name)


Cut.__name__ = ModelCheckpoint.__name__  # by which its state is found


def fit(folder: Path, *callbacks: Any, epochs: int = 3, **options: Any) -> hapi.Model:
    torch.manual_seed(0)
    model = hapi.Model(nn.Linear(4, 2)).prepare("adam", nn.CrossEntropyLoss())
    model.fit((X, Y), batch_size=4, epochs=epochs, save_dir=folder, seed=1, verbose=0, callbacks=callbacks, **options)
    return model


def killed_before(name: str, folder: Path, *callbacks: Any, **options: Any) -> None:
    cut = Cut(**options)
    cut.before = name
    with pytest.raises(Killed):
        fit(folder, cut, *callbacks)


def names(folder: Path) -> set[str]:
    return {path.name.removesuffix(".opt.pt") for path in folder.glob("*.opt.pt")}


def weights(folder: Path, name: str) -> list[torch.Tensor]:
    return list(torch.load(folder / f"{name}.pt").values())


@pytest.mark.parametrize("name", ["top_2", "2", "top_3", "final"])
def test_what_a_kill_came_before_is_there_in_the_end(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"monitor": "loss", "save_top_k": 9}
    fit(tmp_path / "straight", ModelCheckpoint(**options))
    killed_before(name, tmp_path / "cut", **options)
    assert name not in names(tmp_path / "cut")
    fit(tmp_path / "cut", ModelCheckpoint(**options), resume=True)
    expected = names(tmp_path / "straight")
    assert names(tmp_path / "cut") == expected == {"1", "2", "3", "top_1", "top_2", "top_3", "best_model", "final"}
    for each in expected:
        pairs = zip(weights(tmp_path / "straight", each), weights(tmp_path / "cut", each), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), each


def test_one_of_the_best_is_not_made_up_for_in_another_folder(tmp_path: Path) -> None:
    options: dict[str, Any] = {"monitor": "loss", "save_top_k": 9}
    killed_before("top_2", tmp_path / "cut", **options)
    fit(tmp_path / "other", ModelCheckpoint(**options), resume=tmp_path / "cut" / "best_model")
    assert names(tmp_path / "other") == {"2", "3", "top_3", "best_model", "final"}


@pytest.mark.parametrize(("save_freq", "expected"), [(1, {"1", "2", "3"}), (2, {"2", "3"})])
@pytest.mark.parametrize("name", ["2", "3"])
def test_early_stopping_saves_before_the_epoch_s_own(
    tmp_path: Path, name: str, save_freq: int, expected: set[str]
) -> None:
    def best() -> EarlyStopping:
        return EarlyStopping("loss", patience=9, verbose=0)

    killed_before(name, tmp_path, best(), save_freq=save_freq)
    fit(tmp_path, best(), ModelCheckpoint(save_freq), resume=True)
    assert names(tmp_path) == expected | {"best_model", "final"}


class Budget(Callback):
    """Has had enough after the second epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.stop_training = True


def test_the_best_model_of_early_stopping_knows_that_the_run_was_ended(tmp_path: Path) -> None:
    # A callback of the user's own, and another of its kind, which never improves.
    for number, ends in enumerate((Budget(), EarlyStopping("loss", "max", patience=1, verbose=0))):
        folder, best = tmp_path / str(number), EarlyStopping("loss", patience=9, verbose=0)
        straight = fit(tmp_path / f"straight {number}", ends, best)
        killed_before("2", folder, ends, best)
        # It goes on from the best model, which was saved just before.
        resumed = fit(folder, ends, best, ModelCheckpoint(), resume=True)
        assert resumed.epochs_trained == straight.epochs_trained == 2
        assert names(folder) == {"1", "2", "best_model", "final"}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_full_disk_means_for_early_stopping_what_it_means_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    real = files.draft

    def draft(path: Path, *rest: Any) -> Any:
        if path.name.startswith("best_model"):
            raise OSError(28, "No space left on device", str(path))
        return real(path, *rest)

    monkeypatch.setattr(files, "draft", draft)
    goes_on = ModelCheckpoint(save_dir=tmp_path / "b" if elsewhere else None, on_save_error="continue")
    callbacks = EarlyStopping("loss", patience=9, verbose=0), goes_on
    if elsewhere:
        with pytest.raises(OSError, match="No space left"):
            fit(tmp_path / "a", *callbacks)
        return
    with pytest.warns(UserWarning, match=r"goes on without this checkpoint.*best_model"):
        assert fit(tmp_path, *callbacks).epochs_trained == 3
    assert names(tmp_path) == {"1", "2", "3", "final"}


@pytest.mark.parametrize(("key", "without"), [("periodic", []), ("ids", {})])
def test_what_retention_knows_is_needed(tmp_path: Path, key: str, without: Any) -> None:
    killed_before("3", tmp_path, keep_last=1)
    file = tmp_path / "2.opt.pt"
    content = torch.load(file)
    assert content["callbacks"]["ModelCheckpoint.0"][key]
    content["callbacks"]["ModelCheckpoint.0"][key] = without
    torch.save(content, file)
    fit(tmp_path, ModelCheckpoint(keep_last=1), resume=True)
    assert names(tmp_path) == {"2", "3", "final"}, "with it, the second would be deleted"


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (ModelCheckpoint, {"asynchronous": True}, {}),
        (ModelCheckpoint, {"monitor": "loss", "mode": "min"}, {"monitor": "loss", "mode": "max"}),
        (EarlyStopping, {"mode": "min"}, {"mode": "max"}),
        (EarlyStopping, {"min_delta": 0.1}, {}),
        (ReduceLROnPlateau, {"mode": "min"}, {"mode": "max"}),
        (ReduceLROnPlateau, {"min_delta": 0.1}, {}),
    ],
)
def test_what_decides_on_saves_and_stops_is_compared_between_ranks(kind: Any, one: Any, other: Any) -> None:
    assert callbacks_alike([kind(**one)]) != callbacks_alike([kind(**other)])


def test_no_epoch_is_made_up_for_in_the_middle_of_the_next(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_steps": 3, "keep_last": 9}
    killed_before("step_9", tmp_path, save_freq=2, **options)
    assert names(tmp_path) == {"step_3", "step_6"}
    # With this one, the first epoch would have been saved; its weights are gone.
    fit(tmp_path, ModelCheckpoint(1, **options), resume=True)
    assert "2" in names(tmp_path) and "1" not in names(tmp_path)
