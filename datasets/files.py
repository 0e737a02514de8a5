"""Files of a data set: what makes one unusable, and how several are read with all their faults named."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")


class Loaded(NamedTuple):
    """One part (train or test) of a data set, read and checked."""

    data: Tensor
    """(N, C, H, W) uint8."""
    targets: Tensor
    """(N,) int64."""
    classes: list[str]
    unpublished: list[str]
    """Names of the files whose bytes are not the published ones."""


class Broken(Exception):
    """One file is there, but is not what it should be."""


class Unusable(Exception):
    """Files that are missing or broken.

    Attributes:
        problems: What is wrong, by file name.
    """

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name} {reason}" for name, reason in problems.items()))
        self.problems = dict(problems)


def default_root() -> Path:
    """`$HAPI_DATA_HOME`, or `hapi` in the user's cache folder."""
    home = os.environ.get("HAPI_DATA_HOME")
    if home:
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hapi"


def read_each(folder: Path, names: Iterable[str], read: Callable[[Path], T]) -> dict[str, T]:
    """Read several files of a folder.

    Args:
        folder: Where they lie.
        names: Which ones.
        read: Reads one; raises `Broken` or OSError.

    Returns:
        What was read, by name.

    Raises:
        Unusable: At least one could not be read; all of these are named.
    """
    contents: dict[str, T] = {}
    problems: dict[str, str] = {}
    for name in names:
        try:
            contents[name] = read(folder / name)
        except FileNotFoundError:
            problems[name] = "is missing"
        except Broken as error:
            problems[name] = str(error)
        except OSError as error:
            problems[name] = f"cannot be read ({error.strerror or error})"
    if problems:
        raise Unusable(problems)
    return contents


def md5_of(path: Path) -> str:
    """The md5 of a file, in hexadecimal. It tells files apart; it is no protection against an attacker."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
