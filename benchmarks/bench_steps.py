"""What a step of `Model.fit`, `evaluate` and `predict` costs more than the loop's, with which it takes turns.

    python benchmarks/bench_steps.py                  all cases, some minutes
    python benchmarks/bench_steps.py mnist-32 predict-256 --steps 4000

The cases are those of bench_fit.py. Both train or compute in one process: after each step of ours one by hand. What
makes a machine faster or slower for a second then meets both alike, so that some thousand steps tell microseconds,
where an epoch's time tells percents. Left out is what a call costs before its first step and after its last.

A figure is a mean over a block of steps, and the median of the blocks': some of what is done comes once in several
steps, such as reading small batches, of which ours reads up to 32 at once.

Each step finds in the processor's caches what the other way has left there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_fit import adam, cifar_in_memory, convolutions, mlp, mnist_in_memory, provide_data, steps_by_hand
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset
from turns import machine, row

import hapi
from hapi.callbacks.base import CallbackList
from hapi.datasets import CIFAR10, MNIST

Images = Callable[[Any], torch.Tensor]
BLOCK = 320
"""Steps: whole numbers of the batches that ours may read at once, or nearly so."""


def training(network: nn.Module, images: Images, classes: torch.Tensor, batch_size: int) -> Iterator[None]:
    """Steps of training by hand."""
    optimizer = adam(network)
    while True:
        for _ in steps_by_hand(images, classes, network, optimizer, batch_size):
            yield


def evaluating(network: nn.Module, images: Images, classes: torch.Tensor, batch_size: int) -> Iterator[None]:
    """Batches of an evaluation by hand."""
    network.eval()
    loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    while True:
        for start in range(0, len(classes), batch_size):
            labels = classes[start : start + batch_size]
            outputs = network(images(slice(start, start + batch_size)))
            loss_sum += cross_entropy(outputs, labels) * len(labels)
            correct += (outputs.argmax(1) == labels).sum()
            # Not kept while ours computes.
            del labels, outputs
            yield


def predicting(network: nn.Module, images: Images, classes: torch.Tensor, batch_size: int) -> Iterator[None]:
    """Batches of a prediction by hand."""
    network.eval()
    while True:
        parts = []
        for start in range(0, len(classes), batch_size):
            parts.append(network(images(slice(start, start + batch_size))))
            yield


class Turns:
    """Lets the loop take a step after each of ours, where the trainer asks whether anybody looks at the step's values.

    A callback would be a part of what is measured.
    """

    def __init__(self, by_hand: Iterator[None]) -> None:
        self._by_hand, self._wants = by_hand, CallbackList.wants_batch_logs
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self._last: float | None = None

    def __enter__(self) -> Turns:
        turns = self

        def wants_batch_logs(callbacks: CallbackList, kind: str, step: int) -> bool:
            due = turns._wants(callbacks, kind, step)
            ours_ended = time.perf_counter()
            # A loop turns gradients off once a pass.
            with torch.set_grad_enabled(kind == "train"):
                began = time.perf_counter()
                next(turns._by_hand)
                ended = time.perf_counter()
            # A call's first step is not whole.
            if step and turns._last is not None:
                turns.ours.append(ours_ended - turns._last)
                turns.theirs.append(ended - began)
            turns._last = time.perf_counter()
            return due

        CallbackList.wants_batch_logs = wants_batch_logs  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        CallbackList.wants_batch_logs = self._wants  # type: ignore[method-assign]


def run(case: str, steps: int) -> list[str]:
    """The cells of a case: microseconds of the loop's step and of ours, what ours takes more, and the ratio."""
    name, batch_size = case.split("-")[0], int(case.split("-")[1])
    data: Any = MNIST(mode="train")
    images, classes = mnist_in_memory()
    make: Callable[[], nn.Module] = mlp
    if case.startswith("cifar10"):
        data, make = Subset(CIFAR10(mode="train"), range(12500)), convolutions
        images, classes = cifar_in_memory()
    if case.endswith("tensors"):
        converted = images.div(255)
        data = converted, classes

        def batch(rows: Any) -> torch.Tensor:
            return converted[rows]

    else:

        def batch(rows: Any) -> torch.Tensor:
            return images[rows].float().div_(255)

    network = make()
    model = hapi.Model(network).prepare(adam(network), nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    hand = {"evaluate": evaluating, "predict": predicting}.get(name, training)
    with Turns(hand(make(), batch, classes, batch_size)) as turns:
        if hand is training:
            model.fit(data, epochs=10**6, batch_size=batch_size, num_iters=steps)
        while hand is not training and len(turns.ours) < steps:
            getattr(model, name)(data, batch_size=batch_size)
    ours, theirs = (means(times) for times in (turns.ours, turns.theirs))
    more = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return [f"{statistics.median(theirs):.0f}", f"{statistics.median(ours):.0f}", f"{more:+.0f}", f"{ratio:.3f}"]


def means(times: list[float]) -> list[float]:
    """Microseconds a step, of each block."""
    block = min(BLOCK, len(times))
    return [statistics.fmean(times[i : i + block]) * 1e6 for i in range(0, len(times) - block + 1, block)]


CASES = ("mnist-32", "mnist-256", "mnist-32-tensors", "cifar10-32", "evaluate-256", "predict-256")


def main() -> None:
    parser = argparse.ArgumentParser(description="A step of Model.fit, evaluate and predict against one by hand.")
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=3200, help="of each way")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(CASES)}")
    torch.set_flush_denormal(True)
    provide_data()
    table = [row("case", ["by hand, us", "ours, us", "more, us", "ratio"]), row("---", ["---"] * 4)]
    for case in options.cases:
        table.append(row(case, run(case, options.steps)))
        print(table[-1], file=sys.stderr)
    print(machine(), "", *table, sep="\n")


if __name__ == "__main__":
    main()
