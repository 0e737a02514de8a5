"""A run that is told to stop: a script for one process and for launchers.

    python signalled.py FOLDER PHASE [fit's resume]

It writes FOLDER/at.R once rank R is where the signal should come: "train", "eval" (both slow), "parts" (an evaluation
of ten seconds, whose data each rank shares out by itself), or "workers".
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import hapi
from hapi.callbacks import Callback

folder, phase = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
DATA = torch.randn(40, 4), torch.randint(2, (40,))


class Slow(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.01)
        return DATA[0][index], DATA[1][index]


class Parts(IterableDataset):
    def __iter__(self):
        rank = hapi.distributed.get_rank()
        yield from zip(*(column[rank::2] for column in (DATA[0].repeat(20, 1), DATA[1].repeat(20))), strict=True)


class Waits(Callback):
    """Slows the phase down, and says when it is under way."""

    seen = 0

    def on_train_batch_end(self, step, logs=None):
        if phase in ("train", "workers", "slow"):
            self.here(step == 3 and self.model.epochs_trained == 1)

    def on_eval_batch_end(self, step, logs=None):
        self.seen = step + 1
        if phase in ("eval", "parts") and (phase == "eval" or self.model.epochs_trained == 1):
            self.here(step == 2 and self.model.epochs_trained == 1)

    def here(self, now):
        time.sleep(0.05 if phase != "slow" else 0.0)
        if now:
            (folder / f"at.{hapi.distributed.get_rank()}").touch()
            time.sleep(3.0 if phase == "slow" else 0.0)

    def on_exception(self, exc):
        print(f"exception {type(exc).__name__} {exc}, {self.seen} batches evaluated", flush=True)


net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
model = hapi.Model(net).prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
data = Slow() if phase == "workers" else DATA
evaluated = Parts() if phase == "parts" else DATA
# A resumed run reads the same samples, whoever fetches them.
reading = {"num_workers": 2} if phase == "workers" else {}
try:
    history = model.fit(
        data, evaluated, epochs=3, global_batch_size=4, save_dir=folder / "saved", seed=1, verbose=0, log_freq=1,
        callbacks=Waits(), resume=len(sys.argv) > 3, **reading,
    )  # fmt: skip
except KeyboardInterrupt as stop:
    print(f"caught {type(stop).__name__} {stop}", flush=True)
    raise
total = sum(float(p.detach().double().sum()) for p in net.parameters())
print(f"done {model.steps_trained} {total!r} {history.history['val_loss']}", flush=True)
