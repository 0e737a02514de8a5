"""The unchanged examples/mnist.py under every launcher there is: one epoch on the full MNIST, two processes each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import install
import pytest
import torch
from starting import HERE, LAUNCHERS, Job, Launcher
from witness.weights_digest import digest

pytestmark = pytest.mark.launchers

MNIST = str(HERE.parents[1] / "examples" / "mnist.py")
PATIENCE = 300.0
NEAR = 0.005


@dataclass
class Row:
    """One launcher's line of the account."""

    name: str
    accuracy: float | None = None
    seconds: float | None = None
    outcome: str = "passed"
    launcher: Launcher = field(init=False)

    def __post_init__(self) -> None:
        self.launcher = LAUNCHERS[self.name]

    def __str__(self) -> str:
        version = "" if install.missing(*self.launcher.needs) else self.launcher.version()
        accuracy = "-" if self.accuracy is None else f"{self.accuracy:.4f}"
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        processes = f"{self.launcher.processes} process{'es' * (self.launcher.processes > 1)}"
        return f"{self.name:22} {version:20} {processes:11} {accuracy:>6} {seconds:>6} s  {self.outcome}"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return []


Begin = Callable[[str], AbstractContextManager[Row]]


@pytest.fixture
def begin(account: list[str], rows: list[Row]) -> Begin:
    """`with begin(name) as row:` puts a line into the account, whatever happens within."""

    @contextmanager
    def line(name: str) -> Iterator[Row]:
        row = Row(name)
        rows.append(row)
        try:
            yield row
        except BaseException as problem:
            kind = "not run" if isinstance(problem, pytest.skip.Exception) else "FAILED"
            row.outcome = f"{kind}: {str(problem).partition(chr(10))[0]}"
            raise
        finally:
            account.append(str(row))

    return line


@pytest.fixture
def full_data() -> None:
    if not os.environ.get("HAPI_DATA_HOME"):
        pytest.fail("needs the full MNIST: set HAPI_DATA_HOME to a torchvision root that holds it")


@pytest.mark.usefixtures("full_data")
@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_unchanged_example(name: str, launch: Any, begin: Begin, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    witness.mkdir()
    with begin(name) as row:
        job = launch(name, [MNIST, "1"], WITNESS_FOLDER=str(witness), HAPI_TIMEOUT="120")
        codes = job.wait(PATIENCE)
        row.seconds = job.seconds
        assert codes == [0] * len(codes), f"exit codes {codes}\n{job.text()}"
        ranks = [json.loads(path.read_text()) for path in witness.iterdir()]
        row.accuracy = ranks[0]["results"]["acc"]
        check_places(row.launcher, ranks)
        check_equality(ranks, torch.load(job.folder / "checkpoints/mnist/final.pt", weights_only=True))
        check_output(row.launcher, job, str(ranks[0]["results"]))
        check_files(job)


def check_places(launcher: Launcher, ranks: list[dict[str, Any]]) -> None:
    size = launcher.processes
    assert sorted(rank["rank"] for rank in ranks) == list(range(size))
    assert {rank["world_size"] for rank in ranks} == {size}
    assert {rank["launcher"] for rank in ranks} == {"none" if size == 1 else launcher.says}
    assert {rank["backend"] for rank in ranks} == {"none" if size == 1 else "gloo"}


def check_equality(ranks: list[dict[str, Any]], saved: dict[str, torch.Tensor]) -> None:
    assert {rank["weights"] for rank in ranks} == {digest(saved)}
    assert len({json.dumps(rank["results"]) for rank in ranks}) == 1
    assert ranks[0]["results"]["acc"] > 0.95


def check_output(launcher: Launcher, job: Job, results: str) -> None:
    """Rank 0 alone says what runs and shows how far it is; every rank prints what the script prints."""
    size, text = launcher.processes, job.text()
    launched = f"{size} processes ({launcher.says}, gloo)" if size > 1 else "1 process (no launcher)"
    assert re.findall(r"hapi: \d+ process.*?\)", text) == [f"hapi: {launched}"], text
    assert len(re.findall(r"Epoch 1/1 - [\d.]+s - loss", text)) == 1, text
    steps = re.findall(r"Epoch 1/1 step (\d+)/", text)
    assert sorted(set(steps), key=int) == steps, text
    if job.apart:
        outputs = {rank: path.read_text() for rank, path in job.apart.items()}
        assert [output.count(results) for output in outputs.values()] == [1] * size, outputs
        assert "Epoch" not in outputs[1], outputs
        text += outputs[1]
    else:
        assert text.count(results) == size, text
    # On a busy machine Ray's controller reports tries of its own that it repeats.
    said = "\n".join(line for line in text.splitlines() if "(TrainController " not in line)
    assert "Traceback" not in said
    assert "destroy_process_group" not in said


def check_files(job: Job) -> None:
    found = {path.relative_to(job.folder).as_posix() for path in job.folder.glob("checkpoints/**/*") if path.is_file()}
    assert found == {f"checkpoints/mnist/{name}" for name in ("1.pt", "1.opt.pt", "final.pt", "final.opt.pt")}


def test_all_learn_alike(rows: list[Row], account: list[str]) -> None:
    accuracies = {row.name: row.accuracy for row in rows if row.accuracy is not None}
    if len(accuracies) < 2:
        pytest.fail("fewer than two launchers have run: run this test together with the one above")
    spread = max(accuracies.values()) - min(accuracies.values())
    account.append(f"accuracies of {len(accuracies)} launchers within {spread:.4f} (limit {NEAR})")
    assert spread <= NEAR, accuracies
