"""What a checkpoint holds, and how it goes back in.

A checkpoint at `path` is two files. `path.pt` is the plain state dict of the network, which torch.load and
load_state_dict take. `path.opt.pt` holds what else a run needs to go on; `TRAINING_STATES` is the list. Both carry one
id: a pair is whole only if the ids agree, since two files cannot be renamed in one stroke.
"""

from __future__ import annotations

import contextlib
import math
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi import files

TRAINING_STATES = ("loss", "buffers", "optimizer", "scheduler", "scaler", "counters", "position", "callbacks")
"""The entries of `path.opt.pt`, `format` and `id` aside."""

_FORMAT = 1


def weights_path(path: str | Path) -> Path:
    """`path.pt`; a path that ends so already is taken as it is."""
    if not isinstance(path, str | PathLike):
        raise TypeError(
            f"save and load received the path {path!r}, of type {type(path).__name__}, which is no path. "
            'Write a name without ending, such as "checkpoints/mnist".'
        )
    text = str(path)
    if not text or text.endswith(("/", "\\")):
        raise ValueError(
            f"save and load received the path {text!r}, which names a folder and no file. "
            'Write a name without ending, such as "checkpoints/mnist".'
        )
    return Path(text if text.endswith(".pt") else f"{text}.pt")


def is_tensorfile(path: str | Path) -> bool:
    """Whether a path asks, by its ending, for the weights alone in the format of `tensorfile`."""
    return str(path).endswith(".safetensors")


def training_path(path: str | Path) -> Path:
    """`path.opt.pt`."""
    weights = weights_path(path)
    return weights.with_name(weights.name.removesuffix(".pt") + ".opt.pt")


@dataclass(frozen=True)
class Snapshot:
    """What the two files of a checkpoint will hold."""

    weights: Mapping[str, Any]
    training: Mapping[str, Any]

    def copied(self) -> Snapshot:
        """One that training does not change any more; tensors that share memory go on doing so."""
        copies: dict[int, Any] = {}
        entries = {key: files.with_own_tensors(value, copies) for key, value in self.weights.items()}
        weights = files.state_dict_of(entries, getattr(self.weights, "_metadata", {}))
        return Snapshot(weights, files.with_own_tensors(self.training, copies))


# Asked for by whoever saves, see `identified`.
_chosen: ContextVar[str | None] = ContextVar("hapi.checkpoint.id", default=None)


@contextmanager
def identified(identity: str | None) -> Iterator[None]:
    """Within, what is taken down gets this id, which its own training state may know already. None: any."""
    token = _chosen.set(identity)
    try:
        yield
    finally:
        _chosen.reset(token)


def take(network: nn.Module, training: Mapping[str, Any]) -> Snapshot:
    """Take down the states, whose tensors are those that training goes on with.

    Args:
        network: The unwrapped network.
        training: One entry for each of `TRAINING_STATES`.

    Raises:
        TypeError: Something in them would be refused when loaded; the message names its key.
    """
    identity = _chosen.get() or uuid.uuid4().hex
    weights = network.state_dict()
    metadata = files.as_plain(getattr(weights, "_metadata", None) or {}, "network.state_dict()._metadata")
    entries = {key: files.as_plain(value, f"network[{key!r}]") for key, value in weights.items()}
    # Strict loads ignore entries of the metadata that name no module.
    plain = files.state_dict_of(entries, {**metadata, "hapi": {"id": identity}})
    content = {"format": _FORMAT, "id": identity, **{name: training[name] for name in TRAINING_STATES}}
    return Snapshot(plain, {name: files.as_plain(value, name) for name, value in content.items()})


def write(path: str | Path, snapshot: Snapshot) -> None:
    """Write both files, the weights last; to a path that ends in `.safetensors` the weights alone.

    Args:
        path: Without ending, or ending in `.safetensors`.
        snapshot: What `take` gave.

    Raises:
        OSError: The files cannot be written.
    """
    if is_tensorfile(path):
        from hapi import tensorfile

        tensorfile.write(Path(path), snapshot.weights)
        return
    training_file, weights_file = training_path(path), weights_path(path)
    from hapi import pairs

    with (
        files.draft(training_file, partial(files.save_object, snapshot.training)) as new_training,
        files.draft(weights_file, partial(files.save_object, snapshot.weights)) as new_weights,
        pairs.alone(weights_file.parent),
    ):
        pairs.put(new_weights, weights_file, new_training, training_file, snapshot.training["id"])


def remove(path: str | Path, identity: str) -> None:
    """Delete both files, as far as they are there and of the save that had this id."""
    from hapi import pairs

    pairs.remove(weights_path(path), training_path(path), identity)


