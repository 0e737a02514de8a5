"""What a save within an epoch costs the training, written at once and by a thread, against the checkpoint's size.

    python benchmarks/bench_saving.py                    1 to 100 MB
    python benchmarks/bench_saving.py --sizes 1000       1 GB (10 minutes; 10 GB of memory, as much disk for a moment)
    python benchmarks/bench_saving.py --sizes 1 10 100 --rounds 3

Each fit takes the same steps of the same network with Adam and saves twice, after a third and after two thirds of
them. "stall" is the time that the training stands still for a save: from the edge of the optimizer step to its end.
"whole" is what the two saves add to the elapsed time of the fit, over one that does not save: where the thread shares
its cores with the training, it is more than the stall. The ways alternate; shown are medians and, in brackets, the
smallest and largest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn
from turns import machine

import hapi
from hapi.callbacks import ModelCheckpoint

LIMIT = 0.2
STEPS = 30


class Timed(ModelCheckpoint):
    """Notes how long each save within the epoch holds the training up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(every_n_steps=STEPS // 3, keep_last=1, save_freq=10**6, **options)
        self.stalls: list[float] = []

    def save_within(self, stopping: bool) -> None:
        begun = time.perf_counter()
        super().save_within(stopping)
        self.stalls.append(time.perf_counter() - begun)


class Rest(hapi.callbacks.Callback):
    """So that a step takes as long as one of a network of this size on data of some size."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        time.sleep(self.seconds)


def network(megabytes: float) -> nn.Module:
    """So large that weights and Adam's two moments together have this size."""
    width = max(8, int((megabytes * 1e6 / 12 / 4) ** 0.5))
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


def fit(megabytes: float, way: str, folder: str) -> tuple[float, list[float]]:
    net = network(megabytes)
    width = net[0].in_features
    model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters(), lr=1e-4), nn.MSELoss())
    data = torch.ones(STEPS, width), torch.ones(STEPS, width)
    saver = Timed(save_dir=folder, asynchronous=way == "thread")
    # A step that lasts a tenth of what writing takes, so that the thread has time, as in a real training.
    callbacks: list[Any] = [Rest(megabytes * 4e-4)] + ([saver] if way != "none" else [])
    begun = time.perf_counter()
    model.fit(data, batch_size=1, num_iters=STEPS - 1, callbacks=callbacks, verbose=0)
    return time.perf_counter() - begun, saver.stalls


def main() -> None:
    parser = argparse.ArgumentParser(description="What a save within an epoch costs the training.")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 10, 100], help="megabytes")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{machine()}; {options.rounds} rounds")
    print(f"{'MB':>6}  {'at once':>24}  {'by a thread':>24}  {'ratio':>22}")
    for size in options.sizes:
        stalls: dict[str, list[float]] = {"at once": [], "thread": []}
        whole: dict[str, list[float]] = {"none": [], "at once": [], "thread": []}
        for _ in range(options.rounds):
            for way in whole:
                with tempfile.TemporaryDirectory(dir=".") as folder:
                    seconds, found = fit(size, way, folder)
                whole[way].append(seconds)
                if way != "none":
                    stalls[way].append(statistics.mean(found))
        ratios = [b / a for a, b in zip(stalls["at once"], stalls["thread"], strict=True)]
        row = "  ".join(f"{shown(stalls[way], 1e3, 'ms'):>24}" for way in ("at once", "thread"))
        print(f"{size:>6g}  {row}  {shown(ratios, 1, ''):>22}")
        base = statistics.median(whole["none"])
        added = ", ".join(f"{way} {statistics.median(whole[way]) - base:+.2f} s" for way in ("at once", "thread"))
        print(f"{'':>6}  whole fit {base:.2f} s; the two saves add: {added}", flush=True)
    print(f"limit of the ratio: {LIMIT}")


def shown(values: list[float], factor: float, unit: str) -> str:
    low, middle, high = (f"{factor * v:.3g}" for v in (min(values), statistics.median(values), max(values)))
    return f"{middle} {unit}".strip() + f" ({low} to {high})"


if __name__ == "__main__":
    main()
