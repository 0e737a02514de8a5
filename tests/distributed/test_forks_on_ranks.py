"""A rank is forked, for data workers, only while gloo's threads rest: a lock that one holds would never be let go."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hapi.distributed import forks

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="these copy no locked lock")


def forked_beside(iterations: int, name: str | None) -> tuple[bool, bool]:
    """Fork while a thread computes without Python's lock. Whether it was done by then, in the child and here."""
    name = name or forks._NAME
    begun, done = threading.Event(), threading.Event()

    def compute() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", iterations)
        done.set()

    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait()
    child = os.fork()
    if not child:
        os._exit(done.is_set())
    was_done = done.is_set()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    thread.join()
    return bool(status), was_done


def names_of_gloos_threads() -> bool:
    dist.all_reduce(torch.ones(1))
    return forks._NAME in {(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()}


def test_a_fork_waits_for_gloos_threads(ranks):
    assert ranks(2).run(names_of_gloos_threads) == [True, True]
    # Some 0.1 s, for which it waits, and many seconds, for which it does not.
    assert ranks(2).run(forked_beside, 200_000, None) == [(True, True)] * 2
    assert ranks(2).run(forked_beside, 200_000, "another") == [(False, False)] * 2
    assert ranks(2).run(forked_beside, 4_000_000, None) == [(False, False)] * 2
