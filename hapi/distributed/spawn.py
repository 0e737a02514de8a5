"""`spawn`: one function in several processes of this host, started from a script, a notebook or an interpreter."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hapi import kinds

if TYPE_CHECKING:
    from hapi.distributed.launch.devices import Placement
    from hapi.distributed.launch.watch import Worker

_LOOPBACK = "127.0.0.1"
_BLINK = 0.02
_GRACE = 30.0


class SpawnError(RuntimeError):
    """A process of `spawn` did not return. The message holds its traceback.

    Attributes:
        rank: Which failed first.
        exit_code: In a shell's words: 128 + s for a signal.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank, self.exit_code = rank, exit_code


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    *,
    gpus: str | Sequence[int] | None = None,
    backend: str | None = None,
) -> Any:
    """Call a function in several processes that find each other as those of any launcher do.

    The script is not run again in them, and no main guard is needed. No port is chosen by the caller, and several
    `spawn` may run at once. A function of a module is found by its name; one of ``__main__``, of a notebook, or one
    within another needs the package cloudpickle.

    Args:
        func: Called as ``func(*args)`` in each process, which asks `get_rank` which one it is.
        args: Its arguments. They are pickled.
        nprocs: How many processes; -1: one a card, or one a CPU core where there is no card.
        join: Wait for the end and return the results.
        daemon: Without ``join``: end the processes when this one ends, instead of waiting for them then.
        gpus: The cards, ``"0,1"`` or ``[0, 1]``, numbered among those that are visible; ``"cpu"`` for none.
        backend: Of the process group, such as ``"gloo"``; None: the one for the device.

    Returns:
        What the function returned in each process, in rank order; with ``join=False`` an object to ask for it.

    Raises:
        SpawnError: A process raised, was ended, or ended before the function returned. All others are ended.
        TypeError: There is no function to call, or an argument is of another kind.
        ValueError: So many processes or these cards cannot be had.
        RuntimeError: The function cannot be sent to another process.
    """
    kinds.check(spawn, locals())
    if nprocs != -1:
        kinds.count("nprocs", nprocs, 2, owner="spawn", what="processes")
    _check_call(func, args)
    spawned = Spawned(_pack(func, tuple(args)), _place(nprocs, gpus), daemon, backend, waits=join)
    if not join:
        return spawned
    return spawned.join()


def _check_call(func: Any, args: Any) -> None:
    name, wrong = ("func", func) if not callable(func) else ("args", args)
    if not callable(func) or not isinstance(args, Sequence):
        raise TypeError(
            f"spawn received {name}={wrong!r:.60}, of type {type(wrong).__name__}, but a function is called with the "
            "arguments of a tuple. Write spawn(train, args=(config,))."
        )


