"""When the learning rate moves, against lists of rates from torch's own schedulers or written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

import hapi
from hapi.callbacks import Callback, LRScheduler, ModelCheckpoint

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)
STEPS = 5


class Rates(Callback):
    """The rate that each step is taken with."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.param_groups[0]["lr"]))


def model(scheduler: Any, lr: Any = 1.0, **options: Any) -> hapi.Model:
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    optimizer = SGD(network.parameters(), lr=lr)
    return hapi.Model(network).prepare(optimizer, nn.CrossEntropyLoss(), scheduler=scheduler, **options)


def fit(subject: hapi.Model, epochs: int = 3, callbacks: Any = (), **options: Any) -> tuple[list[float], list[float]]:
    """The rates of all steps, and the `lr` of each epoch."""
    rates = Rates()
    options = {"batch_size": 4, "verbose": 0, **options}
    history = subject.fit((X, Y), epochs=epochs, callbacks=[rates, *callbacks], **options)
    assert all(type(value) is float for value in history.history["lr"])
    return rates.rates, history.history["lr"]


def curve(make: Callable[[Any], Any], count: int) -> list[float]:
    """The first rates of a scheduler that is stepped by hand."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(count):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


step_lr = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=3 * STEPS)
cyclic = partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.5, step_size_up=4)


def sequence(optimizer: Any) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=1)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.ExponentialLR(optimizer, 0.5)], [1])


def chain(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def with_cycle(optimizer: Any) -> Any:
    rest = lr_scheduler.ConstantLR(optimizer, 1.0)
    return lr_scheduler.SequentialLR(optimizer, [lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, 2), rest], [4])


def test_no_scheduler() -> None:
    assert fit(model(None)) == ([1.0] * 15, [1.0] * 3)


def test_by_hand_step_lr_moves_once_an_epoch() -> None:
    rates, epochs = fit(model(step_lr))
    assert rates == [1.0] * 5 + [0.5] * 5 + [0.25] * 5
    assert epochs == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    "make",
    [
        step_lr,
        partial(lr_scheduler.MultiStepLR, milestones=[1, 2]),
        partial(lr_scheduler.CosineAnnealingLR, T_max=3),
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
        partial(lr_scheduler.PolynomialLR, total_iters=3),
        sequence,
        chain,
    ],
)
def test_schedulers_of_epochs(make: Any) -> None:
    rates, epochs = fit(model(make))
    assert epochs == curve(make, 3)
    assert rates == [rate for rate in epochs for _ in range(STEPS)]


@pytest.mark.parametrize("make", [one_cycle, cyclic, with_cycle])
def test_schedulers_of_steps(make: Any) -> None:
    rates, epochs = fit(model(make))
    assert rates == curve(make, 15)
    assert epochs == rates[4::STEPS]


@pytest.mark.parametrize(("accumulate", "windows"), [(2, [2, 2, 1]), (3, [3, 2]), (5, [5]), (9, [5])])
def test_a_step_is_one_of_the_optimizer(accumulate: int, windows: list[int]) -> None:
    make = partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=3 * len(windows))
    rates, epochs = fit(model(make), accumulate_grad_batches=accumulate)
    expected = curve(make, 3 * len(windows))
    assert rates == [rate for rate, size in zip(expected, 3 * windows, strict=True) for _ in range(size)]
    assert epochs == expected[len(windows) - 1 :: len(windows)]


@pytest.mark.parametrize(
    ("make", "interval", "per_step"), [(step_lr, "step", True), (cyclic, "epoch", False), (step_lr, "epoch", False)]
)
def test_interval_of_prepare(make: Any, interval: str, per_step: bool) -> None:
    subject = model(make, scheduler_interval=interval)
    assert subject.scheduler_interval == interval
    rates, epochs = fit(subject)
    assert (rates if per_step else epochs) == curve(make, 15 if per_step else 3)


def test_lr_callback_decides_for_one_fit() -> None:
    subject = model(step_lr)
    rates, _ = fit(subject, epochs=1, callbacks=[LRScheduler(by_step=True)])
    assert rates == curve(step_lr, 5)
    assert subject.scheduler_interval == "epoch"
    rates, _ = fit(subject, epochs=2)
    assert rates == [0.5**5] * 5 + [0.5**6] * 5
    rates, epochs = fit(model(one_cycle), callbacks=[LRScheduler(by_epoch=True)])
    assert epochs == curve(one_cycle, 3)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("own", [None, "step", "epoch"])
@pytest.mark.parametrize(
    "callback", [None, LRScheduler(), LRScheduler(by_epoch=True), LRScheduler(by_step=False), LRScheduler(by_step=True)]
)
def test_a_cycle_is_as_long_as_what_it_counts_in_this_fit(
    epochs: int, own: str | None, callback: LRScheduler | None
) -> None:
    """Refused are those that would end within it, before the first step; also where data has no known length."""
    interval = (None if callback is None else callback.interval) or own or "step"
    moves = epochs * STEPS if interval == "step" else epochs
    chosen = [] if callback is None else [callback]
    make = partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=moves)
    subject = model(make, scheduler_interval=own)
    before = subject.scheduler_interval
    rates, of_epochs = fit(subject, epochs, chosen)
    assert (rates if interval == "step" else of_epochs) == curve(make, moves)
    assert subject.scheduler.last_epoch == moves and subject.scheduler_interval == before
    unit = "optimizer steps" if interval == "step" else "epochs with a step each"
    words = rf"made for {moves} steps, of which {moves} are taken, but .* {unit} are to come.*total_steps={2 * moves}\."
    with pytest.raises(ValueError, match=words):
        fit(subject, epochs, chosen)
    assert subject.steps_trained == epochs * STEPS and subject.scheduler_interval == before


def test_epochs_are_counted_where_their_steps_are_not_known() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(X, Y, strict=True))

    make = partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=3)
    data: Any = Stream()
    subject = model(make, scheduler_interval="epoch")
    with pytest.raises(ValueError, match=r"but 4 epochs with a step each are to come. Write total_steps=4\."):
        subject.fit(data, epochs=4, batch_size=4, verbose=0)
    assert subject.steps_trained == 0
    # How many epochs a number of steps makes is not known.
    subject.fit(data, epochs=4, batch_size=4, verbose=0, num_iters=2 * STEPS)
    subject.fit(data, epochs=1, batch_size=4, verbose=0)
    assert subject.scheduler.last_epoch == 3


def test_a_cycle_of_epochs_goes_on_wherever_the_run_was_ended(tmp_path: Path) -> None:
    make = partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=3)
    options = {"eval_data": (X, Y), "seed": 3}
    straight = model(make)
    rates, epochs = fit(straight, callbacks=[LRScheduler(by_epoch=True)], **options)
    for cut in (2, 7, 10, 14):
        callbacks = [LRScheduler(by_epoch=True), ModelCheckpoint(every_n_steps=1)]
        saving = {**options, "save_dir": tmp_path / str(cut)}
        with pytest.raises(Ended):
            fit(model(make), callbacks=[*callbacks, EndsAt(cut)], **saving)
        with pytest.raises(ValueError, match=r"has 3 steps, of which \d are taken, but \d epochs with .*its epochs"):
            fit(model(make), 4, callbacks, resume=True, **saving)
        resumed = model(make)
        assert fit(resumed, callbacks=callbacks, resume=True, **saving) == (rates[cut:], epochs), cut
        assert all(map(torch.equal, resumed.parameters(), straight.parameters())), cut
        assert (resumed.scheduler.last_epoch, resumed.scheduler_interval) == (3, "step")


def test_an_object_or_a_callable() -> None:
    subject = model(None)
    scheduler = step_lr(subject.optimizer)
    subject.prepare(subject.optimizer, nn.CrossEntropyLoss(), scheduler=scheduler)
    assert subject.scheduler is scheduler
    assert fit(subject)[1] == [1.0, 0.5, 0.25]
    subject = model(lambda optimizer: step_lr(optimizer))
    assert isinstance(subject.scheduler, lr_scheduler.StepLR)
    assert fit(subject)[1] == [1.0, 0.5, 0.25]
    assert isinstance(model(lr_scheduler.ConstantLR).scheduler, lr_scheduler.ConstantLR)


class Warmup:
    """A scheduler of the user's own, not derived from torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.count = 0

    def step(self) -> None:
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 1.0 + self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_scheduler_of_the_users_own() -> None:
    assert fit(model(Warmup))[1] == [1.0, 2.0, 3.0]
    assert fit(model(Warmup, scheduler_interval="step"), epochs=1)[0] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_it_goes_on_over_calls() -> None:
    subject = model(one_cycle)
    rates = [rate for _ in range(3) for rate in fit(subject, epochs=1)[0]]
    assert rates == curve(one_cycle, 15)