def sweep(folder: Path) -> None:
    """Delete what saves that were killed, an hour ago or longer, have left of pairs that are none."""
    # A folder without such files asks for no more.
    if any(folder.glob(".*.opt.pt.*")):
        from hapi import pairs

        pairs.sweep(folder)


@dataclass(frozen=True)
class Weights:
    """The contents of a `path.pt`."""

    source: Path
    state: Mapping[str, Any]
    identity: str | None
    """The id that pairs it with its `.opt.pt`; None for a file that `save` did not write."""


def read_weights(path: str | Path) -> Weights:
    """Read the state dict of a network.

    Args:
        path: As it was given to `save`, or any file of a state dict.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or holds something else.
    """
    from hapi import pairs

    source = weights_path(path)
    if is_tensorfile(path):
        from hapi import tensorfile

        source = Path(path)
        return Weights(source, tensorfile.read(source), None)
    if not source.exists() and Path(path).is_file():
        source = Path(path)
    loaded = files.read(source)
    if isinstance(loaded, dict) and {"format", "id", *TRAINING_STATES} <= loaded.keys():
        raise ValueError(
            f"{source} holds the training state of a checkpoint, not the weights of a network. "
            "Load the file that was written with it, without .opt."
        )
    if not isinstance(loaded, Mapping) or not all(isinstance(key, str) for key in loaded):
        raise ValueError(
            f"{source} holds a {type(loaded).__name__}, not the state dict of a network. "
            "Load a file that was written by save, or by torch.save(network.state_dict(), path)."
        )
    return Weights(source, loaded, pairs.identity_in(loaded))


