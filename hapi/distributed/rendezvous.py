"""Where the ranks meet: a store that is theirs alone, in which each leaves its name before the process group is made.

So whoever waits in vain can say for whom. The store's class is handed in; this module knows sockets and words only.
"""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hapi.distributed import host
from hapi.distributed.launchers import LaunchInfo

T = TypeVar("T")

_PATIENCE = 600.0
"""Seconds to wait for the others where HAPI_TIMEOUT is not set; the first may have data to download."""

_VERDICT = "hapi/verdict"
_PUBLISHED = "hapi/store"
_LINGER = 1.0
_PAUSE = 0.1


class _NotYetError(Exception):
    """This try failed; the next one may not."""


def chosen_timeout() -> float | None:
    """The seconds of HAPI_TIMEOUT.

    Raises:
        ValueError: It is not a number above 0.
    """
    text = os.environ.get("HAPI_TIMEOUT")
    if not text:
        return None
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ValueError(
        f"HAPI_TIMEOUT={text!r} is set, but it is not a number of seconds above 0. Write HAPI_TIMEOUT=600, or unset it "
        "for torch's own limits."
    )


def meet(launch: LaunchInfo, make_store: Callable[..., Any]) -> Any:
    """Wait until all ranks are there.

    Args:
        launch: Which of them this is, and where rank 0 is found.
        make_store: torch's `TCPStore`.

    Returns:
        A store that only the processes of this round use. Several hosts: GLOO_SOCKET_IFNAME is set where it has to be.

    Raises:
        RuntimeError: No address is known, its port is taken, or some have not come in time; these are named.
    """
    meeting = _Meeting(launch, make_store, chosen_timeout() or _PATIENCE)
    store = meeting.hold()
    # Rank 0's store at the known port lives on, since something may hold a destroyed group; a later group is announced
    # in it, as in an agent's.
    _met.setdefault((meeting.address, meeting.port), store)
    return store


_met: dict[tuple[str, int], Any] = {}


