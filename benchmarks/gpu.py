"""What `Model.fit` costs and gives on a card: one table of step times, one of checks, within 10 minutes.

    python benchmarks/gpu.py                              all of it
    python benchmarks/gpu.py mlp --laps 15                one of the networks, and the checks
    python benchmarks/gpu.py --no-checks                  only the times

Images are random bytes in memory, kept as hapi.datasets keeps its own. Networks: MNIST's MLP (batch 128),
examples/cifar10.py's (256), and ResNet-18 for 32 x 32 pixels in bf16, channels last (512); fused Adam. The ways take
turns, an epoch each (see turns.py):

fit       `Model.fit`: images in the host's memory, kept on the card from the second epoch on; accuracy kept, lines on
hand      a tuned loop: all images on the card, no value read in an epoch
compiled  the same loop with `torch.compile`
graph     the same loop, its whole step replayed as one CUDA graph

The checks are described in gpu_checks.py. Without a card the same programs run at small sizes on the CPU, which shows
that they run, and no more, in some minutes; what that leaves out is told first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from bench_fit import adam, convolutions, mlp, steps_of
from gpu_checks import CHECKS, ONLY_ON_CARDS
from torch import nn
from torch.nn.functional import cross_entropy
from turns import Laps, Way, compare, machine, report, row

CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CARD else "cpu")
WAYS = ("fit", "hand", "compiled", "graph") if CARD else ("fit", "hand")
LONGEST = 120.0
"""Seconds that a check may take."""


def resnet18() -> nn.Module:
    """torchvision's, whose first layers are made for images of 32 x 32."""
    from torchvision.models import resnet18 as make

    torch.manual_seed(0)
    network = make(num_classes=10)
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network.to(memory_format=torch.channels_last)


