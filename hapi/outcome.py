"""What one batch gave, and what stands for it on a rank without samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hapi.batch import leaves, map_tensors

if TYPE_CHECKING:
    from hapi.objective import Loss


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
        return cls(value / divisor(loss.weight), loss.weight, outputs)


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
