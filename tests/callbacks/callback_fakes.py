"""A model's double, and the hooks of a fit in their order, for tests of single callbacks."""

from types import SimpleNamespace

import torch

from hapi.callbacks.base import CallbackList


class FakeModel:
    """What callbacks use of a Model; `saved` lists the paths that were saved."""

    def __init__(self, lr=0.1, scheduler=None):
        self.network = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=lr)
        self.scheduler = scheduler
        self.scheduler_interval = None
        self.stop_training = False
        self.steps_trained = 0
        self.epochs_trained = 0
        self.saved = []

    def save(self, path):
        self.saved.append(str(path))


def fit(callbacks, epoch_logs, model=None, *, first_epoch=0, state=None, **params):
    """Call the hooks of a fit whose epochs end with these logs; returns the model and the callbacks."""
    model = model or FakeModel()
    last_epoch = params.pop("last_epoch", first_epoch + len(epoch_logs))
    names = list(dict.fromkeys(name for logs in epoch_logs for name in logs))
    params = {"metrics": names, "first_epoch": first_epoch, "last_epoch": last_epoch, "steps": 0, "verbose": 1} | params
    callbacks = CallbackList(callbacks, model, params)
    model.stop_training, model.epochs_trained = False, first_epoch
    callbacks.call("on_train_begin")
    if state is not None:
        callbacks.load_state_dict(state)
    logs = {}
    for epoch, logs in enumerate(epoch_logs, first_epoch):
        callbacks.call("on_epoch_begin", epoch)
        model.epochs_trained = epoch + 1
        callbacks.call("on_epoch_end", epoch, logs=logs)
        if model.stop_training:
            break
    callbacks.call("on_train_end", logs=logs)
    return SimpleNamespace(model=model, callbacks=callbacks)


def losses(*values, name="val_loss"):
    """Epoch logs with one value each; None: an epoch without it."""
    return [{"loss": 1.0} | ({name: value} if value is not None else {}) for value in values]
