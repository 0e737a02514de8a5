"""Starts a script by `hapi.distributed.spawn`:  python by_spawn.py PROCESSES SCRIPT [ARGUMENT ...]"""

from __future__ import annotations

import sys

import scripted

from hapi.distributed import spawn

if __name__ == "__main__":
    processes, *command = sys.argv[1:]
    spawn(scripted.run, (command,), nprocs=int(processes))
