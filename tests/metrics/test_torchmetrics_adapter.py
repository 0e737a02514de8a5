"""torchmetrics behind our interface: its own values, and ranks put together without its collectives."""

import copy
import sys

import pytest
import torch

from hapi.metrics import Accuracy
from hapi.metrics.adapters import as_metric, as_metrics
from hapi.metrics.tally import Tally

torchmetrics = pytest.importorskip("torchmetrics")
CPU = torch.device("cpu")


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        n = 3 + number
        yield torch.randn(n, 4, generator=generator).softmax(1), torch.randint(0, 4, (n,), generator=generator)


def columns(count, seed=0):
    for outputs, labels in batches(count, seed):
        yield outputs[:, 0], (labels == 0).long()


def collection():
    return torchmetrics.MetricCollection(
        {
            "acc": torchmetrics.Accuracy(task="multiclass", num_classes=4),
            "precision": torchmetrics.Precision(task="multiclass", num_classes=4, average="macro"),
            "recall": torchmetrics.Recall(task="multiclass", num_classes=4, average="macro"),
            "auroc": torchmetrics.AUROC(task="multiclass", num_classes=4),
        }
    )


def quantities(count, seed=0):
    for outputs, labels in batches(count, seed):
        yield outputs[:, 0], labels.float()


CASES = {
    "sums": (lambda: torchmetrics.Accuracy(task="multiclass", num_classes=4), batches),
    "lists": (lambda: torchmetrics.AUROC(task="binary"), columns),
    "no reduction": (torchmetrics.PearsonCorrCoef, quantities),
    "sum and count": (torchmetrics.MeanSquaredError, quantities),
    "collection": (collection, batches),
    "composition": (lambda: torchmetrics.MeanSquaredError() + torchmetrics.MeanAbsoluteError(), quantities),
    "classwise": (
        lambda: torchmetrics.wrappers.ClasswiseWrapper(
            torchmetrics.Recall(task="multiclass", num_classes=4, average=None)
        ),
        batches,
    ),
    "nested collections": (
        lambda: torchmetrics.MetricCollection([collection()], prefix="my_"),
        batches,
    ),
}


def reference(make, data):
    metric = make()
    for outputs, labels in data:
        metric.update(outputs, labels)
    value = metric.compute()
    return value if isinstance(value, dict) else {type(metric).__name__: value}


@pytest.mark.parametrize("name", CASES)
def test_values_are_its_own(name):
    make, data = CASES[name]
    tally = Tally(as_metrics(make()), CPU)
    for outputs, labels in data(5):
        tally.update(None, 1, outputs, labels)
    expected = reference(make, data(5))
    assert list(tally.logs()) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(tally.logs()[key], value, rtol=0, atol=0)
        assert tally.reduced()[key] == float(value)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_come_together_a_rank_without_data_included(name, world):
    make, data = CASES[name]
    ranks = [copy.deepcopy(as_metric(make())) for _ in range(world)]
    for number, (outputs, labels) in enumerate(data(5)):
        ranks[number % (world - 1)].update(outputs, labels)
    merged = as_metric(make())
    merged.merge([rank.states() for rank in ranks])
    for key, value in reference(make, data(5)).items():
        torch.testing.assert_close(merged.values()[key], value, rtol=1e-6, atol=1e-6)


def test_a_pass_goes_on_from_its_saved_states():
    first, second = Tally([as_metric(collection())], CPU), Tally([as_metric(collection())], CPU)
    data = list(batches(5))
    for outputs, labels in data[:3]:
        first.update(None, 1, outputs, labels)
    saved = first.state()
    first.update(None, 1, *data[3])  # goes on without changing what was saved
    second.go_on_from([saved])
    for outputs, labels in data[3:]:
        second.update(None, 1, outputs, labels)
    expected = {key: pytest.approx(float(value)) for key, value in reference(collection, data).items()}
    assert second.reduced() == expected


def test_the_user_s_object_is_left_alone():
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=4)
    tally = Tally([as_metric(metric)], CPU)
    tally.update(None, 1, *next(batches(1)))
    assert metric.update_count == 0 and metric.sync_on_compute is True


def test_its_own_sync_is_off_within_too():
    adapted = as_metric(torchmetrics.MetricCollection({"both": torchmetrics.MeanSquaredError() + 1}))
    assert {part.sync_on_compute for _, part in adapted._parts()} == {False}
    assert len(list(adapted._parts())) == 2


def test_names():
    assert as_metric(torchmetrics.MeanSquaredError()).names == ["MeanSquaredError"]
    assert as_metric(collection()).names == ["acc", "auroc", "precision", "recall"]  # its own order
    with pytest.raises(ValueError, match="for torchmetrics MetricCollection"):
        as_metrics([torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()])


class Level(torchmetrics.Metric):
    """A state that is averaged over ranks, changed in place."""

    def __init__(self):
        super().__init__()
        self.add_state("level", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, outputs, labels):
        self.level.add_(outputs)

    def compute(self):
        return self.level


def test_a_rank_without_updates_has_no_part_in_a_mean():
    ranks = [copy.deepcopy(as_metric(Level())) for _ in range(3)]
    ranks[0].update(torch.tensor(1.0), None)
    ranks[2].update(torch.tensor(4.0), None)
    merged = as_metric(Level())
    merged.merge([rank.states() for rank in ranks])
    assert merged.values() == {"Level": torch.tensor(2.5)}


def test_loaded_states_are_copies():
    first, second = as_metric(Level()), as_metric(Level())
    first.update(torch.tensor(1.0), None)
    saved = first.states()
    second.load_states(saved)
    second.update(torch.tensor(1.0), None)
    assert (float(saved[".level"]), float(second.values()["Level"])) == (1.0, 2.0)


def test_a_value_that_is_not_one_number():
    metric = as_metric(torchmetrics.Recall(task="multiclass", num_classes=4, average=None))
    metric.update(*next(batches(1)))
    with pytest.raises(ValueError, match=r"shape \(4,\).*Choose an average"):
        metric.values()


def test_other_metrics_do_without_torchmetrics(monkeypatch):
    monkeypatch.delitem(sys.modules, "torchmetrics")
    tally = Tally(as_metrics([Accuracy(), lambda outputs, labels: labels]), CPU)
    tally.update(None, 1, *next(batches(1)))
    assert list(tally.reduced()) == ["acc", "lambda"]
    assert "torchmetrics" not in sys.modules
