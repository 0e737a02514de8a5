"""hapirun on one host: what a user sees, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from launches import Launch, eventually, is_gone

from hapi.distributed.launch import stub
from hapi.distributed.launch.logs import WorkerLogs

TWO = ("--nproc_per_node", "2")
WAITING = """
    import os, pathlib, signal, subprocess, sys, time
    rank = os.environ["RANK"]
    pathlib.Path(f"pid{rank}.part").write_text(str(os.getpid()))
    os.rename(f"pid{rank}.part", f"pid{rank}")
"""


def test_a_script_runs_as_it_is(tmp_path):
    script = """
        import os, sys
        assert not any(name.startswith("HAPI_STUB") for name in os.environ)
        if os.environ["RANK"] == "0":
            print("stdin ends", sys.stdin is not None, __name__, sys.argv, os.path.basename(sys.path[0]))
            for step in range(3):
                sys.stderr.write(f"\\rbar {step}")
            sys.stderr.write("\\n")
            names = "WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR HAPI_LAUNCHED_BY OMP_NUM_THREADS"
            print(*(os.environ[name] for name in names.split()))
        else:
            print("only in the log")
    """
    (tmp_path / "log").mkdir()
    for name in ("workerlog.0", "workerlog.7"):
        (tmp_path / "log" / name).write_text("of an earlier run\n")
    launch = Launch(
        tmp_path, script, *TWO, "--job-id=night", arguments=("--gpus", "$$", "${local_rank}", "two words"),
        environment={"OMP_NUM_THREADS": "3"},
    )  # fmt: skip
    assert launch.wait() == 0, launch.err
    arguments = ["s.py", "--gpus", "$$", "${local_rank}", "two words"]
    assert launch.out == (
        f"stdin ends True __main__ {arguments} {tmp_path.name}\n"
        "\rbar 0\rbar 1\rbar 2\n"
        "2 0 2 0 127.0.0.1 hapirun 3\n"
    )  # fmt: skip
    assert launch.log(0) == launch.out
    assert launch.log(1) == "only in the log\n"
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["workerlog.0", "workerlog.1"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "log").iterdir())
    assert "s.py as 2 processes" in launch.err
    assert "night" in launch.err


def test_an_exception_is_shown_once_with_its_own_frames_alone(tmp_path):
    script = """
        import os, time
        def broken():
            raise KeyError("no such column")
        if os.environ["RANK"] == "1":
            broken()
        time.sleep(60)
    """
    launch = Launch(tmp_path, script, *TWO)
    assert launch.wait() == 1
    assert "rank 1 on" in launch.err
    assert launch.err.count("Traceback") == 1
    assert launch.err.count("KeyError: 'no such column'") == 2  # the headline, the traceback
    assert re.findall(r"line \d+, in (\S+)", launch.err) == ["<module>", "broken"]
    assert "workerlog.1" in launch.err
    assert launch.log(1).count("Traceback") == 1
    assert "stub.py" not in launch.log(1) + launch.err


RUNNING_A_HELPER = """
    import os, signal, subprocess, sys, time
    helper = "from torch.distributed.elastic.multiprocessing.errors import record; record(lambda: 1 / 0)()"
    rank, how = os.environ["RANK"], sys.argv[1]
    if rank == "0":
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            raise ValueError("of a fork")
        failed = subprocess.run([sys.executable, "-c", helper], stderr=subprocess.DEVNULL).returncode
        print("helper", failed, os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"]), flush=True)
        open("helped", "w").write("x")
        if how == "ends":
            time.sleep(1)
            sys.exit(0)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "says it in its own way":
            sys.exit(1)
        time.sleep(60)
    while not os.path.exists("helped"):
        time.sleep(0.01)
    time.sleep(1)
    if how == "the other raises":
        raise KeyError("no such column")
"""


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("ends", 0, ""),
        ("is killed", 137, "rank 0 on .* was ended by SIGKILL"),
        pytest.param("says it in its own way", 1, "rank 0 on .* raised ZeroDivisionError", marks=pytest.mark.slow),
        ("the other raises", 1, "rank 1 on .* raised KeyError"),
    ],
)
def test_a_failure_of_what_a_rank_runs_is_for_the_rank_to_judge(tmp_path, how, code, words):
    launch = Launch(tmp_path, RUNNING_A_HELPER, *TWO, arguments=(how,))
    assert launch.wait() == code, launch.err
    assert "helper 1 True\n" in launch.out
    assert re.search(words, launch.err), launch.err
    assert ("ZeroDivisionError" in launch.err) == (how == "says it in its own way"), launch.err
    assert "of a fork" not in launch.err
    assert "rank 0" not in launch.err or how != "the other raises", "it was told to stop"


def test_what_all_ranks_raise_is_shown_once(tmp_path):
    launch = Launch(tmp_path, "open('missing.csv')", "--nproc_per_node", "4")
    assert launch.wait() == 1
    shown = launch.out + launch.err
    assert shown.count("Traceback") == 1, shown
    assert re.search(r"The same on ranks [\d, -]+\.", launch.err), launch.err


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("os._exit(3)", 3, "exit code 3"),
        ("sys.exit(5)", 5, "exit code 5"),
        ("sys.exit('not today')", 1, "not today"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path, fault, code, words):
    script = f"""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            print("last words", flush=True)
            open("fault", "w").write(str(time.time()))
            {fault}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(77))
        time.sleep(60)
    """
    launch = Launch(tmp_path, script, *TWO)
    assert launch.wait() == code, launch.err
    assert "rank 1 on" in launch.err
    assert words in launch.err
    assert "last words" in launch.err
    assert "rank 0" not in launch.err, "it was told to stop"
    assert launch.since("fault") < 2.0


def test_a_rank_that_will_not_stop_is_ended_with_its_children(tmp_path):
    script = (
        WAITING
        + """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == "0":
        child = "import os, time; open('child', 'w').write(str(os.getpid())); time.sleep(60)"
        subprocess.Popen([sys.executable, "-c", child])
        while True:
            time.sleep(1)
    while not os.path.exists("child") or not open("child").read():
        time.sleep(0.01)
    open("fault", "w").write(str(time.time()))
    sys.exit(9)
    """
    )
    launch = Launch(tmp_path, script, *TWO, "--grace", "1")
    assert launch.wait() == 9
    assert 0.9 < launch.since("fault") < 4.0
    assert is_gone(int(launch.until("pid0")))
    assert eventually(lambda: is_gone(int(launch.until("child"))), 2)


SAVING = (
    WAITING
    + """
    def save(number, frame):
        time.sleep(0.3)
        open(f"saved{rank}", "w").write(str(number))
        sys.exit(int(sys.argv[1]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, save)
    open(f"ready{rank}", "w").write("x")
    while True:
        time.sleep(0.05)
"""
)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_is_passed_on_and_the_ranks_may_save(tmp_path, number, code):
    launch = Launch(tmp_path, SAVING, *TWO, arguments=("0",))
    pids = [int(launch.until(f"pid{rank}")) for rank in range(2)]
    [launch.until(f"ready{rank}") for rank in range(2)]
    launch.kill(number)
    # A scheduler may send it to all processes of a job, and again.
    time.sleep(0.1)
    launch.kill(signal.SIGTERM)
    assert launch.wait() == code, launch.err
    passed_on = signal.SIGTERM if number == signal.SIGHUP else number
    assert {launch.until(f"saved{rank}") for rank in range(2)} == {str(int(passed_on))}
    assert all(is_gone(pid) for pid in pids)
    assert signal.Signals(number).name in launch.err
    assert "Traceback" not in launch.err


def test_under_nohup_it_outlives_the_terminal(tmp_path):
    launch = Launch(tmp_path, SAVING, *TWO, arguments=("0",), ignored=signal.SIGHUP)
    pids = [int(launch.until(f"pid{rank}")) for rank in range(2)]
    [launch.until(f"ready{rank}") for rank in range(2)]
    for pid in (launch.pid, *pids):
        os.kill(pid, signal.SIGHUP)
    time.sleep(1.0)
    assert not any(is_gone(pid) for pid in (launch.pid, *pids)), launch.err
    launch.kill(signal.SIGTERM)
    assert launch.wait() == 143, launch.err
    assert {launch.until(f"saved{rank}") for rank in range(2)} == {str(int(signal.SIGTERM))}
    assert "SIGHUP" not in launch.err


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    script = (
        WAITING
        + """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    open(f"ready{rank}", "w").write("x")
    time.sleep(60)
    """
    )
    launch = Launch(tmp_path, script, *TWO)
    [launch.until(f"ready{rank}") for rank in range(2)]
    launch.kill(signal.SIGINT)
    time.sleep(0.5)
    assert not is_gone(int(launch.until("pid0")))
    launch.kill(signal.SIGINT)
    before = time.monotonic()
    assert launch.wait() == 130
    assert time.monotonic() - before < 2


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    script = (
        WAITING
        + """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
    """
    )
    launch = Launch(tmp_path, script, *TWO)
    pids = [int(launch.until(f"pid{rank}")) for rank in range(2)]
    launch.kill(signal.SIGKILL)
    eventually(lambda: all(is_gone(pid) for pid in pids), 1.0, "the ranks are gone")
    assert launch.wait() == -signal.SIGKILL


def test_restarts_append_and_count(tmp_path):
    script = """
        import os, sys, time
        print("round", os.environ["TORCHELASTIC_RESTART_COUNT"], "port", os.environ["MASTER_PORT"], flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] < sys.argv[1]:
            if os.environ["RANK"] == "1":
                os._exit(4)
            time.sleep(60)
    """
    launch = Launch(tmp_path, script, *TWO, "--max_restart", "2", arguments=("2",))
    assert launch.wait() == 0, launch.err
    ports = [re.findall(r"port (\d+)", launch.log(rank)) for rank in range(2)]
    assert re.findall(r"round (\d)", launch.out) == ["0", "1", "2"]
    assert ports[0] == ports[1] and len(set(ports[0])) == 3, "each round has a store of its own"
    assert re.findall(r"\((\d) of 2 restarts\)", launch.err) == ["1", "2"]
    again = Launch(tmp_path, script, *TWO, "--max_restart", "1", arguments=("2",))
    assert again.wait() == 4
    assert re.findall(r"round (\d)", again.log(1)) == ["0", "1"], "fresh for each run"


def test_two_jobs_that_log_into_one_folder(tmp_path):
    script = """
        import os, pathlib, sys, time
        job, rank, number = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(f"{job} of rank {rank} begins", number, flush=True)
        pathlib.Path(f"begun{job}{rank}").write_text("x")
        while job == "first" and not pathlib.Path("begunsecond1").exists():
            time.sleep(0.01)
        while job == "second" and not pathlib.Path("over").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        print(f"{job} of rank {rank} ends", number, flush=True)
        if job == "first":
            os._exit(6) if rank == "1" else time.sleep(60)
    """
    first = Launch(tmp_path, script, *TWO, "--max_restart", "1", arguments=("first",))
    [first.until(f"begunfirst{rank}") for rank in range(2)]
    second = Launch(tmp_path, script, *TWO, arguments=("second",), console=tmp_path / "second")
    assert first.wait() == 6, first.err
    (tmp_path / "over").write_text("x")
    assert second.wait() == 0, second.err
    lines = [f"first of rank 0 {what} {number}\n" for number in range(2) for what in ("begins", "ends")]
    assert first.out == "".join(lines)
    assert second.out == second.log(0) == "second of rank 0 begins 0\nsecond of rank 0 ends 0\n"
    assert second.log(1) == "second of rank 1 begins 0\nsecond of rank 1 ends 0\n"
    assert "its log, which another job has replaced:\n  first of rank 1 begins" in re.sub("hapirun: ", "", first.err)
    assert "All that rank 1 wrote" not in first.err


def test_two_jobs_that_start_in_one_folder_at_one_moment(tmp_path, capfd):
    environments, all_logs = [], []
    for _ in range(2):
        all_logs.append(WorkerLogs(str(tmp_path), {}))
        environments.append({0: {"RANK": "0", "WORLD_SIZE": "1"}})
        all_logs[-1].reify(environments[-1])
    (tmp_path / "s.py").write_text("import sys; print(sys.argv[1])")
    for job, logs in enumerate(all_logs):
        command = [sys.executable, stub.__file__, "script", str(tmp_path / "s.py"), str(job)]
        subprocess.run(command, env={**os.environ, **environments[job][0]}, check=True)
        logs.close()
        assert capfd.readouterr().out == f"{job}\n"
    assert (tmp_path / "workerlog.0").read_text() == "1\n"


def test_rank_0_has_a_terminal_where_the_launcher_has_one(tmp_path):
    ours, theirs = os.openpty()
    script = """
        import os, sys
        if os.environ["RANK"] == "0":
            print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns, end="\\r")
            sys.stderr.write("end\\n")
            raise SystemExit(2)
        import time
        time.sleep(60)
    """
    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 91, 0, 0))
    launch = Launch(tmp_path, script, *TWO, console=os.ttyname(theirs))
    assert launch.wait() == 2
    assert os.read(ours, 1000) == b"True True 91\rend\r\n"
    assert (tmp_path / "log" / "workerlog.0").read_bytes() == b"True True 91\rend\n"
    os.close(ours)
    os.close(theirs)


def test_the_command_itself(tmp_path):
    """`python -m hapi.distributed.launch -m module`, as a user types it into a shell that runs single processes too."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(
        "import hapi, sys, torch, torch.distributed as dist\n"
        "hapi.distributed.init_parallel_env()\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print(__name__, sys.argv[1:], dist.get_world_size(), total.item(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "hapi.distributed.launch", "--nproc_per_node", "2", "-m", "package.train", "-x"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HAPI_LAUNCHER": "off"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "__main__ ['-x'] 2 2.0\n"), done.stderr