def test_a_call_that_ends_early_counts_the_steps_taken() -> None:
    subject = model(one_cycle)
    rates, _ = fit(subject, num_iters=7)
    assert rates == curve(one_cycle, 7)
    assert fit(subject, num_iters=8)[0] == curve(one_cycle, 15)[7:]


class Ended(Exception):
    pass


class EndsAt(Callback):
    """Ends the run when so many steps are done and saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        if self.model.steps_trained == self.step:
            raise Ended

    def on_eval_begin(self, logs: Any = None) -> None:
        self.on_train_batch_begin(0)


@pytest.mark.parametrize(("accumulate", "cuts"), [(1, (1, 7, 10, 14)), (2, (2, 7, 10, 14)), (3, (3, 8, 13))])
def test_a_cycle_of_just_the_run_s_steps_goes_on_wherever_the_run_was_ended(
    tmp_path: Path, accumulate: int, cuts: tuple[int, ...]
) -> None:
    make = partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=3 * -(-STEPS // accumulate))
    options = {"eval_data": (X, Y), "seed": 3, "accumulate_grad_batches": accumulate}
    straight = model(make)
    rates, epochs = fit(straight, **options)
    for cut in cuts:
        saving = {**options, "save_dir": tmp_path / str(cut)}
        with pytest.raises(Ended):
            fit(model(make), callbacks=[ModelCheckpoint(every_n_steps=1), EndsAt(cut)], **saving)
        resumed = model(make)
        assert fit(resumed, resume=True, **saving) == (rates[cut:], epochs), cut
        assert all(map(torch.equal, resumed.parameters(), straight.parameters())), cut
        assert resumed.scheduler.last_epoch == resumed.scheduler.total_steps


def test_a_cycle_that_ends_before_a_resumed_run_is_refused(tmp_path: Path) -> None:
    def ended(epochs: int, total: int) -> None:
        make = partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=total)
        fit(model(make), epochs, save_dir=tmp_path, resume=True)

    make = partial(lr_scheduler.OneCycleLR, max_lr=2.0, total_steps=15)
    with pytest.raises(Ended):
        fit(model(make), callbacks=[ModelCheckpoint(every_n_steps=1), EndsAt(7)], save_dir=tmp_path)
    for total in (15, 20):
        # Whatever the script writes now: the saved cycle's length holds.
        with pytest.raises(ValueError, match=r"has 15 steps, of which 7 are taken, but 13 .*reset_optimizer=True"):
            ended(4, total)
    ended(3, 15)
    # Nothing is left to train.
    ended(2, 15)
    # As the error says.
    subject = model(None)
    subject.load(tmp_path / "3", reset_optimizer=True)
    subject.prepare(subject.optimizer, nn.CrossEntropyLoss(), scheduler=one_cycle(subject.optimizer))
    assert fit(subject)[0] == curve(one_cycle, 15)


def test_a_run_that_was_told_to_stop_needs_no_more_of_its_cycle(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    fit(model(one_cycle), callbacks=[Stops()], save_dir=tmp_path)
    resumed = model(one_cycle)
    fit(resumed, epochs=9, save_dir=tmp_path, resume=True)
    assert resumed.epochs_trained == 1


def test_tensor_learning_rate() -> None:
    rates, epochs = fit(model(step_lr, lr=torch.tensor(1.0)))
    assert rates == [1.0] * 5 + [0.5] * 5 + [0.25] * 5
    assert epochs == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("amp_configs", ["bf16", "fp16"])
def test_under_mixed_precision(amp_configs: str) -> None:
    assert fit(model(one_cycle, amp_configs=amp_configs))[0] == curve(one_cycle, 15)


def plateau(optimizer: Any) -> Any:
    # With this threshold nothing counts as an improvement but the first value.
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")


def test_plateau_sees_val_loss() -> None:
    _, epochs = fit(model(plateau), epochs=4, eval_data=(X, Y))
    assert epochs == [1.0, 1.0, 0.5, 0.25]
    subject = model(plateau, lr=0.1)
    history = subject.fit((X, Y), (X[:4], Y[:4]), batch_size=4, epochs=3, verbose=0).history
    assert subject.scheduler.best == history["val_loss"][0]


def test_plateau_moves_only_where_there_was_an_evaluation() -> None:
    _, epochs = fit(model(plateau), epochs=6, eval_data=(X, Y), eval_freq=2)
    assert epochs == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_plateau_has_no_unit_but_the_evaluation() -> None:
    _, epochs = fit(model(plateau, scheduler_interval="step"), epochs=3, eval_data=(X, Y))
    assert epochs == [1.0, 1.0, 0.5]


def test_train_batch_moves_a_scheduler_of_steps() -> None:
    subject = model(cyclic)
    rates = []
    for x, y in zip(X.split(4), Y.split(4), strict=True):
        rates.append(subject.optimizer.param_groups[0]["lr"])
        subject.train_batch(x, y)
    assert rates == curve(cyclic, 5)
    subject = model(step_lr)
    subject.train_batch(X, Y)
    assert subject.optimizer.param_groups[0]["lr"] == 1.0


def test_train_batch_without_an_update_moves_nothing() -> None:
    subject = model(cyclic)
    subject.train_batch(X, Y, update=False)
    assert subject.optimizer.param_groups[0]["lr"] == 0.1
    subject.train_batch(X, Y)
    assert subject.optimizer.param_groups[0]["lr"] == curve(cyclic, 2)[1]
