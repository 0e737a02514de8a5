"""What a step of `Model.fit` costs on two processes, in time and exchanges, against hand-written loops with DDP.

    python benchmarks/bench_ddp.py                       all of it: 3 rounds, a few minutes
    python benchmarks/bench_ddp.py --rounds 5 fit hand   only these ways

Each run is two fresh processes that train over gloo, on one thread each, and the ways alternate, so that a change of
the machine's speed meets all of them alike. A step is timed from the end of the first epoch to the end of the last; the
first one warms up. Ratios are taken within a round. Shown are medians over the rounds and, in brackets, the smallest
and largest. CPU time, of both processes together, says more than elapsed time where other programs are running.

Random numbers, 784 a row, batch 32 a process, Linear 784-512, ReLU, Linear 512-10, Adam.

The iterable gives whole batches and shards itself, so that all that `fit-iterable` does besides is to agree with the
other process on whether either still has data. `fit-unasked` is the same without that agreement, which only equal
lengths allow: between the two lies its cost.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_fit import machine, now, report
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

WORLD_SIZE = 2
BATCH_SIZE = 32
EPOCHS = 4  # the first is not counted
STEPS = 250

Ends = list[tuple[float, float]]
"""When each epoch ended: `now()`."""
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


def make_data(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = steps * WORLD_SIZE * BATCH_SIZE
    return torch.randn(rows, 784, generator=generator), torch.randint(10, (rows,), generator=generator)


class Parts(IterableDataset):
    """Batches in an order of their own, every second one for each process."""

    sharded = True

    def __init__(self, steps: int) -> None:
        self.data = make_data(steps)

    def __iter__(self) -> Batches:
        x, y = self.data
        generator = torch.Generator().manual_seed(1)
        for rows in torch.randperm(len(x), generator=generator).split(WORLD_SIZE * BATCH_SIZE):
            mine = rows.chunk(WORLD_SIZE)[int(os.environ["RANK"])]
            yield x[mine], y[mine]


# The ways to train. Each trains so many epochs of so many steps and returns when each epoch ended.


def fit(epochs: int, steps: int) -> Ends:
    """`Model.fit` on tensors."""
    return fit_on(make_data(steps), epochs, batch_size=BATCH_SIZE)


def fit_iterable(epochs: int, steps: int) -> Ends:
    """`Model.fit` on an iterable data set."""
    return fit_on(DataLoader(Parts(steps), batch_size=None), epochs)


def fit_unasked(epochs: int, steps: int) -> Ends:
    """The same, where nobody asks who still has data."""
    from hapi.distributed import group

    class Told:
        def __init__(self, value: int) -> None:
            self._value = value

        def wait(self) -> int:
            return WORLD_SIZE * self._value

    group.PendingSum = Told  # type: ignore[assignment,misc]
    return fit_iterable(epochs, steps)


def fit_on(data: Any, epochs: int, **options: Any) -> Ends:
    import hapi

    network = make_network()
    ends: Ends = []

    class Clock(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            ends.append(now())

    model = hapi.Model(network).prepare(
        torch.optim.Adam(network.parameters(), lr=1e-3, fused=True), nn.CrossEntropyLoss(), hapi.metrics.Accuracy()
    )
    model.fit(data, epochs=epochs, callbacks=[Clock()], **options)
    return ends


def hand(epochs: int, steps: int) -> Ends:
    """A loop over tensors that shares out each global batch as `fit` does."""
    x, y = make_data(steps)
    generator = torch.Generator().manual_seed(1)

    def batches() -> Batches:
        for rows in torch.randperm(len(x), generator=generator).split(WORLD_SIZE * BATCH_SIZE):
            mine = rows.chunk(WORLD_SIZE)[int(os.environ["RANK"])]
            yield x[mine], y[mine]

    return hand_on(batches, epochs)


def hand_iterable(epochs: int, steps: int) -> Ends:
    """A loop over the same iterable, which hangs where processes have unequally many batches."""
    loader = DataLoader(Parts(steps), batch_size=None)
    return hand_on(lambda: iter(loader), epochs)


def hand_on(batches: Callable[[], Batches], epochs: int) -> Ends:
    network = make_network()
    torch.distributed.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    ends: Ends = []
    for _ in range(epochs):
        loss_sum, correct, count = torch.zeros(()), torch.zeros((), dtype=torch.int64), 0
        for x, y in batches():
            outputs = wrapped(x)
            loss = cross_entropy(outputs, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach() * len(y)
            correct += (outputs.detach().argmax(1) == y).sum()
            count += len(y)
        values = torch.stack([loss_sum, correct.float(), torch.tensor(float(count))])
        torch.distributed.all_reduce(values)
        print(f"loss {values[0] / values[2]:.4f} - acc {values[1] / values[2]:.4f}")
        ends.append(now())
    torch.distributed.destroy_process_group()
    return ends


WAYS: dict[str, Callable[[int, int], Ends]] = {
    "hand": hand,
    "fit": fit,
    "hand-iterable": hand_iterable,
    "fit-iterable": fit_iterable,
    "fit-unasked": fit_unasked,
}
# Each way that is compared, with what it is divided by.
RATIOS = (("fit", "hand"), ("fit-iterable", "hand-iterable"), ("fit-iterable", "fit-unasked"))
UNITS = {"elapsed": "ms/step", "cpu": "ms/step", "peak": "MB"}


# Running and reporting


def time_one(name: str) -> dict[str, float]:
    """Train one way in this process, one of two."""
    ends = WAYS[name](EPOCHS, STEPS)
    unit = 1024 if sys.platform != "darwin" else 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    steps = (EPOCHS - 1) * STEPS
    elapsed, cpu = (1000 * (last - first) / steps for first, last in zip(ends[0], ends[-1], strict=True))
    return {"elapsed": elapsed, "cpu": cpu, "peak": peak / 2**20}


def count_one(name: str, steps: int) -> dict[str, float]:
    """The exchanges of two epochs of so many steps, by kind, as torch's profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        WAYS[name](2, steps)
    return dict(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))


