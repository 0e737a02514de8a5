"""One batch at a time, for loops of the user's own: train_batch, eval_batch, predict_batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from hapi import modes
from hapi.arguments import check_switches
from hapi.batch import Inputs, floats_for, leaves, map_tensors, move, size_of
from hapi.distributed import group
from hapi.metrics.base import OPEN
from hapi.metrics.tally import Tally
from hapi.outcome import Outcome
from hapi.step import Stepper

if TYPE_CHECKING:
    from hapi.engine import Engine


@group.naming_the_lost()
def train_batch(engine: Engine, inputs: Any, labels: Any, update: bool) -> dict[str, float]:
    """See `Model.train_batch`."""
    if engine.prepared.optimizer is None:
        raise ValueError(
            "train_batch was called without an optimizer, so nothing would move the weights. "
            "Write model.prepare(torch.optim.Adam(model.parameters(), lr=1e-3), loss) before it."
        )
    check_switches(update=update)
    stepper = engine.ready()
    placed, placed_labels, size = _placed(engine, stepper, inputs, labels)
    _refuse_no_samples("train_batch", size)
    # What other ranks, or further calls without an update, bring is not known: their weights travel with the gradients.
    alone = group.get_world_size() == 1 and update and not stepper.window_open
    if not stepper.window_open:
        # A loop of the user's own may have left gradients there.
        stepper.clear()
    stepper.forget_form()
    with modes.training(engine.network):
        given = placed if size else None
        outcome = stepper.backward(given, placed_labels, size, size if alone else None, last=update)
    if update:
        stepper.update()
    return _values(engine, stepper, outcome, placed_labels)


@group.naming_the_lost()
def eval_batch(engine: Engine, inputs: Any, labels: Any) -> dict[str, float]:
    """See `Model.eval_batch`."""
    stepper = engine.ready()
    placed, placed_labels, size = _placed(engine, stepper, inputs, labels)
    _refuse_no_samples("eval_batch", size)
    with modes.evaluating(stepper.replica), torch.no_grad():
        outcome = stepper.evaluate(placed, placed_labels, size) if size else None
    return _values(engine, stepper, outcome, placed_labels)


@group.naming_the_lost()
def predict_batch(engine: Engine, inputs: Any) -> Any:
    """See `Model.predict_batch`."""
    stepper = engine.ready()
    placed, _, _ = _placed(engine, stepper, inputs, None)
    with modes.evaluating(engine.network):
        return map_tensors(torch.Tensor.cpu, stepper.predict(placed))


def _placed(engine: Engine, stepper: Stepper, inputs: Any, labels: Any) -> tuple[Inputs, Any, int]:
    if next(leaves(inputs), None) is None:
        raise TypeError(
            f"inputs received {inputs!r:.60}, of type {type(inputs).__name__}, which holds no tensor to compute on. "
            "Write torch.tensor(rows), samples along its first dimension, or a tuple or dict of such tensors."
        )
    floats = floats_for(engine.network)
    chosen = engine.laid_out(move(engine.splitter.as_inputs(inputs), stepper.device, floats))
    engine.remember(chosen)
    values = list(chosen.values()) if isinstance(chosen, dict) else chosen
    return chosen, move(engine.splitter.as_labels(labels), stepper.device, floats), size_of(values)


def _refuse_no_samples(call: str, size: int) -> None:
    """Among several ranks one may well have none in a step; alone there would be nothing to compute on."""
    if size == 0 and group.get_world_size() == 1:
        raise ValueError(
            f"{call} received a batch of no samples, whose mean loss is no number. Pass at least one sample, or leave "
            "the call out where a batch is empty."
        )


def _values(engine: Engine, stepper: Stepper, outcome: Outcome | None, labels: Any) -> dict[str, float]:
    metrics = engine.prepared.metrics
    if outcome is None:
        names = [name for metric in metrics for name in metric.names if name != OPEN]
        return {name: math.nan for name in ("loss", *names)}
    tally = Tally(metrics, stepper.device)
    tally.update(outcome.loss, outcome.weight, outcome.outputs, labels)
    return {name: float(value) for name, value in tally.logs().items()}
