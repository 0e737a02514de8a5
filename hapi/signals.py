"""Signals that tell a run to stop: SIGTERM and SIGUSR1 (pre-emption), SIGINT (Ctrl-C).

The first one is noted, all ranks agree on an edge of an optimizer step, save, and leave. A second one raises at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from hapi.distributed import group

_NUMBERS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))
# What a signal does where nobody has asked for anything else. A handler of the script's own is left alone.
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Stopped(SystemExit):
    """A run was told to stop by SIGTERM or SIGUSR1, and has saved; ends the process with 143."""


class StoppedByUser(Stopped, KeyboardInterrupt):
    """The same by Ctrl-C; ends the process with 130."""


def stopped_by(number: int) -> Stopped:
    """What to raise once all that is to be saved is saved."""
    if number == signal.SIGINT:
        return StoppedByUser(128 + signal.SIGINT)
    # Pre-emption by SIGUSR1 has the same meaning as by SIGTERM, and the same code.
    return Stopped(128 + signal.SIGTERM)


class StopSignals:
    """The first stop signal that this process has received while `watched`.

    Attributes:
        received: Its number; 0 while there is none.
    """

    def __init__(self) -> None:
        self.received = 0
        # A terminal's Ctrl-C goes to every process, and one answer is enough.
        self._answers = group.speaks_for_all()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within, stop signals are noted. One that nothing was raised for counts as one that comes right after.

        In another thread than the main one Python allows no handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {number: signal.getsignal(number) for number in _NUMBERS}
        mine = {number: handler for number, handler in before.items() if handler in _DEFAULTS}
        for number in mine:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in mine.items():
                signal.signal(number, handler)
        if self.received:
            # It came when nobody was to look any more (workers were being ended, say), and is not to be lost.
            signal.raise_signal(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + signal.SIGTERM)
        self.received = number
        if number == signal.SIGINT and self._answers:
            # Not by print: the signal may have come in the middle of one.
            with contextlib.suppress(OSError):
                os.write(2, b"\nhapi: stopping at the next optimizer step; press Ctrl-C again to stop at once\n")


def is_interactive() -> bool:
    """Whether somebody types at this process, which must not end under their hands."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or in_notebook()


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this process. That `ipykernel` was imported says nothing: libraries do that."""
    asked = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return asked is not None and hasattr(asked(), "kernel")
