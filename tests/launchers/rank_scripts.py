"""What the processes of `test_group.py` run: `python rank_scripts.py NAME`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hapi
from hapi.distributed import group

TASKS = Path("/proc/self/task")


def say(text: str) -> None:
    # In one piece: lines of several processes do not mix.
    print(f"{text}\n", end="", flush=True)


class Places(torch.utils.data.Dataset[torch.Tensor]):
    """What a DataLoader's worker answers."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([group.get_rank(), group.get_world_size(), int(group.is_initialized())])


def say_how_many_threads(when: str) -> None:
    """At exit: to be called before the group is joined, and thus saying it after that has been closed."""

    def count() -> int:
        found = 0
        for task in TASKS.iterdir():
            with contextlib.suppress(OSError):  # It has ended meanwhile.
                found += "gloo" in (task / "comm").read_text()
        return found

    def tell() -> None:
        # One that has been waited for is listed until the system has taken it away.
        deadline = time.monotonic() + 2.0
        while count() and time.monotonic() < deadline:
            time.sleep(0.01)
        say(f"threads of gloo at {when}: {count()}")

    atexit.register(tell)


def ended_by_itself() -> None:
    """The script destroys the group that hapi has joined, as scripts for torchrun do."""
    say_how_many_threads("exit")
    group.start()
    group.barrier()
    dist.destroy_process_group()


def restarted() -> None:
    """Rank 1 dies in the first two rounds."""
    say_how_many_threads(f"exit of round {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    group.start()
    total = torch.ones(1)
    dist.all_reduce(total)
    if group.get_rank() == 1 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    say(f"rank {group.get_rank()} finished in round {os.environ['TORCHELASTIC_RESTART_COUNT']}")


def threads_of_each() -> None:
    """How many threads this process computes with, and whether that was shared out."""
    group.start()
    say(f"{torch.get_num_threads()} {group.shared_out_threads()}")


def left_alone() -> None:
    """Rank 1 starts a child, then leaves without a word; rank 0 ends a little later."""
    group.start()
    group.start()
    group.barrier()
    if group.get_rank() == 1:
        child = [sys.executable, "-c", "import children; print('child is a rank:', children.detect() is not None)"]
        subprocess.run(child, check=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})
        for method in ("fork", "spawn"):
            loader = torch.utils.data.DataLoader(Places(), num_workers=1, multiprocessing_context=method)
            say(f"{method} worker: {list(loader)[0].tolist()}")  # noqa: RUF015 - to its end, so that the worker ends
        # What a worker shared is given back here, mostly; after os._exit its tracker calls the rest leaked.
        gc.collect()
        sys.stdout.flush()
        os._exit(0)
    time.sleep(1.0)


def users_group() -> None:
    """The user has made a group; hapi uses it and leaves it as it was, whatever of it the environment tells."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="12355", WORLD_SIZE="2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(lambda: say(f"still there at exit: {dist.is_initialized()}"))
    group.start()
    group.barrier()
    say(f"{group.launcher_name()}: {group.get_world_size()}")
    say(repr(hapi.distributed.ParallelEnv()))


def waits_in_vain() -> None:
    """The process group of two, of which one is missing."""
    # What an exception must not cut off, though it ends a rank without taking the interpreter down.
    atexit.register(say, "registered")
    threading.Thread(target=lambda: (time.sleep(3), say("thread"))).start()
    group.start()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