class _Meeting:
    def __init__(self, launch: LaunchInfo, make_store: Callable[..., Any], seconds: float) -> None:
        self.launch = launch
        self.make_store = make_store
        self.address, self.port = _where(launch)
        self.seconds = seconds
        # The others wait a little longer than rank 0, which knows who is missing and tells them.
        self.deadline = time.monotonic() + seconds + (0 if launch.rank == 0 else 2 * _LINGER)
        self.name = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
        self.agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "TORCHELASTIC_RUN_ID" in os.environ

    def hold(self) -> Any:
        agent = _met.get((self.address, self.port))
        if agent is None and self.agents:
            agent = self._patiently(lambda: self._connect(self.address, self.port))
        if self.launch.rank == 0:
            store = self._serve(agent)
            self._enter(store)
            self._gather(store)
        else:
            store = self._patiently(lambda: self._come_in(agent))
        self._choose_interface(store)
        # From here on it is the group's, with that one's patience.
        store.set_timeout(datetime.timedelta(seconds=max(self.seconds, _PATIENCE)))
        return store

    def _serve(self, agent: Any) -> Any:
        """Rank 0: a new store. The agent's is kept over restarts, with the addresses of dead workers in it."""
        wanted = 0 if agent is not None else self.port
        try:
            store = self.make_store("127.0.0.1", wanted, None, True, self._left(), False)
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error) and "in use" not in str(error):
                raise
            raise RuntimeError(
                f"Rank 0 of {self.launch.world_size} ({self.launch.launcher}) has to serve port {self.port}, but "
                "another process of this host does: a second job, or one that has not ended yet. Set MASTER_PORT to a "
                "free port for all ranks, or leave the choice to `torchrun` or `hapirun`."
            ) from error
        if agent is not None:
            own = self.address if host.is_own(self.address) else host.outgoing_address(self.address)
            agent.set(_PUBLISHED, f"{own} {store.port}")
        return store

    def _come_in(self, agent: Any) -> Any:
        """The others: connect to rank 0's store, leave a name, hear whether all are there."""
        address, port = self.address, self.port
        if agent is not None:
            if not agent.check([_PUBLISHED]):
                raise _NotYetError("rank 0 did not come")
            # It may be that of an earlier round: then it ended with its process, or holds this rank's former name.
            address, _, text = agent.get(_PUBLISHED).decode().partition(" ")
            port = int(text)
        store = self._connect(address, port)
        try:
            self._enter(store)
            store.wait([_VERDICT], self._left())
            missing = store.get(_VERDICT).decode()
        except RuntimeError as error:
            raise _NotYetError(f"rank 0 ended or fell silent ({_first_line(error)})") from error
        if missing:
            raise self._late(_did_not_come(missing))
        return store

    def _connect(self, address: str, port: int) -> Any:
        try:
            # torch's client waits far beyond its limit for a name that is not known and a port that is closed.
            socket.create_connection((address, port), 1.0).close()
        except OSError as error:
            raise _NotYetError(f"rank 0 did not answer at {address}:{port} ({error.strerror or error})") from error
        limit = self._left()
        return _bounded(lambda: self.make_store(address, port, None, False, limit), limit.total_seconds())

    def _enter(self, store: Any) -> None:
        holder = store.compare_set(_key(self.launch.rank), "", self.name).decode()
        if holder != self.name:
            raise _NotYetError(f"rank {self.launch.rank} is taken by process {' of host '.join(holder.split()[1::-1])}")
        route = host.outgoing_address(self.address)
        store.set(f"{_key(self.launch.rank)}/address", route or "")

    def _gather(self, store: Any) -> None:
        """Rank 0: wait for all names, and tell everybody the outcome."""
        keys = {str(rank): _key(rank) for rank in range(self.launch.world_size)}
        missing: list[str] = []
        try:
            store.wait(list(keys.values()), self._left())
        except RuntimeError:
            missing = [rank for rank, key in keys.items() if not store.check([key])]
        store.set(_VERDICT, ", ".join(missing))
        if missing:
            time.sleep(_LINGER)  # The store ends with this process; the others hear the verdict first.
            raise self._late(_did_not_come(", ".join(missing)))

    def _choose_interface(self, store: Any) -> None:
        """The host's own name is what gloo publishes; on many hosts it stands for 127.0.1.1."""
        one_host = self.launch.local_world_size == self.launch.world_size
        if one_host or os.environ.get("GLOO_SOCKET_IFNAME") or host.name_leads_out():
            return
        ranks = range(self.launch.world_size)
        peers = (store.get(f"{_key(rank)}/address").decode() for rank in ranks)
        found = host.interface_towards([self.address, *(peer for peer in peers if peer and not host.is_own(peer))])
        if found is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = found

    def _patiently(self, attempt: Callable[[], T]) -> T:
        while True:
            try:
                return attempt()
            except _NotYetError as problem:
                if time.monotonic() >= self.deadline:
                    raise self._late(str(problem)) from problem
            time.sleep(_PAUSE)

    def _left(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=max(0.1, self.deadline - time.monotonic()))

    def _late(self, problem: str) -> RuntimeError:
        launch = self.launch
        return RuntimeError(
            f"Rank {launch.rank} of {launch.world_size} ({launch.launcher}, host {socket.gethostname()}) has waited "
            f"{self.seconds:g} s for the others at {self.address}:{self.port}, but {problem}: not started, ended "
            f"early, or without a way to that address. Start {launch.world_size} processes, look for the first error "
            "among their outputs, and open the port between the hosts; HAPI_TIMEOUT=SECONDS waits longer, "
            "HAPI_LAUNCHER=off runs this process alone."
        )


def _did_not_come(ranks: str) -> str:
    return f"{'ranks' if ',' in ranks else 'rank'} {ranks} did not come"


def _key(rank: int) -> str:
    return f"hapi/rank/{rank}"


def _where(launch: LaunchInfo) -> tuple[str, int]:
    """Rank 0's address and port; where the launcher gives none, what can be found out about them."""
    address = launch.address or _first_host_of_file(os.environ.get("LSB_DJOB_RANKFILE"))
    if address is None or launch.port is None:
        unknown = "address" if address is None else "port"
        raise RuntimeError(
            f"{launch.launcher} has started {launch.world_size} processes on several hosts, but tells this one (rank "
            f"{launch.rank}) no {unknown} of rank 0. Give all of them MASTER_ADDR (rank 0's host) and MASTER_PORT "
            "(a free port there): `mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ...`, or "
            "`mpirun -x MASTER_ADDR -x MASTER_PORT ...`."
        )
    derived = not os.environ.get("MASTER_ADDR") and launch.launcher != "paddle"
    if launch.rank == 0 and derived and not host.is_own(address):
        raise RuntimeError(
            f"Rank 0 runs on {socket.gethostname()}, but the variables of {launch.launcher} lead the other ranks to "
            f"{address}, which is not an address of this host. Set MASTER_ADDR to this host's address for all ranks."
        )
    return address, launch.port


def _first_host_of_file(path: str | None) -> str | None:
    """LSF's list of hosts, a line a process: the first line is where the job's script runs."""
    if not path:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except OSError:
        return None
    return lines[1] if len(lines) > 1 else None


def _bounded(make: Callable[[], T], seconds: float) -> T:
    """The result of a call that might never return: what listens at the port may not be a store."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    raise _NotYetError(_first_line(errors[0]) if errors else "what listens there is no store of torch's")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
