"""Where a run that was ended goes on: which checkpoint, and what is taken over from it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hapi import checkpoint, cursor, files, rng
from hapi.arguments import FitOptions, check_switches
from hapi.callbacks.terminal import say
from hapi.data import Feed
from hapi.distributed import group

if TYPE_CHECKING:
    from hapi.model import Model


def start(model: Model, options: FitOptions) -> tuple[int, dict[str, Any] | None]:
    """The run's seed; where it goes on from a checkpoint, load that, and give its training state."""
    # Drawn in any case, so that the script's own stream goes on alike.
    seed = group.broadcast_object(rng.draw_seed() if options.seed is None else options.seed)
    source = find(options, model.network, model._engine.fits)
    model._engine.begun = time.time()
    if source is None:
        _tell_of_others(options)
        return seed, None
    state = load(model, source)
    if state is None:
        raise ValueError(
            f"resume found weights at {source}, but no training state that belongs to them, so the run cannot go on. "
            "Resume from a checkpoint that fit or save has written, or load the weights by model.load and start anew."
        )
    _tell_of_the_scheduler(model, state["scheduler"] is not None)
    restore_threads(state["position"])
    _tell_of_the_frozen(_freeze(model.network, state["position"].get("frozen")), options, source)
    if _given(options) != source:
        # Who names a checkpoint begins a branch there, which is the newer run from then on.
        model._engine.begun = state["position"].get("begun", 0.0)
    _tell_if_done(model, options, source, state["position"]["cursor"])
    # None: saved outside a fit.
    return seed if state["position"]["seed"] is None else state["position"]["seed"], state


@group.naming_the_lost()
def load(
    model: Model, path: str | Path, skip_mismatch: bool = False, reset_optimizer: bool = False
) -> dict[str, Any] | None:
    """Load, as `Model.load` says, and return the training state that was restored; None if there was none."""
    check_switches(skip_mismatch=skip_mismatch, reset_optimizer=reset_optimizer)
    # What rank 0 saved before this call is on the disk once it arrives here.
    group.barrier()
    wants_training = model.optimizer is not None and not reset_optimizer
    weights, training = checkpoint.read_pair(path, wants_training)
    if wants_training and weights.identity is not None and training is None:
        checkpoint.warn_of_weights_alone(path)
    skipped = checkpoint.differences(weights, model.network, skip_mismatch)
    if training is not None and not skipped:
        # First what may still be refused, so that an error leaves the network as it was.
        model._engine.restore_training(training)
    checkpoint.put_weights(weights, model.network, skipped)
    if training is not None and not skipped:
        model.epochs_trained = training["counters"]["epochs_trained"]
        model.steps_trained = training["counters"]["steps_trained"]
        model._engine.move_to(training["position"])
        return training
    model._engine.move_to(None)
    return None


def _tell_if_done(model: Model, options: FitOptions, source: str, cursor: Mapping[str, Any] | None) -> None:
    if not options.verbose:
        return
    if model.epochs_trained >= options.epochs + (0 if cursor is None else cursor.get("first_epoch", 0)):
        say(
            f"hapi: {source} has {model.epochs_trained} epochs, and epochs={options.epochs} counts the whole run: "
            "nothing is left to train"
        )
    elif cursor is not None and cursor.get("stopped"):
        say(
            f"hapi: the run of {source} was ended by stop_training (of EarlyStopping, say): nothing is left to train. "
            f'model.load("{source}") and another fit train on'
        )


def _tell_of_the_scheduler(model: Model, was_there: bool) -> None:
    """Say that the learning rate will take another course than it had."""
    if was_there and model.scheduler is None:
        found = "had a scheduler, and prepare was given none: the learning rate stays the checkpoint's"
    elif not was_there and model.scheduler is not None:
        found = f"had no scheduler, and prepare was given a {type(model.scheduler).__name__}, which starts anew"
    else:
        return
    cure = "Prepare the model as it was; where a change is meant, model.load(path) and a fit without resume say so"
    warnings.warn(f"The run to resume {found}. {cure}.", stacklevel=6)


def _tell_of_others(options: FitOptions) -> None:
    """Say that a fresh start finds an earlier run's checkpoints, of which it replaces those of its own names alone."""
    if options.save_dir is None or not options.verbose or not group.speaks_for_all():
        return
    names = [path.name.removesuffix(".opt.pt") for path in Path(options.save_dir).glob("*.opt.pt")]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    steps = sorted((name for name in names if name.startswith("step_")), key=lambda name: (len(name), name))
    kept = ([f"{numbers[0]} to {numbers[-1]}"] if numbers else []) + steps[-1:]
    if kept:
        say(
            f"hapi: {options.save_dir} holds checkpoints of an earlier run, {', '.join(kept)}; resume=True would go on "
            "from it, now those of equal names are replaced and the others stay"
        )


