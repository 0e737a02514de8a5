"""as_metric and as_metrics: what counts as a metric, and what is said of the rest."""

import functools
import math

import pytest
import torch
from torch import nn

from hapi.metrics import Accuracy, Metric, Precision
from hapi.metrics.adapters import as_metric, as_metrics


def hit(outputs, labels):
    return outputs.argmax(1) == labels


OUTPUTS, LABELS = torch.eye(3), torch.tensor([0, 1, 0])


def test_none_one_and_several():
    accuracy, precision = Accuracy(), Precision()
    assert as_metrics(None) == []
    assert as_metrics(accuracy) == [accuracy]
    assert as_metrics([accuracy, precision]) == as_metrics((accuracy, precision)) == [accuracy, precision]


def test_a_function_is_averaged_over_samples_not_over_batches():
    metric = as_metric(hit)
    metric.update(OUTPUTS, LABELS)
    metric.update(torch.eye(3)[:1], torch.tensor([0]))
    assert metric.name == "hit"
    assert metric.compute() == 0.75


def test_a_function_may_return_several_values_per_sample():
    metric = as_metric(nn.L1Loss(reduction="none"))
    metric.update(torch.zeros(2, 4), torch.arange(8.0).view(2, 4))
    metric.update(torch.zeros(1, 4), torch.full((1, 4), 0.5))
    assert metric.name == "L1Loss"
    assert metric.compute() == pytest.approx((1.5 + 5.5 + 0.5) / 3, abs=1e-15)


def test_a_function_without_labels_and_an_empty_batch():
    metric = as_metric(lambda outputs, labels: outputs["x"].norm(dim=1))
    assert metric.name == "lambda"
    metric.update({"x": torch.empty(0, 2)}, None)
    assert math.isnan(metric.compute())
    metric.update({"x": torch.tensor([[3.0, 4.0]])}, None)
    assert metric.compute() == 5.0


def test_a_partial_has_its_function_s_name():
    assert as_metric(functools.partial(hit)).name == "hit"


@pytest.mark.parametrize(
    "wrong",
    [lambda o, y: hit(o, y).float().mean(), lambda o, y: o[:2].sum(1), lambda o, y: o[:, :0]],
)
def test_a_function_must_return_a_value_per_sample(wrong):
    with pytest.raises(ValueError, match=r"Return a value per sample, shape \(N,\): without .mean\(\)"):
        as_metric(wrong).update(OUTPUTS, LABELS)


@pytest.mark.parametrize("wrong", [lambda o, y: 0.5, lambda o, y: hit(o, y).tolist(), lambda o, y: None])
def test_a_function_must_return_a_tensor(wrong):
    with pytest.raises(TypeError, match="Return a tensor with a value per sample"):
        as_metric(wrong).update(OUTPUTS, LABELS)


def test_a_function_is_not_copied_and_keeps_no_graph():
    weight = nn.Parameter(torch.ones(3))

    def weighted(outputs, labels):
        return (outputs * weight).sum(1)

    import copy

    metric = as_metric(weighted)
    twin = copy.deepcopy(metric)
    twin.update(OUTPUTS, LABELS)
    weight.data.fill_(3.0)
    twin.update(OUTPUTS, LABELS)
    assert twin.compute() == 2.0
    assert not twin.total.requires_grad and metric.samples == 0


@pytest.mark.parametrize(("text", "cure"), [("acc", "Accuracy"), ("AUC", "Auc"), ("mse", "MeanSquaredError")])
def test_a_text_is_no_metric(text, cure):
    with pytest.raises(TypeError, match=rf"Write hapi.metrics.{cure}\(\)"):
        as_metrics([text])


def test_a_class_is_no_metric():
    with pytest.raises(TypeError, match=r"Write Accuracy\(\) with parentheses"):
        as_metrics(Accuracy)


def test_anything_else_is_no_metric():
    class Paddle:
        def __call__(self):
            return None

        def accumulate(self):
            return 0.0

    for wrong in (3, object(), {"acc": Accuracy()}, Paddle()):
        with pytest.raises(TypeError, match=r"Write a subclass of hapi.metrics.Metric with update\(outputs, labels\)"):
            as_metrics(wrong)


class NoUpdate(Metric):
    def compute(self):
        return 0.0


class NoValue(Metric):
    def update(self, outputs, labels):
        return None


class NoState(NoUpdate, NoValue):
    pass


@pytest.mark.parametrize(
    ("cls", "cure"),
    [
        (NoUpdate, r"Define update\(self, outputs, labels\)"),
        (NoValue, r"Define compute\(self\)"),
        (NoState, r"Call self.add_state\("),
    ],
)
def test_a_metric_that_cannot_work(cls, cure):
    with pytest.raises(TypeError, match=cure):
        as_metrics(cls())


def test_two_metrics_with_one_name():
    with pytest.raises(ValueError, match=r"called 'acc'.*Give one another name, such as Accuracy\(name=\"acc_2\"\)"):
        as_metrics([Accuracy(), Accuracy()])
    assert len(as_metrics([Accuracy(), Accuracy(name="acc_2"), Accuracy(topk=(1, 2))])) == 3


@pytest.mark.parametrize("name", ["loss", "lr", "epoch", "step", "val_acc"])
def test_a_name_that_logs_use_otherwise(name):
    with pytest.raises(ValueError, match='Give it another name: name="my_metric"'):
        as_metrics([Accuracy(name=name)])
