"""What a step of `Model.fit` costs on several processes, in time and exchanges, against hand-written loops with DDP.

    python benchmarks/bench_ddp.py                        all of it on two processes, a quarter of an hour
    python benchmarks/bench_ddp.py fit hand --ranks 4     only these ways, on four

A way is fresh processes that train over gloo, on one thread each; the ways take turns of some steps and are compared
epoch by epoch (see turns.py).
CPU time, of all processes together, says more than elapsed time where other programs are running.

Random numbers in the shapes of MNIST, 60000 rows, 784 a row, batch 32 a process; the network of `bench_fit.mlp`, Adam.

The iterable gives whole batches and shards itself, so that all that `fit-iterable` does besides is to agree with the
other process on whether either still has data. `fit-unasked` is the same without that agreement, which only equal
lengths allow: between the two lies its cost.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from bench_fit import adam, mlp, steps_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset
from turns import Laps, Way, compare, machine, report, tell_unequal

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "2"))
BATCH_SIZE = 32
ROWS = 60000


def steps_on(ranks: int) -> int:
    """The steps of an epoch."""
    return ROWS // (ranks * BATCH_SIZE)


Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


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


# The ways to train: each marks a lap at the end of every epoch of so many steps, and goes on until it is stopped.


def fit(laps: Laps, steps: int) -> None:
    """`Model.fit` on tensors."""
    fit_on(make_data(steps), laps, batch_size=BATCH_SIZE)


def fit_iterable(laps: Laps, steps: int) -> None:
    """`Model.fit` on an iterable data set."""
    fit_on(DataLoader(Parts(steps), batch_size=None), laps)


def fit_unasked(laps: Laps, steps: int) -> None:
    """The same, where nobody asks who still has data."""
    from hapi.distributed import group

    class Told:
        def __init__(self, value: int) -> None:
            self._value = value

        def wait(self) -> list[int]:
            return [WORLD_SIZE * self._value]

    group.begin_sum = Told  # type: ignore[assignment]
    fit_iterable(laps, steps)


def fit_on(data: Any, laps: Laps, **options: Any) -> None:
    import hapi

    network = mlp()
    optimizer = adam(network)

    class Marks(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            laps.mark(loss=logs["loss"], steps=steps_of(optimizer))

    laps.pause_within_fit()
    model = hapi.Model(network).prepare(optimizer, nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    model.fit(data, epochs=10**6, callbacks=[Marks()], **options)


def hand(laps: Laps, steps: int) -> None:
    """A loop over tensors that shares out each global batch as `fit` does."""
    x, y = make_data(steps)
    generator = torch.Generator().manual_seed(1)

    def batches() -> Batches:
        for rows in torch.randperm(len(x), generator=generator).split(WORLD_SIZE * BATCH_SIZE):
            mine = rows.chunk(WORLD_SIZE)[int(os.environ["RANK"])]
            yield x[mine], y[mine]

    hand_on(batches, laps)


def hand_iterable(laps: Laps, steps: int) -> None:
    """A loop over the same iterable, which hangs where processes have unequally many batches."""
    loader = DataLoader(Parts(steps), batch_size=None)
    hand_on(lambda: iter(loader), laps)


def hand_on(batches: Callable[[], Batches], laps: Laps) -> None:
    network = mlp()
    torch.distributed.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = adam(network)
    while True:
        loss_sum, correct, samples = torch.zeros(()), torch.zeros((), dtype=torch.int64), 0
        for step, (x, y) in enumerate(batches(), 1):
            outputs = wrapped(x)
            loss = cross_entropy(outputs, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach() * len(y)
            correct += (outputs.detach().argmax(1) == y).sum()
            samples += len(y)
            laps.pause_after(step)
        values = torch.stack([loss_sum, correct.float(), torch.tensor(float(samples))])
        torch.distributed.all_reduce(values)
        print(f"loss {values[0] / values[2]:.4f} - acc {values[1] / values[2]:.4f}")
        laps.mark(loss=float(values[0] / values[2]), steps=steps_of(optimizer))


WAYS: dict[str, Callable[[Laps, int], None]] = {
    "fit": fit,
    "hand": hand,
    "fit-iterable": fit_iterable,
    "hand-iterable": hand_iterable,
    "fit-unasked": fit_unasked,
}
# Each way that is compared, with what it is divided by.
RATIOS = (("fit", "hand"), ("fit-iterable", "hand-iterable"), ("fit-iterable", "fit-unasked"))


# Running and reporting


class Counted(Laps):
    """Instead of laps: the exchanges of two epochs, as torch's profiler sees them, printed as a lap's values."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count()
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profile.start()

    def mark(self, **values: float) -> None:
        if next(self._numbers) == 1:
            self._profile.stop()
            names = Counter(event.name for event in self._profile.events() if event.name.startswith("gloo:"))
            super().mark()
            super().mark(**dict.fromkeys((*names, *values), 0.0) | names)


def places(ranks: int) -> list[dict[str, str]]:
    """The variables of each process of a group, with a port of its own; one thread a process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def made(name: str, ranks: int, *flags: str) -> Way:
    """A way on so many processes."""
    return Way(name, [sys.executable, __file__, "--as", name, *flags], places(ranks), on_screen=True)


def exchanges(name: str, ranks: int, log: Path) -> str:
    """The exchanges of one optimizer step: what 40 steps more bring, divided by 40."""
    found = []
    for steps in (20, 40):
        way = made(name, ranks, "--count", str(steps))
        compare([way], 1, log)
        found.append(Counter({key: number for key, number in way.laps[0].items() if key.startswith("gloo:")}))
    few, many = found
    more = {kind: (many[kind] - few[kind]) / 40 for kind in sorted(many) if many[kind] != few[kind]}
    return ", ".join(f"{number:.2f} {kind.removeprefix('gloo:')}" for kind, number in more.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="A step of Model.fit on several processes against hand-written loops.")
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--laps", type=int, default=2, help="how many epochs of each way are timed in a round")
    parser.add_argument("--rounds", type=int, default=8, help="how often all begin anew, in fresh processes")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each way")
    parser.add_argument("--as", dest="one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        laps = Laps() if options.count is None else Counted()
        WAYS[options.one](laps, options.count or steps_on(WORLD_SIZE))
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"unknown ways {sorted(unknown)}; there are {', '.join(WAYS)}")
    print(machine())
    print(
        f"{options.ranks} processes: milliseconds a step, CPU milliseconds a step, MB: medians, quartiles in brackets."
    )
    ways = [made(name, options.ranks) for name in options.ways]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        compare(ways, options.laps, log, options.rounds)
        a_step = 1000 / steps_on(options.ranks)
        units = {"elapsed": a_step, "cpu": a_step, "peak": 1.0}
        print(*report(ways, RATIOS, units), sep="\n", flush=True)
        wrong = tell_unequal(ways, ways[0])
        print("\nexchanges of an optimizer step\n")
        for name in options.ways:
            print(f"- {name}: {exchanges(name, options.ranks, log)}")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
