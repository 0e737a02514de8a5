"""What `Model.fit`, `evaluate` and `predict` cost in one process, against loops written by hand.

    python benchmarks/bench_fit.py                        all cases, half an hour
    python benchmarks/bench_fit.py mnist-32 --rounds 9    one of them
    python benchmarks/bench_fit.py mnist-32 --ways fit hand --denormals

The ways of a case take turns of some steps, are compared epoch by epoch, and begin anew in fresh processes for each
round (see turns.py); fit with its bar, accuracy and History as they are by default on a terminal. CPU time, of all
threads together, says more than elapsed time where other programs are running. The command fails where two ways did not
do the same work.

mnist-*: full MNIST, Linear 784-512, ReLU, Dropout 0.2, Linear 512-10, fused Adam, at that batch size.
mnist-32-usual: the same against torchvision's data set in a DataLoader, and `.item()` in each step; and fit on that
data set.
mnist-32-tensors: the same on a float32 tensor of all images.
cifar10-32: examples/cifar10.py's network, fused Adam, a quarter of its images.
evaluate-256, predict-256: MNIST's training images without training, loss and accuracy, or the outputs of all.

All ways flush denormal numbers to zero, as examples/mnist.py does. Where a pixel is nearly always black, Adam's mean of
the gradients decays into them, and they can double an epoch's time on a CPU, whoever writes the loop.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from turns import Laps, Way, compare, machine, report, tell_unequal

UNITS = {"elapsed": 1.0, "cpu": 1.0, "peak": 1.0}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 10))


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def adam(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)


def steps_of(optimizer: torch.optim.Optimizer) -> float:
    """How many steps an Adam has taken, as it counts them itself."""
    return next((float(state["step"]) for state in optimizer.state.values()), 0.0)


def mnist_in_memory() -> tuple[torch.Tensor, torch.Tensor]:
    """The training images, (60000, 1, 28, 28) uint8, and classes, (60000,) int64; no module is imported for it."""
    raw = Path(os.environ["HAPI_DATA_HOME"], "MNIST", "raw")
    images = torch.frombuffer(bytearray((raw / "train-images-idx3-ubyte").read_bytes()), dtype=torch.uint8, offset=16)
    classes = torch.frombuffer(bytearray((raw / "train-labels-idx1-ubyte").read_bytes()), dtype=torch.uint8, offset=8)
    return images.reshape(-1, 1, 28, 28), classes.long()


def cifar_in_memory() -> tuple[torch.Tensor, torch.Tensor]:
    """A quarter of CIFAR-10's training images, (12500, 3, 32, 32) uint8, and their classes, (12500,) int64."""
    import pickle

    images, classes = [], []
    for number in range(1, 6):
        path = Path(os.environ["HAPI_DATA_HOME"], "cifar-10-batches-py", f"data_batch_{number}")
        batch = pickle.loads(path.read_bytes(), encoding="latin1")
        images.append(torch.from_numpy(batch["data"]).reshape(-1, 3, 32, 32))
        classes += batch["labels"]
    return torch.cat(images)[:12500].clone(), torch.tensor(classes[:12500])


# The ways. Each marks a lap at the end of every epoch, and goes on until it is stopped.


def fit(laps: Laps, batch_size: int) -> None:
    """`Model.fit` on `hapi.datasets.MNIST`."""
    from hapi.datasets import MNIST

    fit_on(MNIST(mode="train"), mlp(), laps, batch_size)


def fit_tensors(laps: Laps, batch_size: int) -> None:
    """`Model.fit` on a float32 tensor of all images."""
    images, classes = mnist_in_memory()
    fit_on((images.div(255), classes), mlp(), laps, batch_size)


def fit_cifar(laps: Laps, batch_size: int) -> None:
    """`Model.fit` on a part of `hapi.datasets.CIFAR10`."""
    from torch.utils.data import Subset

    from hapi.datasets import CIFAR10

    fit_on(Subset(CIFAR10(mode="train"), range(12500)), convolutions(), laps, batch_size)


