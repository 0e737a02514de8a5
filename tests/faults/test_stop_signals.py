"""SIGTERM, SIGUSR1 and Ctrl-C: all ranks stop at one edge, save, and the resumed run ends as if nothing had been."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("signalled.py")


def start(folder, phase, *more, launcher=()):
    folder.mkdir(exist_ok=True)
    for mark in folder.glob("at.*"):
        mark.unlink()
    return subprocess.Popen(
        [sys.executable, *launcher, SCRIPT, folder, phase, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
    )  # fmt: skip


def arrived(folder, processes=1, seconds=90.0):
    end = time.monotonic() + seconds
    while len(list(folder.glob("at.*"))) < processes:
        assert time.monotonic() < end, "the run did not come so far"
        time.sleep(0.01)


def result(process, seconds=120.0):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The last line of a run without a signal, which is the same in every phase."""
    code, out, err = result(start(tmp_path_factory.mktemp("undisturbed") / "run", "none"))
    assert code == 0, err
    return out.splitlines()[-1]


@pytest.mark.parametrize(
    ("phase", "number", "code"),
    [("train", signal.SIGTERM, 143), ("eval", signal.SIGUSR1, 143), ("workers", signal.SIGINT, 130)],
)
def test_alone(tmp_path, undisturbed, phase, number, code):
    process = start(tmp_path, phase)
    arrived(tmp_path)
    process.send_signal(number)
    returned, out, err = result(process)
    name = "StoppedByUser" if number == signal.SIGINT else "Stopped"
    assert returned == code and f"exception {name} {code}" in out, (returned, out, err)
    assert (f"caught {name}" in out) == (number == signal.SIGINT), "a script that catches Ctrl-C still does"
    assert "Traceback" not in err
    saved = sorted(path.name for path in (tmp_path / "saved").glob("step_*"))
    steps = {int(name.split("_")[1].split(".")[0]) for name in saved}
    assert len(saved) == 2 and len(steps) == 1 and 13 < max(steps) <= 20, saved
    code, out, err = result(start(tmp_path, "none", "resume"))
    assert (code, out.splitlines()[-1]) == (0, undisturbed), err
    assert not list((tmp_path / "saved").glob("step_*")), "an epoch's checkpoint has taken its place"


def test_workers_and_all_when_the_whole_group_is_signalled(tmp_path, undisturbed):
    """As a scheduler does: the data workers get it as well."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, tmp_path, "workers"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    arrived(tmp_path)
    os.killpg(process.pid, signal.SIGTERM)
    code, out, err = result(process)
    assert code == 143 and "DataLoader worker" not in err, err
    code, out, err = result(start(tmp_path, "none", "resume"))
    assert (code, out.splitlines()[-1]) == (0, undisturbed), err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_it_at_once(tmp_path, number, code):
    process = start(tmp_path, "slow")
    arrived(tmp_path)
    process.send_signal(number)
    time.sleep(0.3)
    process.send_signal(number)
    returned, _, err = result(process, 30.0)
    assert returned == code and not list((tmp_path / "saved").glob("step_*")), err


HAPIRUN = ("-m", "hapi.distributed.launch", "--nproc_per_node", "2", "--log_dir", "log")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [(HAPIRUN, signal.SIGTERM, 143), (HAPIRUN, signal.SIGINT, 130), (TORCHRUN, signal.SIGTERM, 1)],
)
def test_two_processes(tmp_path, undisturbed, launcher, number, code):
    process = start(tmp_path, "train" if number == signal.SIGTERM else "eval", launcher=launcher)
    arrived(tmp_path, 2)
    process.send_signal(number)
    returned, out, err = result(process)
    assert returned == code, (returned, out, err)
    assert len(list((tmp_path / "saved").glob("step_*.pt"))) == 2, "one pair"
    code, out, err = result(start(tmp_path, "none", "resume", launcher=launcher))
    assert code == 0, err
    # On two processes the sums differ in their last bits; dropout draws per rank.
    assert "done 30 " in out


def test_a_signal_to_one_rank_stops_all(tmp_path):
    process = start(tmp_path, "train", launcher=HAPIRUN)
    arrived(tmp_path, 2)
    ranks = [
        int(pid) for pid in os.listdir("/proc")
        if pid.isdigit() and int(pid) != process.pid and _has_argument(pid, str(tmp_path)) and _rank(pid) == "1"
    ]  # fmt: skip
    assert ranks
    os.kill(ranks[0], signal.SIGTERM)
    code, out, err = result(process)
    assert code == 143 and len(list((tmp_path / "saved").glob("step_*.pt"))) == 2, (code, out, err)


def _read(pid, name):
    try:
        return Path("/proc", pid, name).read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _has_argument(pid, argument):
    return argument in _read(pid, "cmdline")


def _rank(pid):
    return dict(entry.partition("=")[::2] for entry in _read(pid, "environ")).get("RANK")
