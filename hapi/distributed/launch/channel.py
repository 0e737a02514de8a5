"""What the launchers of several hosts tell each other beside torch's rendezvous, which tells them nothing.

One thread does all that needs the network, since an operation on a store has no end where the network is cut; others
look at what it has learned. A store's keys, all under one name:

    hosts          how many have come; each takes the next number i
    beat/i, name/i a counter that goes up while host i lives; its name
    end            why the job ends: a signal, or that a host has failed
    report/i       the failures of host i, once all its workers have ended
    bye/i          host i needs nothing more
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from hapi.distributed.launch.failures import Failure
from hapi.distributed.launch.hosts import Hosts, wait_for_port
from hapi.distributed.launch.job import Job
from hapi.distributed.launch.stores import connect, serve

_INTERVAL = 0.1
# Without a sign of life for so long, a host is lost.
LOST_AFTER = 8.0
_REPORTS_WITHIN = 8.0
_GOODBYE_WITHIN = 10.0
_ENDS_WITHIN = 0.5


class Lost(Exception):
    """Other hosts cannot be reached."""


class Channel:
    """This host's end of the channel.

    Args:
        hosts: Who takes part.
        job: Told of what happens elsewhere; its signals are passed on.
        job_id: Must be the same on all hosts.
        watches: Whether the loss of any host is the end of the job, and not only that of the store's keeper.
        timeout: Seconds to wait for the keeper.
    """

    def __init__(self, hosts: Hosts, job: Job, job_id: str, watches: bool, timeout: float) -> None:
        self._hosts, self._job, self._job_id, self._watches, self._timeout = hosts, job, job_id, watches, timeout
        self._ready, self._closed = threading.Event(), threading.Event()
        self._problem = ""
        self.number = -1
        """This host's. A host that comes again has another one."""
        self._outbox: dict[str, str] = {}
        self._reports: dict[int, list[Failure]] = {}
        self._left: set[int] = set()
        self._silent: set[int] = set()
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._alive = time.monotonic()
        self.count = 0
        """Hosts that have come so far."""
        self.is_lost = False
        self._members: frozenset[int] = frozenset()
        self._store: Any = None
        works = (self._work, self._watch_the_work)
        self._threads = [
            threading.Thread(target=work, name=f"hapi-channel{work.__name__}", daemon=True) for work in works
        ]
        for thread in self._threads:
            thread.start()

    # What the main thread asks for

    def gather(self, least: int) -> None:
        """Wait until so many hosts have come.

        Raises:
            Lost: They have not come in time, or another job is there.
        """
        until = time.monotonic() + self._timeout
        while self.count < least:
            self._job.raise_if_told()
            if self._problem:
                raise Lost(self._problem)
            if time.monotonic() > until + 2 * _INTERVAL:
                raise Lost(
                    f"{self.count} of {least} hosts have come to {self._hosts.master} in {self._timeout:g} s. "
                    "Run the same command on each, or write --timeout with more seconds."
                )
            time.sleep(_INTERVAL / 2)

    def begin_round(self, members: Iterable[int]) -> None:
        """The workers of this host run together with those of these hosts from now on."""
        self._members = frozenset(members)

    def is_short(self) -> bool:
        """Whether a host that is in the round has left or is silent, and the job can go on without it."""
        return not self._watches and not self._members.isdisjoint(self._gone)

    def tell_failing(self) -> None:
        """Have the other hosts end their workers now."""
        self._outbox.setdefault("end", self._end(None))

    def exchange(self, failures: list[Failure]) -> list[Failure]:
        """The failures of all hosts, after each has ended its workers."""
        self._outbox[f"report/{self.number}"] = json.dumps([failure.to_json() for failure in failures])
        self._until(lambda: all(i in self._reports or i in self._gone for i in range(self.count)), _REPORTS_WITHIN)
        known = {self.number: failures, **self._reports}
        return [failure for number in sorted(known) for failure in known[number]]

    def leave(self, patience: float = 0.0) -> None:
        """Say goodbye; the store's keeper stays until the others have done so.

        Args:
            patience: Further seconds for those who may still save.
        """
        if not self._ready.is_set():
            return
        key = f"bye/{self.number}"
        self._outbox[key] = "x"
        if self._hosts.keeps_store:
            self._until(lambda: self._gone >= set(range(self.count)), _GOODBYE_WITHIN + patience)
        else:
            self._until(lambda: key not in self._outbox, _GOODBYE_WITHIN / 2)
        self._closed.set()

    def has_ended(self) -> bool:
        """Whether nothing of this works any more; false where the thread is caught in an operation on the store.

        A process with such a thread must not end as Python ends: the thread would be torn out of torch's C++, which
        aborts the process then.
        """
        self._closed.set()
        self._ready.set()
        for thread in self._threads:
            thread.join(_ENDS_WITHIN)
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def _gone(self) -> set[int]:
        return self._left | self._silent

    def _until(self, condition: Callable[[], bool], limit: float) -> None:
        until = time.monotonic() + limit
        while not condition() and not self.is_lost and not self._job.hurry and time.monotonic() < until:
            time.sleep(_INTERVAL / 4)

    # The thread that works

    def _work(self) -> None:
        try:
            self._open()
            while not self._closed.is_set():
                self._turn()
                self._alive = time.monotonic()
                self._closed.wait(_INTERVAL)
        except Lost as problem:
            self._problem = str(problem)
        except Exception as error:
            # torch has no class of its own for a store that is gone.
            self._lose(f"the connection to the host {self._hosts.master} was lost ({str(error).splitlines()[0]})")

    def _open(self) -> None:
        hosts = self._hosts
        if hosts.keeps_store:
            try:
                keeper = serve(hosts.master, hosts.port)
            except RuntimeError as error:
                raise Lost(
                    f"Port {hosts.port} of {hosts.master} cannot be served, perhaps another job does "
                    f"({str(error).splitlines()[0]}). Write --master with another port on each host."
                ) from error
            self._keeper = keeper
        elif not wait_for_port(hosts.master, hosts.port, time.monotonic() + self._timeout):
            raise Lost(
                f"Nothing answers at {hosts.master}:{hosts.port} for {self._timeout:g} s: the command has not been "
                "started there, has ended already, or the port is closed. Write --timeout with more seconds to wait."
            )
        self._store = connect(hosts.master, hosts.port, self._timeout)
        job = self._store.compare_set(self._key("job"), "", self._job_id).decode()
        if job != self._job_id:
            raise Lost(
                f"The job {job!r} meets at {hosts.master}:{hosts.port}, and this one is {self._job_id!r}. "
                "Write the same --job_id on each host, or another port."
            )
        self.number = self._store.add(self._key("hosts"), 1) - 1
        self._set(f"name/{self.number}", socket.gethostname())
        self._ready.set()

    def _turn(self) -> None:
        self._set(f"beat/{self.number}", str(time.monotonic()))
        passes_on = not self._hosts.is_elastic or self._hosts.keeps_store
        if self._job.signal is not None and self._job.is_mine and passes_on:
            self._outbox.setdefault("end", self._end(self._job.signal))
        for key, value in list(self._outbox.items()):
            self._set(key, value)
            del self._outbox[key]
        self.count = self._store.add(self._key("hosts"), 0)
        if (end := self._get("end")) is not None:
            self._hear(json.loads(end))
        for number in range(self.count):
            if number not in self._left:
                self._look_at(number)

    def _end(self, number: int | None) -> str:
        return json.dumps({"signal": number, "host": socket.gethostname(), "number": self.number})

    def _hear(self, end: dict[str, Any]) -> None:
        if end["number"] == self.number or self._job.is_told:
            return
        if end["signal"] is not None:
            self._job.pass_on(end["signal"])
        else:
            self._job.tell(f"host {end['host']} has failed")

    def _look_at(self, number: int) -> None:
        if number not in self._reports and (report := self._get(f"report/{number}")) is not None:
            self._reports[number] = [Failure.from_json(text) for text in json.loads(report)]
        if self._get(f"bye/{number}") is not None:
            self._left.add(number)
            return
        beat, now = self._get(f"beat/{number}") or b"", time.monotonic()
        before, since = self._beats.get(number, (b"", now))
        if beat != before:
            since = now
        self._beats[number] = (beat, since)
        if now - since <= LOST_AFTER:
            self._silent.discard(number)
        elif number not in self._silent:
            self._silent.add(number)
            if self._watches:
                name = (self._get(f"name/{number}") or b"?").decode()
                self._job.lose(f"host {name} has given no sign of life for {LOST_AFTER:g} s")

    def _watch_the_work(self) -> None:
        self._ready.wait()
        while not self._closed.wait(_INTERVAL):
            if time.monotonic() - self._alive > LOST_AFTER:
                self._lose(f"host {self._hosts.master} has given no answer for {LOST_AFTER:g} s")
                return

    def _lose(self, what: str) -> None:
        self.is_lost = True
        if not self._closed.is_set():
            self._job.lose(what)

    def _key(self, name: str) -> str:
        return f"hapi/{name}"

    def _set(self, name: str, value: str) -> None:
        self._store.set(self._key(name), value)

    def _get(self, name: str) -> bytes | None:
        key = self._key(name)
        value: bytes | None = self._store.get(key) if self._store.check([key]) else None
        return value
