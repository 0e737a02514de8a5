"""What the spawned processes of the tests do. Without torch, so that they start in no time."""

from __future__ import annotations

import os
import signal
import sys
import time


def place(*args):
    names = "RANK LOCAL_RANK WORLD_SIZE HAPI_LAUNCHED_BY HAPI_BACKEND"
    return (*args, *(os.environ.get(name) for name in names.split()))


def detected():
    # Here, as the others do without it.
    from hapi.distributed.launchers import detect

    found = detect()
    return found and (found.launcher, found.rank, found.world_size)


def fail(how):
    if os.environ["RANK"] == "1":
        if how == "raise":
            raise LookupError("no such column")
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "_exit":
            os._exit(3)
        if how == "Ctrl-C":
            raise KeyboardInterrupt
        sys.exit(how)
    time.sleep(60)


def fork_that_raises(folder):
    # One after the other: lines of several processes would mix.
    rank = int(os.environ["RANK"])
    while rank and not os.path.exists(f"{folder}/{rank - 1}"):
        time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        raise ValueError("of a fork")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    open(f"{folder}/{rank}", "w").close()
    time.sleep(1.0)
    return status


def unpicklable():
    return lambda: None


def linger(folder, seconds):
    rank = os.environ["RANK"]

    def save(number, frame):
        time.sleep(0.2)
        with open(f"{folder}/saved{rank}", "w") as file:
            file.write(str(number))
        sys.exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, save)
    with open(f"{folder}/pid{rank}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/pid{rank}.part", f"{folder}/pid{rank}")
    time.sleep(seconds)
    return rank
