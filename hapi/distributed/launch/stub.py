"""What each worker runs first, before the user's code: ties its life to the launcher's, opens its log, reports its end.

It is run by its path and imports the standard library alone, so that a worker is tied and its output caught from the
first milliseconds on, and the seconds that importing torch takes are spent once, by the user's own import.

    python stub.py script PATH [ARGUMENT ...]
    python stub.py module NAME [ARGUMENT ...]
    python stub.py call FOLDER                 a pickled function, for hapi.distributed.spawn
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

PARENT, LOG, HELD, CONSOLE = "HAPI_STUB_PARENT", "HAPI_STUB_LOG", "HAPI_STUB_HELD", "HAPI_STUB_CONSOLE"
"""Variables that the launcher sets for this file alone; they are gone when the user's code runs."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
CALL, RESULT = "call.pickle", "result.pickle"

_PID = os.getpid()
_PR_SET_PDEATHSIG = 1
_LONGEST_TRACEBACK = 100_000
_FRAMES_BEFORE_THE_USERS = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")


def main() -> None:
    """Set this process up, then become the user's program."""
    _die_with(os.environ.pop(PARENT, None))
    _redirect(*(os.environ.pop(name, None) for name in (CONSOLE, HELD, LOG)))
    faulthandler.enable()
    sys.excepthook = _excepthook
    kind, target, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
    if kind == "call":
        _call(target)
        return
    sys.argv[:] = [target, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(target))
    if kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _die_with(parent: str | None) -> None:
    """Have the kernel end this process when the launcher ends in whatever way."""
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before it was asked for.
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)


def _redirect(*names: str | None) -> None:
    """Write to the first of these that can be opened: a system may keep a process out of what another one holds."""
    paths = [path for path in names if path]
    if not paths:
        return
    output = _opened(paths)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # As on a terminal: whoever watches the log sees each line when it is written.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def _opened(paths: Sequence[str]) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY
    for path in paths[:-1]:
        with contextlib.suppress(OSError):
            return os.open(path, flags)
    return os.open(paths[-1], flags)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # The user's traceback begins at the user's code.
    while trace is not None and trace.tb_frame.f_code.co_filename in _FRAMES_BEFORE_THE_USERS:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    # A fork has this hook and the rank's file, but its end is for the rank to judge.
    if os.getpid() == _PID:
        try:
            write_error(os.environ.get(ERROR_FILE), error)
        except OSError as failed:
            print(f"The launcher cannot be told of this exception: {failed}", file=sys.stderr)
    sys.__excepthook__(kind, error, trace)


def write_error(path: str | None, error: BaseException) -> None:
    """Leave an exception where the launcher, and torch's agent too, look for it. Whole or not at all.

    With the process's number: a program that the rank runs has the file's name too, and torch's recorder writes to it.
    """
    if not path:
        return
    now = time.time()
    text = "".join(traceback.format_exception(error))
    extra = {"py_callstack": text[-_LONGEST_TRACEBACK:], "timestamp": str(int(now)), "time": now, "pid": _PID}
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    kind = type(error).__name__
    _write_whole(path, json.dumps({"message": {"message": message, "type": kind, "extraInfo": extra}}).encode())


def _write_whole(path: str, content: bytes) -> None:
    with open(path + ".part", "wb") as file:
        file.write(content)
    os.replace(path + ".part", path)


def _call(folder: str) -> None:
    """Call the function that `spawn` was given and leave there what it returns."""
    with open(os.path.join(folder, CALL), "rb") as file:
        parent: Mapping[str, Any] = pickle.load(file)
    sys.argv[:], sys.path[:] = parent["argv"], parent["path"]
    function, arguments = pickle.loads(parent["call"])
    result = function(*arguments)
    rank = os.environ["RANK"]
    _write_whole(os.path.join(folder, f"{rank}.{RESULT}"), _pickled(result, parent["by_value"]))


def _pickled(result: Any, by_value: bool) -> bytes:
    """Pickle a result in the way in which the function came."""
    try:
        if not by_value:
            return pickle.dumps(result)
        import cloudpickle

        pickled: bytes = cloudpickle.dumps(result)
        return pickled
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"The function returned {type(result).__name__}, which cannot be sent to the process that called spawn: "
            f"{error}. Return numbers, texts, tensors, or lists and dicts of these."
        ) from None


if __name__ == "__main__":
    main()
