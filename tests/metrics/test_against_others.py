"""Our metrics against scikit-learn's and torchmetrics', on random and odd data, whole and put together from ranks."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hapi
from hapi.metrics import F1, Accuracy, Auc, MeanAbsoluteError, MeanSquaredError, Metric, Precision, Recall

sklearn = pytest.importorskip("sklearn.metrics")
torchmetrics = pytest.importorskip("torchmetrics")

CLASSES = 5
RATES = {Precision: sklearn.precision_score, Recall: sklearn.recall_score, F1: sklearn.f1_score}


def of(metric: Metric, outputs: Any, labels: Any, size: int = 7) -> Any:
    """The value over batches of awkward size."""
    for first in range(0, len(outputs), size):
        metric.update(outputs[first : first + size], labels[first : first + size])
    return metric.compute()


def drawn(seed: int, n: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, CLASSES, generator=generator)
    # Labels that the scores know something of; some seeds leave classes out.
    noisy = scores + 1.5 * torch.randn(n, CLASSES, generator=generator)
    return scores, noisy[:, : 2 + seed % 4].argmax(1)


LABEL_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "(N,)": lambda labels: labels,
    "(N, 1)": lambda labels: labels[:, None],
    "one-hot": lambda labels: nn.functional.one_hot(labels, CLASSES),
    "one-hot bool": lambda labels: nn.functional.one_hot(labels, CLASSES).bool(),
    "one-hot float": lambda labels: nn.functional.one_hot(labels, CLASSES).float(),
    "float": lambda labels: labels.float(),
    "uint8": lambda labels: labels.to(torch.uint8),
    "int32": lambda labels: labels.int(),
}
OUTPUT_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda scores: scores,
    "probabilities": lambda scores: scores.softmax(1),
    "class numbers": lambda scores: scores.argmax(1),
}
FORMS = [
    (outputs, labels)
    for outputs, labels in itertools.product(OUTPUT_FORMS, LABEL_FORMS)
    if outputs != "class numbers" or not labels.startswith("one-hot")
]


@pytest.mark.parametrize(("output_form", "label_form"), FORMS)
def test_several_classes(output_form: str, label_form: str) -> None:
    for seed in range(4):
        scores, labels = drawn(seed)
        outputs, given = OUTPUT_FORMS[output_form](scores), LABEL_FORMS[label_form](labels)
        predicted = scores.argmax(1)
        assert of(Accuracy(), outputs, given) == pytest.approx(sklearn.accuracy_score(labels, predicted), abs=1e-15)
        for (kind, theirs), average in itertools.product(RATES.items(), ("macro", "micro", "weighted")):
            ours = of(kind(num_classes=CLASSES, average=average), outputs, given)
            assert ours == pytest.approx(theirs(labels, predicted, average=average, zero_division=0), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_top_k(k: int) -> None:
    for seed in range(4):
        scores, labels = drawn(seed)
        expected = sklearn.top_k_accuracy_score(labels, scores, k=k, labels=range(CLASSES)) if k < CLASSES else 1.0
        assert of(Accuracy(topk=k), scores, labels) == pytest.approx(expected, abs=1e-15)


BINARY_LABELS: dict[str, Callable[[Tensor], Tensor]] = {
    "int": lambda labels: labels,
    "bool": lambda labels: labels.bool(),
    "float": lambda labels: labels.float(),
    "column": lambda labels: labels[:, None],
    "-1 and 1": lambda labels: 2 * labels - 1,
    "smoothed": lambda labels: 0.9 * labels.float() + 0.05,
}
BINARY_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda scores: scores,
    "probabilities": lambda scores: scores.sigmoid(),
    "column": lambda scores: scores[:, None],
    "two columns": lambda scores: torch.stack([-scores, scores], 1),
    "two probabilities": lambda scores: torch.stack([-scores, scores], 1).softmax(1),
    "predicted": lambda scores: (scores >= 0).long(),
    "predicted bool": lambda scores: scores >= 0,
}


@pytest.mark.parametrize("label_form", BINARY_LABELS)
@pytest.mark.parametrize("output_form", BINARY_OUTPUTS)
def test_two_classes(output_form: str, label_form: str) -> None:
    for seed in range(4):
        scores, labels = drawn(seed)
        score, label = scores[:, 0], (labels == 0).long()
        outputs, given = BINARY_OUTPUTS[output_form](score), BINARY_LABELS[label_form](label)
        for kind, theirs in RATES.items():
            assert of(kind(), outputs, given) == pytest.approx(theirs(label, score >= 0, zero_division=0), abs=1e-15)
        if not output_form.startswith("predicted"):
            # Of two classes a label must be the number of a column.
            columns = output_form.startswith("two") and label_form in ("-1 and 1", "smoothed")
            if not columns:
                assert of(Accuracy(), outputs, given) == pytest.approx(sklearn.accuracy_score(label, score >= 0))
            assert of(Auc(), outputs, given) == pytest.approx(sklearn.roc_auc_score(label, score), abs=1e-9)
        elif label_form in ("int", "bool"):
            assert of(Accuracy(), outputs, given) == pytest.approx(sklearn.accuracy_score(label, score >= 0))


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize(("label", "predicted"), list(itertools.product((0, 1), repeat=2)))
def test_one_class_only(kind: Any, label: int, predicted: int) -> None:
    labels, outputs = torch.full((9,), label), torch.full((9,), 2.0 * predicted - 1)
    theirs = RATES[kind]
    assert of(kind(), outputs, labels) == theirs(labels, outputs > 0, zero_division=0)
    for average in ("macro", "micro", "weighted"):
        expected = theirs(labels, outputs.gt(0).long(), average=average, zero_division=0)
        assert of(kind(num_classes=3, average=average), outputs.gt(0).long(), labels) == expected


def test_a_curve_needs_both_classes() -> None:
    for labels in (torch.zeros(9), torch.ones(9)):
        assert math.isnan(of(Auc(), torch.randn(9), labels))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert math.isnan(sklearn.roc_auc_score(labels, torch.randn(9)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_auc_with_ties(dtype: torch.dtype) -> None:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randint(-3, 4, (300,), generator=generator).to(dtype)
        labels = torch.randint(2, (300,), generator=generator)
        assert of(Auc(), scores, labels) == pytest.approx(sklearn.roc_auc_score(labels, scores.float()), abs=1e-12)


def test_auc_of_a_million_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(10**6, generator=generator)
    labels = (torch.rand(10**6, generator=generator) < scores.sigmoid()).long()
    for rounded in (scores, (scores * 100).round()):
        ours = of(Auc(), rounded, labels, size=50_000)
        assert ours == pytest.approx(sklearn.roc_auc_score(labels, rounded), abs=1e-12)


QUANTITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "(N,)": lambda values: values,
    "(N, 1)": lambda values: values[:, None],
    "float64": lambda values: values.double(),
    "half": lambda values: values.half(),
    "int": lambda values: values.round().long(),
    "bool": lambda values: values > 0,
    "numpy": lambda values: values.double().numpy(),
}


@pytest.mark.parametrize("label_form", QUANTITIES)
@pytest.mark.parametrize("output_form", ["(N,)", "(N, 1)", "half", "int", "numpy"])
def test_quantities(output_form: str, label_form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = QUANTITIES[output_form](3 * torch.randn(50, generator=generator))
    labels = QUANTITIES[label_form](3 * torch.randn(50, generator=generator))
    flat = [torch.as_tensor(value).reshape(-1).double().numpy() for value in (labels, outputs)]
    assert of(MeanAbsoluteError(), outputs, labels) == pytest.approx(sklearn.mean_absolute_error(*flat), rel=1e-12)
    assert of(MeanSquaredError(), outputs, labels) == pytest.approx(sklearn.mean_squared_error(*flat), rel=1e-12)


def test_quantities_of_several_outputs() -> None:
    outputs, labels = torch.randn(50, 3), torch.randn(50, 3)
    expected = sklearn.mean_squared_error(labels.double(), outputs.double())
    assert of(MeanSquaredError(), outputs, labels) == pytest.approx(expected, rel=1e-12)


# What cannot be understood.

COLUMN = torch.linspace(-1, 1, 6)
SCORES = torch.eye(6, 4)


@pytest.mark.parametrize(
    ("metric", "outputs", "labels", "said"),
    [
        (Accuracy(), COLUMN, torch.tensor([1, 2, 1, 2, 1, 2]), "from 1 to 2 for 2 classes.*from 0 to 1. Number the"),
        (Auc(), COLUMN, torch.tensor([0, 1, 2, 0, 1, 2]), "from 0 to 2 for 2 classes"),
        (Precision(), COLUMN, torch.tensor([0, 1, 2, 0, 1, 2]), "from 0 to 2 for 2 classes.*write num_classes="),
        (Recall(), torch.arange(6), torch.tensor([0, 1, 1, 0, 1, 0]), "outputs from 0 to 5 for 2 classes"),
        (Accuracy(), SCORES, torch.arange(1, 7) % 5, "labels from 0 to 4 for 4 classes"),
        (Accuracy(), SCORES, torch.tensor([-1, 0, 1, 2, 3, 0]), "from -1 to 3 .*or write ignore_index=-1"),
        (Accuracy(), SCORES, torch.rand(6) + 0.1, "no whole numbers, for outputs of 4 classes.*MeanSquaredError"),
        (F1(num_classes=4), SCORES, torch.arange(6), "from 0 to 5 for 4 classes"),
        (F1(num_classes=4), SCORES, torch.full((6,), -1), "ignore_index=-1"),
        (F1(num_classes=4), torch.arange(6), torch.zeros(6).long(), "outputs from 0 to 5"),
        (Accuracy(), torch.tensor(1.0), torch.tensor(1), "do not fit each other"),
    ],
)
def test_what_cannot_be_understood(metric: Metric, outputs: Tensor, labels: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        metric.update(outputs, labels)


def test_a_late_label_without_a_place_is_refused_too() -> None:
    metric = F1(num_classes=4)
    metric.update(SCORES, torch.zeros(6).long())
    with pytest.raises(ValueError, match=r"F1\(num_classes=4\) received labels .* none of them.* 0 to 3"):
        metric.update(SCORES, torch.full((6,), 4))


def test_options_that_cannot_be_understood() -> None:
    with pytest.raises(ValueError, match="average='weighted' without num_classes.*or leave average out"):
        F1(average="weighted")
    with pytest.raises(ValueError, match=r"average=None, which is unknown.*ClasswiseWrapper"):
        F1(num_classes=3, average=None)
    with pytest.raises(TypeError, match="the imaginary part would be lost"):
        MeanSquaredError().update(torch.ones(3, dtype=torch.complex64), torch.ones(3))


def test_labels_that_the_metric_leaves_out_are_no_fault() -> None:
    labels = torch.tensor([-1, 0, 1, 2, 3, -1])
    expected = sklearn.accuracy_score(labels[1:5], SCORES[1:5].argmax(1))
    assert of(Accuracy(ignore_index=-1), SCORES, labels) == expected


# Several ranks.


def our_cases() -> Iterator[tuple[Callable[[], Metric], Tensor, Tensor]]:
    scores, labels = drawn(3)
    column = scores[:, 0], (labels == 0).long()
    for make in (Accuracy, lambda: Accuracy(topk=(1, 3)), lambda: F1(num_classes=CLASSES)):
        yield make, scores, labels
    for make in (Accuracy, Precision, Recall, F1, Auc, MeanAbsoluteError, MeanSquaredError):
        yield make, *column
        # The first half lies within [0, 1]: only all of them together tell that they are logits.
        yield make, column[0].sort(stable=True).values.roll(30), column[1]


@pytest.mark.parametrize("shares", [(60, 0), (0, 0, 60), (1, 59), (13, 0, 29, 18)], ids=str)
def test_ranks_together_are_one(shares: tuple[int, ...]) -> None:
    for make, outputs, labels in our_cases():
        ranks = []
        for ours, theirs in zip(outputs.split(shares), labels.split(shares), strict=True):
            metric = make()
            of(metric, ours, theirs)
            ranks.append(metric.states())
        merged = make()
        merged.merge(ranks)
        assert merged.compute() == pytest.approx(of(make(), outputs, labels), rel=1e-12)


# torchmetrics, as it is.

KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "accuracy": (lambda: torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES), "classes"),
    "top 2": (lambda: torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, top_k=2), "classes"),
    "f1": (lambda: torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="weighted"), "classes"),
    "auroc": (lambda: torchmetrics.AUROC(task="multiclass", num_classes=CLASSES), "classes"),
    "average precision": (lambda: torchmetrics.AveragePrecision(task="multiclass", num_classes=CLASSES), "classes"),
    "kappa": (lambda: torchmetrics.CohenKappa(task="multiclass", num_classes=CLASSES), "classes"),
    "matthews": (lambda: torchmetrics.MatthewsCorrCoef(task="multiclass", num_classes=CLASSES), "classes"),
    "calibration": (lambda: torchmetrics.CalibrationError(task="multiclass", num_classes=CLASSES), "classes"),
    "binary": (lambda: torchmetrics.F1Score(task="binary"), "column"),
    "multi-label": (lambda: torchmetrics.F1Score(task="multilabel", num_labels=CLASSES), "labels"),
    "ranking": (lambda: torchmetrics.classification.MultilabelRankingAveragePrecision(CLASSES), "labels"),
    "r2": (torchmetrics.R2Score, "quantities"),
    "pearson": (torchmetrics.PearsonCorrCoef, "quantities"),
    "spearman": (torchmetrics.SpearmanCorrCoef, "quantities"),
    "explained": (torchmetrics.ExplainedVariance, "quantities"),
    "cosine": (lambda: torchmetrics.CosineSimilarity(reduction="mean"), "vectors"),
    "collection": (
        lambda: torchmetrics.MetricCollection(
            [
                torchmetrics.Precision(task="multiclass", num_classes=CLASSES, average="macro"),
                torchmetrics.Recall(task="multiclass", num_classes=CLASSES, average="macro"),
                torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),
            ],
            prefix="all_",
        ),
        "classes",
    ),
    "per class": (
        lambda: torchmetrics.ClasswiseWrapper(
            torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average=None)
        ),
        "classes",
    ),
    "extremes": (lambda: torchmetrics.MinMaxMetric(torchmetrics.R2Score()), "quantities"),
}


def data_for(form: str) -> tuple[Tensor, Tensor]:
    scores, labels = drawn(3)
    return {
        "classes": (scores.softmax(1), labels),
        "column": (scores[:, 0].sigmoid(), (labels == 0).long()),
        "labels": (scores.sigmoid(), (scores.roll(1, 0) > 0).long()),
        "quantities": (scores[:, 0], scores[:, 0] + scores[:, 1]),
        "vectors": (scores, scores.roll(1, 1)),
    }[form]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_torchmetrics_in_evaluate_is_torchmetrics_alone(name: str) -> None:
    make, form = KINDS[name]
    outputs, labels = data_for(form)
    alone = make()
    for first in range(0, len(outputs), 7):
        alone.update(outputs[first : first + 7], labels[first : first + 7])
    computed = alone.compute()
    expected = computed if isinstance(computed, dict) else {type(alone).__name__: computed}
    model = hapi.Model(nn.Identity()).prepare(metrics=make())
    assert model.evaluate((outputs, labels), batch_size=7, verbose=0) == {
        key: pytest.approx(float(value), abs=1e-6) for key, value in expected.items()
    }
