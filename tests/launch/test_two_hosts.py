"""hapirun on two hosts, which are network namespaces joined by a cable."""

from __future__ import annotations

import signal
import time

import pytest
from launches import Launch, eventually, is_gone
from namespaces import ADDRESSES
from namespaces import NAMES as HOSTS

# Minutes of hosts that come and go, on network namespaces: `make test-launchers`.
pytestmark = [pytest.mark.launchers, pytest.mark.usefixtures("hosts")]

IPS = ("--ips", ",".join(ADDRESSES))
LONG = 300.0


def launch_both(folder, script, *options, arguments=(), **more):
    return [
        Launch(folder / f"h{index}", script, *options, arguments=arguments, host=host, **more)
        for index, host in enumerate(HOSTS)
    ]


def codes(launches):
    return [launch.wait() for launch in launches]


def shown(launches):
    return "\n".join(f"--- {launch.folder.name}\n{launch.out}\n{launch.err}" for launch in launches)


WAITING = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
pathlib.Path("part").write_text(str(os.getpid()))
os.rename("part", f"pid{rank}")
if rank == "1":
    while not os.path.exists("../h0/pid0"):
        time.sleep(0.01)
"""


def test_ips_give_the_ranks(tmp_path):
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR"
        print(*(os.environ[name] for name in names.split()), total.item(), flush=True)
        dist.destroy_process_group()
    """
    both = launch_both(tmp_path, script, *IPS, environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert codes(both) == [0, 0], shown(both)
    # torch warns there of hosts without a name server.
    assert both[0].out.endswith(f"0 2 0 1 0 2 {ADDRESSES[0]} 2.0\n")
    assert both[1].out == "", "rank 0 is not there"
    assert both[1].log(1).endswith(f"1 2 0 1 1 2 {ADDRESSES[0]} 2.0\n")
    assert "number 1" in both[1].err


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [("raise ValueError('boom')", 1, "ValueError: boom"), ("os._exit(3)", 3, "exit code 3")],
)
def test_a_fault_ends_both(tmp_path, where, fault, code, words):
    script = (
        WAITING
        + f"""
if rank == "{where}":
    open("../fault", "w").write(str(time.time()))
    {fault}
time.sleep(60)
"""
    )
    both = launch_both(tmp_path, script, *IPS)
    assert codes(both) == [code, code], shown(both)
    seconds = time.time() - float((tmp_path / "fault").read_text())
    print(f"{fault} on host {where}: {seconds:.2f} s")
    assert seconds < 6
    for launch in both:
        assert f"rank {where} on {HOSTS[where]}" in launch.err, shown(both)
        assert words in launch.out + launch.err
        assert (launch.out + launch.err).count("Traceback") == ("boom" in fault), shown(both)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_one_reaches_both(tmp_path, number, code):
    script = (
        WAITING
        + """
def save(number, frame):
    open("saved", "w").write(str(number))
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, save)
open("ready", "w").write("x")
time.sleep(60)
"""
    )
    both = launch_both(tmp_path, script, *IPS)
    for launch in both:
        launch.until("ready")
    both[1].kill(number)
    assert codes(both) == [code, code], shown(both)
    assert [launch.until("saved") for launch in both] == [str(int(number))] * 2


@pytest.mark.parametrize("where", [0, 1])
def test_a_killed_launcher_ends_the_other(tmp_path, where):
    both = launch_both(tmp_path, WAITING + "time.sleep(60)", *IPS)
    pids = [int(launch.until(f"pid{rank}")) for rank, launch in enumerate(both)]
    both[where].kill(signal.SIGKILL)
    eventually(lambda: is_gone(pids[where]), 1.0, "its rank is gone")
    before = time.monotonic()
    assert both[1 - where].wait() == 1, shown(both)
    print(f"launcher {where} killed: {time.monotonic() - before:.2f} s")
    assert time.monotonic() - before < 13
    assert is_gone(pids[1 - where])
    assert HOSTS[where] in both[1 - where].err or ADDRESSES[where] in both[1 - where].err


