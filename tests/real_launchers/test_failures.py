"""A rank that fails ends the job, under every launcher: fault x launcher -> seconds until no process is left.

HAPI_TEST_PHASES="train,eval,save" fails in each of these; by default in training alone, for time.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from starting import HERE

PHASES = os.environ.get("HAPI_TEST_PHASES", "train").split(",")
# The group's timeout, in seconds: how long the others wait for a rank that is stopped.
TIMEOUT = 6
LIMIT = 15.0
# Its agent gives workers that do not end by themselves a fixed 30 seconds.
LIMIT_OF_TORCHRUN = 45.0
LAUNCHERS = ("hapirun", "spawn", "srun, 1 node", "Open MPI", "MPICH", "torchrun")
FAULTS = ("raise", "exit", "kill", "stop")


@pytest.mark.launchers
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_rank_that_fails_ends_the_job(launch, account, tmp_path, name, fault, phase):
    job = launch(name, [str(HERE / "faulty.py"), fault, phase], HAPI_TIMEOUT=str(TIMEOUT))
    wait_until((job.folder / "fault").exists, 120, job)
    began = float(wait_for_text(job.folder / "fault"))
    codes = job.wait(60)
    ended = time.time() - began
    pids = [int((job.folder / f"pid.{rank}").read_text()) for rank in (0, 1)]
    wait_until(lambda: not any(map(is_alive, pids)), 60, job)
    gone = time.time() - began
    text = job.text() + "".join(path.read_text(errors="replace") for path in job.apart.values() if path.exists())
    traceback = "ValueError: boom" in text and "Traceback" in text
    times = f"ended in {ended:5.1f} s, all gone in {gone:5.1f} s" + ("   first traceback shown" if traceback else "")
    account.append(f"{name:<14} {fault:<6} in {phase:<6} exit code {codes[0]:>4}   {times}")
    assert codes[0] != 0
    assert traceback == (fault == "raise"), text
    assert gone <= (LIMIT_OF_TORCHRUN if name == "torchrun" else LIMIT), account[-1]


def wait_until(condition, seconds, job):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"it did not come so far in {seconds} s\n{job.text()}"
        time.sleep(0.02)


def wait_for_text(path: Path) -> str:
    until = time.monotonic() + 10
    while not (text := path.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return text


def is_alive(pid: int) -> bool:
    """Whether a process is there, and not just waiting to be collected."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
