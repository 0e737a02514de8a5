"""Two hosts of this machine alone: network namespaces joined by a cable, each with its own address and host name."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

NAMES = tuple(f"hapi{os.getpid()}h{number}" for number in (0, 1))
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
        self.names = NAMES
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
            _ip("netns", "del", name, check=False)
            shutil.rmtree(_FILES / name, ignore_errors=True)

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """The command line that runs another one on the host of this number."""
        name = self.names[number]
        enter = [_found(), "netns", "exec", name, "unshare", "--uts"]
        return [*enter, "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]

    def cut(self, number: int = 1) -> None:
        """Take the cable out of a host."""
        _ip("-n", self.names[number], "link", "set", "eth0", "down")

    def mend(self, number: int = 1) -> None:
        """Put it in again."""
        _ip("-n", self.names[number], "link", "set", "eth0", "up")

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


def _found() -> str:
    """`ip`, also where an administrator's commands lie."""
    return shutil.which("ip", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])) or "ip"


def _ip(*words: str, check: bool = True) -> None:
    _run(_found(), *words, check=check)


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True, text=True, timeout=30)