class Case(NamedTuple):
    """A network and its data."""

    make: Callable[[], nn.Module]
    shape: tuple[int, int, int]
    half: bool
    """Whether it computes in bf16."""
    batch_size: int
    steps: int
    """An epoch's, on a card."""

    def sizes(self) -> tuple[int, int]:
        """Batch size and steps of an epoch on this machine."""
        return (self.batch_size, self.steps) if CARD else (self.batch_size // 32, 4)

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images, uint8, and classes."""
        generator = torch.Generator().manual_seed(0)
        batch_size, steps = self.sizes()
        images = torch.randint(256, (batch_size * steps, *self.shape), generator=generator, dtype=torch.uint8)
        return images, torch.randint(10, (len(images),), generator=generator)


CASES = {
    "mlp": Case(mlp, (1, 28, 28), False, 128, 400),
    "cifar10": Case(convolutions, (3, 32, 32), False, 256, 200),
    "resnet18-bf16": Case(resnet18, (3, 32, 32), True, 512, 50),
}


# The ways. Each marks a lap at the end of every epoch, and goes on until it is stopped.


def fit(case: Case, laps: Laps) -> None:
    """`Model.fit` on images in memory, as `hapi.datasets` has them."""
    import hapi
    from hapi.datasets.files import Loaded
    from hapi.datasets.images import ImageDataset

    class Marks(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            laps.mark(loss=logs["loss"], acc=logs["acc"], steps=steps_of(optimizer))

    data = ImageDataset(Loaded(*case.data(), [str(n) for n in range(10)], []), "train", None, None)
    network = case.make()
    optimizer = adam(network)
    model = hapi.Model(network).prepare(
        optimizer, nn.CrossEntropyLoss(), hapi.metrics.Accuracy(), amp_configs="bf16" if case.half else None
    )
    model.fit(data, epochs=10**6, batch_size=case.sizes()[0], callbacks=[Marks()])


class Loop:
    """The tuned loop: its step, and what an epoch adds up."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.network = case.make().to(DEVICE)
        self.optimizer = adam(self.network)
        self.loss_sum = torch.zeros((), device=DEVICE)
        self.correct = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """A training step on bytes."""
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.case.half):
            outputs = self.network(images.float().div_(255))
            loss = cross_entropy(outputs, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss_sum += loss.detach()
        self.correct += (outputs.detach().argmax(1) == labels).sum()

    def run(self, step: Callable[[torch.Tensor, torch.Tensor], None], laps: Laps) -> None:
        """Epochs without end."""
        batch_size, steps = self.case.sizes()
        images, labels = (tensor.to(DEVICE) for tensor in self.case.data())
        while True:
            self.loss_sum.zero_()
            self.correct.zero_()
            for rows in torch.randperm(len(labels), device=DEVICE).split(batch_size):
                step(images[rows], labels[rows])
            values = {"loss": self.loss_sum.item() / steps, "acc": self.correct.item() / len(labels)}
            print(values)
            laps.mark(**values, steps=steps_of(self.optimizer))


def hand(case: Case, laps: Laps) -> None:
    """Without compilation."""
    loop = Loop(case)
    loop.run(loop.step, laps)


def compiled(case: Case, laps: Laps) -> None:
    """Its network and its backward pass compiled."""
    loop = Loop(case)
    loop.network.compile()
    loop.run(loop.step, laps)


def graph(case: Case, laps: Laps) -> None:
    """The whole step, optimizer included, recorded once and replayed."""
    loop = Loop(case)
    # Counts its steps, and reads its rate, on the card.
    loop.optimizer.param_groups[0]["capturable"] = True
    images, labels = (tensor[: case.batch_size].to(DEVICE) for tensor in case.data())
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            loop.step(images, labels)
    torch.cuda.current_stream().wait_stream(aside)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        loop.step(images, labels)

    def replay(new_images: torch.Tensor, new_labels: torch.Tensor) -> None:
        images.copy_(new_images)
        labels.copy_(new_labels)
        recorded.replay()

    loop.run(replay, laps)


PROGRAMS: dict[str, Callable[[Case, Laps], None]] = {"fit": fit, "hand": hand, "compiled": compiled, "graph": graph}


# Running and reporting


def times(name: str, laps: int, log: Path) -> Iterator[str]:
    """The table of a case, without the ways that cannot run here: one that fails is named, and the rest goes on."""
    names = list(WAYS)
    while names:
        ways = [Way(way, [sys.executable, __file__, name, "--as", way]) for way in names]
        try:
            compare(ways, laps, log)
        except SystemExit as ended:
            failed, _, reason = str(ended).partition(" ")
            yield f"{failed} {reason}\n"
            names.remove(failed)
            continue
        pairs = [("fit", other) for other in names if other != "fit"]
        yield from report(ways, pairs, {"elapsed": 1000 / CASES[name].sizes()[1]})
        yield "\n" + ", ".join(f"{way.name}: loss {way.laps[-1]['loss']:.3f}" for way in ways)
        return


def checks() -> Iterator[str]:
    """A row for each check: what it found, or how it failed."""
    yield row("check", ["", "what was seen"])
    yield row("---", ["---"] * 2)
    for name in CHECKS:
        if name in ONLY_ON_CARDS and not CARD:
            continue
        command = [sys.executable, str(Path(__file__).with_name("gpu_checks.py")), name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            yield row(name, ["FAILED", f"not done after {LONGEST:.0f} s"])
            continue
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
        where = " on gloo" if name == "nccl" and not CARD else ""
        yield row(name, ["FAILED" if done.returncode else f"passed{where}", lines[-1]])


def left_out() -> str:
    """What needs a card."""
    ways = ", ".join(name for name in PROGRAMS if name not in WAYS)
    return (
        f"There is no card here. Left out: the ways {ways}; the checks {', '.join(ONLY_ON_CARDS)}. Sizes were cut to a "
        "few samples, so the times say nothing; the nccl check ran on gloo."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Model.fit on a card: step times and checks.")
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--laps", type=int, default=9, help="how many epochs of each way are timed")
    parser.add_argument("--no-checks", action="store_true", help="only the times")
    parser.add_argument("--as", dest="one", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(CASES)}")
    if options.one:
        PROGRAMS[options.one](CASES[options.cases[0]], Laps())
    began = time.perf_counter()
    print(machine() + (f", {torch.cuda.get_device_name()}" if CARD else ", no card"))
    if not CARD:
        print(left_out())
    print("Milliseconds a step: medians, quartiles in brackets.")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            print(f"\n### {name}\n", flush=True)
            print(*times(name, options.laps, Path(folder, "log")), sep="\n", flush=True)
    if not options.no_checks:
        print("\n### Checks\n")
        for line in checks():
            print(line, flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