def test_a_cut_network_ends_both(tmp_path, hosts):
    both = launch_both(tmp_path, WAITING + "time.sleep(60)", *IPS)
    [launch.until(f"pid{rank}") for rank, launch in enumerate(both)]
    hosts.cut()
    try:
        before = time.monotonic()
        assert codes(both) == [1, 1], shown(both)
        assert time.monotonic() - before < 15
    finally:
        hosts.mend()


def test_who_does_not_come(tmp_path):
    alone = Launch(tmp_path / "h1", "", *IPS, "--timeout", "2", host=HOSTS[1])
    assert alone.wait() == 1
    assert f"Nothing answers at {ADDRESSES[0]}:29400 for 2 s" in alone.err
    alone = Launch(tmp_path / "h0", "", *IPS, "--timeout", "2", host=HOSTS[0])
    assert alone.wait() == 1
    assert "1 of 2 hosts have come" in alone.err
    stopped = Launch(tmp_path / "h0", "", *IPS, host=HOSTS[0])
    eventually(lambda: "meeting at" in stopped.err.partition("1 of 2")[2])
    stopped.kill(signal.SIGTERM)
    assert stopped.wait() == 143
    elsewhere = Launch(tmp_path / "x", "", "--ips", "10.9.9.9,10.9.9.8", host=HOSTS[0])
    assert elsewhere.wait() == 2
    assert "--node_rank" in elsewhere.err


MASTER = ("--master", f"{ADDRESSES[0]}:29500")


def test_restart_on_both(tmp_path):
    script = (
        WAITING
        + """
print("round", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["WORLD_SIZE"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == "1":
        os._exit(4)
    time.sleep(60)
time.sleep(1)
"""
    )
    both = launch_both(tmp_path, script, "--nnodes", "2", *MASTER, "--max_restart", "1")
    assert codes(both) == [0, 0], shown(both)
    logs = sorted(log.read_text() for launch in both for log in (launch.folder / "log").iterdir())
    assert logs == ["round 0 2\nround 1 2\n"] * 2 or sorted("".join(logs).splitlines()) == sorted(
        ["round 0 2", "round 1 2"] * 2
    ), logs


def test_hosts_come_and_go(tmp_path):
    # A host that goes does so when the others' processes have hardly begun: they may not know of it yet.
    script = """
import os, time
print("world", os.environ["WORLD_SIZE"], "restarts", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
open(f"started{os.environ['WORLD_SIZE']}", "w").write(os.environ["RANK"])
if os.path.exists("leave"):
    os.kill(os.getppid(), int(open("leave").read()))
while not os.path.exists("../stop"):
    time.sleep(0.05)
"""
    # Each wait ends with what it waits for, or with the launcher; torch takes its own time to let hosts in and out,
    # and a busy machine has it do so more than once.
    options = ("--nnodes", "1:2", *MASTER, "--max_restart", "3")
    first = Launch(tmp_path / "h0", script, *options, host=HOSTS[0])
    first.until("started1", LONG)
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        (tmp_path / "h0" / "started1").unlink()
        (tmp_path / "h1").mkdir(exist_ok=True)
        (tmp_path / "h1" / "leave").write_text(str(int(number)))
        second = Launch(tmp_path / "h1", script, *options, host=HOSTS[1])
        first.until("started2", LONG)
        assert second.wait(LONG) == code, shown([first, second])
        first.until("started1", LONG)
        (tmp_path / "h0" / "started2").unlink()
    (tmp_path / "stop").write_text("x")
    assert first.wait(LONG) == 0, shown([first, second])


def test_a_host_that_goes_is_not_waited_for_by_one_that_is_done(tmp_path):
    script = WAITING + 'if rank == "1":\n    time.sleep(1)\n    os.kill(os.getppid(), signal.SIGKILL)\n'
    first, second = launch_both(tmp_path, script, "--nnodes", "2", *MASTER, "--max_restart", "1")
    assert second.wait() == -signal.SIGKILL
    assert first.wait() == 0, shown([first, second])
    assert "a host is lost before its processes have ended" in first.err
