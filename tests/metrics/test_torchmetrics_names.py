"""The names of torchmetrics objects that give several values: announced as they will come, or said to be open."""

import csv
import warnings

import pytest
import torch
from torch import nn

import hapi
from hapi.callbacks import CSVLogger, EarlyStopping
from hapi.callbacks.monitor import Monitor
from hapi.metrics.adapters import as_metric, as_metrics
from hapi.metrics.base import OPEN

torchmetrics = pytest.importorskip("torchmetrics")
wrappers = pytest.importorskip("torchmetrics.wrappers")

OUTPUTS, LABELS = torch.randn(9, 3).softmax(1), torch.arange(9) % 3


def several(name="Recall", average=None):
    return getattr(torchmetrics.classification, f"Multiclass{name}")(num_classes=3, average=average)


def classwise(name="Recall", **options):
    return wrappers.ClasswiseWrapper(several(name), **options)


CASES = {
    "classes": (classwise, ["multiclassrecall_0", "multiclassrecall_1", "multiclassrecall_2"]),
    "labels": (lambda: classwise(labels=["a", "b", "c"]), [f"multiclassrecall_{label}" for label in "abc"]),
    "prefix": (lambda: classwise(prefix="r-", postfix="-x"), ["r-0-x", "r-1-x", "r-2-x"]),
    "all scores are kept": (lambda: classwise("AUROC"), [f"multiclassauroc_{number}" for number in range(3)]),
    "extremes": (lambda: wrappers.MinMaxMetric(several(average="macro")), ["raw", "max", "min"]),
    "extremes, all kept": (lambda: wrappers.MinMaxMetric(several("AUROC", "macro")), ["raw", "max", "min"]),
    "bootstrap": (lambda: wrappers.BootStrapper(several(average="macro"), 3), ["mean", "std"]),
    "one": (lambda: several("AUROC", "macro"), ["MulticlassAUROC"]),
    "sum": (lambda: several("AUROC", "macro") + several(average="macro"), ["CompositionalMetric"]),
    "running": (lambda: wrappers.Running(several(average="macro")), ["Running"]),
    "collection": (
        lambda: torchmetrics.MetricCollection(
            {"all": classwise("AUROC"), "one": several("AUROC", "macro")}, prefix="my_"
        ),
        ["my_multiclassauroc_0", "my_multiclassauroc_1", "my_multiclassauroc_2", "my_one"],
    ),
    "the same keys twice": (
        lambda: torchmetrics.MetricCollection({"a": classwise(), "b": classwise()}),
        [f"{key}_multiclassrecall_{number}" for key in "ab" for number in range(3)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_names_are_those_of_the_values(name):
    make, expected = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric = as_metric(make())
    assert metric.names == expected
    metric.update(OUTPUTS, LABELS)
    assert list(metric.values()) == expected


class ByData(torchmetrics.Metric):
    """A key for each class that has come."""

    def __init__(self):
        super().__init__()
        self.add_state("counts", torch.zeros(3))

    def update(self, outputs, labels):
        self.counts += labels.bincount(minlength=3)

    def compute(self):
        return {f"n_{number}": count for number, count in enumerate(self.counts) if count}


class NeedsData(ByData):
    def compute(self):
        if not self.counts.sum():
            raise ValueError("no data")
        return super().compute()


class OneValue(ByData):
    def compute(self):
        return self.counts.sum()


def test_names_that_nobody_can_tell_are_open():
    assert as_metric(ByData()).names == as_metric(NeedsData()).names == [OPEN]
    assert as_metric(OneValue()).names == ["OneValue"]
    collection = torchmetrics.MetricCollection({"one": OneValue(), "mse": torchmetrics.MeanSquaredError()})
    assert as_metric(collection).names == ["mse", "one"]
    assert len(as_metrics([ByData(), NeedsData()])) == 2  # not two of the same name


def test_names_of_several_values_count_as_names():
    assert len(as_metrics([classwise(), classwise("Precision")])) == 2
    with pytest.raises(ValueError, match="Several metrics are called 'multiclassrecall_0'"):
        as_metrics([classwise(), classwise()])


def test_a_monitor_takes_a_name_that_may_come():
    names = {"metrics": ["loss", OPEN, "lr"]}
    Monitor("X", "n_0", "max").check(names)
    with pytest.raises(ValueError, match=r"one of 'loss', 'lr', or pass fit an eval_data"):
        Monitor("X", "val_n_0", "max").check(names)
    Monitor("X", "val_n_0", "max").check({"metrics": [*names["metrics"], "val_loss", f"val_{OPEN}"]})
    with pytest.raises(ValueError, match="the name does not tell"):
        Monitor("X", "n_0").check(names)


@pytest.mark.parametrize(
    ("make", "value"), [(classwise, "multiclassrecall_0"), (NeedsData, "n_0")], ids=["known", "open"]
)
def test_a_fit_monitors_and_logs_them(make, value, tmp_path):
    network = nn.Linear(3, 3)
    model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), 0.1), nn.CrossEntropyLoss(), make())
    data, path = (OUTPUTS, LABELS), tmp_path / "log.csv"
    stopping = EarlyStopping(monitor=f"val_{value}", mode="max", patience=5)
    model.fit(data, data, epochs=2, verbose=0, callbacks=[stopping, CSVLogger(path)])
    rows = list(csv.DictReader(path.read_text().splitlines()))
    keys = [f"{value[:-1]}{number}" for number in range(3)]
    expected = {"epoch", "lr", *(f"{part}{key}" for part in ("", "val_") for key in ("loss", *keys))}
    assert set(rows[0]) == expected and all(cell for row in rows for cell in row.values())
