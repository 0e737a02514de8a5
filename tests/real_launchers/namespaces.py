"""Two hosts of this machine alone: network namespaces joined by a cable, each with its own address and host name."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import install

ADDRESSES = ("10.231.8.10", "10.231.8.9")  # in the order of neither texts nor numbers
_FILES = Path("/etc/netns")  # `ip netns exec` lays what is in there over /etc


class NotPermittedError(RuntimeError):
    """This machine does not let network namespaces be made."""


class Hosts:
    """`with Hosts() as hosts:`, then `hosts.command(0, [...])` is what runs a command on the first of them.

    Raises:
        NotPermittedError: On entering it, where the machine does not permit network namespaces.
    """

    def __init__(self) -> None:
        self.names = [f"hapi{os.getpid()}h{number}" for number in (0, 1)]
        self.addresses = ADDRESSES

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0:
            raise NotPermittedError("network namespaces need root")
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            self.__exit__()
            raise NotPermittedError(f"network namespaces are not allowed here: {str(said).strip()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            _run(install.find("ip") or "ip", "netns", "del", name, check=False)
            shutil.rmtree(_FILES / name, ignore_errors=True)

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """The command line that runs another one on the host of this number."""
        name = self.names[number]
        enter = [install.find("ip") or "ip", "netns", "exec", name, "unshare", "--uts"]
        return [*enter, "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]

    def cut(self, number: int = 1) -> None:
        """Take the cable out of a host."""
        _ip("-n", self.names[number], "link", "set", "eth0", "down")

    def _make(self) -> None:
        table = "".join(f"{address} {name}\n" for address, name in zip(self.addresses, self.names, strict=True))
        ends = [f"{name}v" for name in self.names]
        for name in self.names:
            _ip("netns", "add", name)
            files = _FILES / name
            files.mkdir(parents=True, exist_ok=True)
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
            (files / "resolv.conf").write_text("")  # no name server to wait for
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, address, end in zip(self.names, self.addresses, ends, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", "eth0")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
        for number in (0, 1):
            _run(*self.command(number, ["true"]))


def _ip(*words: str) -> None:
    _run(install.find("ip") or "ip", *words)


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True, text=True, timeout=30)
