"""LRScheduler: for one fit it decides when the model's scheduler steps."""

import pytest
import torch
from callback_fakes import FakeModel, fit, losses

from hapi.callbacks import Callback, LRScheduler
from hapi.callbacks.base import CallbackList


def model_with_scheduler(interval=None):
    model = FakeModel()
    model.scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1)
    model.scheduler_interval = interval
    return model


@pytest.mark.parametrize(
    ("options", "during"),
    [
        ({"by_step": True}, "step"),
        ({"by_epoch": True}, "epoch"),
        ({"by_step": False}, "epoch"),
        ({"by_epoch": False}, "step"),
        ({"by_step": True, "by_epoch": False}, "step"),
        ({"by_step": False, "by_epoch": True}, "epoch"),
        ({}, "as it was"),
    ],
)
def test_the_interval_holds_for_this_fit(options, during):
    seen = []

    class Reader(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append(self.model.scheduler_interval)

    model = model_with_scheduler("as it was")
    fit([LRScheduler(**options), Reader()], losses(1.0, 1.0), model)
    assert seen == [during] * 2
    assert model.scheduler_interval == "as it was"


def test_the_interval_comes_back_after_an_exception_too():
    model = model_with_scheduler()
    callbacks = CallbackList([LRScheduler(by_step=True)], model, {})
    callbacks.call("on_train_begin")
    assert model.scheduler_interval == "step"
    callbacks.call("on_exception", KeyboardInterrupt())
    assert model.scheduler_interval is None


@pytest.mark.parametrize("both", [True, False])
def test_both_or_neither(both):
    with pytest.raises(ValueError, match=r"Write LRScheduler\(by_step=True\) or LRScheduler\(by_epoch=True\)"):
        LRScheduler(by_step=both, by_epoch=both)


def test_no_scheduler():
    with pytest.raises(ValueError, match=r"the model has none. Write prepare\(..., scheduler="):
        fit([LRScheduler()], losses(1.0))


def test_two_of_them():
    model = model_with_scheduler("as it was")
    with pytest.raises(ValueError, match=r"holds 2 of LRScheduler.*Keep one of them"):
        fit([LRScheduler(by_step=True), LRScheduler(by_epoch=True)], losses(1.0), model)
    assert model.scheduler_interval == "as it was"
