"""MLflowCallback: what MLflow's own client reads of a fit, from files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_tensorboard import STEPS, StopAt, fit, model

from hapi.callbacks import MLflowCallback, ModelCheckpoint, tracking
from hapi.signals import stopped_by

mlflow = pytest.importorskip("mlflow")

ROOT = Path(__file__).parents[2]
# Nothing can be imported but the standard library and what the distributions named by argv stand upon.
WITHOUT_THE_REST = """
import importlib.metadata as metadata, sys
from importlib.machinery import PathFinder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

there, left = set(), [Requirement(text) for text in sys.argv[1:]]
while left:
    name = canonicalize_name(left.pop().name)
    if name not in there:
        there.add(name)
        needed = map(Requirement, metadata.requires(name) or ())
        left += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
packages = metadata.packages_distributions()
hidden = {name for name, owners in packages.items() if not there & set(map(canonicalize_name, owners))} - {"hapi"}

class Seen(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [Seen if finder is PathFinder else finder for finder in sys.meta_path]
"""
IN_A_FILE = """
import torch, hapi
from hapi.callbacks import MLflowCallback

def fit(callback):
    model = hapi.Model(torch.nn.Linear(3, 2)).prepare("adam", torch.nn.CrossEntropyLoss())
    model.fit((torch.rand(8, 3), torch.arange(8) % 2), epochs=2, verbose=0, callbacks=callback)

fit(MLflowCallback("digits", tracking_uri="sqlite:///own.db"))
fit(MLflowCallback())
import mlflow
for uri, experiment in (("sqlite:///own.db", "digits"), (None, "Default")):
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "epoch/loss")]
    print(run.info.status, *steps)
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # MLflow would have a database; its files need nothing but itself.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "store").as_uri()


def runs(store: str, experiment: str = "digits") -> list[Any]:
    """In the order in which they were begun."""
    client = mlflow.MlflowClient(store)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return sorted(found, key=lambda run: run.info.start_time)


def points(store: str, run: Any, name: str) -> list[tuple[int, float]]:
    history = mlflow.MlflowClient(store).get_metric_history(run.info.run_id, name)
    return [(point.step, point.value) for point in history]


def callback(store: str, **options: Any) -> MLflowCallback:
    return MLflowCallback("digits", tracking_uri=store, **options)


def test_values_of_epochs_and_steps(store: str) -> None:
    chosen = callback(store, run_name="first", params={"width": 8}, tags={"who": "me"})
    history = fit(model(), chosen)
    (run,) = runs(store)
    assert (run.info.run_name, run.info.status, run.data.tags["who"]) == ("first", "FINISHED", "me")
    for name, values in history.items():
        assert points(store, run, f"epoch/{name}") == list(zip([STEPS, 2 * STEPS], values, strict=True))
    assert run.data.metrics.keys() == {*(f"epoch/{name}" for name in history), "batch/loss", "batch/acc", "batch/lr"}
    assert [step for step, _ in points(store, run, "batch/loss")] == [2, 4, 7, 9]
    known = {"network": "Sequential", "optimizer": "Adam", "lr": "0.001", "batch_size": "4", "epochs": "2", "seed": "3"}
    assert {"width": "8", **known}.items() <= run.data.params.items()


@pytest.mark.parametrize("every_n_steps", [None, 3], ids=["between epochs", "within one"])
def test_a_resumed_fit_goes_on_with_its_run_and_writes_nothing_twice(
    store: str, tmp_path: Path, every_n_steps: int | None
) -> None:
    fit(model(), callback(store), epochs=3, save_dir=tmp_path / "one")
    with pytest.raises(RuntimeError, match="a fault"):
        callbacks = [callback(store), StopAt(1, 4), ModelCheckpoint(every_n_steps=every_n_steps)]
        fit(model(), callbacks, epochs=3, save_dir=tmp_path / "two")
    assert [run.info.status for run in runs(store)] == ["FINISHED", "FAILED"]
    fit(model(), callback(store), epochs=3, save_dir=tmp_path / "two", resume=True)
    straight, resumed = runs(store)
    assert resumed.info.status == "FINISHED" and resumed.data.params == straight.data.params
    for name in straight.data.metrics:
        assert points(store, resumed, name) == points(store, straight, name)


