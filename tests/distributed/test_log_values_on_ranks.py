"""Values of epochs: the same on all ranks though ranks see, compute or name other ones; and what is decided by them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from closed_form import Line, mean_output, prepared, ramp
from ranks import alone, same
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

import hapi
from hapi.distributed import group


class PerClass(hapi.metrics.Metric):
    """The mean output of each class that has been seen: how many values it has depends on the samples."""

    def __init__(self) -> None:
        super().__init__(name="per_class")
        self.add_state("sums", torch.zeros(4))
        self.add_state("counts", torch.zeros(4))

    @property
    def names(self) -> list[str]:
        return [f"class_{number}" for number in range(4) if self.counts[number]]

    def update(self, outputs: Tensor, labels: Any) -> None:
        classes = labels[:, 0].long()
        self.sums.index_add_(0, classes, outputs[:, 0])
        self.counts.index_add_(0, classes, torch.ones(len(classes)))

    def compute(self) -> dict[str, float]:
        return {f"class_{n}": float(self.sums[n] / self.counts[n]) for n in range(4) if self.counts[n]}


def classes_apart(n: int) -> tuple[dict[str, list[float]], dict[str, float], list[list[str]]]:
    """Samples sorted by class, so that ranks see other ones; the keys of each batch's logs on this rank too."""
    keys: list[list[str]] = []

    class Look(hapi.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            keys.append(sorted(logs))

        def on_eval_batch_end(self, step, logs=None):
            keys.append(sorted(logs))

    model = prepared(metrics=PerClass())
    model.optimizer.param_groups[0]["lr"] = 0.0
    x = torch.arange(float(n))[:, None]
    data = x, (x * 3 / n).floor()
    history = model.fit(data, data, global_batch_size=8, shuffle=False, callbacks=Look(), verbose=0).history
    return history, model.evaluate(data, batch_size=4, verbose=0), keys


@pytest.mark.parametrize("n", [1, 3, 8, 13])
def test_keys_that_differ_between_ranks_are_brought_together(ranks, n):
    wanted = alone(classes_apart, n)
    results = ranks(4).run(classes_apart, n)
    history, evaluated = same([result[:2] for result in results])
    assert history.keys() == wanted[0].keys()
    for name, values in history.items():
        assert values == pytest.approx(wanted[0][name], rel=1e-6)
    assert evaluated == pytest.approx(wanted[1], rel=1e-6)
    if n < 4:
        # Ranks without any sample have no running value, and their batch logs no key.
        assert results[3][2] == [[]] * len(results[3][2])
        assert "loss" in results[0][2][0]


class Diced(hapi.metrics.Metric):
    """Computes by chance, as metrics over random subsets do."""

    def __init__(self) -> None:
        super().__init__(name="diced")
        self.add_state("count", 0)

    def update(self, outputs: Tensor, labels: Any) -> None:
        self.count += len(outputs)

    def compute(self) -> float:
        return self.count + random.random() + float(torch.rand(()))


class NamedAfterItsRank(Diced):
    """A key that only one rank has."""

    @property
    def names(self) -> list[str]:
        return [f"rank_{group.get_rank()}"]

    def compute(self) -> dict[str, float]:
        return {f"rank_{group.get_rank()}": float(self.count)}


def by_chance(metric: type[Diced]) -> tuple[dict[str, list[float]], dict[str, float], list[float]]:
    early = hapi.callbacks.EarlyStopping("val_loss", verbose=0, patience=9)
    model = prepared(metrics=metric())
    data = ramp(5)
    history = model.fit(data, data, batch_size=1, epochs=3, callbacks=early, verbose=0)
    return history.history, model.evaluate(data, batch_size=1, verbose=0), [early._watch.best]


@pytest.mark.parametrize("metric", [Diced, NamedAfterItsRank])
def test_what_a_metric_computes_otherwise_on_each_rank_is_rank_0_s(ranks, metric):
    history, evaluated, _ = same(ranks(3).run(by_chance, metric))
    name = "diced" if metric is Diced else "rank_0"
    assert list(history) == ["loss", name, "lr", "val_loss", f"val_{name}"]
    assert 5 <= evaluated[name] < 7


def rising_apart(on_first: list[float], on_others: list[float], epoch: list[int]) -> Any:
    """A loss function whose value is another one on the first rank than on the others."""

    def loss(outputs, labels):
        values = on_first if group.get_rank() == 0 else on_others
        return outputs.mean() * 0 + values[epoch[0]]

    return loss


FALLS, RISES = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0], [1.0, 2.0, 3.0, 4.0, 6.0, 8.0]
"""Their means: 3, 3, 3, 3, 3.5, 4."""


class CountEpochs(hapi.callbacks.Callback):
    """Tells the loss which epoch it is."""

    def __init__(self) -> None:
        self.epoch = [0]

    def on_epoch_begin(self, number, logs=None):
        self.epoch[0] = number


def plateau(kind: str, first: list[float], others: list[float]) -> tuple[list[float], float, list[float]]:
    """The rate is lowered where the mean over ranks does not fall, whatever a rank's own values do."""
    net, count = Line(), CountEpochs()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    callbacks: list[Any] = [count]
    scheduler = None
    if kind == "callback":
        callbacks.append(hapi.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=2, verbose=0))
    else:
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    model = hapi.Model(net).prepare(optimizer, rising_apart(first, others, count.epoch), scheduler=scheduler)
    history = model.fit(ramp(4), ramp(4), batch_size=2, epochs=6, callbacks=callbacks, verbose=0)
    return history.history["lr"], optimizer.param_groups[0]["lr"], history.history["val_loss"]