def run_apart(*arguments: str) -> list[dict[str, float]]:
    """Two fresh processes; the last line of each is its result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD_SIZE)}
    common = {**os.environ, **meeting, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    outputs = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{' '.join(arguments)} failed:\n" + "\n".join(text for pair in outputs for text in pair))
    return [json.loads(written.splitlines()[-1]) for written, _ in outputs]


def timed(name: str) -> dict[str, float]:
    """One run of a way; CPU time and memory are those of both processes."""
    first, second = run_apart("--one", name)
    result = {key: first[key] + second[key] for key in first} | {"elapsed": max(first["elapsed"], second["elapsed"])}
    cells = "".join(f"{result[key]:10.2f} {unit}" for key, unit in UNITS.items())
    print(f"  {name:<14}{cells}", flush=True)
    return result


def exchanges(name: str) -> str:
    """The exchanges of one optimizer step: what 40 steps more bring, divided by 40."""
    few, many = (Counter(run_apart("--count", str(steps), "--one", name)[0]) for steps in (20, 40))
    more = {kind: (many[kind] - few[kind]) / 40 for kind in sorted(many) if many[kind] != few[kind]}
    return ", ".join(f"{count:.2f} {kind.removeprefix('gloo:')}" for kind, count in more.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="A step of Model.fit on two processes against hand-written loops.")
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is run")
    parser.add_argument("--one", choices=WAYS, help="be one of the processes of this way; prints the result as JSON")
    parser.add_argument("--count", type=int, help="with --one: count the exchanges of so many steps")
    options = parser.parse_args()
    if options.one:
        result = time_one(options.one) if options.count is None else count_one(options.one, options.count)
        print(json.dumps(result))
        return
    unknown = set(options.ways) - set(WAYS)
    if unknown:
        parser.error(f"unknown ways {sorted(unknown)}; there are {', '.join(WAYS)}")
    print(machine())
    rounds = []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}")
        rounds.append({name: timed(name) for name in options.ways})
    print("", *report(rounds, RATIOS, UNITS), sep="\n")
    print("\nexchanges of an optimizer step")
    for name in options.ways:
        print(f"{name:<28}{exchanges(name)}")


if __name__ == "__main__":
    main()
