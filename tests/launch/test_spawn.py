"""spawn: results, failures, and the parent's end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import spawned
from launches import eventually, is_gone

from hapi.distributed import spawn
from hapi.distributed.spawn import SpawnError


@pytest.fixture(autouse=True)
def _no_cards(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_results_come_back_in_rank_order():
    first = spawn(spawned.place, ("x", 1), nprocs=2, join=False)
    second = spawn(spawned.place, nprocs=3, backend="gloo")
    assert first.join() == [("x", 1, str(rank), str(rank), "2", "spawn", None) for rank in range(2)]
    assert first.join() == first.join()
    assert second == [(str(rank), str(rank), "3", "spawn", "gloo") for rank in range(3)]
    assert "RANK" not in os.environ
    assert [process.poll() for process in first.processes] == [0, 0]


def test_what_the_shell_says_of_its_own_process_does_not_hold_for_others(monkeypatch):
    monkeypatch.setenv("HAPI_LAUNCHER", "off")
    assert spawn(spawned.detected, nprocs=2) == [("spawn", 0, 2), ("spawn", 1, 2)]


def test_all_cores_or_the_named_cards():
    assert len(spawn(spawned.place)) == len(os.sched_getaffinity(0))
    assert len(spawn(spawned.place, gpus=[0, 1, 2])) == 3


def test_functions_without_a_name_elsewhere(monkeypatch):
    factor = 3
    assert spawn(lambda x: x * factor + int(os.environ["RANK"]), (2,), nprocs=2) == [6, 7]
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(RuntimeError, match=r"lambda.*torch-hapi\[cloudpickle\].*into a module"):
        spawn(lambda: factor, nprocs=1)


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, "LookupError: no such column"),
        ("_exit", 3, "exit code 3"),
        ("SIGKILL", 137, "SIGKILL"),
        (4, 4, "exit code 4"),
        (0, 1, "before its function returned"),
        ("Ctrl-C", 1, "KeyboardInterrupt"),
    ],
)
def test_a_process_that_does_not_return(how, code, words):
    before = time.monotonic()
    with pytest.raises(SpawnError, match=words) as caught:
        spawn(spawned.fail, (how,), nprocs=2)
    assert time.monotonic() - before < 4
    assert (caught.value.rank, caught.value.exit_code) == (1, code)
    assert "rank 0" not in str(caught.value)
    assert str(caught.value).count("Traceback") == (how in ("raise", "Ctrl-C"))
    if how == "raise":
        assert "spawned.py" in str(caught.value)
        assert "stub.py" not in str(caught.value)


def test_a_fork_that_raises_is_for_its_parent_to_judge(capfd, tmp_path):
    assert spawn(spawned.fork_that_raises, (str(tmp_path),), nprocs=2) == [1, 1]
    shown = capfd.readouterr().err
    assert shown.count("ValueError: of a fork") == 2
    assert "stub.py" not in shown


def test_a_result_that_cannot_be_sent():
    words = r"TypeError: The function returned function, which cannot be sent .*\nThe same on rank [01]\."
    with pytest.raises(SpawnError, match=words):
        spawn(spawned.unpicklable, nprocs=2)


@pytest.mark.parametrize(("nprocs", "gpus"), [(0, None), (-2, None), (2.0, None), (True, None), (2, "0,0"), (2, "x")])
def test_refused(nprocs, gpus):
    with pytest.raises(ValueError if type(nprocs) is int else TypeError, match="spawn received"):
        spawn(spawned.place, nprocs=nprocs, gpus=gpus)


def test_join_with_a_time_limit(tmp_path):
    running = spawn(spawned.linger, (str(tmp_path), 1.5), nprocs=2, join=False)
    assert running.join(0.1) is None
    assert running.join() == ["0", "1"]


def in_a_process(function, *args):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "hapi", "hapi.distributed.launch.run"])
    process = context.Process(target=function, args=args)
    process.start()
    return process


def parent(folder, daemon, join):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.stderr = open(f"{folder}/err", "w")  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    spawn(spawned.linger, (folder, 60.0 if join else 1.0), nprocs=2, join=join, daemon=daemon)
    # A forked process does not run these by itself.
    import atexit

    atexit._run_exitfuncs()


@pytest.mark.parametrize(
    ("number", "code", "saved"), [(signal.SIGINT, 1, "2"), (signal.SIGTERM, 143, "15"), (signal.SIGKILL, -9, None)]
)
def test_the_end_of_the_parent(tmp_path, number, code, saved):
    process = in_a_process(parent, str(tmp_path), False, True)
    paths = [tmp_path / f"pid{rank}" for rank in range(2)]
    eventually(lambda: all(path.exists() for path in paths))
    os.kill(process.pid, number)
    if saved is None:
        eventually(lambda: all(is_gone(int(path.read_text())) for path in paths), 1.0, "the processes are gone")
    process.join(10)
    assert process.exitcode == code, (tmp_path / "err").read_text()
    assert all(is_gone(int(path.read_text())) for path in paths)
    for rank in range(2):
        path = tmp_path / f"saved{rank}"
        assert (path.read_text() if path.exists() else None) == saved


@pytest.mark.parametrize("daemon", [False, True])
def test_left_running_at_the_parents_end(tmp_path, daemon):
    process = in_a_process(parent, str(tmp_path), daemon, False)
    process.join(20)
    assert process.exitcode == 0
    pids = [tmp_path / f"pid{rank}" for rank in range(2)]
    assert all(path.exists() and is_gone(int(path.read_text())) for path in pids) or daemon
    assert not (tmp_path / "saved0").exists() or daemon


@pytest.mark.slow
def test_a_script_from_stdin_without_a_main_guard(tmp_path):
    script = """
import hapi, torch
import hapi.distributed as dist

class Result:
    def __init__(self, total):
        self.total = total

def work(start):
    dist.init_parallel_env()
    total = torch.full((), float(start + dist.get_rank()))
    torch.distributed.all_reduce(total)
    return Result(total.item()), dist.get_rank(), dist.get_world_size(), dist.ParallelEnv().launcher

results = dist.spawn(work, (10,), nprocs=2)
assert all(isinstance(result[0], Result) for result in results)
print([(result.total, *rest) for result, *rest in results])
"""
    done = subprocess.run(
        [sys.executable, "-"], input=script, cwd=tmp_path, text=True, capture_output=True, timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.stdout == "[(21.0, 0, 2, 'spawn'), (21.0, 1, 2, 'spawn')]\n", done.stderr
    assert done.stderr == ""
