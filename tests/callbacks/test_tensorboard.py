"""TensorBoard: what its own reader finds in the files that a fit has written."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi.callbacks import Callback, ModelCheckpoint, TensorBoard, tensorboard, tracking

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)
STEPS = 5  # of an epoch

with warnings.catch_warnings():
    # Importing it is the first thing that may warn, about packages of its own.
    warnings.simplefilter("ignore")
    importlib.import_module("torch.utils.tensorboard")
    EventAccumulator = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator


def model() -> hapi.Model:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return hapi.Model(network).prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())


def fit(subject: hapi.Model, callbacks: Any, epochs: int = 2, **options: Any) -> dict[str, list[float]]:
    options = {"log_freq": 2, "eval_data": (X, Y), "seed": 3, **options}
    return subject.fit((X, Y), batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks, **options).history


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value; a step that stands twice is an error."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        assert len(dict(points)) == len(points), f"{tag} has a step twice: {points}"
        found[tag] = dict(points)
    return found


def floats(values: list[float]) -> list[float]:
    """As the files hold them: in single precision."""
    return torch.tensor(values).tolist()


def test_values_of_epochs_and_steps(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    history = fit(model(), TensorBoard(folder))
    found = scalars(folder)
    assert {tag for tag in found if tag.startswith("epoch/")} == {f"epoch/{name}" for name in history}
    for name, values in history.items():
        assert list(found[f"epoch/{name}"].items()) == list(zip([STEPS, 2 * STEPS], floats(values), strict=True))
    assert {"val_loss", "val_acc", "lr"} <= history.keys()
    assert {tag for tag in found if tag.startswith("batch/")} == {"batch/loss", "batch/acc", "batch/lr"}
    assert list(found["batch/loss"]) == [2, 4, 7, 9]


def test_own_log_freq_and_the_running_value(tmp_path: Path) -> None:
    history = fit(model(), TensorBoard(str(tmp_path), log_freq=5))
    found = scalars(tmp_path)
    # After the last step of an epoch, the running value is the epoch's.
    assert found["batch/loss"] == found["epoch/loss"] and list(found["batch/loss"]) == [5, 10]
    assert found["batch/acc"] == dict(zip([5, 10], floats(history["acc"]), strict=True))


def test_accumulated_steps_have_their_own_places(tmp_path: Path) -> None:
    fit(model(), TensorBoard(tmp_path), log_freq=1, accumulate_grad_batches=3)
    assert list(scalars(tmp_path)["batch/loss"]) == list(range(1, 11))


def test_an_epoch_is_on_the_disk_when_it_ends(tmp_path: Path) -> None:
    seen = []

    class Reader(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(list(scalars(tmp_path)["epoch/loss"]))

    fit(model(), [TensorBoard(tmp_path), Reader()])
    assert seen == [[STEPS], [STEPS, 2 * STEPS]]


def test_one_object_for_two_fits_goes_on_in_the_folder(tmp_path: Path) -> None:
    subject, callback = model(), TensorBoard(tmp_path)
    fit(subject, callback)
    fit(subject, callback, epochs=1)
    assert list(scalars(tmp_path)["epoch/loss"]) == [STEPS, 2 * STEPS, 3 * STEPS]


class StopAt(Callback):
    """Ends the run as a fault does."""

    def __init__(self, epoch: int, step: int) -> None:
        self.at = epoch, step

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if (self.epoch, step) == self.at:
            raise RuntimeError("a fault")


def test_a_fit_that_starts_anew_in_the_folder_of_an_earlier_run_hides_it(tmp_path: Path) -> None:
    fit(model(), TensorBoard(tmp_path), epochs=3)
    history = fit(model(), TensorBoard(tmp_path), epochs=1, log_freq=3)
    found = scalars(tmp_path)
    assert found["epoch/loss"] == {STEPS: floats(history["loss"])[0]} and list(found["batch/loss"]) == [3]


def test_the_rate_of_each_step_that_is_written(tmp_path: Path) -> None:
    subject = model()
    schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))  # noqa: E731
    subject.prepare("adam", nn.CrossEntropyLoss(), scheduler=schedule, scheduler_interval="step")
    fit(subject, TensorBoard(tmp_path), log_freq=3)
    rates = {step: floats([1e-3 / step])[0] for step in (3, 8)}
    assert scalars(tmp_path)["batch/lr"] == pytest.approx(rates)
    assert scalars(tmp_path)["epoch/lr"] == pytest.approx({5: 2e-4, 10: 1e-4})


@pytest.mark.parametrize("every_n_steps", [None, 3], ids=["between epochs", "within one"])
def test_a_resumed_fit_hides_what_came_after_its_checkpoint(tmp_path: Path, every_n_steps: int | None) -> None:
    straight = fit(model(), TensorBoard(tmp_path / "straight"), epochs=3, save_dir=tmp_path / "one")
    with pytest.raises(RuntimeError, match="a fault"):
        callbacks = [TensorBoard(tmp_path / "log"), StopAt(1, 4), ModelCheckpoint(every_n_steps=every_n_steps)]
        fit(model(), callbacks, epochs=3, save_dir=tmp_path / "two")
    assert list(scalars(tmp_path / "log")["batch/loss"]) == [2, 4, 7, 9]
    fit(model(), TensorBoard(tmp_path / "log"), epochs=3, save_dir=tmp_path / "two", resume=True)
    assert scalars(tmp_path / "log") == scalars(tmp_path / "straight")
    assert list(scalars(tmp_path / "log")["epoch/loss"].values()) == floats(straight["loss"])


def test_rank_1_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensorboard, tracking):
        monkeypatch.setattr(module, "get_rank", lambda: 1)
    fit(model(), TensorBoard(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    with pytest.raises(ImportError, match=r'not installed.*pip install "torch-hapi\[tensorboard\]".*CSVLogger'):
        TensorBoard()


@pytest.mark.parametrize(("log_freq", "written"), [(0, 10), (-1, 10), (2.0, 2), (2.5, 10), (True, 10)])
def test_a_log_freq_that_counts_nothing(log_freq: Any, written: int) -> None:
    error, why = (ValueError, "it counts steps from 1") if type(log_freq) is int else (TypeError, "not a whole number")
    with pytest.raises(error, match=rf"log_freq=.*{why}.*Write log_freq={written}\."):
        TensorBoard(log_freq=log_freq)
