"""One call of fit, evaluate or predict: from the user's arguments to feeds, callbacks and a plan for the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hapi import arguments, checks, files, kinds, loop, modes, rng, signals
from hapi.agreement import Agreement
from hapi.arguments import FitOptions, check_reading
from hapi.batch import floats_for
from hapi.callbacks import History
from hapi.callbacks.base import Callback, CallbackList, callbacks_alike, default_callbacks
from hapi.cursor import Cursor
from hapi.data import Feed, Request, make_feed
from hapi.data.make import DEFAULT_BATCH_SIZE, has_own_batches, kind_of
from hapi.distributed import group

if TYPE_CHECKING:
    from hapi.model import Model
    from hapi.resuming import Resumed


@dataclass(frozen=True)
class PassOptions:
    """What `Model.evaluate` and `Model.predict` were given, data and callbacks aside."""

    name: str
    batch_size: int
    log_freq: int
    verbose: int
    num_workers: int
    num_iters: int | None = None

    def __post_init__(self) -> None:
        if self.num_iters is not None:
            kinds.count("num_iters", self.num_iters, 100)
        kinds.count("batch_size", self.batch_size, DEFAULT_BATCH_SIZE)
        kinds.count("log_freq", self.log_freq, 10)
        check_reading(self.num_workers, self.verbose)

    def request(self, data_decides: bool, floats: torch.dtype) -> Request:
        """How to read the data; where it has batches of its own, defaults are no wishes."""
        batch_size = None if data_decides and self.batch_size == DEFAULT_BATCH_SIZE else self.batch_size
        return Request(self.name, batch_size, num_workers=int(self.num_workers) or None, lockstep=False, floats=floats)


@group.naming_the_lost()
def fit(model: Model, train_data: Any, eval_data: Any, callbacks: Any, options: FitOptions) -> History:
    """Train; see `Model.fit`."""
    engine = model._engine
    _check_trainable(model)
    # Only for a process that trains.
    from hapi import report, resuming

    stepper = engine.ready()
    chosen = _agreed_callbacks(model, train_data, eval_data, callbacks, options)
    engine.fits += 1
    seed, state = resuming.start(model, options)
    requests = _requests(options, seed, train_data, eval_data, floats_for(model.network))
    train = make_feed(train_data, requests[0], stepper.device)
    evaluation = None if eval_data is None else make_feed(eval_data, requests[1], stepper.device)
    # What both read stands, after training, where evaluation begins.
    apart = None if eval_data is train_data else evaluation
    resumed = None if state is None else resuming.take_over(state, train, apart)
    begun = (0, model.epochs_trained) if resumed is None else (resumed.iterations, resumed.first_epoch)
    params = _fit_params(model, options, train, evaluation, begun[1])
    _check_schedule(model, chosen, params, options, train, resumed)
    _refuse_unwritable([options.save_dir, *(getattr(callback, "save_dir", None) for callback in chosen)])
    run = loop.Run(model, engine.split, stepper, engine.prepared.metrics, CallbackList(chosen, model, params), seed)
    cursor = Cursor(train, evaluation, lambda: stepper.learning_rate, *begun)
    plan = loop.FitPlan(
        train, evaluation, cursor, params["first_epoch"], params["last_epoch"], options.eval_freq,
        options.accumulate_grad_batches, options.num_iters, resumed,
    )  # fmt: skip
    model.stop_training = cursor.stopped = resumed is not None and resumed.stopped
    stepper.sync(parameters=True)
    report.announce(stepper, train, options)
    engine.seed, engine.cursor = seed, cursor
    with _training(model, run, plan) as stopping:
        feeds = [train, evaluation]
        again = partial(engine.look_again, feeds, stepper)
        run = replace(run, label_span=engine.look_at_labels(feeds), look_again=again if _may_change(run) else None)
        loop.fit(run, plan, Agreement(model, options.nan_policy, stopping, run.callbacks.wants_save))
    engine.end_fit()
    # Files that rank 0 wrote are there for every rank once fit has returned.
    group.barrier()
    return next(callback for callback in chosen if isinstance(callback, History))


def _may_change(run: loop.Run) -> bool:
    """Whether callbacks may change labels before an epoch begins, on any rank: some may be one rank's alone."""
    return any(group.gather_objects(run.callbacks.act_before_an_epoch))


def _check_trainable(model: Model, call: str = "fit") -> None:
    engine = model._engine
    prepared = engine.prepared
    if prepared.optimizer is None:
        raise ValueError(
            f"{call} was called without an optimizer, so nothing would move the weights. "
            "Write model.prepare(torch.optim.Adam(model.parameters(), lr=1e-3), loss) before it."
        )
    # Again: a layer may have been exchanged since prepare.
    checks.optimizer_parameters(prepared.optimizer, engine.network, prepared.objective.module)
    checks.modules_beside(model, engine.network, prepared.objective.module)


