"""WandbCallback: what stands in the files that a fit has written offline."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_tensorboard import STEPS, StopAt, fit, model

from hapi.callbacks import ModelCheckpoint, WandbCallback, tracking

wandb = pytest.importorskip("wandb")
# It starts a process of its own.
pytestmark = pytest.mark.slow

BLOCK = 32768


@pytest.fixture(autouse=True, scope="module")
def _apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of wandb's own outside, and no process of its left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp("wandb")))
        yield
        wandb.teardown()


def callback(folder: Path, project: str = "digits", **options: Any) -> WandbCallback:
    return WandbCallback(project, **{"dir": str(folder), "mode": "offline", **options})


def records(file: Path) -> list[Any]:
    """What a file holds: blocks of pieces, each with a checksum, a length and a kind (whole, first, middle, last)."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if place + 7 + length > len(data):
            break  # it is being written
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return found


class Run:
    """A run as its file tells it."""

    def __init__(self, file: Path) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.config: dict[str, Any] = {}
        self.exit_code: int | None = None
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                step = record.history.step.num
                assert step not in self.rows
                self.rows[step] = {name: value for name, value in row.items() if not name.startswith("_")}
            elif kind == "run":
                self.id, self.project, self.name = record.run.run_id, record.run.project, record.run.display_name
                self.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "config":
                self.config |= {item.key: json.loads(item.value_json) for item in record.config.update if item.key}
            elif kind == "exit":
                self.exit_code = record.exit.exit_code


def runs(folder: Path) -> list[Run]:
    """In the order in which they were begun, once wandb's process has written all of them."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.parent.stat().st_ctime_ns)
    until = time.monotonic() + 60
    while any(Run(file).exit_code is None for file in files) and time.monotonic() < until:
        time.sleep(0.05)
    return [Run(file) for file in files]


def test_values_of_epochs_and_steps(tmp_path: Path) -> None:
    history = fit(model(), callback(tmp_path, name="first", config={"width": 8, "lr": 5}))
    (run,) = runs(tmp_path)
    assert (run.project, run.name, run.exit_code) == ("digits", "first", 0)
    assert list(run.rows) == [2, 4, 5, 7, 9, 10]
    for name, values in history.items():
        assert [run.rows[step][f"epoch/{name}"] for step in (STEPS, 2 * STEPS)] == values
    assert run.rows[7].keys() == {"batch/loss", "batch/acc", "batch/lr"} and run.rows[7]["batch/lr"] == 1e-3
    known = {"network": "Sequential", "optimizer": "Adam", "batch_size": 4, "epochs": 2, "seed": 3}
    assert {"width": 8, "lr": 5, **known}.items() <= run.config.items()


def test_values_of_one_step_are_one_row(tmp_path: Path) -> None:
    fit(model(), callback(tmp_path, log_freq=STEPS))
    (run,) = runs(tmp_path)
    assert list(run.rows) == [STEPS, 2 * STEPS]
    assert all(row["batch/loss"] == pytest.approx(row["epoch/loss"]) for row in run.rows.values())


def test_a_resumed_fit_goes_on_with_its_run(tmp_path: Path) -> None:
    straight = fit(model(), callback(tmp_path, mode="disabled"), epochs=3, save_dir=tmp_path / "one")
    with pytest.raises(RuntimeError, match="a fault"):
        callbacks = [callback(tmp_path), StopAt(1, 4), ModelCheckpoint(every_n_steps=3)]
        fit(model(), callbacks, epochs=3, save_dir=tmp_path / "two")
    fit(model(), callback(tmp_path), epochs=3, save_dir=tmp_path / "two", resume=True)
    ended, resumed = runs(tmp_path)
    assert resumed.id == ended.id and (ended.exit_code, resumed.exit_code) == (1, 0)
    assert list(ended.rows) == [2, 4, 5, 7, 9] and list(resumed.rows) == [10, 12, 14, 15]
    assert [resumed.rows[step]["epoch/loss"] for step in (10, 15)] == straight["loss"][1:]


def test_a_run_that_the_script_has_begun_is_used_and_left_open(tmp_path: Path) -> None:
    own = wandb.init(project="own", config={"mine": 1}, dir=str(tmp_path), mode="offline")
    fit(model(), callback(tmp_path, "other"))
    fit(model(), callback(tmp_path, "other"))  # the same steps once more: they stand there
    assert wandb.run is own
    own.log({"after": 1.0})
    own.finish()
    (run,) = runs(tmp_path)
    assert run.project == "own" and run.config["mine"] == 1 and run.config["optimizer"] == "Adam"
    assert [step for step, row in run.rows.items() if "epoch/loss" in row] == [STEPS, 2 * STEPS]
    assert any("after" in row for row in run.rows.values())


def test_each_fit_is_a_run(tmp_path: Path) -> None:
    subject, chosen = model(), callback(tmp_path)
    fit(subject, chosen, epochs=1)
    fit(subject, chosen, epochs=1)
    first, second = runs(tmp_path)
    assert first.id != second.id and list(first.rows)[-1] == STEPS and list(second.rows)[-1] == 2 * STEPS


def test_rank_1_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "get_rank", lambda: 1)
    fit(model(), callback(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_wandbs_costs_values_and_not_the_training(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    own = wandb.init(project="own", dir=str(tmp_path), mode="offline")
    fails = {2, 5, 7}

    def log(values: Any, step: int) -> None:
        if step in fails:
            raise wandb.errors.CommError("no way there")
        logged.append(step)

    def finish(self: Any, **_: Any) -> None:
        raise TimeoutError("Timed out finishing run.")

    monkeypatch.setattr(own, "log", log)
    logged: list[int] = []
    history = fit(model(), callback(tmp_path))
    own.finish()
    assert logged == [4, 9, 10] and len(history["loss"]) == 2

    monkeypatch.setattr(type(own), "finish", finish)
    assert len(fit(model(), callback(tmp_path))["loss"]) == 2
    monkeypatch.undo()
    wandb.run.finish()
    assert capsys.readouterr().out.splitlines() == [
        "WandbCallback: values are lost from step 2 on, as long as this lasts: no way there",
        "WandbCallback: values are lost from step 5 on, as long as this lasts: no way there",
        "WandbCallback: the end of the run could not be told: Timed out finishing run.",
    ]
