"""The key-value stores over which launchers and workers find each other."""

from __future__ import annotations

import datetime

from torch._C._distributed_c10d import TCPStore


def serve(address: str, port: int = 0) -> TCPStore:
    """Keep a store in this process; port 0: a free one, which is taken from here on, so that no two jobs collide."""
    return TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)


def connect(address: str, port: int, timeout: float) -> TCPStore:
    """Be a client of a store that another process keeps.

    Args:
        address: A host's name or address.
        port: Its port.
        timeout: Seconds, for the connection and for each wait.
    """
    seconds = datetime.timedelta(seconds=timeout)
    return TCPStore(address, port, is_master=False, timeout=seconds, wait_for_workers=False)
