"""Errors of predicted quantities: the mean over all elements of the pass."""

from __future__ import annotations

import torch
from torch import Tensor

from hapi.metrics.base import Metric
from hapi.metrics.shapes import misfit, pair


class _MeanError(Metric):
    total: Tensor
    elements: int

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64))
        self.add_state("elements", 0)

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Take in one batch.

        Args:
            outputs: (N, ...).
            labels: The same shape; (N,) and (N, 1) fit each other.

        Raises:
            TypeError: Outputs or labels are not one tensor each, or complex.
            ValueError: Their shapes do not fit each other.
        """
        outputs, labels = pair(self, outputs, labels)
        if outputs.is_complex() or labels.is_complex():
            raise TypeError(
                f"{type(self).__name__} ({self.name!r}) received outputs of dtype {outputs.dtype} and labels of dtype "
                f"{labels.dtype}, of which the imaginary part would be lost. Write a subclass whose update gives real "
                "numbers: super().update(torch.view_as_real(outputs), torch.view_as_real(labels))."
            )
        if outputs.shape != labels.shape:
            if {outputs.shape, labels.shape} != {labels.shape[:1], (*labels.shape[:1], 1)}:
                raise misfit(self, outputs, labels)
            labels = labels.view_as(outputs)
        self.total += self._errors(outputs.to(self.total.dtype) - labels.to(self.total.dtype)).sum()
        self.elements += labels.numel()

    def result(self) -> Tensor:
        """The value; NaN if nothing was taken in."""
        return self.total / self.elements if self.elements else self.total * torch.nan

    def _errors(self, differences: Tensor) -> Tensor:
        raise NotImplementedError


class MeanAbsoluteError(_MeanError):
    """The mean of ``|outputs - labels|`` over all elements.

    Args:
        name: The key in logs.
    """

    def __init__(self, name: str = "mae") -> None:
        super().__init__(name)

    def _errors(self, differences: Tensor) -> Tensor:
        return differences.abs()


class MeanSquaredError(_MeanError):
    """The mean of ``(outputs - labels) ** 2`` over all elements.

    Args:
        name: The key in logs.
    """

    def __init__(self, name: str = "mse") -> None:
        super().__init__(name)

    def _errors(self, differences: Tensor) -> Tensor:
        return differences.square()
