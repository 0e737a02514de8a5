"""What `Model.fit` costs: an epoch of examples/mnist.py against hand-written loops, and the peak memory.

    python benchmarks/bench_fit.py                       all of it: 3 rounds, a few minutes
    python benchmarks/bench_fit.py --rounds 5 fit hand   only these ways
    python benchmarks/bench_fit.py --denormals           with denormal numbers kept

Each run is a process of its own, and the ways alternate, so that a change of the machine's speed meets all of them
alike. An epoch is timed from the end of the first epoch to the end of the last; the first one warms up. Ratios are
taken within a round. Shown are medians over the rounds and, in brackets, the smallest and largest. CPU time, of all
threads together, says more than elapsed time where other programs are running.

Full MNIST (HAPI_DATA_HOME, or downloaded), batch 32, Linear 784-512, ReLU, Dropout 0.2, Linear 512-10, Adam.

All ways flush denormal numbers to zero, as examples/mnist.py does. Where a pixel is nearly always black, Adam's mean of
the gradients decays into them, and they can double an epoch's time on a CPU, whoever writes the loop.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH_SIZE = 32
EPOCHS = 3  # the first is not counted

Ends = list[tuple[float, float]]
"""When each epoch ended: `now()`."""


def now() -> tuple[float, float]:
    """Elapsed seconds, and CPU seconds of this process."""
    return time.perf_counter(), time.process_time()


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 10))


def mnist_in_memory() -> tuple[torch.Tensor, torch.Tensor]:
    """The training images, (60000, 28, 28) uint8, and their classes, (60000,) int64; no module is imported for it."""
    raw = Path(os.environ["HAPI_DATA_HOME"], "MNIST", "raw")
    images = torch.frombuffer(bytearray((raw / "train-images-idx3-ubyte").read_bytes()), dtype=torch.uint8, offset=16)
    classes = torch.frombuffer(bytearray((raw / "train-labels-idx1-ubyte").read_bytes()), dtype=torch.uint8, offset=8)
    return images.reshape(-1, 28, 28), classes.long()


# The ways to train. Each trains EPOCHS epochs and returns when each of them ended.


def fit() -> Ends:
    """`Model.fit` on `hapi.datasets.MNIST`, with its bar or lines as they are by default."""
    import hapi
    from hapi.datasets import MNIST

    return fit_on(MNIST(mode="train"), hapi)


def fit_tensors() -> Ends:
    """`Model.fit` on a float32 tensor of all images."""
    import hapi

    images, classes = mnist_in_memory()
    return fit_on((images.div(255), classes), hapi)


def fit_on(data: object, hapi: object) -> Ends:
    network = make_network()
    ends: Ends = []

    class Clock(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            ends.append(now())

    model = hapi.Model(network).prepare(
        torch.optim.Adam(network.parameters(), lr=1e-3, fused=True),
        nn.CrossEntropyLoss(),
        hapi.metrics.Accuracy(),
    )
    model.fit(data, epochs=EPOCHS, batch_size=BATCH_SIZE, callbacks=[Clock()])
    return ends


def hand() -> Ends:
    """A tuned loop over uint8 tensors in memory: a batch is one indexing, no value is read in an epoch."""
    images, classes = mnist_in_memory()
    return hand_on(lambda rows: images[rows].float().div_(255), classes)


def hand_tensors() -> Ends:
    """The same loop over a float32 tensor of all images."""
    images, classes = mnist_in_memory()
    converted = images.div(255)
    return hand_on(lambda rows: converted[rows], classes)


def hand_on(batch: Callable[[torch.Tensor], torch.Tensor], classes: torch.Tensor) -> Ends:
    network = make_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    ends: Ends = []
    for _ in range(EPOCHS):
        loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for rows in torch.randperm(len(classes)).split(BATCH_SIZE):
            labels = classes[rows]
            outputs = network(batch(rows))
            loss = cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach() * len(rows)
            correct += (outputs.detach().argmax(1) == labels).sum()
        print(f"loss {loss_sum.item() / len(classes):.4f} - acc {correct.item() / len(classes):.4f}")
        ends.append(now())
    return ends


def usual() -> Ends:
    """The usual script: torchvision's data set, ToTensor, DataLoader, and `.item()` each step."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    data = MNIST(os.environ["HAPI_DATA_HOME"], train=True, transform=ToTensor())
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    network = make_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    ends: Ends = []
    for _ in range(EPOCHS):
        loss_sum, correct = 0.0, 0
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = network(images)
            loss = cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(labels)
            correct += (outputs.argmax(1) == labels).sum().item()
        print(f"loss {loss_sum / len(data):.4f} - acc {correct / len(data):.4f}")
        ends.append(now())
    return ends


