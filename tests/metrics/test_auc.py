"""Auc against its definition: the share of pairs won, ties counting one half."""

import math

import pytest
import torch

from hapi.metrics import Auc


def by_pairs(scores, labels):
    ones, zeros = scores[labels == 1].double(), scores[labels == 0].double()
    difference = ones[:, None] - zeros[None, :]
    return float(((difference > 0).double() + (difference == 0).double() / 2).mean())


def auc(outputs, labels, **options):
    metric = Auc(**options)
    metric.update(outputs, labels)
    return metric.compute()


def test_closed_forms():
    labels = torch.tensor([0, 0, 1, 1])
    assert auc(torch.tensor([0.1, 0.2, 0.3, 0.4]), labels) == 1.0
    assert auc(torch.tensor([0.4, 0.3, 0.2, 0.1]), labels) == 0.0
    assert auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), labels) == 0.75
    assert auc(torch.full((4,), 0.5), labels) == 0.5


@pytest.mark.parametrize("seed", range(20))
def test_random_scores_with_many_ties_equal_the_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(2, 60, (), generator=generator))
    scores = torch.randint(0, 6, (n,), generator=generator) / 5
    labels = torch.randint(0, 2, (n,), generator=generator)
    labels[:2] = torch.tensor([0, 1])
    assert auc(scores, labels) == pytest.approx(by_pairs(scores, labels), abs=1e-14)
    assert auc(scores.half(), labels.float()) == pytest.approx(by_pairs(scores, labels), abs=1e-14)


def test_logits_probabilities_and_two_columns_give_the_same():
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 2, dtype=torch.float64), torch.randint(0, 2, (50,))
    margin = logits[:, 1] - logits[:, 0]
    expected = by_pairs(margin, labels)
    for outputs in (logits, logits.softmax(1), margin, margin.sigmoid(), margin[:, None]):
        assert auc(outputs, labels) == pytest.approx(expected, abs=1e-14)
        assert auc(outputs, labels[:, None]) == pytest.approx(expected, abs=1e-14)


def test_ignored_labels_are_left_out():
    scores, labels = torch.tensor([0.1, 0.4, 0.35, 0.8, 0.9]), torch.tensor([0, 0, 1, 1, -100])
    assert auc(scores, labels) == 0.75
    assert auc(scores, labels.masked_fill(labels == -100, 2), ignore_index=2) == 0.75


@pytest.mark.parametrize("padding", [math.nan, -math.inf, math.inf, -100.0])
def test_outputs_at_ignored_labels_are_padding(padding):
    scores, labels = torch.tensor([0.1, 0.4, 0.35, 0.8, padding]), torch.tensor([0, 0, 1, 1, -100])
    assert auc(scores, labels) == 0.75
    two = torch.stack([torch.zeros(5).masked_fill(labels == -100, padding), scores], 1)
    assert auc(two, labels) == 0.75
    assert math.isnan(auc(scores.masked_fill(labels == -100, math.nan), labels.clamp(min=0), ignore_index=None))


def test_nan_without_both_classes_and_for_nan_scores():
    assert math.isnan(Auc().compute())
    assert math.isnan(auc(torch.tensor([0.1, 0.2]), torch.tensor([1, 1])))
    assert math.isnan(auc(torch.tensor([0.1, math.nan]), torch.tensor([0, 1])))


def test_more_than_two_classes():
    with pytest.raises(ValueError, match="Write a subclass whose update picks one class"):
        Auc().update(torch.rand(4, 3), torch.zeros(4).long())


def test_no_graph_is_kept():
    metric = Auc()
    metric.update(torch.rand(4, requires_grad=True), torch.tensor([0, 1, 0, 1]))
    assert not metric.scores[0].requires_grad
