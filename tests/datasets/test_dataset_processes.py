"""Several processes on one host: one downloads, the others wait, and a killed one's place is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from local_mirror import ARCHIVES, Request, assert_whole, resources, running, slow, stalls

NO_PROXY = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}

PROCESSES = """
import json, os, signal, sys, time
from pathlib import Path
import torchvision
from hapi.datasets import MNIST

table = torchvision.datasets.MNIST
table.resources = json.loads(sys.argv[1])

def start(url, root):
    table.mirrors = [url]
    child = os.fork()
    if child == 0:
        try:
            report = f"{root.name}: {len(MNIST(root))}"
        except BaseException as error:
            report = f"{root.name}: {error!r}"
        os.write(1, f"{report}\\n".encode())
        os._exit(0)
    return child

crowd = sys.argv[2], Path("crowd")
children = [start(*crowd) for _ in range(4)]
for child in children:
    os.waitpid(child, 0)

killed = sys.argv[3], Path("killed")
holder = start(*killed)
while not list(killed[1].glob(".MNIST.*.partial-*/*.gz")):
    time.sleep(0.02)
second = start(*killed)
time.sleep(0.3)
assert os.waitpid(second, os.WNOHANG) == (0, 0), "the second process did not wait"
os.kill(holder, signal.SIGKILL)
assert os.WTERMSIG(os.waitpid(holder, 0)[1]) == signal.SIGKILL
begin = time.monotonic()
os.waitpid(second, 0)
print("taken over in", time.monotonic() - begin)
"""


class Processes(NamedTuple):
    """What the processes of one run reported, and what they asked of the server."""

    folder: Path
    reports: list[str]
    hits: Counter[str]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    """Four processes at once on one root; then, on another, one that is killed while a second one waits."""
    folder = tmp_path_factory.mktemp("processes")
    first = next(iter(ARCHIVES))

    def stalls_once(request: Request) -> None:
        if request.server.hits[request.path] == 1:
            stalls(request)
        else:
            request.send(ARCHIVES[first])

    with running() as server:
        server.routes.update({f"/slow/{name}": slow(content) for name, content in ARCHIVES.items()})
        server.routes[f"/good/{first}"] = stalls_once
        urls = [f"{server.url}{name}/" for name in ("slow", "good")]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROCESSES, json.dumps(resources()), *urls],
            env={**os.environ, **NO_PROXY, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return Processes(folder, done.stdout.splitlines(), server.hits)


@pytest.mark.slow
def test_of_four_processes_at_once_one_downloads(processes: Processes) -> None:
    assert [line for line in processes.reports if line.startswith("crowd")] == ["crowd: 12"] * 4
    assert {path: n for path, n in processes.hits.items() if "slow" in path} == {
        f"/slow/{name}": 1 for name in ARCHIVES
    }
    assert_whole(processes.folder / "crowd")


@pytest.mark.slow
def test_a_killed_download_is_taken_over_at_once(processes: Processes) -> None:
    *_, report, time_taken = processes.reports
    assert report == "killed: 12"
    assert float(time_taken.removeprefix("taken over in ")) < 10, "it waited for the dead process's mirror"
    assert {path: n for path, n in processes.hits.items() if "good" in path} == {
        f"/good/{name}": 1 + (index == 0) for index, name in enumerate(ARCHIVES)
    }
    assert_whole(processes.folder / "killed")
