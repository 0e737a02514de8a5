"""Writing checkpoints beside training: one thread, one file at a time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent import futures


class Writer:
    """Runs one job at a time in a thread of its own; what it raises is handed to whoever asks next.

    The interpreter waits for it at exit. A fork while a job runs would copy locks that it holds, so that a data worker
    might hang: forks wait for it.
    """

    def __init__(self) -> None:
        self._thread = futures.ThreadPoolExecutor(1, "hapi-writer")
        self._job: futures.Future[None] | None = None
        _all.add(self)

    def __reduce__(self) -> tuple[type[Writer], tuple[()]]:
        # A copy of its callback, pickled or deep, has a thread of its own, and no job.
        return Writer, ()

    def warm_up(self) -> None:
        """Start the thread, which is kept from job to job: training would have to wait until it has begun."""
        self._thread.submit(int).result()

    def start(self, job: Callable[[], None]) -> None:
        """Start a job. The one before must have been waited for."""
        self._job = self._thread.submit(job)

    def wait(self) -> BaseException | None:
        """Wait until the job is done, and give what it has raised, once."""
        job, self._job = self._job, None
        return None if job is None else job.exception()

    def join(self) -> None:
        """Wait until the job is done; its error stays."""
        if self._job is not None:
            futures.wait([self._job])


def _join_all() -> None:
    if threading.current_thread() is threading.main_thread():
        for writer in list(_all):
            writer.join()


_all: weakref.WeakSet[Writer] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_join_all)
