"""Trials on a model: what they find, and that nothing is left of them."""

from __future__ import annotations

import copy
import math
import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import hapi
from hapi import sizing
from hapi.callbacks import EMA, Callback, CSVLogger, EarlyStopping, LRScheduler, ModelCheckpoint, Profiler
from hapi.trial import untouched

X = torch.randn(46, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


class Counting(nn.Module):
    """Keeps what modules keep: statistics, a buffer that is rebound, a plain number, an extra state, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.number, self.extra = 0, {"seen": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.passing += 1
        self.number += 1
        self.extra["seen"] += 1
        return self.layers(x)

    def get_extra_state(self) -> dict[str, int]:
        return self.extra

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state


class LearntLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs * self.scale, labels)


def model(trained: bool = True, **options: Any) -> hapi.Model:
    """With an optimizer that has seen a step, or not; in groups, whose rates a scheduler moves."""
    torch.manual_seed(0)
    net, loss = Counting(), LearntLoss()
    groups = [{"params": [*net.parameters()]}, {"params": [*loss.parameters()], "lr": 0.001}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.01))
    options = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "clip_grad_norm": 1.0, **options}
    made = hapi.Model(net).prepare(optimizer, loss, hapi.metrics.Accuracy(), **options)
    net.layers[3].eval()  # frozen by the user
    if trained:
        made.fit((X, Y), batch_size=8, epochs=2, verbose=0, seed=2)
    return made


def everything(subject: hapi.Model) -> Any:
    """What a checkpoint would hold, and what it would not."""
    snapshot = subject._snapshot()
    training = {name: value for name, value in snapshot.training.items() if name != "id"}
    net = subject.network
    held = dict(snapshot.weights), training, net.passing, net.number, [m.training for m in net.modules()]
    streams = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1], subject.stop_training
    return copy.deepcopy((*held, *streams, vars(subject.optimizer)["defaults"], subject.optimizer.param_groups))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | numpy.ndarray):
        return type(one) is type(other) and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def sweep(subject: hapi.Model, data: Any) -> None:
    sizes = {} if isinstance(data, DataLoader) else {"batch_size": 8}
    assert len(hapi.find_lr(subject, data, steps=12, **sizes).rates) == 12


def rehearse(subject: hapi.Model, data: Any) -> None:
    sizes = {} if isinstance(data, DataLoader) else {"batch_size": 8}
    hapi.debug.fast_dev_run(subject, data, data, verbose=0, callbacks=[EMA(), EarlyStopping()], **sizes)


def overfit(subject: hapi.Model, data: Any) -> None:
    sizes = {} if isinstance(data, DataLoader) else {"batch_size": 8}
    hapi.debug.overfit_batches(subject, data, 2, 5, verbose=0, **sizes)


TRIALS = [sweep, rehearse, overfit]


@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "new"])
def test_nothing_is_left(trial: Any, trained: bool) -> None:
    subject, other = model(trained), model(trained)
    moments = [m for state in subject.optimizer.state.values() for m in state.values()]
    before = everything(subject)
    trial(subject, (X, Y))
    assert same(everything(subject), before)
    assert [id(m) for state in subject.optimizer.state.values() for m in state.values()] == list(map(id, moments))
    assert all(p.grad is None for p in subject.parameters())
    # Another fit has the same bits as one without a trial before it.
    for each in (subject, other):
        torch.manual_seed(5)
        each.fit((X, Y), (X, Y), batch_size=8, verbose=0)
    assert same(dict(subject.network.state_dict()), dict(other.network.state_dict()))
    assert same(subject.optimizer.state_dict(), other.optimizer.state_dict())


@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_nothing_is_left_of_mixed_precision(trial: Any, precision: str) -> None:
    subject = model(amp_configs=precision)
    before = everything(subject)
    trial(subject, (X, Y))
    assert same(everything(subject), before)


@pytest.mark.parametrize("trial", TRIALS)
def test_a_loaders_order_goes_on(trial: Any) -> None:
    def loader() -> tuple[DataLoader[Any], torch.Generator, torch.Generator]:
        one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        data = TensorDataset(X, Y)
        return DataLoader(data, 8, sampler=RandomSampler(data, generator=one), generator=two), one, two

    given, *generators = loader()
    trial(model(), given)
    _, *fresh = loader()
    assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(generators, fresh, strict=True))


def test_an_error_in_a_trial_leaves_nothing() -> None:
    subject = model()
    before = everything(subject)
    with pytest.raises(KeyError), untouched(subject):
        subject.fit((X, Y), batch_size=8, verbose=0)
        subject.network.layers[0].weight.requires_grad_(False)
        subject.network.layers.append(nn.Linear(3, 3))
        subject.optimizer.add_param_group({"params": subject.network.layers[-1].parameters()})
        raise KeyError
    assert same(everything(subject), before)
    lazy = hapi.Model(nn.LazyLinear(3)).prepare(lambda parameters: torch.optim.SGD(parameters, 0.1), LearntLoss())
    with pytest.raises(ValueError, match=r"weight, bias have no shape yet.*network\(x\[:2\]\)"):
        hapi.find_lr(lazy, (X, Y))


class Odd(nn.Module):
    """Keeps buffers that a plain copy_ cannot write to, or that equal nothing, not even themselves."""

    def __init__(self, table: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        numpy.save(table, numpy.arange(600.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that the map cannot be written to, and that CSR is new
            read_only = torch.from_numpy(numpy.load(table, mmap_mode="r"))
            rows = torch.eye(6).to_sparse_csr()
        self.register_buffer("mask", torch.ones(1, 3).expand(4, 3), persistent=False)
        self.register_buffer("counted", torch.zeros(1, 2).expand(3, 2))
        self.register_buffer("other", torch.ones(2).expand(4, 2))
        self.register_buffer("table", read_only)
        self.register_buffer("unknown", torch.tensor([math.nan, -0.0, 1.0]))
        self.register_buffer("sparse", torch.eye(6).to_sparse())
        self.register_buffer("rows", rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counted[0] += 1  # written to in place, as far as torch lets one
        self.other = self.other + 1  # another tensor, of another layout in memory
        self.unknown.fill_(0.0)
        return self.layer((self.rows @ (self.sparse @ x.T)).T) * self.mask[0]

    def held(self) -> list[Any]:
        dense = [b.to_dense() if b.layout is not torch.strided else b for b in self.buffers()]
        values = [b.numpy(force=True).tobytes() for b in [*self.parameters(), *dense]]
        return [values, [id(b) for b in self.buffers()], [b.stride() for b in (self.mask, self.counted, self.other)]]


LOOKS = [
    *TRIALS,
    lambda subject, data: subject.summary((4, 6)),
    lambda subject, data: hapi.flops(subject.network, (4, 6)),
]


@pytest.mark.parametrize("look", LOOKS, ids=["find_lr", "fast_dev_run", "overfit_batches", "summary", "flops"])
def test_buffers_of_every_layout_are_put_back(look: Any, tmp_path: Path) -> None:
    net = Odd(tmp_path / "table.npy")
    made = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
    before = net.held()
    look(made, (X, Y))
    assert net.held() == before
    assert (made.steps_trained, made.optimizer.param_groups[0]["lr"]) == (0, 0.1)
    assert not net.counted.any()


def test_what_cannot_be_put_back_keeps_nothing_else_from_it() -> None:
    subject = model()
    before = everything(subject)
    lost, value = subject.network.passing, subject.network.passing.clone()
    with pytest.raises(RuntimeError, match="size of tensor"), untouched(subject):
        subject.fit((X, Y), batch_size=8, verbose=0)
        lost.resize_(5)
    lost.resize_(2).copy_(value)
    assert same(everything(subject), before)


class Line(nn.Module):
    """With a loss whose curvature is known: plain gradient descent diverges above a rate of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.at * x


def line(rate: float = 0.1) -> hapi.Model:
    net = Line()
    optimizer = torch.optim.SGD(net.parameters(), rate)
    return hapi.Model(net).prepare(optimizer, lambda outputs, labels: (outputs - labels).square().mean())


def test_the_sweep_is_a_plain_loop() -> None:
    ones, zeros = torch.ones(10), torch.zeros(10)
    sweep = hapi.find_lr(line(), (ones, zeros), batch_size=4, min_lr=1e-4, max_lr=100.0, steps=61)
    at, expected = torch.ones(()), []
    for rate in torch.logspace(-4, 2, 61).tolist():
        expected.append(float(at.square()))
        at = at - rate * 2 * at
    assert sweep.rates == pytest.approx(torch.logspace(-4, 2, 61).tolist()[: len(sweep.rates)])
    assert sweep.losses == pytest.approx(expected[: len(sweep.losses)], rel=1e-3)
    # It has diverged, and ended there.
    assert len(sweep.losses) < 61 and sweep.smoothed[-1] > 4 * min(sweep.smoothed) and sweep.rates[-1] > 1
    slopes = torch.tensor(expected)[2:40] - torch.tensor(expected)[:38]
    steepest = sweep.rates[1 + int(slopes.argmin())]
    assert 0.01 < steepest < 0.1 and steepest / 1.6 <= sweep.suggestion <= steepest * 1.6
    average = 0.0
    for step, (loss, smoothed) in enumerate(zip(sweep.losses, sweep.smoothed, strict=True), 1):
        average = 0.9 * average + 0.1 * loss
        assert smoothed == pytest.approx(average / (1 - 0.9**step))


def test_groups_keep_their_ratio_and_a_scheduler_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, seen = model(scheduler_interval="step"), []
    optimizer = subject.optimizer
    optimizer.param_groups[0]["lr"].fill_(0.02)
    optimizer.param_groups[1]["lr"] = 0.002
    optimizer.register_step_pre_hook(lambda *_: seen.append([float(entry["lr"]) for entry in optimizer.param_groups]))
    sweep = hapi.find_lr(subject, (X, Y), min_lr=1e-4, max_lr=1e-2, steps=5)
    assert [first for first, _ in seen] == pytest.approx(sweep.rates)
    assert [second for _, second in seen] == pytest.approx([rate / 10 for rate in sweep.rates])
    assert [float(entry["lr"]) for entry in optimizer.param_groups] == pytest.approx([0.02, 0.002])


def test_a_loss_that_is_no_number_and_one_that_never_falls() -> None:
    sweep = hapi.find_lr(line(), (torch.full((4,), 1e30), torch.zeros(4)), min_lr=1, max_lr=2, steps=5)
    assert sweep.rates == [] and sweep.suggestion is None
    with pytest.raises(RuntimeError, match="holds no step.*Check the data and the loss"):
        sweep.plot("lr.png")
    flat = hapi.find_lr(line(), (torch.zeros(4), torch.ones(4)), min_lr=1e-3, max_lr=1.0, steps=20)
    assert flat.losses == [1.0] * 20 and flat.suggestion is None


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sweep = hapi.find_lr(line(), (torch.ones(10), torch.zeros(10)), min_lr=1e-3, steps=30)
    sweep.plot(tmp_path / "new folder" / "lr.png")
    assert (tmp_path / "new folder" / "lr.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(RuntimeError, match=r"no screen here.*plot\('lr\.png'\)"):
        sweep.plot()


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"min_lr": 0}, "Write min_lr=1e-7"),
        ({"min_lr": 1.0, "max_lr": 0.1}, "Write min_lr=1e-7"),
        ({"max_lr": math.inf}, r"max_lr=inf.*finite.*Write min_lr=1e-7"),
        ({"max_lr": 1e300}, r"max_lr=1e\+300.*Write min_lr=1e-7"),
        ({"batch_size": 2, "global_batch_size": 2}, "only one can decide. Leave one"),
        ({"diverged": 1}, r"diverged=4\.0"),
        ({"steps": 2}, "Write steps=100"),
        ({"steps": 2.5}, "steps"),
    ],
)
def test_sweeps_that_cannot_be(arguments: dict[str, Any], cure: str) -> None:
    with pytest.raises((ValueError, TypeError), match=cure):
        hapi.find_lr(line(), (X, Y), **arguments)
    with pytest.raises(ValueError, match="find_lr was called without an optimizer"):
        hapi.find_lr(hapi.Model(Line()), (X, Y))


