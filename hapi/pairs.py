"""Two files that belong together: renamed one after the other, and a whole pair at every moment.

The new training state waits under a name of its own until the weights that it belongs to are in place, so that there
is always one with the id of the weights. Imported by a process that saves or loads.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hapi import files

try:
    fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # Windows
    fcntl = None

_LONGEST_WAIT = 30.0
# The names of `_waiting_path`.
_WAITING = re.compile(r"\.(?P<name>.+)\.opt\.pt\.(?P<id>[0-9a-f]{32})", re.DOTALL)


def put(new_weights: Path, weights_file: Path, new_training: Path, training_file: Path, identity: str) -> None:
    """Rename both files into place, the weights last but one, within `alone`.

    Args:
        new_weights: The draft of the weights.
        weights_file: Where it is to go.
        new_training: The draft of the training state.
        training_file: Where that is to go.
        identity: The id that both carry.

    Raises:
        OSError: A rename fails; what is in place then is a pair all the same.
    """
    waiting = _waiting_path(training_file, identity)
    try:
        files.rename(new_training, waiting)
        files.rename(new_weights, weights_file)
    except BaseException:
        # A second stop signal, or the disk, may end it right after the weights were exchanged: then what waits is all
        # that belongs to them.
        if new_weights.exists():
            waiting.unlink(missing_ok=True)
        raise
    files.rename(waiting, training_file)
    _remove_waiting(training_file)


def training_of(training_file: Path, identity: str | None) -> Path:
    """Where the training state is that belongs to weights of this id: mostly in its place.

    It waits where the process was ended between the two renames of a save.
    """
    if identity is None:
        return training_file
    waiting = _waiting_path(training_file, identity)
    return waiting if waiting.exists() else training_file


def identity_in(weights: Any) -> str | None:
    """The id in what a file of weights holds; None for one that `save` did not write."""
    # Of a file from elsewhere, any of this may be something else.
    metadata = getattr(weights, "_metadata", None)
    own = metadata.get("hapi") if isinstance(metadata, Mapping) else None
    identity = own.get("id") if isinstance(own, Mapping) else None
    return identity if isinstance(identity, str) else None


def finish(weights_file: Path, training_file: Path, identity: str) -> None:
    """Do the last rename of a save that was ended before it, where this user may."""
    waiting = _waiting_path(training_file, identity)
    if not waiting.exists():
        return
    # What stands against it is no reason not to load what was found.
    with contextlib.suppress(Exception), alone(weights_file.parent):
        # Looked at again: the run that was ended may be at it too, started anew.
        if identity_in(files.peek(weights_file)) == identity and waiting.exists():
            files.rename(waiting, training_file)


def remove(weights_file: Path, training_file: Path, identity: str) -> None:
    """Delete both, as far as they are there and of this very save: another run may have saved under the name since.

    The weights go first, without which nobody looks at the rest.
    """
    waiting = _waiting_path(training_file, identity)
    with alone(weights_file.parent):
        for file in (weights_file, training_file):
            if _is_of(file, identity):
                file.unlink(missing_ok=True)
        waiting.unlink(missing_ok=True)


def _is_of(file: Path, identity: str) -> bool:
    """Whether a file of a pair is surely of this save. Damage shows as a dozen types."""
    try:
        content = files.peek(file)
        return identity in (identity_in(content), content.get("id"))
    except Exception:
        return False


def sweep(folder: Path) -> None:
    """Delete training states that an hour ago or longer were left waiting for weights that never came, or have gone.

    A later save to the same path would do it; the name of a step may never come again.
    """
    for leftover in folder.glob(".*.opt.pt.*"):
        form = _WAITING.fullmatch(leftover.name)
        if form is None or not files.is_left(leftover):
            continue
        with contextlib.suppress(OSError):
            if not _may_be_of(folder / f"{form['name']}.pt", form["id"]):
                leftover.unlink()


def _may_be_of(weights_file: Path, identity: str) -> bool:
    try:
        return identity_in(files.peek(weights_file)) == identity
    except FileNotFoundError:
        return False
    except Exception:  # Perhaps it can be read elsewhere.
        return True


@contextmanager
def alone(folder: Path, reading: bool = False) -> Iterator[None]:
    """No other process is within this context for the same folder, where the file system has locks.

    The lock is waited for half a minute at most: a process may hold it that was stopped for good.

    Args:
        folder: One that is there.
        reading: Others that read may be within it. A folder that cannot be opened is read without a lock: whether its
            files can be read shows when they are.

    Raises:
        OSError: The folder cannot be opened, to write in it.
    """
    descriptor = _opened(folder, reading) if fcntl is not None else None
    if descriptor is None:
        yield
        return
    try:
        locked = _lock(descriptor, fcntl.LOCK_SH if reading else fcntl.LOCK_EX)
        try:
            yield
        finally:
            if locked:
                # Not by closing: a data worker that was started meanwhile has the descriptor too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _opened(folder: Path, reading: bool) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY)
    except OSError as error:
        if reading:
            return None
        raise OSError(
            f"{folder} cannot be locked for a save ({error.strerror}), so nothing in it was changed. "
            "Check that the folder is still there and may be read by this user, or save to another place."
        ) from error


def _lock(descriptor: int, kind: int) -> bool:
    give_up = time.monotonic() + _LONGEST_WAIT
    while time.monotonic() < give_up:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:  # a file system without locks
            return False
    return False


def _remove_waiting(training_file: Path) -> None:
    """Training states of saves to this path that were ended by a kill."""
    for leftover in training_file.parent.glob(f".{glob.escape(training_file.name)}.{'[0-9a-f]' * 32}"):
        leftover.unlink(missing_ok=True)


def _waiting_path(training_file: Path, identity: str) -> Path:
    return training_file.with_name(f".{training_file.name}.{identity}")
