"""What hapi adds to the start of a job: `torchrun` with a script that starts the group itself, and with hapi's.

    python benchmarks/bench_startup.py                two processes, 7 rounds, a minute or two
    python benchmarks/bench_startup.py --rounds 3 torch model

Each run is a whole `torchrun` command, from its start to its end: imports, process group, DDP, one training step of a
small network, exit. The ways alternate, so that a change of the machine's speed meets all of them alike; differences
are taken within a round. Shown are medians over the rounds and, in brackets, the smallest and largest. CPU time, of all
processes together, says more than elapsed time where other programs are running.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from turns import machine

LIMIT = 0.5
PROCESSES = 2
ROOT = Path(__file__).parents[1]


def with_torch() -> None:
    """The group started and the network wrapped by hand."""
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    network = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    nn.functional.cross_entropy(network(torch.ones(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    dist.destroy_process_group()


def with_basic_api() -> None:
    """The same loop on hapi's basic API."""
    import torch
    from torch import nn

    import hapi

    hapi.distributed.init_parallel_env()
    network = hapi.distributed.DataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    nn.functional.cross_entropy(network(torch.ones(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()


def with_model() -> None:
    """The same step by `hapi.Model`."""
    import torch
    from torch import nn

    import hapi

    network = nn.Linear(8, 2)
    model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.1), nn.CrossEntropyLoss())
    model.train_batch(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))


WAYS = {"torch": with_torch, "basic": with_basic_api, "model": with_model}


def measure(way: str) -> tuple[float, float]:
    """Elapsed and CPU seconds of one job."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES), __file__, "--as", way]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    for _ in range(3):
        before, cpu = time.perf_counter(), _cpu_of_children()
        ended = subprocess.run(command, env=variables).returncode
        if not ended:
            return time.perf_counter() - before, _cpu_of_children() - cpu
        if way != "torch":
            break
        # A process of torch's alone aborts now and then, where its threads are running yet as the interpreter ends.
        print("torch's own script has failed, and is run once more", flush=True)
    raise SystemExit(f"{' '.join(command)} ended with {ended}")


def _cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--as", dest="body", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.body:
        WAYS[options.body]()
        return 0
    ways = ["torch", *(way for way in options.ways if way != "torch")]
    print(machine())
    for way in ways:
        measure(way)  # fills the disk's cache
    rounds = []
    for number in range(1, options.rounds + 1):
        rounds.append({way: measure(way) for way in ways})
        seen = ", ".join(f"{way} {elapsed:.2f} s (CPU {cpu:.2f} s)" for way, (elapsed, cpu) in rounds[-1].items())
        print(f"round {number}: {seen}", flush=True)
    print("way      elapsed seconds           CPU seconds               elapsed over torch        CPU over torch")
    worst = 0.0
    for way in ways:
        elapsed, cpu = ([round_[way][k] for round_ in rounds] for k in (0, 1))
        over = [[round_[way][k] - round_["torch"][k] for round_ in rounds] for k in (0, 1)]
        print(f"{way:8}", *(f"{spread(values):25}" for values in (elapsed, cpu, *over)))
        worst = max(worst, statistics.median(over[0]))
    print(f"limit: {LIMIT} s elapsed over torch; {'kept' if worst <= LIMIT else 'NOT KEPT'}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
