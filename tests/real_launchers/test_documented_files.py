"""The guide's Slurm script, submitted as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import install
import pytest
from cluster import Cluster, NotPermittedError
from starting import HERE, environment

ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "tests"))

from docs_pages import DOCS, blocks, shims  # noqa: E402

pytestmark = pytest.mark.launchers


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if reason := install.missing("srun", "slurmctld", "slurmd", "munged"):
        (pytest.skip if os.environ.get("HAPI_LAUNCHERS_OPTIONAL") else pytest.fail)(reason)
    try:
        with Cluster() as made:
            yield made
    except NotPermittedError as error:
        pytest.skip(f"not permitted on this machine: {error}")


def submit(cluster: Cluster, folder: Path, importable: Path) -> str:
    """Submit train.slurm; the job's number."""
    (script,) = (block for block in blocks(DOCS / "scaling-out.md") if block.title == "train.py")
    (folder / "train.py").write_text(script.code, encoding="utf-8")
    shims(folder / "bin")
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    variables = environment(PYTHONPATH=str(importable), PATH=path, **cluster.environment)
    command = [install.find("sbatch") or "sbatch", "--parsable", str(DOCS / "launch" / "train.slurm")]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def await_log(log: Path, pattern: str, times: int = 1, seconds: float = 400) -> str:
    until = time.monotonic() + seconds
    text = ""
    while time.monotonic() < until:
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        if len(re.findall(pattern, text)) >= times:
            return text
        time.sleep(0.5)
    raise AssertionError(f"{pattern!r} has not come {times} times:\n{text}")


def test_the_slurm_script_trains_and_goes_on_after_its_signal(
    cluster: Cluster, importable: Path, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, importable)
    log = tmp_path / f"train-{job}.log"
    text = await_log(log, r"Epoch 1/10 ")
    assert "hapi: 2 processes (slurm, gloo)" in text
    # What Slurm sends before the time is over.
    cluster.call("scancel", "--signal=USR1", job)
    await_log(log, r"hapi: stopped after step \d+")
    # A job that was put back waits until its credentials have expired, which the cluster lets be soon.
    text = await_log(log, r"'acc': (\d\.\d+)", times=2)
    assert "hapi: resuming from checkpoints/step_" in text
    first, second = re.findall(r"'acc': (\d\.\d+)", text)
    assert first == second
    # In the middle of a job's end its daemons would take long to end.
    until = time.monotonic() + 60
    while cluster.call("squeue", "-h"):
        assert time.monotonic() < until, "the job does not end"
        time.sleep(0.2)
