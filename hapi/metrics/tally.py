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

# The running sums after each of so many batches are kept.
_APART = 256
# So many numbers of outputs and labels at most wait for an update in common.
_MOST_WAITING = 1 << 15


class Tally:
    """Loss and metrics of one pass, a training epoch or an evaluation: this rank's, at its end all ranks'.

    Args:
        metrics: The metrics, as `as_metrics` returns them. They are copied, and start anew.
        device: Where the network's outputs are.
        label_span: Between which numbers all labels of the pass lie; None: that is not known.
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
        self.expect_labels(label_span)
        self._losses = _LossSum(device)
        self._updates = 0

    def expect_labels(self, label_span: tuple[int, int] | None) -> None:
        """Say anew between which numbers the labels to come lie."""
        for metric in self._metrics:
            metric.label_span = label_span

    def update(self, loss: Tensor | None, weight: int | float | Tensor, outputs: Any, labels: Any) -> None:
        """Take in one batch. No value is read.

        Args:
            loss: The batch's mean loss, 0-dim, detached; None: there is none.
            weight: What the mean was taken over: a number of samples or tokens, or a 0-dim tensor.
            outputs: The network's outputs, as the metrics take them, detached.
            labels: The batch's labels.

        Raises:
            TypeError: A metric keeps something in an attribute that it did not declare as a state.
        """
        self._updates += 1
        if loss is not None:
            self._losses.add(loss, weight)
        if self._updates == 1:
            # The first batch is looked at closely.
            with torch.no_grad():
                for metric in self._metrics:
                    _update_watched(metric, outputs, labels)
            return
        if self._others:
            _count(self._others, [(outputs, labels)])
        if self._joining and (batches := self._waiting.take(outputs, labels)):
            _count(self._joining, batches)

    @property
    def metrics(self) -> list[Metric]:
        """The metrics, which have taken in every batch."""
        _count(self._joining, self._waiting.joined())
        return self._metrics

    def miss(self) -> None:
        """A batch went by in which this rank has no samples: `take_nonfinite` counts it too, as other ranks do."""
        self._losses.miss()

    def logs(self) -> dict[str, Tensor]:
        """This rank's running values, 0-dim tensors that nobody has read: ``loss`` if any, then metrics."""
        logs: dict[str, Tensor] = {}
        if self._losses.is_told:
            logs["loss"] = self._losses.sum / self._losses.weight
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
        """Whether a loss since the last call, or before it in this process, was infinite or NaN. Reads them together.

        Returns:
            How many batches ago the first of them came, 0 for the last batch; None if there was none.
        """
        return self._losses.take_nonfinite()

    def forget_nonfinite(self) -> None:
        """In place of `take_nonfinite`, where nobody asks."""
        self._losses.forget_nonfinite()

    def state(self) -> dict[str, Any]:
        """All values, on the CPU: tensors, numbers, and lists and dicts of them."""
        return {
            "loss_sum": _saved(self._losses.sum),
            "weight": float(self._losses.weight),
            "updates": self._updates,
            "has_loss": self._losses.is_told,
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
        self._losses.go_on_from(
            sum(float(state["loss_sum"]) for state in ranks),
            sum(state["weight"] for state in ranks),
            any(state["has_loss"] for state in ranks),
        )
        self._updates = sum(state["updates"] for state in ranks)
        for index, metric in enumerate(self.metrics):
            metric.merge([state["metrics"][index] for state in ranks])


class _LossSum:
    """The weighted losses of a pass, summed up; the sums before tell which loss was the first that is no number.

    What lives for some batches lies in memory of its own, here and in `_Waiting`: many small tensors between those of a
    step would keep the C library from using what a step has let go for the next one.
    """

    def __init__(self, device: torch.device) -> None:
        exact = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(_APART + 1, dtype=exact, device=device)
        # Each of them, as far as they are needed: twice as many each time, so that few are made between steps.
        self._places = [self._sums[0]]
        self._at = self._looked_at = 0
        # Of the sums looked at since the last question, how many are infinite or NaN: the last ones.
        self._bad = torch.zeros((), dtype=torch.int64, device=device)
        # An infinite or NaN sum that was taken over from an earlier process.
        self._before: float | None = None
        # What came as numbers, what came as tensors.
        self._weight: int | float = 0
        self._device_weight: Tensor | None = None
        self.is_told = False
        """Whether there was any loss."""

    @property
    def sum(self) -> Tensor:
        """So far, 0-dim."""
        return self._places[self._at] if self._before is None else self._places[self._at] + self._before

    @property
    def weight(self) -> int | float | Tensor:
        """What it was taken over."""
        return self._weight if self._device_weight is None else self._device_weight + self._weight

    def add(self, loss: Tensor, weight: int | float | Tensor) -> None:
        """Take in a mean."""
        self.is_told = True
        if isinstance(weight, Tensor):
            # The mean over nothing is NaN, and NaN times 0 would stay in the sum. What is left where nothing counts
            # (label smoothing of classes of weight 0) is the sum itself.
            nothing = weight == 0
            loss = loss.masked_fill(nothing & ~loss.isfinite(), 0.0)
            before, after = self._next()
            torch.addcmul(before, loss, weight + nothing, out=after)
            if self._device_weight is None:
                self._device_weight = torch.zeros_like(before)
            self._device_weight += weight
        elif not weight:
            self.miss()
        else:
            before, after = self._next()
            torch.add(before, loss, alpha=weight, out=after)
            self._weight += weight

    def miss(self) -> None:
        """Count a batch that adds nothing."""
        before, after = self._next()
        after.copy_(before)

    def _next(self) -> tuple[Tensor, Tensor]:
        """Where the sum is, and where the one after it goes."""
        if self._at == _APART:
            self._look()
            self._places[0].copy_(self._places[self._at])
            self._at = self._looked_at = 0
        self._at += 1
        if self._at == len(self._places):
            self._places += self._sums[self._at : 2 * self._at].unbind()
        return self._places[self._at - 1], self._places[self._at]

    def _look(self) -> None:
        self._bad = self._bad + (~self._sums[self._looked_at + 1 : self._at + 1].isfinite()).sum()

    def take_nonfinite(self) -> int | None:
        """See `Tally.take_nonfinite`."""
        self._look()
        bad = int(self._bad)
        self.forget_nonfinite()
        # Once one is no number, none is any more.
        return bad - 1 if bad else None

    def forget_nonfinite(self) -> None:
        """See `Tally.forget_nonfinite`."""
        self._bad, self._looked_at = torch.zeros_like(self._bad), self._at

    def go_on_from(self, total: float, weight: int | float, is_told: bool) -> None:
        """Take over what an earlier process has summed up."""
        self._before = None if math.isfinite(total) else total
        self._places[self._at].fill_(total if self._before is None else 0.0)
        self._weight, self._device_weight, self.is_told = weight, None, is_told


class _Waiting:
    """Copies of small batches, for metrics that count as well over several of them: a copy is cheaper than a count."""

    def __init__(self) -> None:
        self._form: Any = None
        self._room = self._filled = 0
        # Of outputs and of labels: all of it, and a part for each batch, as far as they are needed.
        self._memory: list[Tensor] = []
        self._places: list[tuple[Tensor, ...]] = []

    def take(self, outputs: Any, labels: Any) -> list[tuple[Tensor, ...]]:
        """Keep a batch of class scores, if it is like the one before and small.

        Returns:
            What is to be counted now, in order: the batches that waited as one, where they are enough; that one and a
            batch that is not kept. Good until the next call.
        """
        if type(outputs) is not Tensor or type(labels) is not Tensor:
            return [*self.joined(), (outputs, labels)]
        form = outputs.shape, labels.shape, outputs.dtype, labels.dtype
        if form != self._form:
            batches = [*self.joined(), (outputs, labels)]
            self._form, self._room, self._places = form, _room_for(outputs, labels), []
            return batches
        if not self._room:
            return [(outputs, labels)]
        if self._filled == len(self._places):
            self._add_places(outputs, labels)
        place, place_of_labels = self._places[self._filled]
        place.copy_(outputs)
        place_of_labels.copy_(labels.detach() if labels.requires_grad else labels)
        self._filled += 1
        return [] if self._filled < self._room else self.joined()

    def _add_places(self, *batch: Tensor) -> None:
        if not self._places:
            self._memory = [part.new_empty((self._room * len(part), *part.shape[1:])) for part in batch]
        size, there = len(batch[0]), len(self._places)
        more = slice(there * size, min(max(1, 2 * there), self._room) * size)
        self._places += zip(*(torch.split(memory[more], size) for memory in self._memory), strict=True)

    def joined(self) -> list[tuple[Tensor, ...]]:
        """All that was kept, as one batch; none if there is nothing. It is let go."""
        if not self._filled:
            return []
        samples, self._filled = self._filled * len(self._places[0][0]), 0
        return [tuple(memory[:samples] for memory in self._memory)]


def _room_for(outputs: Tensor, labels: Tensor) -> int:
    """How many batches like this one wait; 0: none."""
    scores = labels.dim() > 0 and outputs.shape[:1] + outputs.shape[2:] == labels.shape
    numbers = outputs.numel() + labels.numel()
    dense = outputs.layout is labels.layout is torch.strided
    room = _MOST_WAITING // numbers if scores and dense and numbers else 0
    return room if room > 1 else 0


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


def _count(metrics: Sequence[Metric], batches: Sequence[tuple[Any, ...]]) -> None:
    if not batches:
        return
    # A metric may compute with more than what it was given. Not by no_grad(), which makes twice as many calls.
    with torch.set_grad_enabled(False):
        for batch in batches:
            for metric in metrics:
                metric.update(*batch)


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
