"""What the options of `prepare` that are to save time do to an epoch of `Model.fit`, in one process.

    python benchmarks/bench_options.py                       all of them, a quarter of an hour or more
    python benchmarks/bench_options.py named compile         these alone

On CIFAR-10's first 6400 images, 128 in a batch, with the network of `examples/cifar10.py`. `plain` is an Adam of
torch's as scripts write it; `named` the one that `prepare("adam")` makes; the others are `named` with one option more.
Ways take turns and are compared epoch by epoch (see turns.py). `compile` compiles before its first lap. What the
options do on a card is gpu.py's to say.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_fit import UNITS, convolutions, fit_on, provide_data
from torch.utils.data import Subset
from turns import Laps, Way, compare, machine, report

BATCH_SIZE = 128
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "named": {},
    "channels-last": {"channels_last": True},
    "compile": {"compile": True},
    "bf16": {"amp_configs": "bf16"},
}


def fit(laps: Laps, name: str) -> None:
    """`Model.fit` with what the way of this name asks for."""
    from hapi.datasets import CIFAR10

    network = convolutions()
    optimizer: Any = torch.optim.Adam(network.parameters(), lr=1e-3) if name == "plain" else "adam"
    fit_on(Subset(CIFAR10(mode="train"), range(6400)), network, laps, BATCH_SIZE, optimizer, **OPTIONS[name])


def main() -> None:
    parser = argparse.ArgumentParser(description="Options of prepare, against a fit without them.")
    parser.add_argument("ways", nargs="*", default=list(OPTIONS), help=f"of {', '.join(OPTIONS)}")
    parser.add_argument("--laps", type=int, default=2, help="epochs of each process that are timed")
    parser.add_argument("--rounds", type=int, default=5, help="how many processes of each way")
    parser.add_argument("--as", dest="one", choices=OPTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.ways) - set(OPTIONS):
        parser.error(f"unknown ways {sorted(unknown)}; there are {', '.join(OPTIONS)}")
    torch.set_flush_denormal(True)
    if options.one:
        fit(Laps(), options.one)
    provide_data()
    ways = [Way(name, [sys.executable, __file__, "--as", name], on_screen=True) for name in options.ways]
    with tempfile.TemporaryDirectory() as folder:
        compare(ways, options.laps, Path(folder, "log"), options.rounds)
    print(machine(), "", sep="\n")
    print(*report(ways, [(name, options.ways[0]) for name in options.ways[1:]], UNITS), sep="\n")
    print("\nlosses of the last lap:", {way.name: round(way.laps[-1]["loss"], 3) for way in ways})


if __name__ == "__main__":
    main()
