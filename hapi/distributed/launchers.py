"""The launcher's environment variables, read into a `LaunchInfo`: pure, without torch.

Each launcher is a row of `_READERS`; the first whose variables are all there decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchInfo:
    """Where a launcher has put this process."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    address: str
    port: int


_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def detect(environ: Mapping[str, str] | None = None) -> LaunchInfo | None:
    """Say which launcher started this process.

    Args:
        environ: The environment to read; by default that of this process.

    Returns:
        Rank, world size and the rest, or None for a process that no launcher placed.

    Raises:
        RuntimeError: The variables say that there are several processes, but not which of them this is.
    """
    environ = os.environ if environ is None else environ
    if environ.get("HAPI_LAUNCHER") == "off":
        return None
    for read in _READERS:
        info = read(environ)
        if info is not None:
            return info
    _refuse_half_set(environ)
    return None


def _torchelastic(environ: Mapping[str, str]) -> LaunchInfo | None:
    if "TORCHELASTIC_RUN_ID" not in environ or not _has(environ, *_RENDEZVOUS):
        return None
    return _rendezvous(environ, "torchrun")


def _plain(environ: Mapping[str, str]) -> LaunchInfo | None:
    if not _has(environ, *_RENDEZVOUS) or int(environ["WORLD_SIZE"]) <= 1:
        return None
    return _rendezvous(environ, "env")


_READERS: tuple[Callable[[Mapping[str, str]], LaunchInfo | None], ...] = (_torchelastic, _plain)


def _rendezvous(environ: Mapping[str, str], launcher: str) -> LaunchInfo:
    local_rank = int(environ.get("LOCAL_RANK", 0))
    return LaunchInfo(
        launcher=launcher,
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_rank=local_rank,
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
        node_rank=int(environ.get("GROUP_RANK", 0)),
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
    )


def _refuse_half_set(environ: Mapping[str, str]) -> None:
    if int(environ.get("WORLD_SIZE", "1") or 1) <= 1:
        return
    missing = [name for name in _RENDEZVOUS if not environ.get(name)]
    raise RuntimeError(
        f"WORLD_SIZE={environ['WORLD_SIZE']} is set, but {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not: several processes were meant, and this one cannot find the "
        "others. "
        "Start the script by `torchrun --nproc-per-node N script.py`, set all of RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT, or set HAPI_LAUNCHER=off for one process."
    )


def _has(environ: Mapping[str, str], *names: str) -> bool:
    return all(environ.get(name) for name in names)