def passing_buffers(network: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that no state dict holds (`persistent=False`), by name: training may change them all the same."""
    names = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in network.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in network.named_buffers() if name in names}


def restore_passing_buffers(network: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Put back what `passing_buffers` gave, of buffers that have grown or were filled on the way too."""
    owners = dict(network.named_modules())
    for name, value in saved.items():
        prefix, _, leaf = name.rpartition(".")
        owner = owners.get(prefix)
        if owner is None or leaf not in owner._non_persistent_buffers_set:
            continue
        buffer = owner._buffers[leaf]
        if buffer is not None and buffer.shape == value.shape:
            buffer.data.copy_(value)
        else:
            near = buffer if buffer is not None else next(network.parameters(), value)
            owner._buffers[leaf] = value.to(near.device, copy=True)


class UnfitError(ValueError):
    """A whole checkpoint is of another network."""


def differences(weights: Weights, network: nn.Module, skip_mismatch: bool) -> list[str]:
    """What of the weights does not fit the network, one line a kind.

    Args:
        weights: What `read_weights` gave.
        network: Where they are to go.
        skip_mismatch: Missing, unexpected and wrongly shaped entries may be left out.

    Raises:
        ValueError: There are differences, and `skip_mismatch` is False.
    """
    from hapi import fitting

    expected = network.state_dict()
    problems = fitting.differences(fitting.unwrapped_names(weights.state, expected), expected)
    if problems and not skip_mismatch:
        raise UnfitError(
            f"{weights.source} is of another network: {'; '.join(problems)}. "
            "Build the network that was saved, or pass skip_mismatch=True to load what fits."
        )
    return problems


def put_weights(weights: Weights, network: nn.Module, skipped: list[str]) -> None:
    """Put the weights that fit into the network, on whatever device it is.

    Args:
        weights: What `read_weights` gave.
        network: Where to.
        skipped: What `differences` gave; named in a warning.
    """
    from hapi import fitting

    expected = network.state_dict()
    state = fitting.unwrapped_names(weights.state, expected)
    fits = {k: value for k, value in state.items() if k in expected and fitting.fits(value, expected[k])}
    if skipped:
        loaded = f"loaded {len(fits)} of {len(expected)} entries"
        warnings.warn(f"{weights.source}: {loaded}. Skipped: {'; '.join(skipped)}", stacklevel=4)
    # By its version a module tells a state dict of its own from one of an older form, which it would convert.
    metadata = getattr(weights.state, "_metadata", None)
    metadata = metadata if isinstance(metadata, Mapping) else {}
    modules = {name: module for name, module in network.named_modules(remove_duplicate=False)}
    named = fitting.unwrapped_names(metadata, modules)
    network.load_state_dict(files.state_dict_of(fits, named), strict=False)


def read_training(path: str | Path, identity: str | None) -> dict[str, Any] | None:
    """What `path.opt.pt` holds, if it belongs to the weights with this id; None where there is no such file.

    Raises:
        ValueError: It is damaged, or of another save than the weights.
    """
    from hapi import pairs

    source = pairs.training_of(training_path(path), identity)
    if not source.exists():
        return None
    content: dict[str, Any] = files.read(source)
    known = isinstance(content, dict) and content.get("format") == _FORMAT
    if not known or not {"id", *TRAINING_STATES} <= content.keys() or not isinstance(content["position"], dict):
        raise ValueError(
            f"{source} is not the training state of a checkpoint of this version. "
            "Pass reset_optimizer=True to load the weights alone."
        )
    if content.get("id") != identity:
        raise ValueError(
            f"{source} and {weights_path(path).name} are of two different saves: the pair is not whole. "
            "Load another checkpoint, or pass reset_optimizer=True to load the weights alone."
        )
    return content


def read_pair(path: str | Path, with_training: bool = True) -> tuple[Weights, dict[str, Any] | None]:
    """Read both files while nobody who saves there puts another pair in their place.

    Args:
        path: As for `read_weights`.
        with_training: False: the weights alone.

    Returns:
        The weights, and the training state; None where it is not wanted or not there, and for weights that `save` did
        not write.

    Raises:
        FileNotFoundError: There are no such weights.
        ValueError: A file is damaged, or they are of two saves.
    """
    from hapi import pairs

    with pairs.alone(weights_path(path).parent, reading=True):
        weights = read_weights(path)
        wanted = with_training and weights.identity is not None
        return weights, read_training(path, weights.identity) if wanted else None


def warn_of_weights_alone(path: str | Path) -> None:
    """Say that a save's other file is not there: the optimizer would start anew without a word."""
    warnings.warn(
        f"{weights_path(path)} was saved together with {training_path(path).name}, which is not there: the weights "
        "alone are loaded, and the optimizer starts anew. Copy both files, or write load(..., reset_optimizer=True).",
        stacklevel=5,  # the script's own line, past what is around Model.load
    )


def newest(
    folder: str | Path, network: nn.Module, run: str | None = None, fit: int | None = None
) -> tuple[str | None, list[str]]:
    """The newest whole checkpoint of a folder that fits a network: of the run begun last, the furthest of its steps.

    Args:
        folder: Where to look.
        network: Whose weights are wanted.
        run: Only of this run (`group.run_name`); None: of any.
        fit: Only of the call of fit with this number in its process; None: of any.

    Returns:
        Its path without ending, None if there is none; and what was passed over, a line each with the reason.

    Raises:
        UnfitError: All that are whole are of another network.
    """
    from hapi import pairs

    passed_over: list[str] = []
    unfit: UnfitError | None = None
    weights_files = [path for path in Path(folder).glob("[!.]*.pt") if not path.name.endswith(".opt.pt")]
    for path in sorted(weights_files, key=_age, reverse=True):
        try:
            weights, training = read_pair(path)
            if weights.identity is None:
                raise ValueError(f"{path} was not written by save, so no training state belongs to it.")
            if training is None:
                raise ValueError(f"{path} has no {training_path(path).name} beside it: the pair is not whole.")
            if run is not None and training["position"].get("run") != run:
                raise ValueError(f"{path} is of an earlier run; resume=True would go on from it.")
            if fit is not None and training["position"].get("fit", fit) != fit:
                continue  # a script may call fit several times, and comes to the others by itself
            differences(weights, network, skip_mismatch=False)
            # So that whoever copies the two files has both.
            pairs.finish(path, training_path(path), weights.identity)
            return str(path.with_suffix("")), passed_over
        except (ValueError, OSError) as error:
            passed_over.append(str(error))
            unfit = error if isinstance(error, UnfitError) and unfit is None else unfit
    if unfit is not None:
        raise unfit
    return None, passed_over


def _age(path: Path) -> tuple[float, float, int]:
    """When a checkpoint's run was begun, and how far it had come. What cannot be read counts as the newest.

    So it is named. Times of files decide at last only: a copied folder has other ones.
    """
    from hapi import pairs

    # Not verified: it decides the order in which files are looked at, no more. Damage shows as a dozen types.
    identity = None
    with contextlib.suppress(Exception):
        identity = pairs.identity_in(files.peek(path))
    try:
        training = files.peek(pairs.training_of(training_path(path), identity))
        begun, steps = training["position"].get("begun", 0.0), training["counters"]["steps_trained"]
    except Exception:
        begun = steps = math.inf
    try:
        return begun, steps, path.stat().st_mtime_ns
    except OSError:  # Another run that saves here may have deleted it.
        return begun, steps, 0
