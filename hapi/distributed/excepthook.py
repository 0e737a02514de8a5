"""An exception that ends a rank, made known to the launcher: to torch's agent for its summary, to hydra as an abort."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_UNTIL_IT_IS_READ = 0.3
_watching: int | None = None
_failed = False


def watch() -> None:
    """From now on make an uncaught exception known to the launcher. Calling it again does nothing."""
    global _watching
    if _watching == os.getpid():
        return
    _watching = os.getpid()
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        # A fork has the hook, but neither the rank nor the file.
        is_rank = os.getpid() == _watching
        if is_rank:
            _failed = True
            _report(error.with_traceback(trace))
        before(kind, error, trace)
        if is_rank and isinstance(error, Exception):
            # Not here: torch's own hook, around this one, has the text still to print.
            atexit.register(_end_at_once)

    sys.excepthook = hook


def has_failed() -> bool:
    """Whether an uncaught exception is ending this process."""
    return _failed


def _end_at_once() -> None:
    """Called first of all that is registered: end as Python does, but for taking the interpreter down.

    That takes a second, in which sockets stay open; the others notice what has happened when they close.
    """
    if sys.flags.inspect or os.environ.get("PYTHONINSPECT"):
        return
    atexit.unregister(_end_at_once)
    try:
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                with contextlib.suppress(OSError):
                    stream.flush()
        _abort_others()
        os._exit(1)


def _abort_others() -> None:
    """Have hydra (MPICH, Intel MPI) end the job.

    It ends the others by itself where a rank was killed, but not where one exits, with whatever code: it would wait for
    a rank that is stopped, or computes on. Open MPI, Slurm and torch's agent need no word.
    """
    if "HYDI_CONTROL_FD" not in os.environ or int(os.environ.get("PMI_SIZE", "1")) < 2:
        return
    # It ends this process too, at once, and what mpiexec has not read by then is lost.
    time.sleep(_UNTIL_IT_IS_READ)
    try:
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=1\n")
    except (KeyError, ValueError, OSError) as failed:
        print(f"hapi: mpiexec cannot be told to end the other ranks: {failed}", file=sys.stderr)


def _report(error: BaseException) -> None:
    path = os.environ.get(_ERROR_FILE)
    if not path or Path(path).exists():
        return  # Whoever wrote it, torch's `record` or hapirun, knew more.
    details = {
        "py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time())),
        "pid": os.getpid(),
    }  # fmt: skip
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    part = Path(f"{path}.part")
    try:
        part.write_text(json.dumps({"message": {"message": message, "extraInfo": details}}), encoding="utf-8")
        part.replace(path)
    except OSError as failed:
        print(f"hapi: the launcher cannot be told of this exception: {failed}", file=sys.stderr)
