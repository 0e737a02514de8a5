"""The area under the ROC curve, from all scores of the pass."""

from __future__ import annotations

import torch
from torch import Tensor

from hapi import kinds
from hapi.batch import is_counted
from hapi.metrics.base import Metric, as_exact
from hapi.metrics.shapes import align, pair


class Auc(Metric):
    """The area under the ROC curve, exact.

    It is the chance that a sample of class 1 scores higher than one of class 0, a tie counting one half.
    Nothing is binned: all scores of the pass are kept, 5 to 9 bytes a sample, and gathered from all ranks at
    its end. Where the labels of a pass are all of one class there is no curve, and the value is NaN.

    Outputs are (N,) or (N, 1), probabilities or logits alike, or (N, 2), the columns of class 0 and class 1,
    likewise. Labels are 0 or 1 (or -1 or 1), (N,) or (N, 1).

    Args:
        name: The key in logs.
        ignore_index: Samples with this label are left out. None: no such label.
    """

    scores: list[Tensor]
    kinds: list[Tensor]

    def __init__(self, name: str = "auc", *, ignore_index: int | None = -100) -> None:
        kinds.check(Auc, locals())
        super().__init__(name)
        self.ignore_index = ignore_index
        self.add_state("scores", torch.empty(0), reduce="cat")
        self.add_state("kinds", torch.empty(0, dtype=torch.int8), reduce="cat")

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Take in one batch.

        Raises:
            TypeError: Outputs or labels are not one tensor each.
            ValueError: Their shapes do not fit each other, or there are more than two classes or other labels.
        """
        outputs, labels = pair(self, outputs, labels)
        # Whole numbers, such as votes, are scores as well.
        outputs, labels = align(self, outputs if outputs.is_floating_point() else as_exact(outputs), labels, 2)
        if outputs.ndim > labels.ndim:
            if outputs.shape[1] != 2:
                raise ValueError(
                    f"Auc received outputs of {outputs.shape[1]} classes, shape {tuple(outputs.shape)}: the curve is "
                    "that of class 1 against class 0. Write a subclass whose update picks one class of interest."
                )
            # Of probabilities and of logits alike the difference is what orders the samples.
            outputs = as_exact(outputs[:, 1]) - as_exact(outputs[:, 0])
        scores, kinds = outputs.detach(), (labels > 0.5).to(torch.int8)
        if self.ignore_index is not None:
            left_out = ~is_counted(labels, self.ignore_index)
            # The scores there are padding, from which no NaN may come into the value.
            scores, kinds = scores.masked_fill(left_out, 0), kinds.masked_fill(left_out, -1)
        self.scores.append(scores.flatten())
        self.kinds.append(kinds.flatten())

    def result(self) -> Tensor:
        """The value; NaN unless both classes occur, and if a score is NaN."""
        scores, order = as_exact(self.concatenated("scores")).sort()
        kinds = self.concatenated("kinds")[order]
        ones, zeros = kinds == 1, kinds == 0
        zeros_before = torch.cat([zeros.new_zeros(1, dtype=torch.int64), zeros.cumsum(0)])
        below = zeros_before[torch.searchsorted(scores, scores)]
        not_above = zeros_before[torch.searchsorted(scores, scores, right=True)]
        # Twice the number of pairs won, a whole number, since each tie counts one half.
        twice_won = (ones * (below + not_above)).sum()
        value = as_exact(twice_won) / (2 * ones.sum() * zeros.sum())
        return value.masked_fill(scores.isnan().any(), torch.nan)
