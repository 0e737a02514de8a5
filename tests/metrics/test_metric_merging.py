"""Random splits over ranks, empty ones included: merged states give what one process gives."""

import copy

import pytest
import torch

from hapi.metrics import F1, Accuracy, Auc, MeanAbsoluteError, MeanSquaredError, Precision, Recall
from hapi.metrics.adapters import as_metric


def class_batch(n, generator):
    labels = torch.randint(0, 4, (n,), generator=generator)
    labels[torch.rand(n, generator=generator) < 0.1] = -100
    return torch.randn(n, 4, generator=generator), labels


def column_batch(n, generator):
    return torch.randn(n, generator=generator), torch.randint(0, 2, (n,), generator=generator)


def probability_batch(n, generator):
    outputs, labels = column_batch(n, generator)
    return outputs.sigmoid(), labels


def quantity_batch(n, generator):
    return torch.randn(n, 3, generator=generator), torch.randn(n, 3, generator=generator)


def right(outputs, labels):
    return outputs.argmax(1) == labels


CASES = {
    "accuracy": (Accuracy, class_batch),
    "topk": (lambda: Accuracy(topk=(1, 3)), class_batch),
    "binary accuracy": (Accuracy, column_batch),
    "binary accuracy of probabilities": (Accuracy, probability_batch),
    "precision": (Precision, column_batch),
    "recall": (lambda: Recall(num_classes=4), class_batch),
    "f1": (lambda: F1(num_classes=4, average="micro"), class_batch),
    "auc": (Auc, column_batch),
    "mae": (MeanAbsoluteError, quantity_batch),
    "mse": (MeanSquaredError, quantity_batch),
    "function": (lambda: as_metric(right), class_batch),
}


@pytest.mark.parametrize("name", CASES)
def test_any_split_over_ranks_equals_one_process(name):
    make, batch = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    for _ in range(15):
        world = int(torch.randint(1, 6, (), generator=generator))
        one, ranks = make(), [make() for _ in range(world)]
        for _ in range(int(torch.randint(1, 7, (), generator=generator))):
            outputs, labels = batch(int(torch.randint(1, 9, (), generator=generator)), generator)
            one.update(outputs, labels)
            ranks[int(torch.randint(0, world, (), generator=generator))].update(outputs, labels)
        merged = make()
        merged.merge([rank.states() for rank in ranks])
        for key, expected in one.values().items():
            torch.testing.assert_close(merged.values()[key], expected, rtol=0, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_merges_to_the_same_bits(name):
    make, batch = CASES[name]
    generator = torch.Generator().manual_seed(1)
    ranks = [make() for _ in range(3)]
    for rank in ranks:
        rank.update(*batch(7, generator))
    states = [rank.states() for rank in ranks]
    seen = []
    for _ in ranks:
        merged = make()
        merged.merge(copy.deepcopy(states))
        seen.append({key: float(value).hex() for key, value in merged.values().items()})
    assert seen[0] == seen[1] == seen[2]
