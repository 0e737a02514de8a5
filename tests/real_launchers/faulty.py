"""A training in which rank 1 fails:  python faulty.py FAULT PHASE

FAULT: raise, exit (3, at once), kill, stop.  PHASE: train, eval, save.
Each rank leaves `pid.R`, and rank 1 `fault`, made in the moment of the fault.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import hapi
from hapi.callbacks import Callback

FAULT, PHASE = sys.argv[1:3]


def fail():
    Path("fault").write_text(repr(time.time()))
    if FAULT == "raise":
        raise ValueError("boom")
    if FAULT == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL if FAULT == "kill" else signal.SIGSTOP)


class Fails(Callback):
    def now(self, phase, step=3):
        if phase == PHASE and step == 3 and self.model.epochs_trained >= 1 and hapi.distributed.get_rank() == 1:
            fail()

    def on_train_begin(self, logs=None):
        Path(f"pid.{hapi.distributed.get_rank()}").write_text(str(os.getpid()))

    def on_train_batch_end(self, step, logs=None):
        self.now("train", step)

    def on_eval_batch_end(self, step, logs=None):
        self.now("eval", step)

    def on_epoch_end(self, epoch, logs=None):
        # Rank 0 goes on to save, and tells the others how it went.
        self.now("save")


torch.manual_seed(0)
net = nn.Linear(4, 2)
model = hapi.Model(net).prepare("sgd", nn.CrossEntropyLoss())
data = torch.randn(640, 4), torch.randint(2, (640,))
model.fit(data, data, epochs=4, batch_size=8, save_dir="saved", verbose=0, seed=0, callbacks=Fails())