def _agreed_callbacks(
    model: Model, train_data: Any, eval_data: Any, callbacks: Any, options: FitOptions
) -> list[Callback]:
    """The callbacks of a fit, once all ranks are seen to make the same one."""
    chosen = default_callbacks(
        callbacks, verbose=options.verbose, log_freq=options.log_freq, save_dir=options.save_dir,
        save_freq=options.save_freq,
    )  # fmt: skip
    evaluated = None if eval_data is None else kind_of(eval_data)
    more = {"train_data": kind_of(train_data), "eval_data": evaluated, "callbacks": callbacks_alike(chosen)}
    arguments.same_call("fit", options.alike() | more | arguments.alike(model._engine.prepared))
    return chosen


def _check_schedule(
    model: Model, chosen: list[Callback], params: dict[str, Any], options: FitOptions, train: Feed,
    resumed: Resumed | None,
) -> None:  # fmt: skip
    """See before the first step that the scheduler can do all that is to come, at the interval that it will have."""
    schedule = model._engine.prepared.schedule
    if schedule is None:
        return
    # Only for a process that has a scheduler.
    from hapi.callbacks.lr import LRScheduler

    # Set by the callback when training begins, which is too late to refuse anything.
    wished = [callback.interval for callback in chosen if isinstance(callback, LRScheduler)]
    interval = next(filter(None, wished), schedule.interval)
    schedule.check(params["metrics"], _planned_moves(interval, params, options, train, resumed), interval)


