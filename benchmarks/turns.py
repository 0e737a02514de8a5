"""Programs that take turns, so that a change of the machine's speed meets all of them alike.

A comparison is a few ways to do the same work, each a command of its own: one or several fresh processes. All are
started, and then they take turns: one does a lap (an epoch, a thousand steps) while the others wait, then the next. A
ratio is taken between laps that follow one another, and the median over all laps is what is told. On a machine whose
speed drifts by 20 % within a minute, whole runs after one another would say nothing about 3 %.

A way's program calls `Laps.mark` at the end of each lap, which hands the turn back and waits for the next one; what
lies between two marks is what is timed. Its last call ends the program. One whose laps take seconds hands the turn on
within them too, by `Laps.pause`: a machine's speed may well change within a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, BinaryIO

ADDRESS = "HAPI_BENCH_ADDRESS"
TURN = 50
"""Steps after which a way that pauses lets the others come up to there."""
ALIKE = {"loss": {"rel_tol": 0.15, "abs_tol": 0.002}, "sum": {"rel_tol": 1e-3}}
"""How far from each other values of the same work may be: orders and dropout are drawn by chance."""


class Laps:
    """The side of a way's program.

    Without a driver (`ADDRESS` is not set) the laps follow one another and their times are printed.

    Args:
        pauses: Whether `pause` does anything: not where the ways that it is compared with cannot.
    """

    def __init__(self, pauses: bool = True) -> None:
        self._pauses = pauses
        address = os.environ.get(ADDRESS)
        self._driver: Connection | None = None
        if address:
            host, port = address.split(":")
            self._driver = Client((host, int(port)))
        self._began: tuple[float, float] | None = None
        self._before = (0.0, 0.0)
        """What the lap had taken up to its last pause."""
        self._paused = 0.0
        """Seconds, in all."""

    def pause(self) -> None:
        """Let the others come up to here in their laps, which takes nothing of this one's time."""
        if not self._pauses or self._driver is None or self._began is None:
            return
        now = _now()
        self._before = self._taken(now)
        self._hand_on(None)
        self._began = _now()
        self._paused += self._began[0] - now[0]

    def pause_after(self, step: int) -> None:
        """Pause where a step's number, from 1, says so."""
        if step % TURN == 0:
            self.pause()

    def pause_within_fit(self) -> None:
        """Pause in `Model.fit`, `evaluate` and `predict`, where they ask whether anybody looks at a step's values.

        A hook of a callback's would be a part of what is measured: it is told each step's values. What fit does every
        so many seconds, such as painting its bar, it does of its own: the clocks that it asks stand still meanwhile.
        """
        from hapi.callbacks.base import CallbackList

        for name in ("monotonic", "perf_counter"):
            setattr(time, name, self._standing_still(getattr(time, name)))

        asked = CallbackList.wants_batch_logs

        def wants_batch_logs(callbacks: CallbackList, kind: str, step: int) -> bool:
            wants = asked(callbacks, kind, step)
            self.pause_after(step + 1)
            return wants

        CallbackList.wants_batch_logs = wants_batch_logs  # type: ignore[method-assign]

    def _standing_still(self, clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() - self._paused

    def _hand_on(self, message: dict[str, float] | None) -> None:
        assert self._driver is not None
        self._driver.send(message)
        if not self._driver.recv():
            sys.stdout.flush()
            # At once: what a trainer does after its last epoch is not part of a lap.
            os._exit(0)

    def _taken(self, at: tuple[float, float]) -> tuple[float, float]:
        """Seconds of this lap up to a moment, elapsed and of CPU time."""
        assert self._began is not None
        parts = zip(self._before, self._began, at, strict=True)
        elapsed, cpu = (before + now - then for before, then, now in parts)
        return elapsed, cpu

    def mark(self, **values: float) -> None:
        """End a lap and wait for the turn to begin the next one. The first call ends the warm-up.

        Args:
            values: What shows that the work was done, such as the lap's loss.

        Raises:
            SystemExit: It was the last lap.
        """
        lap = None
        if self._began is not None:
            elapsed, cpu = self._taken(_now())
            lap = {"elapsed": elapsed, "cpu": cpu, "peak": peak_memory()} | values
        if self._driver is None:
            print(lap, file=sys.stderr)
        else:
            self._hand_on(lap)
        self._began, self._before = _now(), (0.0, 0.0)


def _now(clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    return clock(), time.process_time()


def peak_memory() -> float:
    """The most memory that this process has held, in MB."""
    status = Path("/proc/self/status")
    if status.exists():
        # What getrusage tells on Linux holds for the process that started this one too, up to its exec.
        return float(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@dataclass
class Way:
    """A program to compare, and what its laps gave."""

    name: str
    command: Sequence[str]
    environments: Sequence[Mapping[str, str]] = field(default_factory=lambda: [{}])
    """One process for each."""
    on_screen: bool = False
    """Whether it writes to a terminal, so that it paints its bar."""
    laps: list[dict[str, float]] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def start(self, log: Path) -> None:
        """Start the processes, and wait until each has ended its warm-up."""
        self.log, self.processes, self.readers = log, [], []
        with Listener(("127.0.0.1", 0)) as listener, log.open("ab") as output:
            host, port = listener.address
            for variables in self.environments:
                environment = {**os.environ, **variables, ADDRESS: f"{host}:{port}"}
                self.processes.append(self._process(environment, output))
            self.connections = [self._accept(listener) for _ in self.environments]
        self._receive()

    def _process(self, environment: Mapping[str, str], output: BinaryIO) -> subprocess.Popen[bytes]:
        if not self.on_screen:
            return subprocess.Popen(self.command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        # Not on Windows.
        import pty

        reader, screen = pty.openpty()
        self.readers.append(threading.Thread(target=_read, args=(reader, self.log), daemon=True))
        self.readers[-1].start()
        try:
            return subprocess.Popen(self.command, env=environment, stdout=screen, stderr=screen)
        finally:
            os.close(screen)

    def _accept(self, listener: Listener) -> Connection:
        listener._listener._socket.settimeout(1)  # type: ignore[attr-defined]
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                self._refuse_ended()

    def _refuse_ended(self) -> None:
        if any(process.poll() is not None for process in self.processes):
            for reader in self.readers:
                reader.join(1)
            raise SystemExit(f"{self.name} ended early:\n{self.log.read_text(errors='replace')[-4000:]}")

    def _receive(self) -> list[Any]:
        messages = []
        for connection in self.connections:
            while not connection.poll(1):
                self._refuse_ended()
            try:
                messages.append(connection.recv())
            except EOFError:
                raise SystemExit(f"{self.name} ended early:\n{self.log.read_text(errors='replace')[-4000:]}") from None
        return messages

    def turn(self) -> bool:
        """Let it go on while all others wait; whether it has ended its lap, or else paused in it."""
        for connection in self.connections:
            connection.send(True)
        ranks = self._receive()
        if None in ranks:
            return False
        total = {key: sum(rank[key] for rank in ranks) for key in ("cpu", "peak")}
        self.laps.append({**ranks[0], **total, "elapsed": max(rank["elapsed"] for rank in ranks)})
        return True

    def stop(self) -> None:
        """End the processes."""
        for connection in self.connections:
            # One that has ended already.
            with contextlib.suppress(OSError):
                connection.send(False)
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read(screen: int, log: Path) -> None:
    """Keep what is written to a terminal, up to its end."""
    # Linux tells of the end by an error.
    end = contextlib.suppress(OSError)
    with end, os.fdopen(screen, "rb", buffering=0) as written, log.open("ab", buffering=0) as kept:
        while part := written.read(1 << 16):
            kept.write(part)


def compare(ways: Sequence[Way], laps: int, log: Path, rounds: int = 1) -> None:
    """Let the ways take turns, so many laps each, the order turned round every time.

    Args:
        ways: The programs.
        laps: How many laps each does in a round.
        log: Where their output goes.
        rounds: How often all begin anew, in fresh processes: where its memory lies alone can make one some percent
            slower than another of the same program, as long as it lives.
    """
    log.unlink(missing_ok=True)
    for _ in range(rounds):
        try:
            for way in ways:
                way.start(log)
            for number in range(laps):
                running = list(ways if number % 2 == 0 else reversed(ways))
                while running:
                    running = [way for way in running if not way.turn()]
        finally:
            for way in ways:
                way.stop()


def ratios(way: Way, other: Way, key: str) -> list[float]:
    """Lap by lap, one by the other."""
    return [one[key] / two[key] for one, two in zip(way.laps, other.laps, strict=True)]


def unequal(way: Way, other: Way) -> str:
    """What shows that a way did not do the other's work; empty if nothing does."""
    one, two = way.laps[-1], other.laps[-1]
    if one.get("steps") != two.get("steps"):
        return f"{one.get('steps', 0):.0f} steps instead of {two.get('steps', 0):.0f}"
    for name, within in ALIKE.items():
        # What one of them does not tell is like nothing.
        ours, theirs = one.get(name, math.nan), two.get(name, math.nan)
        if (name in one or name in two) and not math.isclose(ours, theirs, **within):
            return f"{name} {ours:.4f} instead of {theirs:.4f}"
    return ""


def tell_unequal(ways: Sequence[Way], other: Way) -> bool:
    """Print which ways did not do the other's work; whether there is one."""
    faults = [(way.name, fault) for way in ways if (fault := unequal(way, other))]
    for name, fault in faults:
        print(f"\nNot the same work: {name}, {fault}.", flush=True)
    return bool(faults)


def report(ways: Sequence[Way], pairs: Sequence[tuple[str, str]], units: Mapping[str, float]) -> Iterator[str]:
    """Tables in Markdown: each way's laps, then the pairs' ratios, medians with the quartiles.

    Args:
        ways: What has run.
        pairs: Which is divided by which, by name; those that have not run are left out.
        units: For each column, such as "elapsed", what its values are multiplied by to be shown.
    """
    by_name = {way.name: way for way in ways}
    yield row("way", list(units))
    yield row("---", ["---"] * len(units))
    for way in ways:
        yield row(way.name, [spread([lap[key] * unit for lap in way.laps], 2) for key, unit in units.items()])
    found = [(one, two) for one, two in pairs if one in by_name and two in by_name]
    if found:
        yield ""
        yield row("ratio", list(units))
        yield row("---", ["---"] * len(units))
    for one, two in found:
        cells = [spread(ratios(by_name[one], by_name[two], key), 3) for key in units]
        yield row(f"{one} / {two}", cells)


def row(first: str, others: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join([first, *others]) + " |"


def spread(values: Sequence[float], digits: int) -> str:
    """The median and, in brackets, the quartiles."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{quartiles[1]:.{digits}f} ({quartiles[0]:.{digits}f} to {quartiles[2]:.{digits}f})"


def machine() -> str:
    """The machine and the versions that the figures hold for."""
    import torch

    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return (
        f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.system()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
