"""Two hosts for tests of hapirun: network namespaces joined by a cable. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

PREFIX = f"ha{os.getpid() % 10000}"
HOSTS = (f"{PREFIX}h0", f"{PREFIX}h1")
ADDRESSES = ("10.231.7.10", "10.231.7.9")  # in the order of neither texts nor numbers


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@contextmanager
def made():
    """The hosts are there within; the test is skipped where the machine does not permit them."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed: no network namespaces to play hosts")
    try:
        _make()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"not permitted on this machine: network namespaces ({error.stderr.strip()})")
    yield
    for host in HOSTS:
        ip("netns", "del", host)


def _make():
    for host in HOSTS:
        ip("netns", "add", host)
    ip("link", "add", f"{PREFIX}v0", "type", "veth", "peer", "name", f"{PREFIX}v1")
    for index, (host, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
        ip("link", "set", f"{PREFIX}v{index}", "netns", host)
        ip("-n", host, "link", "set", f"{PREFIX}v{index}", "name", "eth0")
        ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", host, "link", "set", link, "up")
