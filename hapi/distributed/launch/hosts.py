"""Which hosts take part, and this one's place among them."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from hapi.distributed.host import is_loopback, is_own, outgoing_address
from hapi.distributed.launch.options import DEFAULT_PORT, Options, UsageError

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Hosts:
    """Where the hosts meet.

    Attributes:
        master: The host that keeps the store, as all hosts call it; None: there is this host alone.
        port: Of the store; 0: a free one.
        keeps_store: Whether it is this host.
        least: As many are needed.
        most: More are not let in.
        place: This host's place in a fixed order; None: the order is found when they meet.
        address: Where others reach this host.
    """

    master: str
    port: int
    keeps_store: bool
    least: int
    most: int
    place: int | None
    address: str

    @property
    def alone(self) -> bool:
        """Whether no other host takes part."""
        return self.most == 1

    @property
    def is_elastic(self) -> bool:
        """Whether they may come and go."""
        return self.least != self.most


def find_hosts(options: Options) -> Hosts:
    """Work it out from the command line and from this host's addresses.

    Raises:
        UsageError: This host's place is not known, or its address.
    """
    place: int | None
    if len(options.ips) > 1:
        place = options.node_rank if options.node_rank is not None else _place_among(options.ips)
        master, port, least, most = options.ips[0], DEFAULT_PORT, len(options.ips), len(options.ips)
    elif options.max_nodes > 1 and options.master is not None:
        place, (master, port) = options.node_rank, options.master
        least, most = options.min_nodes, options.max_nodes
    else:
        return Hosts(_LOOPBACK, 0, True, 1, 1, 0, _LOOPBACK)
    keeps_store = is_own(master) if place is None else place == 0
    address = master if keeps_store else outgoing_address(master)
    if address is None:
        raise UsageError(
            f"The master {master} cannot be reached from {socket.gethostname()}: there is no such name, or no way to "
            "it. Write an address that every host can reach."
        )
    if keeps_store and (is_loopback(address) or address == "localhost"):
        raise UsageError(f"The master {master} is an address that each host has for itself. Write one that others see.")
    return Hosts(master, port, keeps_store, least, most, place, address)


def _place_among(addresses: tuple[str, ...]) -> int:
    own = [place for place, address in enumerate(addresses) if is_own(address)]
    if len(own) == 1:
        return own[0]
    found = "none of them is" if not own else f"{len(own)} of them are"
    raise UsageError(
        f"--ips {','.join(addresses)}: {found} an address of this host ({socket.gethostname()}), so its place is not "
        "known. Write --node_rank with its place, from 0, or correct the list."
    )


def wait_for_port(address: str, port: int, until: float) -> bool:
    """Whether something answers there before a moment of `time.monotonic`.

    A plain look, since torch's own client waits without limit for an answer that it cannot read.
    """
    while time.monotonic() < until:
        try:
            with socket.create_connection((address, port), timeout=2):
                return True
        except OSError:
            time.sleep(0.2)
    return False