def fit_on(
    data: object, network: nn.Module, laps: Laps, batch_size: int, optimizer: Any = None, **options: Any
) -> None:
    """`Model.fit` with its accuracy; further options are those of `prepare`."""
    import hapi

    class Marks(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            laps.mark(loss=logs["loss"], acc=logs["acc"], steps=steps_of(model.optimizer))

    laps.pause_within_fit()
    optimizer = optimizer or adam(network)
    model = hapi.Model(network).prepare(optimizer, nn.CrossEntropyLoss(), hapi.metrics.Accuracy(), **options)
    model.fit(data, epochs=10**6, batch_size=batch_size, callbacks=[Marks()])


def hand(laps: Laps, batch_size: int) -> None:
    """A tuned loop over uint8 tensors in memory: a batch is one indexing, no value is read in an epoch."""
    images, classes = mnist_in_memory()
    hand_on(lambda rows: images[rows].float().div_(255), classes, mlp(), laps, batch_size)


def hand_tensors(laps: Laps, batch_size: int) -> None:
    """The same loop over a float32 tensor of all images."""
    images, classes = mnist_in_memory()
    converted = images.div(255)
    hand_on(lambda rows: converted[rows], classes, mlp(), laps, batch_size)


def hand_cifar(laps: Laps, batch_size: int) -> None:
    """The same loop over CIFAR-10, normalized as `hapi.datasets.CIFAR10` does it by default."""
    images, classes = cifar_in_memory()
    hand_on(lambda rows: images[rows].float().div_(255), classes, convolutions(), laps, batch_size)


def hand_on(
    batch: Callable[[torch.Tensor], torch.Tensor],
    classes: torch.Tensor,
    network: nn.Module,
    laps: Laps,
    batch_size: int,
) -> None:
    optimizer = adam(network)
    while True:
        for step, values in enumerate(steps_by_hand(batch, classes, network, optimizer, batch_size), 1):
            loss_sum, correct = values
            laps.pause_after(step)
        logs = {"loss": loss_sum.item() / len(classes), "acc": correct.item() / len(classes)}
        print(logs)
        laps.mark(**logs, steps=steps_of(optimizer))


def steps_by_hand(
    batch: Callable[[torch.Tensor], torch.Tensor],
    classes: torch.Tensor,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_size: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The steps of an epoch; after each, the sum of the losses and the right ones so far, which nobody has read."""
    loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    for rows in torch.randperm(len(classes)).split(batch_size):
        labels = classes[rows]
        outputs = network(batch(rows))
        loss = cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_sum += loss.detach() * len(rows)
        correct += (outputs.detach().argmax(1) == labels).sum()
        yield loss_sum, correct


def usual(laps: Laps, batch_size: int) -> None:
    """The usual script: torchvision's data set, ToTensor, DataLoader, and `.item()` each step."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    data = MNIST(os.environ["HAPI_DATA_HOME"], train=True, transform=ToTensor())
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    network = mlp()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    while True:
        loss_sum, correct = 0.0, 0
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = network(images)
            loss = cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(labels)
            correct += (outputs.argmax(1) == labels).sum().item()
        values = {"loss": loss_sum / len(data), "acc": correct / len(data)}
        print(values)
        laps.mark(**values, steps=steps_of(optimizer))


def fit_torchvision(laps: Laps, batch_size: int) -> None:
    """`Model.fit` on torchvision's data set."""
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    fit_on(MNIST(os.environ["HAPI_DATA_HOME"], train=True, transform=ToTensor()), mlp(), laps, batch_size)


def evaluate(laps: Laps, batch_size: int) -> None:
    """`Model.evaluate`."""
    import hapi
    from hapi.datasets import MNIST

    model = hapi.Model(mlp()).prepare(loss=nn.CrossEntropyLoss(), metrics=hapi.metrics.Accuracy())
    data = MNIST(mode="train")
    laps.pause_within_fit()
    while True:
        laps.mark(**model.evaluate(data, batch_size=batch_size))


def evaluate_by_hand(laps: Laps, batch_size: int) -> None:
    """A tuned loop in eval mode, without gradients."""
    images, classes = mnist_in_memory()
    network = mlp()
    while True:
        loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        network.eval()
        with torch.no_grad():
            for step, start in enumerate(range(0, len(classes), batch_size), 1):
                labels = classes[start : start + batch_size]
                outputs = network(images[start : start + batch_size].float().div_(255))
                loss_sum += cross_entropy(outputs, labels) * len(labels)
                correct += (outputs.argmax(1) == labels).sum()
                laps.pause_after(step)
        network.train()
        laps.mark(loss=loss_sum.item() / len(classes), acc=correct.item() / len(classes))


def predict(laps: Laps, batch_size: int) -> None:
    """`Model.predict`, the outputs of all samples as one tensor."""
    import hapi
    from hapi.datasets import MNIST

    model = hapi.Model(mlp())
    data = MNIST(mode="train")
    laps.pause_within_fit()
    while True:
        outputs = model.predict(data, batch_size=batch_size, stack_outputs=True)
        laps.mark(sum=float((outputs[0] if isinstance(outputs, list) else outputs).sum()))


def predict_by_hand(laps: Laps, batch_size: int) -> None:
    """A tuned loop in eval mode, whose outputs are joined at its end."""
    images, classes = mnist_in_memory()
    network = mlp()
    while True:
        network.eval()
        parts = []
        with torch.no_grad():
            for step, start in enumerate(range(0, len(classes), batch_size), 1):
                parts.append(network(images[start : start + batch_size].float().div_(255)))
                laps.pause_after(step)
        network.train()
        laps.mark(sum=float(torch.cat(parts).sum()))


CASES: dict[str, dict[str, Callable[[Laps, int], None]]] = {
    "mnist-32": {"fit": fit, "hand": hand},
    "mnist-256": {"fit": fit, "hand": hand},
    "mnist-32-tensors": {"fit": fit_tensors, "hand": hand_tensors},
    "mnist-32-usual": {"fit": fit, "hand": hand, "usual": usual, "fit-torchvision": fit_torchvision},
    "cifar10-32": {"fit": fit_cifar, "hand": hand_cifar},
    "evaluate-256": {"evaluate": evaluate, "hand": evaluate_by_hand},
    "predict-256": {"predict": predict, "hand": predict_by_hand},
}

# Two processes of the same program may differ by 5 %, more than two laps of one: many processes of few laps tell most.
LAPS_AND_ROUNDS = {"mnist-32-usual": (2, 4), "cifar10-32": (1, 12), "evaluate-256": (5, 12), "predict-256": (5, 12)}


def provide_data() -> None:
    """Download MNIST and CIFAR-10 if they are not there, and tell the runs where they are."""
    from hapi.datasets import CIFAR10, MNIST
    from hapi.datasets.files import default_root

    MNIST(mode="train")
    CIFAR10(mode="train")
    os.environ["HAPI_DATA_HOME"] = str(default_root())


def run_case(name: str, options: argparse.Namespace) -> bool:
    """Run a case and print its tables; whether all ways did the same work."""
    flags = ["--denormals"] if options.denormals else []
    ways = [
        Way(way, [sys.executable, __file__, name, "--as", way, *flags], on_screen=True)
        for way in CASES[name]
        if not options.ways or way in options.ways
    ]
    with tempfile.TemporaryDirectory() as folder:
        laps, rounds = LAPS_AND_ROUNDS.get(name, (2, 8))
        compare(ways, options.laps or laps, Path(folder, "log"), options.rounds or rounds)
    first, *others = (way.name for way in ways)
    pairs = [*((first, other) for other in others), ("usual", "hand"), ("fit-torchvision", "hand")]
    print(f"\n### {name}\n")
    print(*report(ways, pairs, UNITS), sep="\n", flush=True)
    return not tell_unequal(ways, ways[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Model.fit, evaluate and predict against loops written by hand.")
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--laps", type=int, help="epochs of each process that are timed: 1 to 5, as the case needs")
    parser.add_argument("--rounds", type=int, help="how many processes of each way: 4 to 12")
    parser.add_argument("--ways", nargs="+", default=[], help="only these")
    parser.add_argument("--denormals", action="store_true", help="keep denormal numbers")
    parser.add_argument("--as", dest="one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(CASES)}")
    if options.one:
        torch.set_flush_denormal(not options.denormals)
        (case,) = options.cases
        CASES[case][options.one](Laps(), int(case.split("-")[1]))
    provide_data()
    print(machine())
    print("Seconds a lap, CPU seconds a lap, MB: medians, quartiles in brackets.")
    sys.exit(not all([run_case(case, options) for case in options.cases]))


if __name__ == "__main__":
    main()