class Spawned:
    """The processes of one `spawn`. Made by `spawn` alone."""

    def __init__(self, call: bytes, placement: Placement, daemon: bool, backend: str | None, waits: bool) -> None:
        from hapi.distributed.launch.stores import serve
        from hapi.distributed.launch.stub import CALL
        from hapi.distributed.launch.watch import Watch

        self._folder = Path(tempfile.mkdtemp(prefix="hapi-spawn-"))
        (self._folder / CALL).write_bytes(call)
        self._store = serve(_LOOPBACK)
        self._daemon, self._results = daemon, list[Any]()
        # The kernel ties a process to the *thread* that started it.
        tied = waits or threading.current_thread() is threading.main_thread()
        shared = _environment(placement, self._store.port, backend, tied)
        self._watch = Watch([self._start(rank, shared) for rank in range(placement.processes)])
        atexit.register(self._at_exit)

    def _start(self, rank: int, shared: dict[str, str]) -> Worker:
        from hapi.distributed.launch import stub
        from hapi.distributed.launch.watch import Worker

        error_file = self._folder / f"{rank}.json"
        numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
        process = subprocess.Popen(
            [sys.executable, str(Path(stub.__file__).absolute()), "call", str(self._folder)],
            env={**shared, **numbers, stub.ERROR_FILE: str(error_file)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return Worker(rank, process, error_file, result=self._folder / f"{rank}.{stub.RESULT}")

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The processes, in rank order."""
        return [worker.process for worker in self._watch.workers]

    def join(self, timeout: float | None = None) -> list[Any] | None:
        """Wait for the end.

        Args:
            timeout: At most so many seconds; None: as long as it takes.

        Returns:
            The results in rank order, or None when the time is over and some still run.

        Raises:
            SpawnError: A process did not return; all others have been ended.
            KeyboardInterrupt: After all processes have been told, and have had time to save. A second one ends them.
            SystemExit: The same for SIGTERM and SIGUSR1, where the script has no handler of its own for these.
        """
        if self._results:
            return self._results
        until = float("inf") if timeout is None else time.monotonic() + timeout
        with _stop_signals() as received:
            try:
                while self._watch.running() and not self._watch.has_failed() and not received:
                    if time.monotonic() >= until:
                        return None
                    time.sleep(_BLINK)
                self._conclude(received)
            except KeyboardInterrupt:
                self._end(signal.SIGINT, _GRACE)
                raise
        return self._results

    def _conclude(self, received: list[int]) -> None:
        from hapi.distributed.launch.watch import GRACE_AFTER_FAILURE

        if received:
            self._end(received[0], _GRACE)
            raise SystemExit(128 + signal.SIGTERM)
        if self._watch.has_failed():
            self._watch.settle()
            self._watch.end(signal.SIGTERM, GRACE_AFTER_FAILURE)
            error = self._error()
            self._close()
            raise error
        self._results = [pickle.loads(worker.result.read_bytes()) for worker in self._watch.workers if worker.result]
        self._close()

    def _error(self) -> SpawnError:
        from hapi.distributed.launch.failures import describe, first_of

        failures = self._watch.failures()
        first = first_of(failures)
        if first is None:
            return SpawnError("The processes ended without a result.", 0, 1)
        return SpawnError(describe(first, failures, already_shown=False), first.rank, first.status)

    def _end(self, number: int, grace: float) -> None:
        try:
            self._watch.end(number, grace)
        except KeyboardInterrupt:
            self._watch.end(signal.SIGKILL, 0)
        finally:
            self._close()

    def _at_exit(self) -> None:
        if self._daemon:
            self._end(signal.SIGTERM, _GRACE)
        else:
            self.join()

    def _close(self) -> None:
        atexit.unregister(self._at_exit)
        shutil.rmtree(self._folder, ignore_errors=True)


def _place(nprocs: int, gpus: str | Sequence[int] | None) -> Placement:
    from hapi.distributed.launch.devices import place
    from hapi.distributed.launch.options import UsageError, parse_devices

    if gpus is not None and not isinstance(gpus, Sequence):
        raise TypeError(
            f"spawn received gpus={gpus!r:.60}, of type {type(gpus).__name__}, which is no list of cards. Write "
            'gpus=[0, 1], or gpus="cpu" for none.'
        )
    text = gpus if gpus is None or isinstance(gpus, str) else ",".join(map(str, gpus))
    processes = None if nprocs == -1 else nprocs
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        return place(parse_devices(text, _write), processes, default=cores, write=_write)
    except UsageError as error:
        raise ValueError(f"spawn received {error}") from None


def _write(name: str, value: object) -> str:
    return f"nprocs={value}" if name == "nproc_per_node" else f'{name}="{value}"'


def _environment(placement: Placement, port: int, backend: str | None, tied: bool) -> dict[str, str]:
    """What all processes get. The names are torchrun's, so that whatever reads these finds its place."""
    from hapi.distributed.environment import OVERRIDE
    from hapi.distributed.launch import stub
    from hapi.distributed.launch.devices import threads_for
    from hapi.distributed.launchers import OWNER

    size = str(placement.processes)
    environment = {
        "OMP_NUM_THREADS": str(threads_for(placement.processes)),
        **os.environ,
        **placement.environment,
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"spawn-{os.getpid()}-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # This process keeps the store that the others meet in.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HAPI_LAUNCHED_BY": "spawn",
        **({"HAPI_BACKEND": backend} if backend else {}),
        **({stub.PARENT: str(os.getpid())} if tied else {}),
    }
    # If this process has a rank of its own, or is to be alone, that does not hold for them.
    for name in (OWNER, OVERRIDE):
        environment.pop(name, None)
    return environment


def _pack(func: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call as bytes, together with what another interpreter needs to read it."""
    try:
        call = pickle.dumps((func, args))
        by_value = _names_main(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        by_value, why = True, str(error)
    else:
        why = "it belongs to __main__, which the other processes do not run"
    if by_value:
        try:
            import cloudpickle
        except ImportError:
            name = getattr(func, "__qualname__", repr(func))
            raise RuntimeError(
                f"spawn received {name} and its arguments, which pickle cannot send to another process: {why}. Install "
                "the extra by pip install 'torch-hapi[cloudpickle]', or put the function into a module and import it."
            ) from None
        call = cloudpickle.dumps((func, args))
    return pickle.dumps({"argv": sys.argv, "path": sys.path, "call": call, "by_value": by_value})


def _names_main(pickled: bytes) -> bool:
    """Whether something is to be looked up in the script, under the name that it has here alone."""
    import pickletools  # here and not above, as few scripts spawn

    return any(isinstance(word, str) and word.split(" ")[0] == "__main__" for _, word, _ in pickletools.genops(pickled))


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects the signals that ask for an end, if this thread may and the script does not handle them itself."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    mine = []
    if threading.current_thread() is threading.main_thread():
        mine = [n for n in (signal.SIGTERM, signal.SIGUSR1) if signal.getsignal(n) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
