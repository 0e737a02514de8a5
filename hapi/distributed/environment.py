"""What a process knows of itself, and how launchers write numbers and hosts into its environment. Without torch."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

Environ = Mapping[str, str]

OVERRIDE = "HAPI_LAUNCHER"
ALONE_HINT = f"set {OVERRIDE}=off for one process"

_AT_IMPORT = dict(os.environ)


def _made_by_multiprocessing() -> bool:
    return multiprocessing.parent_process() is not None


def _stdin_is_terminal() -> bool:
    return os.isatty(0)


@dataclass(frozen=True)
class Process:
    """What the variables alone do not tell about a process. By default: this one.

    Attributes:
        pid: Its number.
        is_worker: Whether multiprocessing made it, as it does a DataLoader's workers.
        has_terminal: Whether someone may be typing into it.
        initial: The environment that it was started with; None: ask the system.
        starter: The pid that `ancestor` answers; None: ask the system.
    """

    pid: int = field(default_factory=os.getpid)
    is_worker: bool = field(default_factory=_made_by_multiprocessing)
    has_terminal: bool = field(default_factory=_stdin_is_terminal)
    initial: Environ | None = None
    starter: int | None = None

    def started_with(self) -> Environ:
        """The environment as it was before any code of this process ran, or forked it."""
        return _initial_environment() if self.initial is None else self.initial

    def ancestor(self, prefix: str) -> int:
        """The pid of the nearest ancestor whose command begins so; without one, the parent's."""
        return _ancestor(self.pid, prefix) if self.starter is None else self.starter


@lru_cache(maxsize=1)
def _initial_environment() -> Environ:
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return _AT_IMPORT  # Not Linux: the nearest that is known.
    pairs = (entry.partition("=") for entry in os.fsdecode(raw).split("\0"))
    return {name: value for name, _, value in pairs if name}


@lru_cache(maxsize=8)
def _ancestor(pid: int, prefix: str) -> int:
    current = pid
    while current > 1:
        try:
            stat = Path(f"/proc/{current}/stat").read_text(errors="replace")
        except OSError:
            break
        # "12 (a command) S 11 ...": the command may hold spaces and brackets.
        command = stat[stat.index("(") + 1 : stat.rindex(")")]
        if command.startswith(prefix):
            return current
        current = int(stat[stat.rindex(")") + 1 :].split()[1])
    return os.getppid()


def number(environ: Environ, name: str, default: int | None = None) -> int:
    """A variable's whole number from 0; the default where it is not set or empty.

    Raises:
        RuntimeError: It is something else.
    """
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if text.strip().isdecimal():
        return int(text)
    raise RuntimeError(
        f"{name}={text!r} is set, but it has to be a whole number from 0: the place of this process among the others "
        f"is read from it. Correct it, start the script anew by its launcher, or {ALONE_HINT}."
    )


def first_number(environ: Environ, names: Sequence[str], default: int) -> int:
    """The number of the first of these variables that is set."""
    return next((number(environ, name) for name in names if environ.get(name)), default)


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form: n03 of ``"n[03-05,9],m1"``, r1n7 of ``"r[1-2]n[7,9]"``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def task_counts(text: str) -> list[int]:
    """Slurm's tasks of each node: ``"2(x3),1"`` means 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def are_not(missing: Sequence[str]) -> str:
    """The words "A, B are not" for an error."""
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not"
