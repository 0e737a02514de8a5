"""The running values of one pass over data: loss and metrics, on the device until somebody reads them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hapi.batch import map_tensors
from hapi.distributed import group
from hapi.metrics.base import Metric

# So many losses are kept apart before they are packed into one tensor: a long pass must not hold many small
# ones.
_PACK_AFTER = 256
# So many numbers of outputs and labels at most wait for an update in common.
_MOST_WAITING = 1 << 15


class Tally:
    """Loss and metrics of one pass, a training epoch or an evaluation: this rank's, at its end all ranks'.

    Args:
        metrics: The metrics, as `as_metrics` returns them. They are copied, and start anew.
        device: Where the network's outputs are.
        label_span: Between which numbers all labels of the pass lie; None: that is not known.

    Attributes:
        recent_losses: The losses since the last `take_nonfinite`.
    """

    def __init__(
        self, metrics: Sequence[Metric], device: torch.device, label_span: tuple[int, int] | None = None
    ) -> None:
        # What the ranks' states are put together in, which replaces its own.
        self._merged = [_anew(metric) for metric in metrics]
        self._metrics = [_anew(metric).to(device) for metric in metrics]
        self._joining = [metric for metric in self._metrics if metric.joins_batches]
        self._others = [metric for metric in self._metrics if not metric.joins_batches]
        self._waiting = _Waiting()
        for metric in self._metrics:
            metric.label_span = label_span
        self._device = device
        exact = torch.float32 if device.type == "mps" else torch.float64
        self._loss_sum = torch.zeros((), dtype=exact, device=device)
        # The weight so far: what came as numbers, what came as tensors.
        self._weight: int | float = 0
        self._device_weight: Tensor | None = None
        self._updates = 0
        self._has_loss = False
        self.recent_losses: list[Tensor] = []
        # One for all updates: a decorator would make one for each.
        self._no_grad = torch.no_grad()

    def update(self, loss: Tensor | None, weight: int | float | Tensor, outputs: Any, labels: Any) -> None:
        """Take in one batch. No value is read.

        Args:
            loss: The batch's mean loss, 0-dim, detached and not overwritten later; None: there is none.
            weight: What the mean was taken over: a number of samples or tokens, or a 0-dim tensor.
            outputs: The network's outputs, as the metrics take them.
            labels: The batch's labels, likewise.

        Raises:
            TypeError: A metric keeps something in an attribute that it did not declare as a state.
        """
        # An evaluation has turned gradients off already.
        if torch.is_grad_enabled():
            with self._no_grad:
                self._take(loss, weight, outputs, labels)
        else:
            self._take(loss, weight, outputs, labels)

    def _take(self, loss: Tensor | None, weight: int | float | Tensor, outputs: Any, labels: Any) -> None:
        self._updates += 1
        if loss is not None:
            self._add_loss(loss, weight)
        if self._updates == 1:
            # The first batch is looked at closely.
            for metric in self._metrics:
                _update_watched(metric, outputs, labels)
            return
        for metric in self._others:
            metric.update(outputs, labels)
        if self._joining:
            self._count(self._waiting.take(outputs, labels))

    @property
    def metrics(self) -> list[Metric]:
        """The metrics, which have taken in every batch."""
        with self._no_grad:
            self._count(self._waiting.joined())
        return self._metrics

    def _count(self, batches: Sequence[tuple[Any, Any]]) -> None:
        for batch in batches:
            for metric in self._joining:
                metric.update(*batch)

    def miss(self) -> None:
        """A batch went by in which this rank has no samples: `take_nonfinite` counts it too, as other ranks do."""
        self._keep(torch.zeros((), device=self._device))

    def logs(self) -> dict[str, Tensor]:
        """This rank's running values, 0-dim tensors that nobody has read: ``loss`` if any, then metrics."""
        logs: dict[str, Tensor] = {}
        if self._has_loss:
            logs["loss"] = self._loss_sum / self._total_weight()
        if self._updates:
            add_values(logs, self.metrics)
        return logs

    def reduced(self) -> dict[str, float]:
        """The values over all ranks, the same floats on each. To be called on all ranks.

        Values of which no rank has any data are left out; the mean of a loss in which nothing counts is NaN.
        """
        ranks = group.gather_objects(self.state())
        weight = sum(float(rank["weight"]) for rank in ranks)
        values: dict[str, Tensor] = {}
        logs: dict[str, float] = {}
        if any(rank["has_loss"] for rank in ranks):
            logs["loss"] = sum(float(rank["loss_sum"]) for rank in ranks) / weight if weight else math.nan
        if any(rank["updates"] for rank in ranks):
            for index, metric in enumerate(self._merged):
                metric.merge([rank["metrics"][index] for rank in ranks])
            add_values(values, self._merged)
        # What a metric computes may be drawn by chance, or named after the rank: rank 0's holds.
        return group.broadcast_object(logs | {name: float(value) for name, value in values.items()})

    def take_nonfinite(self) -> int | None:
        """Whether a loss since the last call was infinite or NaN. Reads them once, together.

        Returns:
            How many batches ago the first of them came, 0 for the last batch; None if there was none.
        """
        if not self.recent_losses:
            return None
        bad = ~_packed(self.recent_losses).isfinite()
        self.recent_losses = []
        indices = bad.cpu().nonzero()
        return len(bad) - 1 - int(indices[0]) if len(indices) else None

    def state(self) -> dict[str, Any]:
        """All values, on the CPU: tensors, numbers, and lists and dicts of them."""
        return {
            "loss_sum": _saved(self._loss_sum),
            "weight": float(self._total_weight()),
            "updates": self._updates,
            "has_loss": self._has_loss,
            "metrics": [map_tensors(_saved, metric.states()) for metric in self.metrics],
        }

    def go_on_from(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `state` returned, on one rank or on several whose values are put together.

        Raises:
            ValueError: It is of other metrics.
        """
        for state in ranks:
            if len(state["metrics"]) != len(self.metrics):
                raise ValueError(
                    f"The running values to go on from are of {len(state['metrics'])} metrics, but there are "
                    f"{len(self.metrics)}. Prepare the model with the metrics that it was trained with."
                )
        if not ranks:
            return
        self._loss_sum.fill_(sum(float(state["loss_sum"]) for state in ranks))
        self._weight, self._device_weight = sum(state["weight"] for state in ranks), None
        self._updates = sum(state["updates"] for state in ranks)
        self._has_loss = any(state["has_loss"] for state in ranks)
        for index, metric in enumerate(self.metrics):
            metric.merge([state["metrics"][index] for state in ranks])

    def _add_loss(self, loss: Tensor, weight: int | float | Tensor) -> None:
        self._has_loss = True
        if isinstance(weight, Tensor):
            # The mean over nothing is NaN, and NaN times 0 would stay in the sum. What is left where nothing counts
            # (label smoothing of classes of weight 0) is the sum itself.
            nothing = weight == 0
            loss = loss.masked_fill(nothing & ~loss.isfinite(), 0.0)
            self._loss_sum.addcmul_(loss, weight + nothing)
            if self._device_weight is None:
                self._device_weight = torch.zeros_like(self._loss_sum)
            self._device_weight += weight
        elif weight:
            self._loss_sum.add_(loss, alpha=weight)
            self._weight += weight
        else:
            return
        self._keep(loss)

    def _keep(self, loss: Tensor) -> None:
        self.recent_losses.append(loss)
        if len(self.recent_losses) > _PACK_AFTER:
            self.recent_losses = [_packed(self.recent_losses)]

    def _total_weight(self) -> int | float | Tensor:
        return self._weight if self._device_weight is None else self._device_weight + self._weight


class _Waiting:
    """Copies of small batches, for metrics that count as well over several of them: a copy is cheaper than a count."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._form: Any = None
        self._room = 0

    def take(self, outputs: Any, labels: Any) -> list[tuple[Any, Any]]:
        """Keep a batch of class scores, if it is like the one before and small.

        Returns:
            What is to be counted now, in order: the batches that waited as one, where they are enough; that one and a
            batch that is not kept.
        """
        if isinstance(outputs, Tensor) and isinstance(labels, Tensor):
            form = outputs.shape, labels.shape, outputs.dtype, labels.dtype
            if form == self._form and self._room:
                self._outputs.append(outputs.clone())
                self._labels.append(labels.clone())
                return [] if len(self._outputs) < self._room else self.joined()
            if form != self._form:
                scores = labels.dim() > 0 and outputs.shape[:1] + outputs.shape[2:] == labels.shape
                numbers = outputs.numel() + labels.numel()
                self._form, self._room = form, _MOST_WAITING // numbers if scores and numbers else 0
        return [*self.joined(), (outputs, labels)]

    def joined(self) -> list[tuple[Tensor, Tensor]]:
        """All that was kept, as one batch; none if there is nothing. It is let go."""
        if not self._outputs:
            return []
        batch = torch.cat(self._outputs), torch.cat(self._labels)
        self._outputs, self._labels = [], []
        return [batch]


def add_values(logs: dict[str, Tensor], metrics: Sequence[Metric]) -> None:
    """Add the metrics' values to the logs.

    Raises:
        ValueError: A name is there already.
    """
    for metric in metrics:
        for name, value in metric.values().items():
            if name in logs:
                raise ValueError(
                    f"Two metrics computed a value called {name!r}: each needs a key of its own in the logs. Give one "
                    "of them another name."
                )
            logs[name] = value


def _anew(metric: Metric) -> Metric:
    """A copy at the start of a pass. States are not copied, since they are set anew, nor what they are set to."""
    held = [vars(metric).get(name) for name in metric._defaults]
    kept = {id(value): value for value in (*held, *metric._defaults.values())}
    fresh = copy.deepcopy(metric, kept)
    fresh.reset()
    return fresh


def _update_watched(metric: Metric, outputs: Any, labels: Any) -> None:
    before = _kept_aside(metric)
    metric.update(outputs, labels)
    after = _kept_aside(metric)
    changed = [name for name in before if after.get(name) != before[name]]
    if changed:
        raise TypeError(
            f"The metric {type(metric).__name__} changed {', '.join(changed)} in update, which it did not declare as "
            "a state: what several passes or ranks put there could not be told apart or put together. Write "
            f'self.add_state("{changed[0]}", default) in __init__.'
        )


def _kept_aside(metric: Metric) -> dict[str, Any]:
    """What tells whether an attribute that is no state holds something else than before."""
    marks: dict[str, Any] = {}
    for name, value in vars(metric).items():
        if name in metric._defaults:
            continue
        if isinstance(value, Tensor):
            marks[name] = (id(value), None if value.is_inference() else value._version)
        elif isinstance(value, int | float):
            marks[name] = repr(value)
        elif isinstance(value, list | dict | set):
            marks[name] = len(value)
    return marks


def _saved(tensor: Tensor) -> Tensor:
    # A copy, also from the CPU: what was saved must not go on with the pass.
    return tensor.detach().to("cpu", copy=True)


def _packed(losses: list[Tensor]) -> Tensor:
    return torch.cat([loss.reshape(-1) for loss in losses])
