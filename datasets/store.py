"""From a root folder to a data set in memory: read what is there, fetch what is missing or broken."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hapi.datasets.download import Archive, DownloadFailed, fetch, host_lock, place, staging
from hapi.datasets.files import Loaded, Unusable
from hapi.distributed import get_rank

_warned: set[tuple[str, Path]] = set()


@dataclass(frozen=True)
class Published:
    """A data set as its authors publish it."""

    name: str
    folder: str
    """Below the root."""
    files: tuple[str, ...]
    """All files, of both parts."""
    check: Callable[[Path], object]
    """Reads one of the files; raises `Broken` if its structure is wrong."""
    archives: Callable[[], list[Archive]]
    """Where they are published. Imports torchvision."""


def load(published: Published, root: Path, read: Callable[[Path], Loaded], download: bool) -> Loaded:
    """Read one part of a data set below a root, after fetching files that are missing or broken.

    A root that holds what is read is only read: no lock is taken, nothing is written.

    Args:
        published: The data set.
        root: The root of all data sets.
        read: Reads the part from the data set's folder; raises `Unusable`.
        download: Whether files may be fetched.

    Raises:
        RuntimeError: Files are missing or broken, and fetching them is forbidden or failed.
    """
    folder = root / published.folder
    try:
        loaded = read(folder)
    except Unusable as problem:
        if not download:
            raise RuntimeError(
                f"{_received(published, root, problem)}, and download=False forbids fetching them. "
                f"Pass download=True, or {_by_hand(published, folder)}"
            ) from None
        loaded = _load_fetched(published, root, read)
    if loaded.unpublished:
        _warn_once(published.name, folder, loaded.unpublished)
    return loaded


def _load_fetched(published: Published, root: Path, read: Callable[[Path], Loaded]) -> Loaded:
    folder = root / published.folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with host_lock(root / f".{published.name}.lock") as locked:
            try:
                return read(folder)  # Another process may have fetched it while this one waited.
            except Unusable as error:
                problem = error
            _fetch_files(published, root, problem, locked)
            return read(folder)
    except DownloadFailed as error:
        raise RuntimeError(
            f"{_received(published, root, problem)}, and no mirror gave them: {error}. "
            f"Try again where the network can be reached, or {_by_hand(published, folder)}"
        ) from error
    except Unusable as error:
        raise RuntimeError(
            f"{_received(published, root, error)}, although they were downloaded: they do not fit together. "
            f"Remove that folder and try again, or {_by_hand(published, folder)}"
        ) from error
    except OSError as error:
        raise RuntimeError(
            f"{published.name} received root={str(root)!r}, where files are missing and none can be written "
            f"({error}). "
            f"Name a folder that can be written, by root= or HAPI_DATA_HOME, or {_by_hand(published, folder)}"
        ) from error


def _fetch_files(published: Published, root: Path, problem: Unusable, locked: bool) -> None:
    folder = root / published.folder
    wanted = set(problem.problems)
    # The other part's files as well: whoever goes off line afterwards has both.
    wanted.update(
        name for name in published.files if not (folder / name).exists() and not (folder / f"{name}.gz").exists()
    )
    with staging(root, published.name, locked) as stage:
        for archive in published.archives():
            needed = wanted.intersection(archive.members)
            if needed:
                fetch(archive, stage, published.check)
            for name in needed:
                place(stage / name, folder / name)


def _received(published: Published, root: Path, problem: Unusable) -> str:
    listed = ", ".join(f"{name} ({reason})" for name, reason in problem.problems.items())
    folder = root / published.folder
    return f"{published.name} received root={str(root)!r}, but files in {folder} cannot be used: {listed}"


def _by_hand(published: Published, folder: Path) -> str:
    advice = f"put {', '.join(published.files)} into {folder}"
    try:
        archives = published.archives()
    except ImportError:
        return f"{advice}; torchvision, which knows where they are published, is not installed."
    urls = ", ".join(url for archive in archives for url in archive.urls[:1])
    return f"{advice} (unpacked from {urls})."


def _warn_once(name: str, folder: Path, unpublished: list[str]) -> None:
    if (name, folder) in _warned or get_rank() != 0:
        return
    _warned.add((name, folder))
    warnings.warn(
        f"{name} in {folder} is used, but not byte for byte the published one ({', '.join(unpublished)}): "
        "only its structure was checked.",
        stacklevel=_levels_to_caller(),
    )


def _levels_to_caller() -> int:
    """The `stacklevel`, for the function that asks, of the first frame outside this package."""
    level = 0
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("hapi.datasets"):
        frame = frame.f_back
        level += 1
    return level + 1
