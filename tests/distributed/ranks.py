"""Processes that train together: started once in a test session, given one function after another to call.

They are forked from one process that has imported torch already, so that nine of them start in a few seconds. A
function that does not come back in time is a failure that shows where each rank stands.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import Any

import numpy
import torch
import torch.distributed as dist

from hapi.distributed import group

TIMEOUT = 60.0
"""Seconds that a function may take, on a machine that may be busy."""

_GRACE = 2.0
_processes = multiprocessing.get_context("forkserver")
# What takes seconds to import and several tests use. One that is not there is left out.
_PRELOADED = ["torch._dynamo", "torch.nn.parallel", "hapi", "torchmetrics.classification", __name__]


class RankFailure(AssertionError):
    """A rank raised, died or did not come back."""


class Ranks:
    """A process group of so many processes. It starts at the first `run`, and anew after a failure.

    Args:
        world_size: How many.
        environment: Variables that they find besides.
    """

    def __init__(self, world_size: int, **environment: str) -> None:
        self.world_size = world_size
        self._environment = environment
        self._members: list[_Member] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call a function of a module on every rank.

        Before it is called the ranks are given different random states, as scripts have that seed nothing.

        Returns:
            What it returned, in rank order.

        Raises:
            RankFailure: A rank raised, died, or did not come back; all tracebacks are in the message.
        """
        if not self._members:
            self._start()
        message = pickle.dumps((function, args, timeout))
        for member in self._members:
            member.send(message)
        outcomes = self._collect(time.monotonic() + timeout + _GRACE)
        if all(outcome is not None and outcome[0] for outcome in outcomes):
            return [outcome[1] for outcome in outcomes if outcome is not None]
        called = f"{function.__module__}.{function.__qualname__}{args!r} on {self.world_size} ranks"
        for member in self._members:
            member.close()
        parts = [member.report(outcome) for member, outcome in zip(self._members, outcomes, strict=True)]
        self.close()
        raise RankFailure("\n".join([called, *parts]))

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        for member in self._members:
            member.close()
            member.forget()
        self._members = []

    def _start(self) -> None:
        _processes.set_forkserver_preload(_PRELOADED)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._members = [_Member(rank, self.world_size, port, self._environment) for rank in range(self.world_size)]

    def _collect(self, deadline: float) -> list[tuple[bool, Any] | None]:
        outcomes: list[tuple[bool, Any] | None] = [None] * self.world_size
        while waiting := [member for member in self._members if outcomes[member.rank] is None]:
            connections = [member.connection for member in waiting]
            ready = multiprocessing.connection.wait(connections, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for member in waiting:
                if member.connection in ready:
                    outcome = outcomes[member.rank] = member.receive()
                    if not outcome[0]:
                        # The others may wait for this one until the end of time.
                        deadline = min(deadline, time.monotonic() + _GRACE)
        return outcomes


class _Member:
    """One process, seen from the tests."""

    def __init__(self, rank: int, world_size: int, port: int, more: dict[str, str]) -> None:
        self.rank = rank
        self.connection, theirs = _processes.Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `forget`
        environment = {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo", "HAPI_TIMEOUT": str(TIMEOUT),
            **more,
        }  # fmt: skip
        self._process = _processes.Process(target=_serve, args=(theirs, environment, _Handed(self._log)))
        self._process.start()
        theirs.close()

    def send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except OSError:
            return  # It is dead; `receive` says so.

    def receive(self) -> tuple[bool, Any]:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._process.join(_GRACE)
            return False, f"the process ended with exit code {self._process.exitcode}"

    def report(self, outcome: tuple[bool, Any] | None) -> str:
        what = "it did not come back" if outcome is None else "it returned" if outcome[0] else outcome[1]
        self._log.seek(0)
        written = self._log.read().decode(errors="replace")[-8000:]
        return f"--- rank {self.rank}: {what}\n{written}"

    def close(self) -> None:
        self.connection.close()
        self._process.join(2.0)
        if self._process.is_alive():
            # Shows its stack in the log, then ends.
            self._process.terminate()
            self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def forget(self) -> None:
        """Let go of what it has written."""
        self._log.close()


class _Handed:
    """An open file on its way into a new process, where it arrives as a descriptor."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._file.fileno()),)


def _received(descriptor: Any) -> int:
    return descriptor.detach()


def _serve(connection: multiprocessing.connection.Connection, environment: dict[str, str], log: int) -> None:
    """The life of one rank."""
    os.environ.update(environment)
    # A process of the fork server would start data workers through one of its own, which imports torch anew.
    multiprocessing.set_start_method("fork", force=True)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Of loaders as scripts have them: what they leave out, repeat or shuffle is what the cases are about.
    warnings.filterwarnings("ignore", "The loader's|predict received a loader with")
    group.start()
    count = 0
    while True:
        try:
            message = connection.recv_bytes()
            count += 1
            connection.send_bytes(_answer(message, count))
        except (EOFError, OSError):
            break  # The tests have ended, or given this group up.


def _answer(message: bytes, count: int) -> bytes:
    try:
        function, args, timeout = pickle.loads(message)
        faulthandler.dump_traceback_later(timeout, exit=True)
        scatter_seeds(group.get_rank())
        result = pickle.dumps((True, function(*args)))
        _check_alignment(count)
    except BaseException:
        result = pickle.dumps((False, traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
    return result


def _check_alignment(count: int) -> None:
    """A collective that only some ranks called would be taken for this one, or leave it waiting."""
    counts = torch.tensor([count, -count])
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    assert counts.tolist() == [count, -count], f"the ranks' collectives do not match: {counts.tolist()} for {count}"


def scatter_seeds(rank: int) -> None:
    """Random states that differ between ranks, and are those of rank 0 in one process."""
    random.seed(1000 + rank)
    numpy.random.seed(1000 + rank)
    torch.manual_seed(1000 + rank)


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Call it here, in one process, in the random state of rank 0."""
    scatter_seeds(0)
    return function(*args)


def same(values: Sequence[Any]) -> Any:
    """The one value that all ranks returned."""
    assert all(value == values[0] for value in values[1:]), f"the ranks differ: {values}"
    return values[0]