WAYS: dict[str, Callable[[], Ends]] = {
    "hand": hand,
    "fit": fit,
    "usual": usual,
    "hand-tensors": hand_tensors,
    "fit-tensors": fit_tensors,
}
# Each way that is compared, with what it is divided by.
RATIOS = (("fit", "hand"), ("fit", "usual"), ("fit-tensors", "hand-tensors"))
UNITS = {"elapsed": "s/epoch", "cpu": "s/epoch", "peak": "MB"}


# Running and reporting


def provide_data() -> None:
    """Download MNIST if it is not there, and tell the runs where it is."""
    from hapi.datasets import MNIST
    from hapi.datasets.files import default_root

    MNIST(mode="train")
    os.environ["HAPI_DATA_HOME"] = str(default_root())


def run_one(name: str, denormals: bool) -> dict[str, float]:
    """Train one way in this process."""
    torch.set_flush_denormal(not denormals)
    ends = WAYS[name]()
    unit = 1024 if sys.platform != "darwin" else 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    elapsed, cpu = ((last - first) / (EPOCHS - 1) for first, last in zip(ends[0], ends[-1], strict=True))
    return {"elapsed": elapsed, "cpu": cpu, "peak": peak / 2**20}


def run_apart(name: str, denormals: bool) -> dict[str, float]:
    """Train one way in a fresh process; its last line is the result."""
    command = [sys.executable, __file__, "--one", name, *(["--denormals"] if denormals else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    cells = "".join(f"{result[key]:10.2f} {unit}" for key, unit in UNITS.items())
    print(f"  {name:<14}{cells}", flush=True)
    return result


def machine() -> str:
    """The machine and the versions that the figures hold for."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return (
        f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.system()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def report(
    rounds: list[dict[str, dict[str, float]]], ratios: Sequence[tuple[str, str]], units: Mapping[str, str]
) -> Iterator[str]:
    """The closing tables: of each way, in these units, and of each of these pairs that was run."""
    names = list(rounds[0])
    yield heading("way", [f"{key} ({unit})" for key, unit in units.items()])
    for name in names:
        yield row(name, [[one[name][key] for one in rounds] for key in units])
    yield "\n" + heading("ratio", list(units))
    for name, other in ratios:
        if name in names and other in names:
            yield row(f"{name} / {other}", [[one[name][key] / one[other][key] for one in rounds] for key in units])


def heading(first: str, others: list[str]) -> str:
    return f"{first:<28}" + "".join(f"{other:>26}" for other in others)


def row(first: str, columns: list[list[float]]) -> str:
    return heading(first, [spread(values) for values in columns])


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description="An epoch of Model.fit against hand-written loops.")
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is run")
    parser.add_argument("--denormals", action="store_true", help="keep denormal numbers")
    parser.add_argument("--one", choices=WAYS, help="run one way in this process and print the result as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one, options.denormals)))
        return
    unknown = set(options.ways) - set(WAYS)
    if unknown:
        parser.error(f"unknown ways {sorted(unknown)}; there are {', '.join(WAYS)}")
    provide_data()
    print(machine())
    rounds = []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}")
        rounds.append({name: run_apart(name, options.denormals) for name in options.ways})
    print("", *report(rounds, RATIOS, UNITS), sep="\n")


if __name__ == "__main__":
    main()
