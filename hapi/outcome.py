"""What one batch gave, what it weighs, and what stands for it on a rank without samples."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from hapi.batch import leaves, map_tensors
from hapi.distributed import group
from hapi.objective import Loss, wrong_count


class Outcome(NamedTuple):
    """What one batch gave, detached."""

    loss: torch.Tensor | None
    """Mean over the batch."""
    weight: int | torch.Tensor
    """How much it weighs in a mean over batches: samples, or the loss's own count."""
    outputs: Any

    @classmethod
    def of(cls, loss: Loss, size: int, outputs: Any) -> Outcome:
        """That of a batch of so many samples."""
        value, outputs = _without_graph(loss.value), map_tensors(_without_graph, outputs)
        if loss.weight is None:
            return cls(value, size, outputs)
        weight = _without_graph(loss.weight)
        return cls(value / divisor(weight), weight, outputs)


class Form(NamedTuple):
    """How the losses of a fit weigh, agreed by all ranks."""

    counted: bool
    """Whether they know their own weights."""
    scale: float
    """What sums are divided by before they are backpropagated: about one batch's weight, so that they stay in the
    range of half precision; a power of two, so that it changes no bit."""

    @classmethod
    def agreed(cls, outcome: Outcome | None) -> Form:
        """That of a first batch, of which a rank may have none. A collective.

        Raises:
            ValueError: The loss has counted less than nothing.
        """
        counts = outcome is not None and isinstance(outcome.weight, torch.Tensor)
        weight = float(outcome.weight) if outcome is not None and counts else 0.0
        if weight < 0:
            raise wrong_count(weight)
        ranks = group.gather_objects((counts, weight))
        mean = sum(weight for _, weight in ranks) / len(ranks)
        return cls(any(flag for flag, _ in ranks), 2.0 ** round(math.log2(mean)) if mean > 0 else 1.0)


def outcome_if_plain(value: Any, outputs: Any, size: int) -> Outcome | None:
    """The outcome of a step that gave a mean and one output, as nearly all do; None: it has to be looked at.

    It calls nothing of Python's, unlike `Outcome.of`.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(outputs, torch.Tensor) or value.dim() or not outputs.dim():
        return None
    value = value.detach() if value.requires_grad else value
    return Outcome(value, size, outputs.detach() if outputs.requires_grad else outputs)


def without_rows(tensor: torch.Tensor) -> torch.Tensor:
    """What a rank without samples gives a network whose layers wait for every rank, as SyncBatchNorm does."""
    return (tensor[:0] if tensor.dim() else tensor).detach().cpu()


def zero_of(outputs: Any) -> torch.Tensor:
    """Zero, with the graph of outputs without samples behind it."""
    parts = [leaf.sum() for leaf in leaves(outputs) if leaf.is_floating_point()]
    return torch.stack(parts).sum() * 0 if parts else torch.zeros(())


def divisor(count: torch.Tensor) -> torch.Tensor:
    """What a sum is divided by: 1 where nothing was counted, and the sum is 0."""
    return torch.where(count == 0, torch.ones_like(count), count)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor
