"""A collective that fails since another rank is gone or late: which one, told through the ranks' common store."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from typing import Any

# What gloo, NCCL and the store say of a peer that is gone or does not come.
_OF_PEERS = re.compile(
    r"Connection (closed|reset)|Broken pipe|Timed out waiting|[Ss]ocket [Tt]imeout|Dist\w*Error|NCCL"
)
_PATIENCE = 1.5
"""Seconds in which the others may leave word: they fail of the same collective at about the same time."""
_PAUSE = 0.05
_SHOWN = 300


class RankLostError(RuntimeError):
    """A rank cannot go on since others are gone, or have not come to the collective in time."""


def leave_word(error: BaseException, store: Any, rank: int) -> None:
    """Before this rank ends or goes on without the others: tell them what has happened here."""
    if isinstance(error, RankLostError):
        return  # of a call within another, and no first cause
    text = f"{type(error).__name__}: {error}".partition("\n")[0][:_SHOWN]
    with contextlib.suppress(RuntimeError):
        store.set(_key("failed", rank), text)


def take_back(store: Any, rank: int) -> None:
    """The script has caught the error, and makes another call."""
    with contextlib.suppress(RuntimeError):
        for kind in ("failed", "waits"):
            store.delete_key(_key(kind, rank))


def explained(
    error: BaseException, store: Any, rank: int, world_size: int, seconds: float | None
) -> RuntimeError | None:
    """What has become of the others, if this error is about them; else None.

    Args:
        error: What a collective has raised.
        store: The store in which the ranks have met.
        rank: This rank.
        world_size: How many there are.
        seconds: How long a collective waits, where HAPI_TIMEOUT says so.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RankLostError) or not isinstance(error, RuntimeError) or not _OF_PEERS.search(text):
        return None
    with contextlib.suppress(RuntimeError):
        store.set(_key("waits", rank), "1")
    words, silent, reachable = _words(store, rank, world_size)
    if words:
        found = "; ".join(f"rank {other} failed first, of {word}" for other, word in words.items())
    elif not reachable:
        found = "rank 0 has ended, and with it the store in which the ranks have met"
    elif silent:
        names = ", ".join(map(str, silent))
        found = (
            f"rank{'s' * (len(silent) > 1)} {names} left no word: killed, too slow, at its end or at another call, as "
            "where this call stands under `if rank == 0`"
        )
    else:
        found = "all of them are there, so one has made another call"
    limit = f" within HAPI_TIMEOUT={seconds:g} s" if seconds and re.search("[Tt]imed? ?out", text) else ""
    return RankLostError(
        f"Rank {rank} of {world_size} (host {socket.gethostname()}, process {os.getpid()}) could not go on with the "
        f"others{limit}: {found} ({text.partition(chr(10))[0]:.200}). Look for the first error among their "
        "outputs; make the same calls of fit, evaluate and predict on every rank; HAPI_TIMEOUT=SECONDS waits longer, "
        "HAPI_DEBUG=1 tells calls apart."
    )


def _words(store: Any, rank: int, world_size: int) -> tuple[dict[int, str], list[int], bool]:
    """What failed ranks have said, who has said nothing, and whether the store still answers."""
    silent = [other for other in range(world_size) if other != rank]
    deadline = time.monotonic() + _PATIENCE
    words: dict[int, str] = {}
    try:
        while silent and not words and time.monotonic() < deadline:
            failed = [other for other in silent if store.check([_key("failed", other)])]
            words = {other: store.get(_key("failed", other)).decode() for other in failed}
            silent = [o for o in silent if o not in words and not store.check([_key("waits", o)])]
            time.sleep(_PAUSE)
    except RuntimeError:
        # It has ended with its process.
        return words, silent, False
    return words, silent, True


def _key(kind: str, rank: int) -> str:
    return f"hapi/{kind}/{rank}"