@pytest.mark.slow
def test_a_database_in_a_file(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extra = re.search(r"^mlflow = \[(.*)\]$", text, re.MULTILINE)
    core = re.search(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    assert extra is not None and core is not None
    names = re.findall(r'"([^"]+)"', core[1] + extra[1])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environ["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", WITHOUT_THE_REST + IN_A_FILE, *names]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=150)
    assert done.stdout.splitlines()[-2:] == ["FINISHED 1 2"] * 2, done.stdout + done.stderr


def test_a_run_that_the_script_has_begun_is_used_and_left_open(store: str) -> None:
    mlflow.set_tracking_uri(store)
    try:
        mlflow.set_experiment("digits")
        with mlflow.start_run() as own:
            mlflow.log_param("optimizer", "mine")
            fit(model(), MLflowCallback())
            assert mlflow.active_run().info.run_id == own.info.run_id
            assert runs(store)[0].info.status == "RUNNING"
        (run,) = runs(store)
        assert [step for step, _ in points(store, run, "epoch/loss")] == [STEPS, 2 * STEPS]
        assert run.data.params["optimizer"] == "mine" and run.data.params["network"] == "Sequential"
        # The script's experiment, without a run of its own.
        fit(model(), MLflowCallback(), epochs=1)
        assert len(runs(store)) == 2
    finally:
        mlflow.set_tracking_uri(None)


def test_names_that_mlflow_does_not_take(store: str) -> None:
    subject = model()

    def top(outputs: Any, labels: Any) -> Any:
        return (outputs.argmax(1) == labels).float()

    top.__name__ = "top@1"
    subject.prepare("adam", subject.loss, top)
    fit(subject, callback(store))
    assert "epoch/top_1" in runs(store)[0].data.metrics


def test_a_server_that_goes_away_costs_values_and_not_the_training(store: str, capsys: Any) -> None:
    chosen = callback(store, log_freq=1)

    class Away(StopAt):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if (self.epoch, step) == self.at:
                self.kept = chosen._run
                chosen._run = (mlflow.MlflowClient("http://127.0.0.1:9"), chosen._run[1])
            if (self.epoch, step) == (0, 4):
                chosen._run = self.kept

    mlflow.environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.set(0)
    try:
        fit(model(), [chosen, Away(0, 1)])
    finally:
        mlflow.environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.unset()
    (run,) = runs(store)
    assert [step for step, _ in points(store, run, "batch/loss")] == [1, 2, 6, 7, 8, 9, 10]
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 1 and told[0].startswith("MLflowCallback: values are lost from step 3 on")
    assert run.info.status == "FINISHED"


def test_a_run_that_is_stopped(store: str) -> None:
    class Stops(StopAt):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            raise stopped_by(15)

    with pytest.raises(SystemExit):
        fit(model(), [callback(store), Stops(0, 0)])
    assert [run.info.status for run in runs(store)] == ["KILLED"]


def test_rank_1_writes_nothing(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "get_rank", lambda: 1)
    fit(model(), callback(store))
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be(store: str) -> None:
    for experiment, uri in (("", store), ("digits", "nonsense://x")):
        with pytest.raises(
            RuntimeError, match=r"^MLflowCallback received tracking_uri=.*no run can be begun: .*Write "
        ):
            fit(model(), MLflowCallback(experiment, tracking_uri=uri))


def test_params_that_are_no_plain_values() -> None:
    with pytest.raises(TypeError, match=r"MLflowCallback received params with 'a': \[1\].*Write params="):
        MLflowCallback(params={"a": [1]})


def test_tags_have_texts_for_names() -> None:
    with pytest.raises(TypeError, match=r"MLflowCallback received tags with the key 1, of type int.*Write tags="):
        MLflowCallback(tags={1: "me"})
