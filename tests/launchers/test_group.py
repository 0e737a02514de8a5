"""How the ranks meet, and what is left when they part: in threads where that tells as much, else in real processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hapi.distributed import host, rendezvous, threads
from hapi.distributed.launchers import LaunchInfo

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "rank_scripts.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- meeting -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HAPI_TIMEOUT", "20")
    monkeypatch.setattr(rendezvous, "_met", {})


@pytest.fixture
def in_threads() -> Iterator[Callable[..., list[Future[Any]]]]:
    pool = ThreadPoolExecutor()

    def call(function: Callable[..., Any], *ranks: int) -> list[Future[Any]]:
        return [pool.submit(function, rank) for rank in ranks]

    yield call
    pool.shutdown()


def launch(rank: int, size: int, port: int | None, address: str | None = "127.0.0.1", local: int = 0) -> LaunchInfo:
    return LaunchInfo("env", rank, size, rank, local or size, 0, address, port)


def test_all_meet_in_one_store(in_threads: Any) -> None:
    port = free_port()
    stores = [future.result() for future in in_threads(lambda r: meet(launch(r, 3, port)), 2, 1, 0)]
    stores[0].set("word", "given")
    assert [store.get("word") for store in stores] == [b"given"] * 3
    assert {store.timeout for store in stores} == {rendezvous.datetime.timedelta(seconds=600)}


def meet(info: LaunchInfo) -> Any:
    return rendezvous.meet(info, dist.TCPStore)


def test_everyone_names_the_missing(in_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAPI_TIMEOUT", "1.5")
    port = free_port()
    for rank, future in zip((0, 2), in_threads(lambda r: meet(launch(r, 4, port)), 0, 2), strict=True):
        with pytest.raises(RuntimeError) as caught:
            future.result()
        message = str(caught.value)
        assert message.startswith(f"Rank {rank} of 4 (env, host {socket.gethostname()}) has waited 1.5 s")
        assert f"at 127.0.0.1:{port}, but ranks 1, 3 did not come" in message
        assert "Start 4 processes" in message


def test_rank_0_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAPI_TIMEOUT", "0.5")
    port = free_port()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 0 did not answer at 127.0.0.1:{port} \(Connection refused\)"):
        meet(launch(1, 2, port))
    assert time.monotonic() - began < 6
    with pytest.raises(RuntimeError, match="rank 0 did not answer at no-such-host.invalid:"):
        meet(launch(1, 2, port, address="no-such-host.invalid"))


def test_something_else_listens_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAPI_TIMEOUT", "0.5")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"Rank 1 of 2 .* but .*"):
            meet(launch(1, 2, other.getsockname()[1]))
        assert time.monotonic() - began < 10
        with pytest.raises(RuntimeError, match="another process of this host does.*MASTER_PORT"):
            meet(launch(0, 2, other.getsockname()[1]))


def test_one_rank_twice(in_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAPI_TIMEOUT", "1.5")
    port = free_port()
    rank_0, *twins = in_threads(lambda r: meet(launch(r, 3, port)), 0, 1, 1)
    with pytest.raises(RuntimeError, match="rank 2 did not come"):
        rank_0.result()
    messages = [str(twin.exception()) for twin in twins]
    assert any("rank 2 did not come" in message for message in messages)
    assert all("Rank 1 of 3" in message for message in messages)


def test_a_restarted_round_does_not_meet_the_dead(in_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    first = [future.result() for future in in_threads(lambda r: meet(launch(r, 2, agents.port)), 0, 1)]
    first[0].set("default_pg/0/address", "of a dead worker")
    rendezvous._met.clear()  # New processes have met nobody yet.
    # The first round's store is alive still, as it may be on another host; rank 1 is early.
    late = in_threads(lambda r: meet(launch(r, 2, agents.port)), 1)[0]
    time.sleep(0.5)
    assert not late.done()
    second = [future.result() for future in [*in_threads(lambda r: meet(launch(r, 2, agents.port)), 0), late]]
    assert not second[0].check(["default_pg/0/address"])
    second[0].set("word", "given")
    assert second[1].get("word") == b"given"


def test_a_second_group_after_the_first_was_destroyed(in_threads: Any) -> None:
    port = free_port()
    rounds = []
    for _ in range(3):
        stores = [future.result() for future in in_threads(lambda r: meet(launch(r, 2, port)), 1, 0)]
        assert not stores[0].check(["word"])
        stores[0].set("word", "given")
        assert stores[1].get("word") == b"given"
        rounds.append(stores)
    assert len({stores[1].port for stores in rounds}) == 3


def test_no_address_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no address of rank 0\. Give all of them MASTER_ADDR"):
        meet(launch(1, 4, None, address=None))
    with pytest.raises(RuntimeError, match="lead the other ranks to 192.0.2.77, which is not an address of this host"):
        meet(launch(0, 4, 4, address="192.0.2.77"))
    ranks = tmp_path / "ranks"
    ranks.write_text("batch1\ncompute1\ncompute1\ncompute2\n")
    monkeypatch.setenv("LSB_DJOB_RANKFILE", str(ranks))
    monkeypatch.setenv("HAPI_TIMEOUT", "0.2")
    with pytest.raises(RuntimeError, match="rank 0 did not answer at compute1:4 "):
        meet(launch(1, 4, 4, address=None))


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_timeout_is_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAPI_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"HAPI_TIMEOUT='{text}' is set, but it is not a number of seconds above 0"):
        rendezvous.chosen_timeout()


def test_the_interface_is_chosen_where_the_name_leads_nowhere(in_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "name_leads_out", lambda: False)
    asked: list[list[str]] = []
    monkeypatch.setattr(host, "interface_towards", lambda targets: asked.append(list(targets)) or "eth7")
    for local, expected in ((2, None), (1, "eth7")):
        port = free_port()
        infos = [launch(rank, 2, port, local=local) for rank in (0, 1)]
        for future in in_threads(lambda rank, infos=infos: meet(infos[rank]), 0, 1):
            future.result()
        assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
    assert all(targets[0] == "127.0.0.1" for targets in asked)


def test_addresses_of_this_host() -> None:
    assert host.is_own("127.0.0.1")
    assert host.is_own("localhost")
    assert not host.is_own("192.0.2.77")
    assert not host.is_own("no-such-host.invalid")
    assert host.outgoing_address("127.0.0.1") == "127.0.0.1"
    assert host.is_loopback("127.0.1.1")
    assert not host.is_loopback("10.0.0.1")
    assert host.interface_towards(["127.0.0.1"]) is None
    assert host._interface_of("127.0.0.1") == "lo"


# --- real processes ----------------------------------------------------------------------------------------------


def start(name: str, *, without: str = "", **environ: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not re.match("HAPI_|TORCHELASTIC_", name)}
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HAPI_TIMEOUT": "30", **environ}
    kept.pop(without, None)
    environ.pop(without, None)
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS), name],
        env={**kept, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def of_two(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_processes_that_part(tmp_path: Path) -> None:
    """Several scripts side by side, since importing torch takes nearly all of their time."""
    port = free_port()
    error_file = tmp_path / "error.json"
    alone = start("left_alone", **of_two(0, port))
    gone = start("left_alone", **of_two(1, port))
    vain = start("waits_in_vain", **of_two(1, free_port()), HAPI_TIMEOUT="1", TORCHELASTIC_ERROR_FILE=str(error_file))
    users = start("users_group")
    other = free_port()
    ended = [start("ended_by_itself", **of_two(rank, other)) for rank in (0, 1)]

    # A peer has died, and nothing is said of it at exit.
    assert finish(alone) == (0, "", "")
    code, out, err = finish(gone)
    assert code == 0, err
    assert out.splitlines() == ["child is a rank: False", "fork worker: [[1, 2, 0]]", "spawn worker: [[1, 2, 0]]"]
    assert "were inherited from the process that holds the rank" in err
    # The script ends by os._exit: what it may still share of a worker's queue is called leaked, by Python itself.
    assert sum("Warning" in line and "resource_tracker" not in line for line in err.splitlines()) == 1, err

    code, out, err = finish(vain)
    assert (code, out) == (1, "thread\nregistered\n")
    assert "Traceback" in err and "Rank 1 of 2 (env, host" in err
    told = json.loads(error_file.read_text())["message"]
    assert told["message"].startswith("RuntimeError: Rank 1 of 2 (env, host")
    assert "in waits_in_vain" in told["extraInfo"]["py_callstack"]
    assert abs(int(told["extraInfo"]["timestamp"]) - time.time()) < 100

    told = (
        "ParallelEnv(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, device='cpu', "
        "backend='gloo', launcher='process group')"
    )
    assert finish(users) == (0, f"process group: 1\n{told}\nstill there at exit: True\n", "")
    # A thread that lets go of a tensor while the interpreter is taken down would abort the process.
    assert [finish(process) for process in ended] == [(0, "threads of gloo at exit: 0\n", "")] * 2


@pytest.mark.slow
def test_processes_share_out_the_threads_of_their_cores() -> None:
    port, other = free_port(), free_port()
    unsaid = [start("threads_of_each", without="OMP_NUM_THREADS", **of_two(rank, port)) for rank in (0, 1)]
    said = [start("threads_of_each", **of_two(rank, other), OMP_NUM_THREADS="2") for rank in (0, 1)]
    cores = len(threads.place()[1])
    fair = max(1, cores // 2)
    for process in unsaid:
        code, out, err = finish(process)
        assert (code, out) == (0, f"{fair} {fair if cores > 1 else None}\n"), err
    for process in said:
        code, out, err = finish(process)
        assert (code, out) == (0, "2 None\n"), err


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([(0, 1, 2, 3)] * 2, [2, 2]),
        ([(0, 1), (2, 3)], [2, 2]),  # each bound to cores of its own
        ([(0, 1), (2, 3), (0, 1), (2, 3)], [1, 1, 1, 1]),
        ([(0,)] * 3, [1, 1, 1]),
        ([tuple(range(8))] * 3, [2, 2, 2]),
    ],
)
def test_cores_that_are_shared_are_shared_out(cores: list[tuple[int, ...]], expected: list[int]) -> None:
    ranks = [("a", those) for those in cores]
    others = [("b", tuple(range(64)))]
    assert [threads.fair_share([*ranks, *others], rank) for rank in ranks] == expected


@pytest.mark.slow
def test_restarts_find_a_fresh_store() -> None:
    command = ["--standalone", "--max-restarts", "2", "--nproc-per-node", "2", str(SCRIPTS), "restarted"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HAPI_TIMEOUT": "30"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    finished = [f"rank {rank} finished in round 2" for rank in (0, 1)]
    # A round that fails may end in order or not; it cannot finish.
    last = [line for line in done.stdout.splitlines() if "round 2" in line]
    assert sorted(last) == [*finished, *2 * ["threads of gloo at exit of round 2: 0"]]
    assert "finished in round" not in done.stdout.replace("finished in round 2", "")
    # No round was lost to the store.
    assert "did not come" not in done.stderr
    assert "cannot connect" not in done.stderr