def _planned_moves(
    interval: str, params: dict[str, Any], options: FitOptions, train: Feed, resumed: Resumed | None
) -> int | None:
    """Optimizer steps, or epochs, to come in a fit that runs to its end; None where that is not known beforehand."""
    if options.num_iters is not None:
        return None
    epochs = int(params["last_epoch"] - params["first_epoch"])
    if epochs <= 0 or (resumed is not None and resumed.stopped):
        return 0
    if interval == "epoch":
        # One that was begun before has its step still to come.
        return epochs
    if train.steps is None:
        return None
    first = train.steps - _steps_taken(train, resumed)
    updates, of_first = (-(-steps // options.accumulate_grad_batches) for steps in (train.steps, first))
    return updates * (epochs - 1) + of_first


def _steps_taken(train: Feed, resumed: Resumed | None) -> int:
    """Steps of its first epoch that a resumed run has behind it, counted in batches of this many ranks."""
    if resumed is None or resumed.within is None or train.steps is None:
        return 0
    start = resumed.within.start
    # Where ranks share an order, another number of them may have taken the steps. Of a step that falls between two of
    # theirs it is not known whether the epoch has one more: it counts as taken, so that no right total is refused.
    taken = start.step if train.stride is None else -(-start.taken // train.stride)
    return min(taken, train.steps)


@contextmanager
def _training(model: Model, run: loop.Run, plan: loop.FitPlan) -> Iterator[signals.StopSignals]:
    """What surrounds the loop of a fit; gives the stop signals that arrive within."""
    stopping = signals.StopSignals()
    with (
        _leaving_in_order(),
        stopping.watched(),
        _reading(plan.train, plan.evaluation),
        # Whatever context the script calls fit in.
        torch.inference_mode(False),
        torch.enable_grad(),
        model._engine.in_call(run.callbacks),
        rng.isolated(run.stepper.device),
        modes.training(model.network),
    ):
        try:
            yield stopping
        finally:
            # The gradients of a window that an error has cut off belong to no later call.
            run.stepper.clear()


@contextmanager
def _reading(*feeds: Feed | None) -> Iterator[None]:
    """Within, workers may read data ahead."""
    try:
        yield
    finally:
        for feed in feeds:
            if feed is not None:
                feed.close()


@contextmanager
def _leaving_in_order() -> Iterator[None]:
    """A run that was told to stop ends its process when every rank has done what it had to do, and no notebook."""
    try:
        yield
    except signals.Stopped:
        group.barrier()
        if not signals.is_interactive():
            raise


@group.naming_the_lost()
def evaluate(model: Model, data: Any, callbacks: Any, options: PassOptions) -> dict[str, float]:
    """Evaluate; see `Model.evaluate`."""
    with _single_pass(model, "evaluate", data, callbacks, options, {"num_iters": options.num_iters}) as (run, feed):
        run = replace(run, label_span=model._engine.look_at_labels([feed]))
        return loop.evaluate(run, feed, options.num_iters)


@group.naming_the_lost()
def predict(model: Model, data: Any, callbacks: Any, options: PassOptions, stack_outputs: bool) -> Any:
    """Predict; see `Model.predict`."""
    arguments.check_switches(stack_outputs=stack_outputs)
    with _single_pass(model, "predict", data, callbacks, options, {"stack_outputs": stack_outputs}) as (run, feed):
        return loop.predict(run, feed, stack_outputs)


@contextmanager
def _single_pass(
    model: Model, call: str, data: Any, callbacks: Any, options: PassOptions, more: dict[str, Any]
) -> Iterator[tuple[loop.Run, Feed]]:
    engine = model._engine
    stepper = engine.ready()
    prepared = arguments.alike(engine.prepared)
    more = {options.name: kind_of(data), **more}
    compared = {"batch_size": options.batch_size, **more, "loss": prepared["loss"], "metrics": prepared["metrics"]}
    arguments.same_call(call, compared)
    feed = make_feed(data, options.request(has_own_batches(data), floats_for(model.network)), stepper.device)
    params = {
        **_extent(feed, options.num_iters), "verbose": options.verbose, "log_freq": options.log_freq,
        "metrics": _log_names(model),
    }  # fmt: skip
    chosen = default_callbacks(
        callbacks, verbose=options.verbose, log_freq=options.log_freq, save_dir=None, save_freq=1
    )
    # A seed of the script's own stream that is not advanced by asking for it.
    seed = group.broadcast_object(torch.initial_seed())
    run = loop.Run(model, engine.split, stepper, engine.prepared.metrics, CallbackList(chosen, model, params), seed)
    if not engine.running:
        stepper.sync(parameters=True)
    with _reading(feed), engine.in_call(run.callbacks), rng.isolated(stepper.device):
        yield run, feed


def _extent(feed: Feed, num_iters: int | None) -> dict[str, int | None]:
    """How much evaluate or predict will read, at most."""
    steps, samples, batch = feed.steps, feed.samples, feed.global_batch
    if num_iters is not None:
        steps = num_iters if steps is None else min(num_iters, steps)
        samples = None if samples is None or batch is None else min(samples, num_iters * batch)
    return {"steps": steps, "samples": samples, "global_batch": batch}


def _log_names(model: Model) -> list[str]:
    return ["loss", *(name for metric in model._engine.prepared.metrics for name in metric.names)]


def _refuse_unwritable(folders: list[str | Path | None]) -> None:
    """Raise on every rank if rank 0, which writes, cannot write there."""
    wanted = {str(folder): files.why_not_writable(Path(folder)) for folder in folders if folder is not None}
    for folder, problem in group.broadcast_object(wanted).items():
        if problem is not None:
            raise ValueError(
                f"save_dir received {folder!r}, where no checkpoint can be written: {problem}. "
                "Choose a folder that you may write to, or leave save_dir out to train without checkpoints."
            )


def _requests(
    options: FitOptions, seed: int, train_data: Any, eval_data: Any, floats: torch.dtype
) -> tuple[Request, Request]:
    """How to read the two data sets. An option that only one of them can follow is meant for that one."""
    train_decides = has_own_batches(train_data)
    eval_decides = eval_data is None or has_own_batches(eval_data)
    common = {"global_batch_size": options.global_batch_size, "num_workers": options.num_workers}
    for_train: dict[str, Any] = {"batch_size": options.train_batch, **common}
    for_eval: dict[str, Any] = {"batch_size": options.eval_batch, **common}
    paired = isinstance(options.batch_size, tuple | list)
    if paired and (train_decides or (eval_data is not None and eval_decides)):
        raise ValueError(
            f"batch_size={options.batch_size!r} has a size for each of train_data and eval_data, but one of them comes "
            "in batches of its own. Write one number, which the other follows."
        )
    if train_decides and not eval_decides:
        for_train = {}
    if eval_decides:
        for_eval = {}
    return (
        Request(
            "train_data", **for_train, shuffle=options.shuffle, drop_last=options.drop_last, seed=seed, floats=floats
        ),
        Request("eval_data", **for_eval, lockstep=False, floats=floats),
    )


def _fit_params(
    model: Model, options: FitOptions, train: Feed, evaluation: Feed | None, begun_at: int
) -> dict[str, Any]:
    names = [*_log_names(model), "lr"]
    if evaluation is not None:
        names += [f"val_{name}" for name in _log_names(model)]
    return {
        "batch_size": train.batch_size,
        "global_batch": train.global_batch,
        "eval_global_batch": None if evaluation is None else evaluation.global_batch,
        "epochs": options.epochs,
        "first_epoch": model.epochs_trained,
        # A run that goes on counts its epochs from its own start.
        "last_epoch": begun_at + options.epochs,
        "steps": train.steps,
        "samples": train.samples,
        "metrics": names,
        "accumulate_grad_batches": options.accumulate_grad_batches,
        # As it was prepared: a callback may do the clipping itself.
        "clip_grad_norm": model._engine.prepared.clip_grad_norm,
        **{n: getattr(options, n) for n in ("verbose", "log_freq", "save_dir", "save_freq", "eval_freq", "num_iters")},
    }
