"""Forks of a rank, such as data workers: torch's threads are let come to rest first.

A thread of gloo's lets go of a collective's tensors after the caller has gone on, and makes a Python thread state for
that. Where the process is forked in that moment, a Python before 3.12 copies the lock of these states as it is, locked,
and the child waits for it before its first line, for ever.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_LONGEST = 1.0
"""Seconds. A thread whose collective is under way for longer lets go of nothing: whoever began it holds the tensors."""


def watch() -> None:
    """From now on every fork of this process waits for gloo's threads, where it has to."""
    global _is_watching
    if not _is_watching and sys.version_info < (3, 12) and _THREADS.is_dir():
        _is_watching = True
        os.register_at_fork(before=_settle)


_is_watching = False


def _settle() -> None:
    """Wait until gloo's threads sleep, and still do after they could have had Python's lock."""
    deadline = time.monotonic() + _LONGEST
    threads = [thread for thread in _THREADS.iterdir() if _read(thread / "comm").strip() == _NAME]
    asleep = 0
    while threads and asleep < 2 and time.monotonic() < deadline:
        asleep = asleep + 1 if all(_sleeps(thread) for thread in threads) else 0
        # Not holding the lock meanwhile, which such a thread may sleep for.
        time.sleep(0.0005)


def _sleeps(thread: Path) -> bool:
    # "12 (a name) S ...": the state comes after the name; nothing is there of a thread that has ended.
    return _read(thread / "stat").rpartition(") ")[2][:1] in ("S", "")


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
