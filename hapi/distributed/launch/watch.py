"""Watches the workers of this host: exact times of death, who failed, and their end when the job ends.

Shared by `hapirun` and `spawn`; without torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hapi.distributed.launch.failures import Failure, is_communication, read_error, tail_of, was_caused

_BLINK = 0.02
# How long the others get to report the same, or the true cause, after the first sign of a failure.
_SETTLE = 0.3
_WRITING = 0.1
GRACE_AFTER_FAILURE = 5.0


@dataclass
class Worker:
    """One process of this host."""

    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    log: Path | None = None
    output: Path | None = None
    """The same file as `log`, whatever becomes of its name."""
    result: Path | None = None
    """What it leaves when it has done its work, None where its exit code alone says that."""
    died: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def code(self) -> int | None:
        """The exit code as `subprocess` has it, None while it runs."""
        return self.process.poll()

    @property
    def log_found(self) -> str:
        """Where its log is found, empty where another job has taken the name since."""
        with contextlib.suppress(OSError):
            if self.log and self.output and self.log.samefile(self.output):
                return str(self.log)
        return ""

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The exception that has ended its program, as `read_error` has it, though the process may linger."""
        error = read_error(self.error_file)
        if error is None or error["pid"] == self.process.pid:
            return error
        # Most likely of a program that it runs or has run, whose failure is for the rank to judge. Where the rank has
        # ended as an exception ends it, the file may be its own, by torch's recorder under a hook of the user's.
        return error if self.code == 1 and error["pid"] is None else None

    @property
    def has_raised(self) -> bool:
        """Whether an exception has ended its program."""
        return self.error is not None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended badly, or is about to."""
        code = self.code
        left_early = code == 0 and self.result is not None and not self.result.exists()
        return left_early or code not in (None, 0) or self.has_raised


class Watch:
    """The workers of one round, from their start to their end.

    Each leads a session of its own, so that what it started can be ended with it.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self._told: float | None = None
        threading.Thread(target=self._note_deaths, name="hapi-watch", daemon=True).start()

    def _note_deaths(self) -> None:
        if not hasattr(os, "pidfd_open"):
            while waiting := [worker for worker in self.workers if worker.died is None]:
                for worker in waiting:
                    if worker.code is not None:
                        worker.died = time.time()
                time.sleep(_BLINK)
            return
        alive: dict[int, Worker] = {}
        poller = select.poll()
        for worker in self.workers:
            try:
                descriptor = os.pidfd_open(worker.process.pid)
            except ProcessLookupError:
                worker.died = time.time()
                continue
            alive[descriptor] = worker
            poller.register(descriptor, select.POLLIN)
        while alive:
            for descriptor, _ in poller.poll():
                alive.pop(descriptor).died = time.time()
                poller.unregister(descriptor)
                os.close(descriptor)

    def running(self) -> list[Worker]:
        """Those that have not ended."""
        return [worker for worker in self.workers if worker.code is None]

    def has_failed(self) -> bool:
        """Whether one has ended badly, or is about to."""
        return any(worker.has_failed for worker in self.workers)

    def settle(self) -> None:
        """Wait for the moment in which the others show the same failure, or its true cause."""
        until = time.monotonic() + _SETTLE
        while time.monotonic() < until and any(not worker.has_raised for worker in self.running()):
            time.sleep(_BLINK)
        # A traceback is written after the report that `has_raised` sees.
        time.sleep(_WRITING)

    def end(self, number: int, grace: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Tell all that run to stop, and end those that have not done so after the grace, with what they started.

        Args:
            number: The signal that tells them. Their own children (data workers) do not get it.
            grace: Seconds.
            hurry: Asked again and again; once it is true, the grace is over.
        """
        told = self.running()
        for worker in told:
            if _is_stopped(worker.process.pid):
                worker.notes += (f"rank {worker.rank} is stopped (SIGSTOP)",)
        if self._told is None:
            self._told = time.time()
        for worker in told:
            # One that has raised may finish what it does at its exit, but to have lost the others is no reason to wait.
            error = worker.error
            if error is None or is_communication(error["message"]):
                _send(worker.process.pid, number)
                _send(worker.process.pid, signal.SIGCONT)
        until = time.monotonic() + grace
        while self.running() and time.monotonic() < until and not hurry():
            time.sleep(_BLINK)
        for worker in self.workers:
            if worker in told or worker.has_failed:
                # Its session, where children outlive it; the number is not reused while one does.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
        for worker in told:
            worker.process.wait()

    def failures(self) -> list[Failure]:
        """What went wrong, leaving out what was caused by `end`. To be asked after all have ended."""
        notes = tuple(note for worker in self.workers for note in worker.notes)
        found = []
        for worker in self.workers:
            error, code = worker.error, worker.code or 0
            died = worker.died or time.time()
            after = self._told is not None and died > self._told
            if not worker.has_failed or (after and was_caused(error)):
                continue
            if error is not None and code <= 0:
                code = 1
            early = ("It ended before its function returned.",) if code == 0 else ()
            found.append(
                Failure(
                    rank=worker.rank,
                    host=socket.gethostname(),
                    code=code,
                    time=error["time"] if error else died,
                    message=error["message"] if error else "",
                    traceback=error["traceback"] if error else "",
                    log=worker.log_found,
                    tail=tail_of(worker.output),
                    notes=(*early, *notes),
                )
            )
        return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"
