"""What the tests of real launchers share: places to run in, a way to start, and the account at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cluster
import install
import namespaces
import pytest
from starting import HERE, LAUNCHERS, Job, Task, environment

_OPTIONAL = bool(os.environ.get("HAPI_LAUNCHERS_OPTIONAL"))
_lines = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_lines] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if lines := config.stash.get(_lines, []):
        terminalreporter.section("launchers")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def account(pytestconfig: pytest.Config) -> list[str]:
    """Lines that are shown at the end of the run."""
    return pytestconfig.stash[_lines]


class _Places:
    """The cluster and the two hosts, made when first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._made: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """The place; a string where the machine does not permit it."""
        if name not in self._made:
            make = {"cluster": cluster.Cluster, "hosts": namespaces.Hosts}[name]
            try:
                self._made[name] = self._stack.enter_context(make())
            except (cluster.NotPermittedError, namespaces.NotPermittedError) as error:
                self._made[name] = str(error)
        return self._made[name]


@pytest.fixture(scope="session")
def places() -> Iterator[_Places]:
    with ExitStack() as stack:
        yield _Places(stack)


@pytest.fixture(scope="session")
def importable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH: hapi, without the other folders beside it, and the witness."""
    folder = tmp_path_factory.mktemp("importable")
    for path in (HERE.parents[1] / "hapi", *(HERE / "witness").glob("*.py")):
        (folder / path.name).symlink_to(path)
    return folder


Launch = Callable[..., Job]


@pytest.fixture
def launch(places: _Places, importable: Path, tmp_path: Path) -> Iterator[Launch]:
    """`launch(name, command, **environment)` starts a script by a launcher, in tmp_path / "run".

    The test fails where the launcher could be installed and is not, and skips where the machine does not permit it.
    """
    jobs: list[Job] = []

    def start(name: str, command: list[str], **more: str) -> Job:
        launcher = LAUNCHERS[name]
        if reason := install.missing(*launcher.needs):
            (pytest.skip if _OPTIONAL else pytest.fail)(reason)
        place = {launcher.place: places.get(launcher.place)} if launcher.place else {}
        for refusal in place.values():
            if isinstance(refusal, str):
                pytest.skip(f"not permitted on this machine: {refusal}")
        variables = environment(PYTHONPATH=str(importable), **more)
        jobs.append(launcher.start(Task(tmp_path / "run", command, variables, launcher.processes, **place)))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()
