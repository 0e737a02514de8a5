"""The command line of `hapirun`. What follows the script's name belongs to the script."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

HELP = """\
usage: hapirun [options] script.py [the script's arguments ...]
       hapirun [options] -m module [the module's arguments ...]

Starts the script as several processes that train together, on this host or on several.

which processes
  --gpus, --devices LIST   cards of this host, such as 0,1: one process each; "cpu" for none
  --nproc_per_node N       processes on this host (default: one a card, one where there is none)
several hosts: the same command on each
  --ips A,B,...            their addresses; the first is the master, the place is the node's rank
  --nnodes N | MIN:MAX     how many; a range lets hosts come and go while it runs
  --master HOST[:PORT]     where they meet (default port 29400)
  --node_rank, --rank R    this host's place, for a fixed order
  --timeout SECONDS        how long to wait for the other hosts (default 600)
how it runs
  --max_restart N          start all processes anew after a failure, up to N times (default 0)
  --grace SECONDS          what a process gets to save when it is told to stop (default 30; after a failure at most 5)
  --log_dir FOLDER         workerlog.N, the output of rank N (default log)
  --job_id NAME            shown, and checked between hosts
  -h, --help"""

_OPTIONS = {
    "--gpus": "devices",
    "--devices": "devices",
    "--nproc_per_node": "processes",
    "--ips": "ips",
    "--nnodes": "nodes",
    "--master": "master",
    "--node_rank": "node_rank",
    "--rank": "node_rank",
    "--timeout": "timeout",
    "--max_restart": "max_restart",
    "--grace": "grace",
    "--log_dir": "log_dir",
    "--job_id": "job_id",
}
# What other launchers call it.
_ELSEWHERE = {
    "--max_restarts": "--max_restart",
    "--nprocs": "--nproc_per_node",
    "--num_processes": "--nproc_per_node",
    "--master_addr": "--master",
    "--rdzv_endpoint": "--master",
    "--module": "-m",
}
_CLOSE_ENOUGH = 0.7
DEFAULT_PORT = 29400
"""Where hosts meet, unless --master names another port."""


class UsageError(Exception):
    """The command line cannot be followed; nothing was started."""


@dataclass(frozen=True)
class Options:
    """What was asked for; None means that it was not."""

    script: str
    is_module: bool
    arguments: tuple[str, ...]
    devices: tuple[str, ...] | None = None
    processes: int | None = None
    ips: tuple[str, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    master: tuple[str, int] | None = None
    timeout: float = 600.0
    max_restart: int = 0
    grace: float = 30.0
    log_dir: str = "log"
    job_id: str | None = None
    given: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may come and go."""
        return self.min_nodes != self.max_nodes


def parse(arguments: Sequence[str]) -> Options | None:
    """Read a command line.

    Returns:
        The options, or None where help was asked for.

    Raises:
        UsageError: It names an unknown option, a value that does not fit, or no script.
    """
    given: dict[str, str] = {}
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word in ("-h", "--help"):
            return None
        if word == "-m" or not word.startswith("-"):
            return _options(given, word, waiting)
        name, equals, value = word.partition("=")
        key = _OPTIONS.get(name.replace("-", "_").replace("__", "--", 1))
        if key is None:
            raise UsageError(_unknown(name))
        if not equals:
            if not waiting:
                raise UsageError(f"{name} came last and has no value. Write {name} VALUE before the script's name.")
            value = waiting.pop(0)
        given[key] = value
    raise UsageError("No script was named, so there is nothing to start. Write hapirun [options] script.py.")


def _unknown(name: str) -> str:
    folded = name.replace("-", "_").replace("__", "--", 1)
    begun = [option for option in _OPTIONS if len(folded) > 3 and option.startswith(folded)]
    close = difflib.get_close_matches(folded, _OPTIONS, n=1, cutoff=_CLOSE_ENOUGH)
    meant = [_ELSEWHERE[folded]] if folded in _ELSEWHERE else begun[:1] or close
    hint = f"Did you mean {meant[0]}?" if meant else "hapirun --help lists the options."
    return f"Unknown option {name}. {hint} Options of the script come after the script's name."


def _options(given: dict[str, str], word: str, rest: list[str]) -> Options:
    is_module = word == "-m"
    if is_module and not rest:
        raise UsageError("-m came last and names no module. Write -m package.module.")
    script, *arguments = rest if is_module else [word, *rest]
    if not is_module and not os.path.exists(script):
        raise UsageError(f"The script {script!r} does not exist (looked in {os.getcwd()}). Write the path of a file.")
    min_nodes, max_nodes = _nodes(given.get("nodes", "1"))
    options = Options(
        script,
        is_module,
        tuple(arguments),
        devices=parse_devices(given.get("devices")),
        processes=_whole("--nproc_per_node", given.get("processes"), least=1),
        ips=tuple(_list("--ips", given["ips"])) if "ips" in given else (),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=_whole("--node_rank", given.get("node_rank"), least=0),
        master=_address(given.get("master")),
        timeout=_seconds("--timeout", given.get("timeout", "600")),
        max_restart=_whole("--max_restart", given.get("max_restart", "0"), least=0) or 0,
        grace=_seconds("--grace", given.get("grace", "30")),
        log_dir=given.get("log_dir", "log"),
        job_id=given.get("job_id"),
        given=frozenset(given),
    )
    _check_hosts(options)
    return options


def _check_hosts(options: Options) -> None:
    if options.ips:
        for key in ("nodes", "master"):
            if key in options.given:
                raise UsageError(
                    f"--ips and --{'nnodes' if key == 'nodes' else key} were both given, and both say which hosts "
                    "there are. Write one of the two."
                )
        if len(set(options.ips)) < len(options.ips):
            raise UsageError(f"--ips {','.join(options.ips)} names a host twice. Write each host's address once.")
    hosts = len(options.ips) or options.max_nodes
    if options.node_rank is not None and options.node_rank >= hosts:
        raise UsageError(
            f"--node_rank {options.node_rank} does not exist among {hosts} host(s), which are numbered from 0. "
            f"Write 0 to {hosts - 1}."
        )
    if options.max_nodes > 1 and options.master is None:
        raise UsageError(
            f"--nnodes {options.max_nodes} needs a place where the hosts meet. "
            "Write --master HOST:PORT, the address of one of them, on each."
        )
    in_fixed_order = bool(options.ips) or options.node_rank is not None
    if in_fixed_order and options.is_elastic:
        raise UsageError("--node_rank fixes the hosts' order, and --nnodes MIN:MAX lets it change. Leave one out.")
    if in_fixed_order and options.max_restart and hosts > 1:
        raise UsageError(
            f"--max_restart {options.max_restart} does not go with a fixed order of hosts (--ips, --node_rank): torch "
            f"restarts only hosts that meet anew. Write --nnodes {hosts} --master HOST:PORT on each host instead."
        )


def _nodes(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    least = _whole("--nnodes", low, least=1) or 1
    most = _whole("--nnodes", high, least=1) or 1 if colon else least
    if most < least:
        raise UsageError(f"--nnodes {text} ends before it begins. Write MIN:MAX, such as {most}:{least}.")
    return least, most


def as_option(name: str, value: object) -> str:
    """How a setting is written on the command line."""
    return f"--{name} {value}"


def parse_devices(text: str | None, write: Callable[[str, object], str] = as_option) -> tuple[str, ...] | None:
    """A list of cards; () for none, None where nothing was said.

    Raises:
        UsageError: It is something else.
    """
    if text is None:
        return None
    if text == "cpu":
        return ()
    ids = [part.strip() for part in text.split(",")]
    if not all(card.isdecimal() for card in ids) or len(set(ids)) < len(ids):
        raise UsageError(
            f"{write('gpus', text)}, which is not a list of different cards. "
            f"Write {write('gpus', '0,1')} or {write('gpus', 'cpu')}."
        )
    return tuple(ids)


def _list(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{name} {text!r} has an empty entry. Write the entries with one comma between two.")
    return parts


def _address(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, DEFAULT_PORT
    number = _whole("the port of --master", port, least=1) or 0
    if not host or number > 65535:
        raise UsageError(f"--master {text} is not an address. Write HOST:PORT with a port of at most 65535.")
    return host.strip("[]"), number


def _whole(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{name} received {text!r}, which is not a whole number from {least}. Write such a number.")
    return int(text)


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name} received {text!r}, which is not a time. Write a number of seconds, such as 30.")
    return value