@pytest.mark.parametrize("kind", ["callback", "scheduler"])
def test_a_plateau_is_one_of_the_mean_over_ranks(ranks, kind):
    for first, others in ((FALLS, RISES), (RISES, FALLS)):
        rates, last, values = same(ranks(2).run(plateau, kind, first, others))
        assert values == [3.0, 3.0, 3.0, 3.0, 3.5, 4.0]
        assert (rates, last) == ([1.0, 1.0, 1.0, 0.5, 0.5, 0.25], 0.25)


def best(folder: str, first: list[float], others: list[float]) -> tuple[float, list[str], float | None]:
    """The best checkpoint by a metric, with a rising weight to tell epochs apart."""
    net, count = Line(weight=0.0), CountEpochs()

    def error(outputs, labels):
        return torch.full((len(outputs),), (first if group.get_rank() == 0 else others)[count.epoch[0]])

    # Each epoch is one step, which adds 1 to the weight.
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=1.0), lambda o, _: -o.mean(), error)
    x, y = torch.ones(4, 1), torch.zeros(4, 1)
    keeper = hapi.callbacks.ModelCheckpoint(monitor="val_error", mode="min", save_freq=100)
    model.fit((x, y), (x, y), batch_size=2, epochs=5, save_dir=folder, callbacks=[count, keeper], verbose=0)
    state = torch.load(Path(folder) / "best_model.pt", weights_only=True)
    return float(state["layer.weight"]), sorted(path.name for path in Path(folder).iterdir()), keeper._watch.best


def test_the_best_checkpoint_is_that_of_the_mean_over_ranks(ranks, tmp_path):
    # Means 4, 3, 2, 2.5, 3: the third epoch is the best, which is neither rank's own.
    first, others = [0.0, 1.0, 2.0, 3.0, 4.0], [8.0, 5.0, 2.0, 2.0, 2.0]
    for number, pair in enumerate(((first, others), (others, first))):
        weight, files, value = same(ranks(2).run(best, str(tmp_path / str(number)), *pair))
        assert (weight, value) == (3.0, 2.0)
        assert "best_model.pt" in files


def early(first: list[float], others: list[float], monitor: str) -> tuple[int, int | None]:
    net, count = Line(), CountEpochs()
    stopper = hapi.callbacks.EarlyStopping(monitor, mode="min", patience=3, verbose=0)
    loss = rising_apart(first, others, count.epoch)
    model = hapi.Model(net).prepare(
        torch.optim.SGD(net.parameters(), lr=1.0), loss, lambda o, _: loss(o, _).expand(len(o))
    )
    model.fit(ramp(4), ramp(4), batch_size=2, epochs=6, callbacks=[count, stopper], verbose=0)
    return model.epochs_trained, stopper.stopped_epoch


@pytest.mark.parametrize("monitor", ["loss", "val_loss", "lambda"])
def test_early_stopping_goes_by_the_mean_over_ranks(ranks, monitor):
    for first, others in ((FALLS, RISES), (RISES, FALLS)):
        assert same(ranks(2).run(early, first, others, monitor)) == (4, 4)


def spread_of_losses(n: int) -> dict[str, list[float]]:
    """Accumulated, in batches that weigh unequally; a metric beside it that weighs by samples."""
    net = Line()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = hapi.Model(net).prepare(optimizer, lambda o, y: ((o * y).sum(), y.sum()), lambda o, y: o[:, 0])
    x = torch.arange(float(n))[:, None]
    y = (torch.arange(n) % 3).float()[:, None]
    return model.fit((x, y), (x, y), global_batch_size=5, accumulate_grad_batches=2, epochs=2, verbose=0).history


@pytest.mark.parametrize("n", [2, 7, 16])
def test_a_loss_weighs_by_its_own_count_and_a_metric_by_samples(ranks, n):
    wanted = sum(x * (x % 3) for x in range(n)) / sum(x % 3 for x in range(n))
    history = same(ranks(4).run(spread_of_losses, n))
    for name, value in (("loss", wanted), ("lambda", (n - 1) / 2)):
        assert history[name] == pytest.approx([value] * 2, rel=1e-6)
        assert history[f"val_{name}"] == pytest.approx([value] * 2, rel=1e-6)


def running_values() -> tuple[list[float], list[float]]:
    """Batch logs are this rank's running means; the epoch's are of all."""
    running: list[float] = []

    class Look(hapi.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            assert isinstance(logs["loss"], Tensor)
            running.append(float(logs["loss"]))

    net = Line()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.0), mean_output)
    history = model.fit(ramp(8), batch_size=2, shuffle=False, callbacks=Look(), verbose=0)
    return running, history.history["loss"]


def test_batch_logs_are_this_rank_s_running_values(ranks):
    (first, epoch), (second, other) = ranks(2).run(running_values)
    assert first == [0.5, (0 + 1 + 4 + 5) / 4]
    assert second == [2.5, (2 + 3 + 6 + 7) / 4]
    assert epoch == other == [3.5]


def write_a_log(path: str) -> list[str]:
    """A file of values that every rank's script asks for."""
    model = prepared()
    model.fit(ramp(5), batch_size=1, epochs=2, callbacks=hapi.callbacks.CSVLogger(path), verbose=0)
    return sorted(entry.name for entry in Path(path).parent.iterdir())


def test_rank_0_alone_writes_the_file_of_values(ranks, tmp_path):
    assert same(ranks(3).run(write_a_log, str(tmp_path / "log.csv"))) == ["log.csv"]
    header, *rows = (tmp_path / "log.csv").read_text().splitlines()
    assert header.startswith("epoch,")
    assert [row.split(",")[0] for row in rows] == ["1", "2"]
