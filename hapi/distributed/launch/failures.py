"""Which process failed first, and what is said about it. Shared by `hapirun` and `spawn`; without torch."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAIL_LINES = 20
_TAIL_BYTES = 8000

# What a process raises because another one is gone: true, but never the first cause.
_COMMUNICATION = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Timed out waiting|[Ss]ocket [Tt]imeout|wait timeout after|"
    r"NCCL|\b[Gg]loo\b|Dist(Network|Store|Backend)Error|ProcessGroup|monitoredBarrier"
)
# Exceptions that are the way in which a process obeys a signal.
_OBEDIENT = ("KeyboardInterrupt", "SystemExit")


@dataclass(frozen=True)
class Failure:
    """The end of one process that was not a success."""

    rank: int
    host: str
    code: int
    """As `subprocess` has it: the exit code, or minus the signal's number."""
    time: float
    """Seconds since the epoch: of the exception where there was one, else of the death."""
    message: str = ""
    """The exception's last line, empty where there was none."""
    traceback: str = ""
    log: str = ""
    """The path of what the process wrote."""
    tail: str = ""
    """The last lines of that."""
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """The exit code in a shell's words: 128 + s for a signal; never 0."""
        return exit_status(self.code) or 1

    @property
    def is_communication(self) -> bool:
        """Whether it failed because others could not be reached."""
        return is_communication(self.message)

    @property
    def order(self) -> tuple[bool, float]:
        """Sorts failures of all hosts; their clocks may differ, so that the kind comes before the time."""
        return self.is_communication, self.time

    def to_json(self) -> str:
        """For another host."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """What another host sent."""
        fields = json.loads(text)
        return cls(**{**fields, "notes": tuple(fields["notes"])})


def is_communication(message: str) -> bool:
    """Whether an exception says that others could not be reached."""
    return bool(_COMMUNICATION.search(message))


def exit_status(code: int) -> int:
    """The exit code that a shell would show for a process that `subprocess` gives this code."""
    return code if code >= 0 else 128 - code


def first_of(failures: Sequence[Failure]) -> Failure | None:
    """The failure that ended the job."""
    return min(failures, key=lambda failure: failure.order, default=None)


def read_error(path: Path) -> Mapping[str, Any] | None:
    """What an exception left in an error file: `message`, `type`, `traceback`, `time`, `pid`; None where there is none.

    The file may have been written by torch's own recorder, which knows whole seconds only, and leaves no pid.
    """
    try:
        message = json.loads(path.read_bytes())["message"]
        if isinstance(message, str):
            return {"message": message, "type": "", "traceback": message, "time": path.stat().st_mtime, "pid": None}
        extra = message["extraInfo"]
        time = float(extra.get("time", path.stat().st_mtime))
        kind = str(message.get("type") or message["message"].partition(":")[0])
        found = {"message": message["message"], "type": kind, "traceback": extra["py_callstack"]}
        return {**found, "time": time, "pid": extra.get("pid")}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as error:
        unread = f"an exception, whose report cannot be read ({error})"
        return {"message": unread, "type": "", "traceback": unread, "time": path.stat().st_mtime, "pid": None}


def was_caused(error: Mapping[str, Any] | None) -> bool:
    """Whether a process that had been told to stop ended for that reason, and not by a fault of its own."""
    return error is None or error["type"] in _OBEDIENT


def tail_of(path: Path | None) -> str:
    """The last lines of a log."""
    if path is None or not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(text.replace("\r", "\n").rstrip().splitlines()[-TAIL_LINES:])


def ended_how(failure: Failure) -> str:
    """A few words on how the process ended."""
    if failure.message:
        return f"raised {failure.message.splitlines()[0]}"
    if failure.code >= 0:
        return f"ended with exit code {failure.code}"
    name = signal.Signals(-failure.code).name if -failure.code in list(signal.Signals) else f"signal {-failure.code}"
    memory = " (the system does that where memory runs out)" if failure.code == -signal.SIGKILL else ""
    return f"was ended by {name}{memory}"


def report(failures: Sequence[Failure], rank_0_is_shown: bool) -> tuple[int, str]:
    """The exit code of a job that failed so, and what is said about it.

    Args:
        failures: Those of all hosts, at least one.
        rank_0_is_shown: Whether rank 0's output stands on this console.
    """
    first = min(failures, key=lambda failure: failure.order)
    alike = [failure.rank for failure in failures if failure is first or failure.message == first.message != ""]
    return first.status, describe(first, failures, rank_0_is_shown and 0 in alike)


def describe(first: Failure, failures: Sequence[Failure], already_shown: bool) -> str:
    """The report on the console.

    Args:
        first: The failure that ended the job.
        failures: All that are known, those that followed from it included.
        already_shown: Whether the output of `first`, or of another rank that raised the same, stands on this console.
    """
    lines = [f"rank {first.rank} on {first.host} {ended_how(first)}", *first.notes]
    alike = sorted(f.rank for f in failures if f.message and f.message == first.message and f.rank != first.rank)
    if first.traceback and already_shown:
        lines.append("Its traceback stands above.")
    elif first.traceback.strip() != first.message:
        lines.append(first.traceback.rstrip())
    elif first.tail and not already_shown:
        log = first.log or "its log, which another job has replaced"
        lines += [f"The last lines of {log}:", *(f"  {line}" for line in first.tail.splitlines())]
    if alike:
        lines.append(f"The same on rank{'s' if len(alike) > 1 else ''} {ranges(alike)}.")
    lines += [
        f"rank {other.rank} on {other.host} {ended_how(other)}"
        for other in sorted(failures, key=lambda failure: failure.rank)
        if other.rank not in (first.rank, *alike) and not other.is_communication
    ]
    if first.log:
        lines.append(f"All that rank {first.rank} wrote: {first.log}")
    return "\n".join(lines)


def ranges(numbers: Sequence[int]) -> str:
    """``[1, 2, 3, 7]`` as ``1-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
