"""Accuracy, precision, recall and F1: counts of whole numbers, exact at any world size.

Forms of a batch that all of them take, ``C`` classes in dimension 1 as torch's losses have it:

| outputs | labels | predicted class |
| --- | --- | --- |
| (N, C, ...), C > 1 | class numbers (N, ...) or (N, 1, ...) | the largest of C |
| (N, C, ...), C > 1 | one-hot or probabilities (N, C, ...) | the largest of C, on both sides |
| (N,) or (N, 1, ...), floating point | 0 or 1, with or without the 1 | 1 from the threshold on |
| class numbers, an integer dtype | class numbers, same shape | the output itself |

One column (the third form) holds probabilities or logits. Which of the two is decided at the end from all
outputs of the pass: they are probabilities (threshold 0.5) if every one lies within [0, 1], logits (threshold
0) otherwise. ``threshold=`` decides it instead. Labels equal to ``ignore_index`` are left out, and whatever the outputs
hold there. Several classes at once in one sample (multi-label) are none of these forms. Labels of one column may also
be -1 and 1, or probabilities, which are of class 1 above 0.5. Labels that are no numbers of classes are refused where
they occur in the first batch of a pass, whose values are read.

Equal outputs: the first class of the largest is the predicted one, and with ``topk`` which of them are among
the largest is torch's choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hapi import kinds
from hapi.batch import is_counted
from hapi.metrics.base import Metric, as_exact
from hapi.metrics.shapes import align, pair

# Where one column turns to class 1: probabilities, logits.
_BOTH_THRESHOLDS = (0.5, 0.0)
_AVERAGES = ("macro", "weighted", "micro")


class _Counting(Metric):
    """Counts of outputs of one column, for each threshold that may be the right one.

    The four of a row: true positives, predicted ones, actual ones, samples.
    """

    counts: Tensor
    columns: int
    low: Tensor
    high: Tensor

    def __init__(self, name: str | None, threshold: float | None, ignore_index: int | None) -> None:
        super().__init__(name)
        self.ignore_index = ignore_index
        self._thresholds = _BOTH_THRESHOLDS if threshold is None else (threshold,)
        self.add_state("counts", torch.zeros(len(self._thresholds), 4, dtype=torch.int64))
        self.add_state("columns", 0)
        self.add_state("low", torch.tensor(torch.inf, dtype=torch.float64), reduce="min")
        self.add_state("high", torch.tensor(-torch.inf, dtype=torch.float64), reduce="max")

    def _count(self, scores: Tensor, labels: Tensor) -> None:
        if not scores.numel():
            return
        self.columns += 1
        valid = self._valid(labels)
        actual = (labels > 0.5) & valid
        predicted = torch.stack([scores >= threshold for threshold in self._thresholds]) & valid
        columns = (predicted & actual, predicted, actual.expand_as(predicted), valid.expand_as(predicted))
        self.counts += torch.stack([column.flatten(1).sum(1) for column in columns], dim=1)
        if len(self._thresholds) > 1:
            # What stands at ignored labels is anything, such as the same padding. 0 speaks for neither form.
            low, high = torch.where(valid, scores, 0).aminmax()
            self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)

    def _valid(self, labels: Tensor) -> Tensor:
        if self.ignore_index is None:
            return torch.ones_like(labels, dtype=torch.bool)
        return is_counted(labels, self.ignore_index)

    def _counted(self) -> Tensor:
        """(4,): the counts at the right threshold."""
        if len(self._thresholds) == 1:
            return self.counts[0]
        probabilities = (self.low >= 0) & (self.high <= 1)
        return torch.where(probabilities, self.counts[0], self.counts[1])


class Accuracy(_Counting):
    """The share of samples (or pixels) whose class is predicted rightly.

    Args:
        topk: How many of the largest outputs may hold the label: a number, or several for several values.
        name: The key in logs; with a ``topk`` other than 1 ``{name}_top{k}``, a value for each k.
        threshold: For one output column: the output from which on class 1 is predicted. None: 0.5 if all
            outputs lie within [0, 1], otherwise 0.
        ignore_index: Samples with this label are left out, as torch's losses do. None: no such label.

    Example:
        >>> accuracy = Accuracy()
        >>> accuracy.update(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        >>> accuracy.compute()
        0.5
    """

    hits: Tensor
    counted: Tensor
    complete: int

    def __init__(
        self,
        topk: int | Sequence[int] = (1,),
        name: str = "acc",
        *,
        threshold: float | None = None,
        ignore_index: int | None = -100,
    ) -> None:
        kinds.check(Accuracy, locals())
        super().__init__(name, threshold, ignore_index)
        self.topk = _checked_topk(topk)
        self._names = [name] if self.topk == (1,) else [f"{name}_top{k}" for k in self.topk]
        # hits[k]: how often the label was the output with exactly k larger ones.
        self.add_state("hits", torch.zeros(max(self.topk), dtype=torch.int64))
        # What has counted: of labels with some to leave out, and of those without.
        self.add_state("counted", torch.tensor(0))
        self.add_state("complete", 0)

    @property
    def joins_batches(self) -> bool:  # type: ignore[override]
        """See `Metric`: whole numbers are added up. Which of several equal outputs torch ranks first is its own."""
        # Another `update`, of a subclass or of the object itself, counts on each batch.
        return type(self) is Accuracy and self.topk == (1,) and "update" not in vars(self)

    @property
    def names(self) -> list[str]:
        """The keys in logs: ``acc``, or ``acc_top1``, ``acc_top5``."""
        return list(self._names)

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Take in one batch, in one of the forms in this module's table.

        Raises:
            TypeError: Outputs or labels are not one tensor each.
            ValueError: Their shapes do not fit each other, labels are no class numbers, or ``topk`` is larger than
                the number of classes.
        """
        outputs, labels = align(self, *pair(self, outputs, labels))
        ignored = self.ignore_index
        if ignored is None or self._lies_outside(ignored):
            self.complete += labels.numel()
        else:
            self.counted += is_counted(labels, ignored).sum()
        if outputs.ndim > labels.ndim:
            self._count_classes(outputs, labels)
            return
        if self.topk != (1,):
            raise ValueError(
                f"Accuracy(topk={self.topk}) received one output a sample, shape {tuple(outputs.shape)}: there are no "
                "further classes to look at. Write Accuracy()."
            )
        if outputs.is_floating_point():
            self._count(outputs, labels)
        else:
            # Predictions may be padded as the labels are: an ignored label then equals its output.
            self.hits += (outputs.eq(labels) & self._valid(labels)).sum()

    def _lies_outside(self, label: int) -> bool:
        """Whether no label of the pass is this one, so that none need be looked for."""
        return self.label_span is not None and not self.label_span[0] <= label <= self.label_span[1]

    def _count_classes(self, outputs: Tensor, labels: Tensor) -> None:
        deepest = self.hits.numel()
        if deepest == 1:
            self.hits += self._counting(outputs.argmax(1).eq(labels), labels).sum()
            return
        if deepest > outputs.shape[1]:
            raise ValueError(
                f"Accuracy(topk={self.topk}) received outputs of {outputs.shape[1]} classes, shape "
                f"{tuple(outputs.shape)}: there are no {deepest} largest ones. Write a topk of at most "
                f"{outputs.shape[1]}."
            )
        ranked = outputs.topk(deepest, dim=1).indices.transpose(0, 1)
        self.hits += self._counting(ranked.eq(labels), labels).flatten(1).sum(1)

    def _counting(self, hits: Tensor, labels: Tensor) -> Tensor:
        # The largest of C scores is never a negative label to ignore: the usual case needs no further operation.
        return hits if self.ignore_index is None or self.ignore_index < 0 else hits & self._valid(labels)

    def result(self) -> Tensor | dict[str, Tensor]:
        """The value or values; NaN if no sample counted."""
        hits = self.hits.cumsum(0)
        if self.columns:
            true_positives, predicted, actual, samples = self._counted()
            # Of one column all is right but the ones that were missed or wrongly found.
            hits += samples - predicted - actual + 2 * true_positives
        shares = as_exact(hits) / (self.counted + self.complete)
        values = {name: shares[k - 1] for name, k in zip(self._names, self.topk, strict=True)}
        return values if len(values) > 1 else values[self._names[0]]


def _checked_topk(topk: int | Sequence[int]) -> tuple[int, ...]:
    several = tuple(topk) if isinstance(topk, Sequence) else (topk,)
    several = tuple(kinds.count("topk", k, 1, owner="Accuracy", what="classes") for k in several)
    if not several or len(set(several)) < len(several):
        raise ValueError(
            f"Accuracy received topk={topk!r}, but each of them names a value: it takes one number of classes or "
            "several, none of them twice. Write topk=1 or topk=(1, 5)."
        )
    return several


class _Rate(_Counting):
    """What precision, recall and F1 share: counts of class 1, or of each class."""

    class_counts: Tensor

    def __init__(
        self,
        name: str | None = None,
        *,
        threshold: float | None = None,
        num_classes: int | None = None,
        average: str = "macro",
        ignore_index: int | None = -100,
    ) -> None:
        kinds.check(_Rate, {**locals(), "average": str(average)})
        super().__init__(name, threshold, ignore_index)
        if average not in _AVERAGES:
            raise ValueError(
                f"{type(self).__name__} received average={average!r}, which is unknown. Write, with num_classes, "
                'average="macro" (mean over the classes), "weighted" (the same, by how often each occurs) or "micro" '
                "(over all samples), without it nothing, for the value of class 1. A value for each class is given by "
                "torchmetrics.ClasswiseWrapper."
            )
        if average != "macro" and num_classes is None:
            raise ValueError(
                f"{type(self).__name__} received average={average!r} without num_classes, so that there are no classes "
                f"to average over: it gives the value of class 1. Write {type(self).__name__}(num_classes=10, "
                f"average={average!r}), or leave average out."
            )
        if num_classes is not None and num_classes < 2:
            raise ValueError(
                f"{type(self).__name__} received num_classes={num_classes}: there are at least two classes. Leave "
                "num_classes out for the value of class 1 alone."
            )
        if num_classes is not None:
            kinds.count("num_classes", num_classes, 10, owner=type(self).__name__)
        self.num_classes, self.average = num_classes, average
        self.add_state("class_counts", torch.zeros(3, num_classes or 1, dtype=torch.int64))

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Take in one batch, in one of the forms in this module's table.

        Raises:
            TypeError: Outputs or labels are not one tensor each.
            ValueError: Their shapes do not fit each other or ``num_classes``, or labels are no class numbers.
        """
        outputs, labels = align(self, *pair(self, outputs, labels), self.num_classes or 2)
        if self.num_classes is None:
            self._count(self._positive_scores(outputs, labels), labels)
            return
        if outputs.ndim > labels.ndim:
            if outputs.shape[1] != self.num_classes:
                raise ValueError(
                    f"{type(self).__name__}(num_classes={self.num_classes}) received outputs of {outputs.shape[1]} "
                    f"classes, shape {tuple(outputs.shape)}. Write num_classes={outputs.shape[1]}."
                )
            outputs = outputs.argmax(1)
        elif outputs.is_floating_point():
            raise ValueError(
                f"{type(self).__name__}(num_classes={self.num_classes}) received one output a sample, shape "
                f"{tuple(outputs.shape)}: that tells two classes apart. Leave num_classes out."
            )
        self._count_classes(outputs.flatten(), labels.flatten())

    def _positive_scores(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if outputs.ndim == labels.ndim:
            return outputs
        if outputs.shape[1] > 2:
            raise ValueError(
                f"{type(self).__name__} received outputs of {outputs.shape[1]} classes, shape {tuple(outputs.shape)}: "
                f"it tells class 1 from class 0. Write {type(self).__name__}(num_classes={outputs.shape[1]})."
            )
        return outputs.argmax(1) if len(self._thresholds) > 1 else outputs[:, 1]

    def _count_classes(self, predicted: Tensor, labels: Tensor) -> None:
        valid = self._valid(labels)
        # Left-out samples add 0 to some class: selecting the others would have to wait for the device. Predictions may
        # be padded there too, with numbers that are no class.
        labels, predicted = torch.where(valid, labels, 0).long(), torch.where(valid, predicted, 0).long()
        ones = valid.long()
        try:
            self.class_counts[0].index_add_(0, labels, ones * predicted.eq(labels))
            self.class_counts[1].index_add_(0, predicted, ones)
            self.class_counts[2].index_add_(0, labels, ones)
        except IndexError as error:
            raise ValueError(
                f"{type(self).__name__}(num_classes={self.num_classes}) received labels or predicted classes that are "
                f"none of them: their numbers run from 0 to {self.num_classes - 1 if self.num_classes else 0}. Number "
                "the classes from 0, and write ignore_index= for samples that are to be left out."
            ) from error

    def result(self) -> Tensor:
        """The value; 0 where nothing was predicted or nothing was there."""
        if self.num_classes is None:
            return self._ratio(*self._counted()[:3])
        if self.average == "micro":
            return self._ratio(*self.class_counts.sum(1))
        if self.average == "weighted":
            actual = self.class_counts[2]
            return (self._ratio(*self.class_counts) * actual).sum() / actual.sum().clamp(min=1)
        occurs = self.class_counts[1] + self.class_counts[2] > 0
        return self._ratio(*self.class_counts).sum() / occurs.sum().clamp(min=1)

    def _ratio(self, true_positives: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        """The value of each class from its counts."""
        raise NotImplementedError


class Precision(_Rate):
    """The share of the samples predicted as class 1 that are of class 1; 0 if none is predicted.

    Args:
        name: The key in logs.
        threshold: The output of class 1 from which on it is predicted. None: for one column 0.5 if all
            outputs lie within [0, 1], otherwise 0; for two columns the larger one.
        num_classes: How many classes there are, to average over all of them. None: class 1 against class 0,
            from outputs of one or two columns.
        average: With ``num_classes``, ``"macro"``: the mean over the classes that occur in labels or
            predictions; ``"weighted"``: the same, each class weighed by its number of labels; ``"micro"``: over
            all samples, whatever their class.
        ignore_index: Samples with this label are left out. None: no such label.
    """

    def _ratio(self, true_positives: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        return _share(true_positives, predicted)


class Recall(_Rate):
    """The share of the samples of class 1 that are predicted as such; 0 if there is none.

    Its arguments are those of `Precision`.
    """

    def _ratio(self, true_positives: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        return _share(true_positives, actual)


class F1(_Rate):
    """The harmonic mean of precision and recall; 0 if class 1 never occurs.

    Its arguments are those of `Precision`.
    """

    def _ratio(self, true_positives: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        return _share(2 * true_positives, predicted + actual)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return as_exact(part) / whole.clamp(min=1)
