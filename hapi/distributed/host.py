"""This host's addresses and network interfaces, by the standard library."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def is_own(address: str) -> bool:
    """Whether a name or an address belongs to this host: only then can a socket be bound to it."""
    try:
        for family, kind, _, _, found in socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.bind(found)
                return True
    except OSError:
        return False
    return False


def outgoing_address(target: str) -> str | None:
    """The address that this host has towards another; None where there is no way. Nothing is sent."""
    try:
        for family, kind, _, _, found in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(found)
                return str(probe.getsockname()[0])
    except OSError:
        return None
    return None


def name_leads_out() -> bool:
    """Whether this host's own name stands for an address at which others can reach it."""
    try:
        return not is_loopback(socket.gethostbyname(socket.gethostname()))
    except OSError:
        return False


def is_loopback(address: str) -> bool:
    """Whether an address is one that each host has for itself."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def interface_towards(targets: Iterable[str]) -> str | None:
    """The interface by which the first of the targets is reached that is not this host's loopback; None: not found."""
    for target in targets:
        own = outgoing_address(target)
        if own is not None and not is_loopback(own):
            return _interface_of(own)
    return None


def _interface_of(address: str) -> str | None:
    try:
        import fcntl
    except ImportError:
        return None  # Windows
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
