"""Why a job ends from outside: a signal to the launcher, or news from another host. Read by the agent's loop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from hapi.distributed.launch.failures import exit_status

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# How long the main thread gets to act itself. It cannot while it waits inside torch for other hosts.
_PATIENCE = 1.0


class Told(Exception):
    """Ends the agent's loop: the job has been told to end."""


class Job:
    """What has been told. Signals are caught from its construction on."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.is_mine = True
        """Whether the signal came to this host, and not to another."""
        self.elsewhere = ""
        """What ended the job on another host, empty where nothing did."""
        self.is_lost = False
        """Whether that is the loss of a host."""
        self.hurry = False
        """Whether the user will not wait for the grace."""
        self._answered = threading.Event()
        self._conclude: Callable[[], int] = lambda: self.status
        for number in _SIGNALS:
            # Whoever starts a job under nohup wants it to outlive the terminal. The others are never sent unasked: a
            # shell ignores SIGINT and SIGQUIT for what it puts into the background, and a script may send them.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        self._start(lambda: self._listen(readable))

    @property
    def is_told(self) -> bool:
        """Whether the job is to end."""
        return self.signal is not None or bool(self.elsewhere)

    @property
    def status(self) -> int:
        """The exit code that follows from a signal, or from the loss of a host."""
        if self.signal is None:
            return 1
        # Pre-emption, by whichever signal, has one code.
        return exit_status(-(signal.SIGTERM if self.signal == signal.SIGUSR1 else self.signal))

    @property
    def for_workers(self) -> int:
        """The signal that tells the workers to stop. Few expect the end of a terminal."""
        unusual = self.signal in (None, signal.SIGHUP, signal.SIGQUIT)
        return signal.SIGTERM if self.signal is None or unusual else self.signal

    def raise_if_told(self) -> None:
        """Called by the main thread, between two looks at the workers.

        Raises:
            Told: The job is to end.
        """
        if self.is_told:
            self._answered.set()
            raise Told

    def answer(self) -> None:
        """The main thread takes care of the end from here on."""
        self._answered.set()

    def concludes_by(self, conclude: Callable[[], int]) -> None:
        """What to do, in another thread, where the main thread is stuck in torch and no worker runs.

        Args:
            conclude: Says what there is to say. Returns the exit code.
        """
        self._conclude = conclude

    def tell(self, what: str) -> None:
        """Another host has failed."""
        if not self.is_told:
            self.elsewhere = what
            self._start(self._give_up_unless_answered)

    def lose(self, what: str) -> None:
        """Another host is lost."""
        if not self.is_told:
            self.is_lost = True
            self.tell(what)

    def pass_on(self, number: int) -> None:
        """Another host has received a signal."""
        if not self.is_told:
            self.is_mine = False
            self._receive(number)

    def _receive(self, number: int) -> None:
        self.signal = number
        self._start(self._give_up_unless_answered)

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
                    self._receive(number)

    def _give_up_unless_answered(self) -> None:
        if not self._answered.wait(_PATIENCE):
            code = self.status
            try:
                code = self._conclude()
            finally:
                os._exit(code)

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="hapi-job", daemon=True).start()