def find(options: FitOptions, network: nn.Module, fit: int) -> str | None:
    """The checkpoint that fit goes on from, the same on every rank; None for a fresh start.

    What was passed over in the search, and why, is printed by rank 0.

    Args:
        options: Of the call.
        network: Whose checkpoint.
        fit: The number of this call of fit in the process.

    Raises:
        ValueError: The folder has checkpoints of another network alone.
    """
    if options.save_dir is not None and group.speaks_for_all():
        files.sweep(Path(options.save_dir))
    if options.resume is False or (options.resume is None and not group.was_restarted()):
        return None
    # Unasked, only what this very run has saved is gone on from.
    only = (group.run_name(), fit) if options.resume is None else (None, None)
    folder = options.save_dir
    given = _given(options)
    if given is not None:
        # A launcher's restart goes on with what this run has saved since it set out from there.
        own = _own_newest(options, network, fit) if group.was_restarted() else None
        if own is not None:
            return own
        if not group.broadcast_object(Path(given).is_dir() and not checkpoint.weights_path(given).exists()):
            return given
        folder = given
    if folder is None:
        if group.was_restarted() and options.verbose:
            say(
                "hapi: the launcher has restarted this run, which starts anew: fit has no save_dir to look for "
                'checkpoints in. Write fit(..., save_dir="checkpoints").'
            )
        return None
    # Rank 0 writes the files, and may be the only one to see them whole at this moment.
    found, passed_over, unfit = group.broadcast_object(_searched(folder, network, *only))
    if unfit is not None:
        # A fresh start would replace the checkpoints of another network, one after the other.
        raise ValueError(f"resume found no checkpoint to go on from: {unfit} To start anew, choose another save_dir.")
    if options.verbose:
        for line in passed_over:
            say(f"hapi: passed over: {line}")
        say(f"hapi: resuming from {found}" if found else f"hapi: no checkpoint in {folder} to resume from")
    return found


def _own_newest(options: FitOptions, network: nn.Module, fit: int) -> str | None:
    """The newest checkpoint of this very run in its `save_dir`."""
    if options.save_dir is None:
        return None
    found, _, _ = group.broadcast_object(_searched(options.save_dir, network, group.run_name(), fit))
    if found and options.verbose:
        say(f"hapi: resuming from {found}")
    return found


def _given(options: FitOptions) -> str | None:
    """The path that `resume` names, a checkpoint's or a folder's."""
    if options.resume is None or isinstance(options.resume, bool):
        return None
    return str(options.resume).rstrip("/\\") or "/"


def _searched(
    folder: str | Path, network: nn.Module, run: str | None, fit: int | None
) -> tuple[str | None, list[str], str | None]:
    """What `checkpoint.newest` finds, on rank 0; an error as its text, which all ranks get."""
    if not group.speaks_for_all():
        return None, [], None
    try:
        return *checkpoint.newest(folder, network, run, fit), None
    except checkpoint.UnfitError as error:
        return None, [], str(error)


@dataclass(frozen=True)
class Resumed:
    """What a run that goes on takes over from its checkpoint, besides weights, optimizer and counters."""

    form: list[Any] | None
    """Of `Stepper.form`; None where the world has changed."""
    callbacks: dict[str, Any]
    within: cursor.Within | None
    """Where in its first epoch it starts; None: at the beginning."""
    iterations: int
    """Training steps that it has taken."""
    stopped: bool
    """Whether it was ended by a wish to stop, a callback's or the script's."""
    first_epoch: int
    """Epochs that were trained when it began, by earlier calls of fit."""


def take_over(state: Mapping[str, Any], train: Feed, evaluation: Feed | None) -> Resumed:
    """What the run takes over from the training state of its checkpoint.

    Args:
        state: Of `Engine.training_state`.
        train: The training data, which is told where it stands.
        evaluation: The evaluation data, likewise.
    """
    position = state["position"]
    same_world = position["world_size"] == group.get_world_size()
    within, iterations, stopped, first_epoch = None, 0, False, 0
    # None: saved outside a fit.
    if position["cursor"] is not None:
        within, remark = cursor.place(position["cursor"], train, same_world)
        iterations = position["cursor"]["iterations"]
        stopped = position["cursor"].get("stopped", False)
        first_epoch = position["cursor"].get("first_epoch", 0)
        if evaluation is not None:
            evaluation.restore(cursor.evaluation_state(position["cursor"], same_world))
        if remark is not None:
            warnings.warn(f"The resumed run does not go on quite where it was: {remark}.", stacklevel=4)
    form = position["form"] if same_world else None
    return Resumed(form, state["callbacks"], within, iterations, stopped, first_epoch)


def _freeze(network: nn.Module, names: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Train and leave alone the parameters that the run did: a callback may have changed that on the way.

    Returns:
        Those that the script left to train and are frozen now, and the other way round.
    """
    frozen: list[str] = []
    freed: list[str] = []
    for name, parameter in network.named_parameters() if names is not None else ():
        freeze = name in (names or ())
        if parameter.requires_grad == freeze:
            parameter.requires_grad_(not freeze)
            (frozen if freeze else freed).append(name)
    return frozen, freed


def _tell_of_the_frozen(changed: tuple[list[str], list[str]], options: FitOptions, source: str) -> None:
    """Say which parameters the script has set otherwise: a line, no warning, since a callback may well have done it."""
    told = [
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''} {what}"
        for names, what in zip(changed, ("stay frozen", "are trained"), strict=True)
        if names
    ]
    if told and options.verbose:
        say(
            f"hapi: {' and '.join(told)}, as in the run of {source}, though the script has set requires_grad "
            f'otherwise; where a change is meant, model.load("{source}") and a fit without resume keep it'
        )


def restore_threads(position: dict[str, object]) -> None:
    """Compute with as many threads as before: sums come out in other bits with another number."""
    threads = position["threads"]
    if isinstance(threads, int) and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