class Narrow(nn.Module):
    """Has room for so many samples in training."""

    def __init__(self, room: int, error: Exception | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.room, self.error = room, error or torch.OutOfMemoryError("Tried to allocate")
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(x) > self.room:
            raise self.error
        return self.layer(x)


def narrow(room: int, **options: Any) -> hapi.Model:
    net = Narrow(room, **options)
    return hapi.Model(net).prepare(torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss())


@pytest.fixture
def _any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device that tells when its memory is used up."""
    monkeypatch.setattr(sizing, "_runs_out", lambda device: True)


@pytest.mark.usefixtures("_any_device")
@pytest.mark.parametrize(
    ("room", "start"),
    [
        (1, 2),
        (31, 2),
        (3, 64),
        (100, 5),
        *(pytest.param(r, s, marks=pytest.mark.slow) for r in (2, 8, 46) for s in (2, 64)),
    ],
)
@pytest.mark.slow
def test_the_largest_batch_that_fits(room: int, start: int) -> None:
    subject = narrow(room)
    before = copy.deepcopy(subject.network.state_dict())
    stream = torch.get_rng_state()
    assert hapi.find_batch_size(subject, (X, Y), start, verbose=0) == min(room, 46)
    assert same(dict(subject.network.state_dict()), dict(before)) and torch.equal(torch.get_rng_state(), stream)
    assert subject.optimizer.state == {} and subject.steps_trained == 0 and max(subject.network.sizes) <= 46
    # Few trials: doubled, then halved in between.
    assert len(set(subject.network.sizes)) <= 14


@pytest.mark.usefixtures("_any_device")
@pytest.mark.slow
def test_limits_lines_and_other_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert hapi.find_batch_size(narrow(100), (X, Y), largest=20) == 20
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["find_batch_size: 2 fits", "find_batch_size: 4 fits"]
    assert lines[-1] == "find_batch_size: 20 samples are all that were to be tried"

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 46

        def __getitem__(self, index: int) -> Any:
            return X[index], Y[index]

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(X, Y, strict=True))

    assert hapi.find_batch_size(narrow(30), Rows(), verbose=0) == 30
    assert hapi.find_batch_size(narrow(30), Stream(), verbose=0) == 30
    assert hapi.find_batch_size(narrow(100), Stream(), verbose=0) == 46
    assert hapi.find_batch_size(narrow(9, error=RuntimeError("MPS backend out of memory")), (X, Y), verbose=0) == 9


@pytest.mark.usefixtures("_any_device")
def test_no_size_fits_and_other_errors() -> None:
    with pytest.raises(RuntimeError, match="a single sample needs more memory"):
        hapi.find_batch_size(narrow(0), (X, Y), verbose=0)
    with pytest.raises(RuntimeError, match="another fault"):
        hapi.find_batch_size(narrow(3, error=RuntimeError("another fault")), (X, Y), verbose=0)
    with pytest.raises(ValueError, match=r"DataLoader, which comes in batches.*loader\.dataset"):
        hapi.find_batch_size(narrow(3), DataLoader(TensorDataset(X, Y)))
    with pytest.raises(ValueError, match="largest"):
        hapi.find_batch_size(narrow(3), (X, Y), largest=0)


def test_on_the_cpu_it_says_why_it_cannot() -> None:
    with pytest.raises(RuntimeError, match=r"called on the cpu.*raises no error there.*Call it on an accelerator"):
        hapi.find_batch_size(narrow(3), (X, Y))


class Counts(Callback):
    """Of steps."""

    def __init__(self) -> None:
        self.steps = {"train": 0, "eval": 0}

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.steps["train"] += 1

    def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
        self.steps["eval"] += 1


@pytest.mark.parametrize("steps", [1, 3])
def test_a_rehearsal_is_short_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    monkeypatch.chdir(tmp_path)
    subject, counts = model(), Counts()
    calls = subject.network.number
    writers = [CSVLogger("log.csv"), ModelCheckpoint(save_dir="kept", monitor="val_loss"), Profiler(wait=0, active=1)]
    values = hapi.debug.fast_dev_run(
        subject, (X, Y), (X, Y), X, 8, steps=steps, callbacks=[*writers, EarlyStopping(), counts]
    )
    assert list(tmp_path.iterdir()) == [] and counts.steps == {"train": steps, "eval": steps}
    assert values.keys() == {"loss", "acc", "lr", "val_loss", "val_acc"} and all(map(math.isfinite, values.values()))
    printed = capsys.readouterr().out
    assert ("1 step per" if steps == 1 else "3 steps per") in printed and "Predict" in printed
    assert subject.network.number == calls


def test_a_rehearsal_finds_mistakes() -> None:
    class Fails(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["no such value"]

    subject = model()
    before = everything(subject)
    with pytest.raises(KeyError, match="no such value"):
        hapi.debug.fast_dev_run(subject, (X, Y), callbacks=Fails(), verbose=0)
    with pytest.raises(ValueError, match="monitors 'val_loss'"):
        hapi.debug.fast_dev_run(subject, (X, Y), callbacks=EarlyStopping(), verbose=0)
    assert same(everything(subject), before)


@pytest.mark.parametrize("batches", [1, 3])
def test_a_few_batches_are_learnt(capsys: pytest.CaptureFixture[str], batches: int) -> None:
    seen: list[frozenset[Any]] = []

    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(frozenset(map(tuple, x.tolist())))
            return super().forward(x)

    torch.manual_seed(0)
    net = Net(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    subject = hapi.Model(net).prepare(torch.optim.Adam(net.parameters(), 0.02), nn.CrossEntropyLoss())
    history = hapi.debug.overfit_batches(subject, (X, Y), batches, 80, 4)
    assert len(history.epoch) == 80 and history.history["loss"][-1] < 0.02 < 0.5 < history.history["loss"][0]
    # The same batches each time, and no others.
    assert len(seen) == 80 * batches and len(set(seen)) == batches
    line = capsys.readouterr().out
    assert line.startswith("overfit_batches: loss ") and f"in 80 passes over {batches} batch" in line


def test_a_few_batches_with_the_callbacks_of_a_run_that_has_a_schedule() -> None:
    subject = hapi.Model(nn.Linear(6, 3))
    step = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)  # noqa: E731
    subject.prepare(torch.optim.SGD(subject.parameters(), 0.1), nn.CrossEntropyLoss(), scheduler=step)
    history = hapi.debug.overfit_batches(subject, (X, Y), epochs=3, callbacks=LRScheduler(by_epoch=True), verbose=0)
    assert history.history["lr"] == [0.1] * 3 and subject.scheduler_interval != "step"


def test_labels_that_say_nothing_are_not_learnt_by_a_network_that_cannot() -> None:
    subject = hapi.Model(nn.Linear(6, 3)).prepare("sgd", nn.CrossEntropyLoss())
    data = torch.zeros(8, 6), torch.arange(8) % 3
    assert hapi.debug.overfit_batches(subject, data, verbose=0).history["loss"][-1] > 1


class RowsLeft(torch.utils.data.IterableDataset):
    """Knows which row is next, in whichever pass."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        for _ in range(12):
            self.next += 1
            yield torch.randn(6), self.next % 3

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_data_with_a_state_is_where_it_was():
    data = RowsLeft()
    data.next = 5
    hapi.find_lr(hapi.Model(torch.nn.Linear(6, 3)).prepare("sgd", torch.nn.CrossEntropyLoss()), data, batch_size=2)
    assert data.next == 5
