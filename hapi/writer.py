"""Writing checkpoints beside training: one thread, one file at a time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable


class Writer:
    """Runs one job at a time in a thread of its own; what it raises is handed to whoever asks next.

    A fork while the thread runs would copy locks that it holds, so that a data worker might hang: forks wait for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        _all.add(self)

    def start(self, job: Callable[[], None]) -> None:
        """Start a job. The one before must have been waited for."""
        # Not a daemon: the interpreter waits for it at exit.
        self._thread = threading.Thread(target=self._run, args=(job,), name="hapi-writer")
        self._thread.start()

    def wait(self) -> Exception | None:
        """Wait until the job is done, and give what it has raised, once."""
        self.join()
        error, self._error = self._error, None
        return error

    def join(self) -> None:
        """Wait until the job is done; its error stays."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # Handed to the main thread by `wait`.
            self._error = error


def _join_all() -> None:
    if threading.current_thread() is threading.main_thread():
        for writer in list(_all):
            writer.join()


_all: weakref.WeakSet[Writer] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_join_all)
