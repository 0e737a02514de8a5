"""The loops: fit, evaluate, predict. Nothing of ranks, devices or precision is decided here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hapi import checks, modes, rng
from hapi.agreement import Agreement
from hapi.batch import Inputs
from hapi.callbacks.base import CallbackList
from hapi.cursor import Cursor, Within
from hapi.data import BEGINNING, Feed, Piece, Start
from hapi.distributed import group
from hapi.metrics.base import Metric
from hapi.metrics.tally import Tally
from hapi.signals import stopped_by
from hapi.step import Stepper

if TYPE_CHECKING:
    from hapi.resuming import Resumed


_total_of = attrgetter("total")


class Trainee(Protocol):
    """What the loops need of a Model."""

    stop_training: bool
    epochs_trained: int
    steps_trained: int


@dataclass(frozen=True)
class Run:
    """Who takes part in a call of fit, evaluate or predict."""

    model: Trainee
    split: Callable[..., tuple[Inputs, Any]]
    stepper: Stepper
    metrics: list[Metric]
    callbacks: CallbackList
    seed: int
    label_span: tuple[int, int] | None = None
    """Between which numbers all labels lie, where that is known beforehand."""
    look_again: Callable[[], tuple[int, int] | None] | None = None
    """Finds `label_span` anew, for a fit before whose epochs callbacks may change labels; else None."""

    def tally(self) -> Tally:
        """Running values that start anew."""
        return Tally(self.metrics, self.stepper.device, self.label_span)

    def expect_labels(self, tally: Tally) -> None:
        """Called before a pass, when its callbacks have had their turn."""
        if self.look_again is not None:
            tally.expect_labels(self.look_again())


@dataclass(frozen=True)
class FitPlan:
    """What one call of fit is to do."""

    train: Feed
    evaluation: Feed | None
    cursor: Cursor
    first_epoch: int
    last_epoch: int
    eval_freq: int
    accumulate: int
    num_iters: int | None
    resumed: Resumed | None = None

    def left(self) -> int | None:
        """The training steps that `num_iters` still allows; None: as many as there are."""
        return None if self.num_iters is None else max(0, self.num_iters - self.cursor.iterations)

    @property
    def is_spent(self) -> bool:
        """Whether `num_iters` is reached."""
        return self.left() == 0


def fit(run: Run, plan: FitPlan, agreement: Agreement) -> None:
    """Train for the plan's epochs.

    Raises:
        Stopped: A signal has told the run to stop, and what is to be saved is saved.
    """
    model, callbacks = run.model, run.callbacks
    logs: dict[str, float] = {}
    within = None
    run.stepper.begin(plan.resumed.form if plan.resumed else None)
    plan.train.until = 0 if callbacks.act_between_epochs or plan.num_iters is not None else plan.last_epoch
    callbacks.call("on_train_begin")
    if plan.resumed is not None:
        callbacks.load_state_dict(plan.resumed.callbacks)
        within = plan.resumed.within
    for epoch in range(plan.first_epoch, plan.last_epoch):
        if within is None and (plan.is_spent or plan.cursor.stopped):
            break
        _set_streams(run, rng.EPOCH, epoch)
        tally = _begin_epoch(run, plan, epoch, within)
        if plan.resumed is not None and within is not None:
            callbacks.load_state_dict(plan.resumed.callbacks)
        logs = _train_epoch(run, plan, agreement, epoch, tally, BEGINNING if within is None else within.start)
        within = None
        last = epoch + 1 == plan.last_epoch or plan.is_spent or plan.cursor.stopped
        _set_streams(run, rng.EPOCH_TRAINED, epoch)
        if plan.evaluation is not None and (last or (epoch + 1) % plan.eval_freq == 0):
            logs |= _evaluate_within(run, plan, plan.evaluation, agreement)
        run.stepper.end_epoch(logs)
        model.epochs_trained = epoch + 1
        plan.cursor.end_epoch()
        if callbacks.savers:
            plan.cursor.gather()
        _set_streams(run, rng.EPOCH_END, epoch)
        callbacks.end_epoch(epoch, logs, lambda: _agree_to_stop(plan, agreement))
        _leave_if_told(run, plan, agreement)
        _hand_back_memory(epoch == plan.first_epoch)
    if callbacks.savers:
        plan.cursor.gather()
    callbacks.call("on_train_end", logs=logs)
    agreement.stops()
    if agreement.signal:
        # All that was to be saved is saved.
        raise stopped_by(agreement.signal)


def _hand_back_memory(first: bool) -> None:
    # Only for a process that trains.
    from hapi import heap

    heap.of_process.end_epoch(first)


def _evaluate_within(run: Run, plan: FitPlan, feed: Feed, agreement: Agreement) -> dict[str, float]:
    """The evaluation of an epoch, which a run that is stopped within it makes anew when it goes on."""
    plan.cursor.evaluating = True
    values = evaluate(run, feed, check_in=_CheckIn(run, plan, agreement))
    plan.cursor.evaluating = False
    return {f"val_{name}": value for name, value in values.items()}


def _agree_to_stop(plan: FitPlan, agreement: Agreement) -> None:
    """Whether the run ends here: a checkpoint says so too, or a run that goes on from it would train further."""
    plan.cursor.stopped = agreement.stops()


def _set_streams(run: Run, purpose: int, epoch: int) -> None:
    """For what is drawn outside steps: by callbacks."""
    rng.set_streams(rng.mix(run.seed, purpose, epoch, group.get_rank()), run.stepper.device)


def _begin_epoch(run: Run, plan: FitPlan, epoch: int, within: Within | None) -> Tally:
    """The running values of an epoch that starts, or is gone on with; a save knows of it from here on."""
    tally = run.tally()
    if within is not None:
        tally.go_on_from(within.values)
        run.stepper.begin_at(within.learning_rate)
    plan.cursor.begin_epoch(BEGINNING if within is None else within.start, tally)
    run.callbacks.call("on_epoch_begin", epoch)
    run.expect_labels(tally)
    return tally


def _train_epoch(
    run: Run, plan: FitPlan, agreement: Agreement, epoch: int, tally: Tally, start: Start
) -> dict[str, float]:
    """One pass over the training data, or the rest of one; the values over all ranks."""
    model, stepper, callbacks, feed, cursor = run.model, run.stepper, run.callbacks, plan.train, plan.cursor
    step, steps_left = start.step, 0 if cursor.stopped else plan.left()
    begin, before_update = _edges_of_steps(run, feed, epoch)
    chosen = modes.by_piece(stepper.network, feed)
    for window in _windows(islice(feed.pieces(epoch, start), steps_left), plan.accumulate):
        cursor.begin_window()
        window_total = sum(map(_total_of, window))
        for number, piece in enumerate(window, 1):
            begin(step)
            last = number == len(window)
            inputs, labels = (None, None) if piece.batch is None else run.split(feed.place(piece.batch))
            backward = stepper.backward if chosen is None else chosen(piece, stepper.backward)
            outcome = backward(inputs, labels, piece.size, window_total, last)
            if last:
                if before_update is not None:
                    before_update(step)
                stepper.update()
            if outcome is None:
                tally.miss()
            else:
                tally.update(*outcome, labels)
            if last:
                model.steps_trained += len(window)
                cursor.end_window(window)
            if callbacks.wants_batch_logs("train", step):
                callbacks.call("on_train_batch_end", step, logs=tally.logs())
            step += 1
            # Let go of before the next one is read; see `_windows`.
            del piece, inputs, labels, outcome
        if _ends_here(run, plan, agreement, tally, epoch, step - 1):
            break
    cursor.stopped = agreement.end_epoch(tally, epoch, step - 1)
    _leave_if_told(run, plan, agreement)
    # BatchNorm's statistics are each rank's own until here; callbacks may use the network on any rank.
    stepper.sync(parameters=False)
    # The rate that the last step was taken with: an epoch's scheduler moves after this.
    return tally.reduced() | {"lr": stepper.learning_rate}


def _edges_of_steps(run: Run, feed: Feed, epoch: int) -> tuple[Callable[[int], None], Callable[[int], None] | None]:
    """What is done before the batch of a number is placed, and before the optimizer step after it, if anything."""
    # Only for a process that trains.
    from hapi import draws

    stepper = run.stepper
    begin = draws.beginner(feed, stepper, run.metrics, run.callbacks, rng.mix(run.seed, rng.STEP, epoch))
    return begin, draws.before_update(stepper, rng.mix(run.seed, rng.UPDATE, epoch))


def _ends_here(run: Run, plan: FitPlan, agreement: Agreement, tally: Tally, epoch: int, step: int) -> bool:
    """At the edge of an optimizer step: save if that is due; whether the epoch ends here since a rank has asked for it.

    Raises:
        Stopped: By a signal.
    """
    stops = agreement.after_step(tally, epoch, step)
    savers = run.callbacks.savers
    due = agreement.saves or (bool(savers) and run.callbacks.saves_at(run.model.steps_trained))
    if due or agreement.signal:
        stops |= agreement.before_save(tally, epoch, step)
    plan.cursor.stopped = stops
    if due:
        _save(run, plan, stopping=False)
    if agreement.signal:
        _leave_if_told(run, plan, agreement)
    return stops


@dataclass(frozen=True)
class _CheckIn:
    """An evaluation within fit is given up where the run is told to stop."""

    run: Run
    plan: FitPlan
    agreement: Agreement

    def between_steps(self, aligned: bool) -> bool:
        """Whether this rank reads no further: the others do as they are told, and all meet at the end."""
        if not aligned:
            return self.agreement.told
        if self.agreement.in_evaluation():
            _leave_if_told(self.run, self.plan, self.agreement)
        return False

    def at_end(self, aligned: bool) -> None:
        """Before values of which a rank may have a part alone are used."""
        if not aligned:
            self.agreement.stops()
            _leave_if_told(self.run, self.plan, self.agreement)


def _leave_if_told(run: Run, plan: FitPlan, agreement: Agreement) -> None:
    """Save and leave, if all ranks have agreed on a signal."""
    if agreement.signal:
        _save(run, plan, stopping=True)
        raise stopped_by(agreement.signal)


def _save(run: Run, plan: FitPlan, stopping: bool) -> None:
    """Let callbacks save at the edge of an optimizer step."""
    plan.cursor.gather()
    run.callbacks.save(stopping)


def evaluate(run: Run, feed: Feed, num_iters: int | None = None, check_in: _CheckIn | None = None) -> dict[str, float]:
    """One pass without training; the values over all ranks.

    Args:
        run: Who takes part.
        feed: The data.
        num_iters: At most so many steps.
        check_in: Asked after each step, and at the end.
    """
    stepper, callbacks = run.stepper, run.callbacks
    aligned = feed.aligned or group.get_world_size() == 1
    tally = run.tally()
    step = -1
    stepper.sync(parameters=False)
    callbacks.call("on_eval_begin", logs={"steps": feed.steps})
    run.expect_labels(tally)
    with modes.evaluating(stepper.replica):
        set_streams, chosen = _keyed(run, feed, "eval"), modes.by_piece(stepper.network, feed)
        begins = callbacks.batch_hooks["on_eval_batch_begin"]
        # Not by enumerate, which holds on to a piece until the next one is read.
        for piece in islice(feed.pieces(0), num_iters):
            step += 1
            if begins:
                callbacks.call("on_eval_batch_begin", step)
            if piece.batch is not None:
                if set_streams is not None:
                    set_streams(piece)
                inputs, labels = run.split(feed.place(piece.batch))
                # For both at once, and not by no_grad(), whose twice as many calls cost as much as a small layer.
                with torch.set_grad_enabled(False):
                    compute = stepper.evaluate if chosen is None else chosen(piece, stepper.evaluate)
                    outcome = compute(inputs, labels, piece.size)
                    tally.update(*outcome, labels)
                del inputs, labels, outcome
            # What the next batch is read into is then still in the processor's cache.
            del piece
            if callbacks.wants_batch_logs("eval", step):
                callbacks.call("on_eval_batch_end", step, logs=tally.logs())
            if check_in is not None and check_in.between_steps(aligned):
                break
    if check_in is not None:
        check_in.at_end(aligned)
    values = tally.reduced()
    if not values:
        _refuse_empty("eval_data", step)
        raise checks.nothing_to_compute()
    callbacks.call("on_eval_end", logs=values)
    return values


def predict(run: Run, feed: Feed, stack_outputs: bool) -> Any:
    """The network's outputs for all samples, in the data set's order, on every rank."""
    # Only for a process that predicts.
    from hapi import predictions

    stepper, callbacks = run.stepper, run.callbacks
    stepper.sync(parameters=False)
    parts: list[predictions.Positioned] = []
    kept = predictions.Kept()
    step = -1
    callbacks.call("on_predict_begin", logs={"steps": feed.steps})
    with modes.evaluating(stepper.network):
        set_streams, chosen = _keyed(run, feed, "predict"), modes.by_piece(stepper.network, feed)
        begins = callbacks.batch_hooks["on_predict_batch_begin"]
        for piece in feed.pieces(0):
            step += 1
            if begins:
                callbacks.call("on_predict_batch_begin", step)
            if piece.batch is not None:
                if set_streams is not None:
                    set_streams(piece)
                inputs, _ = run.split(feed.place(piece.batch), False)
                compute = stepper.predict if chosen is None else chosen(piece, stepper.predict)
                parts.append((piece.position, piece.size, kept(compute(inputs))))
                del inputs
            del piece
            if callbacks.wants_batch_logs("predict", step):
                callbacks.call("on_predict_batch_end", step, logs={})
    _refuse_empty("test_data", len(parts) - 1)
    gather = predictions.stacked if stack_outputs else predictions.in_batches
    gathered = gather(parts, feed.ordered)
    callbacks.call("on_predict_end", logs={})
    return gathered


def _keyed(run: Run, feed: Feed, kind: str) -> Callable[[Piece], None] | None:
    """What sets the random streams before each batch of an evaluation; None where nobody draws."""
    stream, device = rng.mix(run.seed, rng.EVALUATE), run.stepper.device
    # For what hooks draw at the end, whether or not anybody draws before.
    rng.set_streams(stream, device)
    # Only for a process that makes a pass.
    from hapi import draws

    setter = draws.setter(kind, feed, run.stepper, run.metrics, run.callbacks)
    if setter is None:
        return None

    def set_streams(piece: Piece) -> None:
        # Keyed by the batch's number among all ranks' batches, which for data with an order does not depend on how
        # many ranks there are.
        position = piece.position if isinstance(piece.position, int) else int(piece.position[0])
        setter(rng.mix(position, after=stream), device)

    return set_streams


def _refuse_empty(name: str, last_step: int) -> None:
    """Raise on every rank if no rank has had a batch; found out only for data whose length shows at its end."""
    if group.begin_max([float(last_step)]).wait()[0] < 0:
        raise ValueError(
            f"{name} gave no batch, so there is nothing to compute on: it is empty, or it can be iterated only once. "
            "Pass data with at least one sample, whose __iter__ starts anew each time."
        )


def _windows(pieces: Iterator[Piece], size: int) -> Iterator[list[Piece]]:
    """The pieces of one optimizer step at a time; the last window may be short."""
    while window := list(islice(pieces, size)):
        yield window
        # What the next batch is read into is then still in the processor's cache.
        window.clear()
