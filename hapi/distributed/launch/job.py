"""Why a job ends from outside: a signal to the launcher, or news from another host. Read by the agent's loop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from hapi.distributed.launch.console import say
from hapi.distributed.launch.failures import Failure, exit_status

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# How long the main thread gets to act on a signal itself. It cannot while it waits inside torch for other hosts.
_PATIENCE = 1.0


class Told(Exception):
    """Ends the agent's loop: the job has been told to end."""


class Job:
    """What has been told. Signals are caught from its construction on."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.remote: Failure | None = None
        """Why another host ended."""
        self.hurry = False
        """Whether the user will not wait for the grace."""
        self._heard = threading.Event()
        self._answered = threading.Event()
        self._on_give_up: Callable[[], None] = lambda: None
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(readable, True)
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(readable,), name="hapi-signals", daemon=True).start()

    @property
    def is_told(self) -> bool:
        """Whether the job is to end."""
        return self.signal is not None or self.remote is not None

    @property
    def status(self) -> int:
        """The exit code that follows from what was told."""
        if self.signal is not None:
            # Pre-emption, by whichever signal, has one code.
            return exit_status(-(signal.SIGTERM if self.signal == signal.SIGUSR1 else self.signal))
        return self.remote.status if self.remote is not None else 1

    @property
    def for_workers(self) -> int | None:
        """The signal that tells the workers to stop, None for the usual one. Few expect the end of a terminal."""
        return None if self.signal in (signal.SIGHUP, signal.SIGQUIT) else self.signal

    def raise_if_told(self) -> None:
        """Called by the main thread, between two looks at the workers.

        Raises:
            Told: The job is to end.
        """
        if self.is_told:
            self._answered.set()
            raise Told

    def tell(self, failure: Failure) -> None:
        """Another host has ended."""
        if not self.is_told:
            self.remote = failure
        self._give_up_unless_answered()

    def answer(self) -> None:
        """The main thread takes care of the end from here on."""
        self._answered.set()

    def on_give_up(self, action: Callable[[], None]) -> None:
        """What to do, in another thread, before the process is left without its main thread."""
        self._on_give_up = action

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The listening thread does all of it; this is here so that the signal does nothing else.
        del number, frame

    def _listen(self, readable: int) -> None:
        while True:
            for number in os.read(readable, 16):
                if number not in _SIGNALS:
                    continue
                # A second SIGTERM says nothing new: a scheduler sends it to all processes. A second Ctrl-C does.
                self.hurry = self.hurry or (self.is_told and number == signal.SIGINT)
                if not self.is_told:
                    self.signal = number
                    threading.Thread(target=self._give_up_unless_answered, daemon=True).start()

    def _give_up_unless_answered(self) -> None:
        """Where the main thread is stuck in torch, no worker runs: leave without it."""
        if not self._answered.wait(_PATIENCE):
            with contextlib.suppress(Exception):
                self._on_give_up()
            if self.signal is not None:
                say(f"{signal.Signals(self.signal).name} while waiting for other hosts; exit code {self.status}")
            os._exit(self.status)
