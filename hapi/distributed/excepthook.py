"""An exception that ends a rank, left where torch's agent looks for it: its summary then shows the real traceback."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_watching: int | None = None
_failed = False


def watch() -> None:
    """From now on leave an uncaught exception in the launcher's error file. Calling it again does nothing."""
    global _watching
    if _watching == os.getpid():
        return
    _watching = os.getpid()
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        # A fork has the hook, but neither the rank nor the file.
        if os.getpid() == _watching:
            _failed = True
            _report(error.with_traceback(trace))
        before(kind, error, trace)

    sys.excepthook = hook


def has_failed() -> bool:
    """Whether an uncaught exception is ending this process."""
    return _failed


def _report(error: BaseException) -> None:
    path = os.environ.get(_ERROR_FILE)
    if not path or Path(path).exists():
        return  # Whoever wrote it, torch's `record` or hapirun, knew more.
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    part = Path(f"{path}.part")
    try:
        part.write_text(json.dumps({"message": {"message": message, "extraInfo": details}}), encoding="utf-8")
        part.replace(path)
    except OSError as failed:
        print(f"hapi: the launcher cannot be told of this exception: {failed}", file=sys.stderr)
