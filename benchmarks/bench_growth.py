"""What `Model.fit` costs before its first step, and what grows with the length of a training.

    python benchmarks/bench_growth.py                 all of it, some minutes
    python benchmarks/bench_growth.py start memory    some of it

start    seconds of `import hapi` after `import torch`, its modules, and seconds from calling fit to the end of its
         first step: MNIST in memory, batch 32, one process
memory   MB that the process holds after the 5th of 200 epochs with an evaluation each, and how many more after the
         200th: fit, and the same loop by hand; the least of the ten epochs from there and of the last ten, since what
         the C library has not yet handed back comes and goes
order    seconds to the first step, and how many MB more the process holds at its end than before fit, on data of 100
         million samples that are lengths only

Each figure is of fresh processes that alternate, 5 of each; medians, and in brackets the smallest and the largest. The
package is compiled to bytecode first, as pip does it when it installs one: Python may be told not to.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

EPOCHS, SETTLED, LOOKS = 200, 5, 10
LOOKED_AT = {*range(SETTLED, SETTLED + LOOKS), *range(EPOCHS + 1 - LOOKS, EPOCHS + 1)}
MANY = 10**8


def held() -> float:
    """MB that this process has in memory now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(seen: list[float]) -> dict[str, float]:
    """Of the MB held as each of LOOKED_AT begins: those after SETTLED epochs, and how many more at the end."""
    then = min(seen[:LOOKS])
    return {"MB then": then, "MB more": min(seen[LOOKS:]) - then}


def start() -> dict[str, float]:
    """See the module's text."""
    import torch

    before, began = set(sys.modules), time.perf_counter()
    import hapi

    imported, modules = time.perf_counter() - began, len(set(sys.modules) - before)
    from bench_fit import adam, mlp, mnist_in_memory

    images, classes = mnist_in_memory()
    data, network = (images.div(255), classes), mlp()
    model = hapi.Model(network).prepare(adam(network), torch.nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    seconds, _ = first_step(model, data, batch_size=32)
    return {"import s": imported, "modules": modules, "first step s": seconds}


def first_step(model: Any, data: Any, **options: Any) -> tuple[float, float]:
    """Seconds from the call of fit to the end of its first step, and MB that the process holds then."""
    import hapi

    class Ends(hapi.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            ended.append(time.perf_counter())
            # What fit has made is still there.
            ended.append(held())

    ended: list[float] = []
    began = time.perf_counter()
    model.fit(data, epochs=1, callbacks=[Ends()], num_iters=1, **options)
    return ended[0] - began, ended[1]


def part_of_mnist() -> tuple[Any, Any]:
    from bench_fit import mnist_in_memory

    images, classes = mnist_in_memory()
    return images[:2048].div(255), classes[:2048]


def fit() -> dict[str, float]:
    """Epochs of `Model.fit`."""
    from bench_fit import adam, mlp
    from torch import nn

    import hapi

    class Marks(hapi.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch in LOOKED_AT:
                seen.append(held())

    seen: list[float] = []
    data, network = part_of_mnist(), mlp()
    model = hapi.Model(network).prepare(adam(network), nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    model.fit(data, data, epochs=EPOCHS + 1, batch_size=32, callbacks=[Marks()])
    return growth(seen)


def hand() -> dict[str, float]:
    """The same epochs by hand."""
    import torch
    from bench_fit import adam, mlp
    from torch.nn.functional import cross_entropy

    seen = []
    (images, classes), network = part_of_mnist(), mlp()
    optimizer = adam(network)
    for epoch in range(EPOCHS + 1):
        if epoch in LOOKED_AT:
            seen.append(held())
        total, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for rows in torch.randperm(len(classes)).split(32):
            labels, outputs = classes[rows], network(images[rows])
            loss = cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            correct += (outputs.detach().argmax(1) == labels).sum()
        network.eval()
        with torch.no_grad():
            for x, y in zip(images.split(32), classes.split(32), strict=True):
                outputs = network(x)
                total += cross_entropy(outputs, y)
                correct += (outputs.argmax(1) == y).sum()
        network.train()
        print(epoch, total.item(), correct.item())
    return growth(seen)


def order() -> dict[str, float]:
    """See the module's text."""
    import torch
    from torch import nn
    from torch.utils.data import Dataset

    import hapi

    class Lengths(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return MANY

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((4,), float(index % 7))

    network = nn.Linear(4, 2)
    model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.01), lambda outputs: outputs.mean())
    warm = torch.rand(64, 4)
    model.fit([warm], epochs=1, verbose=0)
    before = held()
    seconds, then = first_step(model, Lengths(), batch_size=32, verbose=0)
    return {"first step s": seconds, "MB more": then - before}


PARTS: dict[str, dict[str, Callable[[], dict[str, float]]]] = {
    "start": {"fit": start},
    "memory": {"fit": fit, "hand": hand},
    "order": {"fit": order},
}


def run(part: str, rounds: int) -> None:
    """Run a part and print its table."""
    from turns import row

    found: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in PARTS[part]}
    for _ in range(rounds):
        for way, columns in found.items():
            command = [sys.executable, __file__, part, "--as", way]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{part} {way}: {done.stderr[-2000:]}")
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                columns[name].append(value)
    print(f"\n### {part}\n")
    names = list(next(iter(found.values())))
    print(row("way", names), row("---", ["---"] * len(names)), sep="\n")
    for way, columns in found.items():
        cells = [f"{statistics.median(v):.3g} ({min(v):.3g} to {max(v):.3g})" for v in columns.values()]
        print(row(way, cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What Model.fit costs at its start, and what grows.")
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes of each way")
    parser.add_argument("--as", dest="one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    if options.one:
        print(json.dumps(PARTS[options.parts[0]][options.one]()))
        return
    from bench_fit import provide_data
    from turns import machine

    provide_data()
    package = importlib.util.find_spec("hapi")
    assert package is not None and package.submodule_search_locations
    compileall.compile_dir(package.submodule_search_locations[0], quiet=1)
    print(machine())
    for part in options.parts:
        run(part, options.rounds)


if __name__ == "__main__":
    main()
