"""A training of two processes that is killed again and again: what a life of it does.

Its ranks are forks of a server that has imported torch: a life starts in a fraction of a second.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hapi
from hapi import files
from hapi.callbacks import EarlyStopping, ModelCheckpoint
from hapi.datasets import FashionMNIST

WORLD, EPOCHS, ROWS, BATCH = 2, 2, 800, 20
STEPS = ROWS // (WORLD * BATCH)
LAST = EPOCHS * STEPS

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "hapi", "torch._dynamo", "torch.nn.parallel"])


def train(folder: Path) -> str:
    """Train to the end, from wherever the files in the folder allow; a digest of all that must be the same."""
    torch.manual_seed(0)
    sample = FashionMNIST(mode="train", sample=True)
    x, y = sample.data[:ROWS].float() / 255, sample.targets[:ROWS]
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 10)
    )
    model = hapi.Model(net).prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    history = model.fit(
        (x, y), (x[:200], y[:200]), epochs=EPOCHS, batch_size=BATCH, save_dir=folder, seed=7, verbose=0, resume=True,
        callbacks=[ModelCheckpoint(monitor="val_loss", every_n_steps=1), EarlyStopping(patience=50, verbose=0)],
    )  # fmt: skip
    digest = hashlib.sha256()
    states = [value for state in model.optimizer.state_dict()["state"].values() for value in state.values()]
    for tensor in (*net.state_dict().values(), *states):
        digest.update(tensor.numpy().tobytes())
    digest.update(repr((model.steps_trained, history.epoch, history.history)).encode())
    return digest.hexdigest()


def newest_step(folder: Path) -> int:
    """The steps of the newest file that is there."""
    found = [0]
    for path in folder.glob("[!.]*.pt"):
        name = path.name.split(".")[0]
        if name.startswith("step_"):
            found.append(int(name[5:]))
        elif name.isdigit():
            found.append(int(name) * STEPS)
    return max(found)


class Life:
    """One start of the training, as a launcher makes it: two ranks that come up together.

    Args:
        folder: Its save_dir.
        dies_at: Rank 0 kills itself at so many-th of its calls of an operation on files: ("replace", 7).
    """

    def __init__(self, folder: Path, dies_at: tuple[str, int] | None = None) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ranks: list[BaseProcess] = [
            _processes.Process(target=_live, args=(folder, rank, port, dies_at)) for rank in range(WORLD)
        ]
        for rank in self.ranks:
            rank.start()

    def kill(self, victims: tuple[int, ...]) -> None:
        """SIGKILL these ranks, and the others a moment later, as a launcher does."""
        for victim in victims:
            self.ranks[victim].kill()
        time.sleep(0.05)
        self.end()

    def end(self) -> None:
        """No rank is left."""
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def is_over(self) -> bool:
        """Whether a rank has ended, by itself or by its own hand."""
        return any(rank.exitcode is not None for rank in self.ranks)

    def result(self, seconds: float = 120.0) -> list[str]:
        """The ranks' digests, of a life that comes to its end."""
        end = time.monotonic() + seconds
        for rank in self.ranks:
            rank.join(max(0.0, end - time.monotonic()))
        codes = [rank.exitcode for rank in self.ranks]
        self.end()
        assert codes == [0] * WORLD, f"exit codes {codes}:\n{self.log()}"
        return [(self.folder / f"digest.{rank}").read_text() for rank in range(WORLD)]

    def log(self) -> str:
        """What the ranks have written."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log.*")))


def _live(folder: Path, rank: int, port: int, dies_at: tuple[str, int] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo", HAPI_TIMEOUT="60",
    )  # fmt: skip
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    if rank == 0 and dies_at is not None:
        _die_at(*dies_at)
    digest = train(folder)
    (folder / f"digest.{rank}").write_text(digest)
    sys.stdout.flush()
    os._exit(0)


def _die_at(operation: str, count: int) -> None:
    """This process kills itself right before or right after the count-th call of an operation of `os`.

    Of "write", by which torch fills a checkpoint's file: with a half or all of it in the file.
    """
    place: Any = files._Sink if operation == "write" else os
    real: Callable[..., Any] = getattr(place, operation)
    calls = [0]
    before = random.random() < 0.5

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == count and before:
            if operation == "write":
                real(args[0], memoryview(args[1]).cast("B")[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(place, operation, counted)
