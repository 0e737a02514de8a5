"""How far a fit has come within its epoch: what a checkpoint says of it, and where a resumed run starts.

Random streams are keyed by epoch, step and rank, and orders are drawn from the run's seed, so that numbers say almost
everything. What is left are the running values of the epoch, rank by rank, and what only the data knows of its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hapi.batch import is_array
from hapi.data import BEGINNING, Feed, Piece, Start
from hapi.distributed import group
from hapi.metrics.tally import Tally


@dataclass(frozen=True)
class Within:
    """The epoch that a resumed run starts in, as this rank needs it; without one, the run starts at an epoch's edge."""

    start: Start
    values: Sequence[Mapping[str, Any]]
    """Of `Tally.state`: this rank's own; after a change of the world size rank 0 has all."""
    learning_rate: float
    """That of the last step."""


class Cursor:
    """The place of a fit at the edge of its last optimizer step.

    Args:
        feed: The training data.
        evaluation: That of the evaluations in between, or None.
        learning_rate: Gives that of the last step.
        iterations: Training steps that the run had taken when it was resumed.
        first_epoch: Epochs that were trained when the run began.
    """

    def __init__(
        self,
        feed: Feed,
        evaluation: Feed | None,
        learning_rate: Callable[[], float],
        iterations: int,
        first_epoch: int,
    ) -> None:
        self._feed = feed
        self._evaluation = evaluation
        self._first_epoch = first_epoch
        self._learning_rate = learning_rate
        self.iterations = iterations
        self.stopped = False
        """Whether all ranks have agreed to end the run here."""
        self.evaluating = False
        """Whether an evaluation is under way, which a run that goes on makes anew."""
        self._start = BEGINNING
        self._step = self._passed = 0
        self._tally: Tally | None = None
        self._at_edge = True
        self._reads = False
        self._ranks: list[Any] | None = None

    def begin_epoch(self, start: Start, tally: Tally) -> None:
        """An epoch starts, or is gone on with."""
        self._start, self._step, self._tally, self._ranks = start, start.step, tally, None
        self._passed = 0
        self._reads = False

    def begin_window(self) -> None:
        """Batches of the next optimizer step are read: values that belong to it are no longer those of the last."""
        self._at_edge, self._ranks = False, None
        self._reads = True

    def end_window(self, window: Sequence[Piece]) -> None:
        """The optimizer step was taken, on these batches of this rank."""
        self._step += len(window)
        self.iterations += len(window)
        for piece in window:
            self._passed += piece.passed
        self._at_edge = True

    def end_epoch(self) -> None:
        """The epoch is over, its evaluation included."""
        self._start, self._step, self._tally, self._ranks = BEGINNING, 0, None, None
        self._reads = False

    @property
    def is_between_epochs(self) -> bool:
        """Whether no step of an epoch was taken that is still to be finished."""
        return self._step == 0

    def gather(self) -> None:
        """Bring together what the ranks hold, for a save that follows. A collective."""
        self._ranks = group.gather_objects(self._own())

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps.

        What other ranks hold is in it only after `gather`: a save may be called on rank 0 alone.
        """
        ranks = self._ranks
        if ranks is None and self._at_edge and group.get_world_size() == 1:
            ranks = [self._own()]
        feed = self._feed
        rounds = self._step - self._start.step + self._passed
        taken = None if feed.stride is None else self._start.taken + rounds * feed.stride
        within = {"step": self._step, "taken": taken, "learning_rate": self._learning_rate()}
        return {
            "iterations": self.iterations,
            "stopped": self.stopped,
            "first_epoch": self._first_epoch,
            "unit": feed.unit,
            "samples": feed.samples,
            "batch": feed.batch_size if feed.unit == "batches" else None,
            "within": within if self._tally is not None and self._step else None,
            "ranks": ranks,
            # Rank 0 draws the order that all share: with its state alone no sample is lost.
            "data": self._data_state() if self._at_edge or feed.keeps_beginning else None,
            "evaluation": self._evaluation_state(),
        }

    def _evaluation_state(self) -> Any:
        return None if self._evaluation is None else self._evaluation.state(self.evaluating)

    def _own(self) -> dict[str, Any]:
        within = self._tally is not None and self._step > 0
        values = self._tally.state() if within and self._tally is not None else None
        stateful = self._feed.stateful
        dataset = None if stateful is None else copy.deepcopy(stateful.state_dict())
        return {
            "values": values, "data": self._data_state(), "dataset": dataset, "evaluation": self._evaluation_state()
        }  # fmt: skip

    def _data_state(self) -> Any:
        if self._start.data is not None and not self._reads:
            # Nothing was read since the run was resumed.
            return self._start.data
        return self._feed.state(self._reads)


def place(state: Mapping[str, Any], feed: Feed, same_world: bool) -> tuple[Within | None, str | None]:
    """Where a resumed run starts, on this rank.

    Args:
        state: What `Cursor.state` gave.
        feed: The training data, which is told what it has to know.
        same_world: Whether there are as many ranks as then.

    Returns:
        The place within an epoch, None for an epoch's edge; and why it is not quite the place that was saved.
    """
    ranks, within = state["ranks"], state["within"]
    own = None if ranks is None else ranks[group.get_rank() if same_world else 0]
    data = state.get("data") if own is None else own["data"]
    lost = None
    if own is None and data is not None and feed.stride is None and group.get_world_size() > 1:
        data, lost = None, "each process has an order of its own in this data, and only rank 0's place in it was saved"
    dataset = None if own is None else own.get("dataset")
    if dataset is not None and feed.stateful is not None:
        feed.stateful.load_state_dict(dataset)
    if within is None:
        if not same_world and ranks is not None and not all(_equal(rank["data"], ranks[0]["data"]) for rank in ranks):
            data, lost = None, "each process had a place of its own in this data, which begins anew"
        feed.restore(data)
        return None, lost
    changed = _changed(state, feed, same_world)
    if changed is not None:
        return None, f"the epoch starts anew, since {changed}"
    taken = within["taken"] if within["taken"] is not None else 0
    start = Start(within["step"], taken, data)
    if ranks is None:
        lost = lost or "the epoch's logs will be those of its rest alone"
        return Within(start, (), within["learning_rate"]), lost
    values = [rank["values"] for rank in (ranks if not same_world else ranks[group.get_rank() :][:1])]
    return Within(start, values if same_world or group.get_rank() == 0 else (), within["learning_rate"]), None


def evaluation_state(state: Mapping[str, Any], same_world: bool) -> Any:
    """Where the evaluation data of this rank stood, of what `Cursor.state` gave; None: it begins anew."""
    ranks = state["ranks"]
    if ranks is None or any("evaluation" not in rank for rank in ranks):
        # Saved on rank 0 alone, or by an earlier build.
        return state.get("evaluation")
    own = [rank["evaluation"] for rank in ranks]
    if same_world:
        return own[group.get_rank()]
    return own[0] if all(_equal(other, own[0]) for other in own) else None


def _equal(one: Any, other: Any) -> bool:
    """Whether two states of data are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if is_array(one) and is_array(other):
        return one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


def _changed(state: Mapping[str, Any], feed: Feed, same_world: bool) -> str | None:
    """Why a run cannot go on in the middle of this data; None if it can."""
    if state["unit"] != feed.unit:
        return "the data is of another kind than it was"
    if not same_world and feed.stride is None:
        return "each process has an order of its own in this data"
    samples, batch = state.get("samples"), state.get("batch")
    if None not in (samples, feed.samples) and samples != feed.samples:
        return f"the data has {feed.samples} samples, and had {samples}"
    if None not in (batch, feed.batch_size) and batch != feed.batch_size:
        return f"its batches have {feed.batch_size} samples, and had {batch}"
    return None
