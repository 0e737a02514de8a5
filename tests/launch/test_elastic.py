"""A training under `hapirun --nnodes 1:2 --max_restart 3` on two hosts goes on when workers or hosts come and go.

HAPI_TEST_TRIES sets how often each case is tried (1).
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from launches import Launch
from namespaces import ADDRESSES
from namespaces import NAMES as HOSTS

pytestmark = [pytest.mark.launchers, pytest.mark.usefixtures("hosts")]

TRIES = int(os.environ.get("HAPI_TEST_TRIES", "1"))
OPTIONS = ("--nnodes", "1:2", "--master", f"{ADDRESSES[0]}:29500", "--max_restart", "3")
LONG = 120.0
EPOCHS, SAMPLES = 12, 512

# Unchanged by restarts: fit resumes by itself under a launcher that restarts. `world.W` appears once W processes train.
SCRIPT = f"""
import os, time
from pathlib import Path
import torch
from torch import nn
import hapi
from hapi.callbacks import Callback, ModelCheckpoint

class Slow(Callback):
    def on_train_batch_end(self, step, logs=None):
        time.sleep(0.01 if Path("../hurry").exists() else 0.05)
        if self.model.steps_trained >= 12:
            part = Path(f"part.{{os.getpid()}}")
            part.write_text(str(os.getpid()))
            part.rename(f"world.{{hapi.distributed.get_world_size()}}")

torch.manual_seed(0)
data = torch.randn({SAMPLES}, 4), torch.randint(2, ({SAMPLES},))
net = nn.Linear(4, 2)
model = hapi.Model(net).prepare("adam", nn.CrossEntropyLoss())
history = model.fit(
    data, epochs={EPOCHS}, batch_size=8, save_dir="../saved", verbose=0, seed=0,
    callbacks=[Slow(), ModelCheckpoint(every_n_steps=5)],
)
weights = torch.cat([p.detach().flatten() for p in net.parameters()]).sum().item()
Path("end").write_text(f"{{hapi.distributed.get_world_size()}} {{model.epochs_trained}} {{history.epoch}} {{weights}}")
"""


class Run:
    def __init__(self, folder):
        self.folder = folder
        self.hosts = {}

    def start(self, number):
        self.hosts[number] = Launch(self.folder / f"h{number}", SCRIPT, *OPTIONS, host=HOSTS[number])

    def until(self, world, *numbers, instead_of=()):
        """Wait until so many processes train together, and none of those; their process ids."""
        return [self._until(number, f"world.{world}", instead_of) for number in numbers]

    def _until(self, number, name, instead_of):
        while True:
            # What was left of it before does not count; a step that was under way may leave it once more.
            (self.folder / f"h{number}" / name).unlink(missing_ok=True)
            if (pid := int(self.hosts[number].until(name, LONG))) not in instead_of:
                return pid

    def ends(self, world, *numbers):
        (self.folder / "hurry").touch()
        shown = "\n".join(launch.err for launch in self.hosts.values())
        for number in numbers:
            assert self.hosts[number].wait(LONG) == 0, shown
        texts = [(self.folder / f"h{number}" / "end").read_text() for number in numbers]
        assert len(set(texts)) == 1, (texts, shown)
        assert texts[0].startswith(f"{world} {EPOCHS} {list(range(1, EPOCHS + 1))} "), (texts, shown)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    for launch in run.hosts.values():
        launch.end()


@pytest.mark.parametrize("_", range(TRIES))
def test_a_killed_worker(run, _):
    run.start(0)
    run.start(1)
    workers = run.until(2, 0, 1)
    before = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    run.until(2, 0, 1, instead_of=workers)
    print(f"two train again after {time.monotonic() - before:.1f} s")
    run.ends(2, 0, 1)


@pytest.mark.parametrize("_", range(TRIES))
def test_a_host_that_loses_power(run, hosts, _):
    run.start(0)
    run.start(1)
    run.until(2, 0, 1)
    before = time.monotonic()
    hosts.cut()  # so that no connection is seen to end
    try:
        run.hosts[1].kill(signal.SIGKILL)
        run.until(1, 0)
        print(f"one trains on after {time.monotonic() - before:.1f} s")
        run.ends(1, 0)
    finally:
        hosts.mend()


@pytest.mark.parametrize("_", range(TRIES))
def test_a_host_that_joins(run, _):
    run.start(0)
    run.until(1, 0)
    before = time.monotonic()
    run.start(1)
    run.until(2, 0, 1)
    print(f"two train after {time.monotonic() - before:.1f} s")
    run.ends(2, 0, 1)
