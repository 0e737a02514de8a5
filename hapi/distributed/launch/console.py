"""Rank 0's output on the launcher's console, byte for byte and at once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import struct
import sys
import termios
import threading
import tty
from pathlib import Path
from typing import Protocol

_BLINK = 0.03
_CHUNK = 1 << 16
_CONSOLE = 1
_WINDOW = struct.Struct("HHHH")


def say(text: str) -> None:
    """Write a message of the launcher itself, to stderr, so that stdout holds rank 0's output alone."""
    with contextlib.suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"hapirun: {text}\n".encode(errors="replace"))


class Output(Protocol):
    """How rank 0's output reaches the console."""

    @property
    def target(self) -> str | None:
        """What rank 0 writes to, None for its log."""

    def stop(self) -> None:
        """Show what is still to be shown, and end. Rank 0 has ended before."""


def show(log: Path, start: int) -> Output:
    """Begin to show what is written to a log from a position on.

    Where the console is a terminal, rank 0 gets one too, so that bars, colours and widths are as without a launcher.
    """
    if os.isatty(_CONSOLE):
        with contextlib.suppress(OSError):
            return _Terminal(log)
    return _Tail(log, start)


class _Tail:
    """Follows the log. Bytes, since a progress bar's carriage returns are no line ends."""

    target: str | None = None

    def __init__(self, log: Path, start: int) -> None:
        self._file = log.open("rb", buffering=0)
        self._file.seek(start)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="hapi-tail", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while True:
            # Asked before reading, so that nothing written before the end is left out.
            ended = self._ended.is_set()
            chunk = self._file.read(_CHUNK)
            if chunk:
                if not _write(_CONSOLE, chunk):
                    return
            elif ended:
                return
            else:
                self._ended.wait(_BLINK)

    def stop(self) -> None:
        """Show the rest."""
        self._ended.set()
        self._thread.join(timeout=5)
        self._file.close()


class _Terminal:
    """A terminal of rank 0's own; what arrives there goes to the console and into the log."""

    def __init__(self, log: Path) -> None:
        self._ours, self._theirs = os.openpty()
        # No translation of line ends: the console's own terminal does that, and the log wants none.
        tty.setraw(self._theirs)
        self.target = os.ttyname(self._theirs)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self._wake, self._waker = os.pipe()
        self._follow_size()
        self._thread = threading.Thread(target=self._follow, name="hapi-terminal", daemon=True)
        self._thread.start()

    def _follow_size(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(_CONSOLE, termios.TIOCGWINSZ, bytes(_WINDOW.size))
            fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGWINCH, self._follow_size)

    def _follow(self) -> None:
        console = True
        while True:
            ready, _, _ = select.select([self._ours, self._wake], [], [])
            if self._ours not in ready:
                return
            try:
                chunk = os.read(self._ours, _CHUNK)
            except OSError as error:
                if error.errno != errno.EIO:  # which says that no one holds the other end
                    raise
                return
            _write(self._log, chunk)
            console = console and _write(_CONSOLE, chunk)

    def stop(self) -> None:
        """Show the rest."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        os.close(self._theirs)
        os.write(self._waker, b"x")
        self._thread.join(timeout=5)
        for descriptor in (self._ours, self._log, self._wake, self._waker):
            os.close(descriptor)


def _write(descriptor: int, chunk: bytes) -> bool:
    """Write all of it; False where there is no reader any more."""
    rest = memoryview(chunk)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True
