"""A disk that forgets: what was asked of it in order, and what it may hold if the power goes at any moment.

What a file holds is kept once the file was flushed (fsync); names are kept once their folder was. Until then each may
have reached the disk or not, on its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

_listening: list[Recorder] = []
_hooked = False


class Recorder:
    """The operations on files below a folder, in their order.

    `operations` holds tuples: ("make", path), ("create", path), ("flush", path, content or None for a folder),
    ("rename", source, target), ("remove", path), and whatever the test adds.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.operations: list[tuple[Any, ...]] = []

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        paths = [os.fspath(path) for path in arguments[:2] if isinstance(path, str | os.PathLike)]
        if not paths or not paths[0].startswith(self.root):
            return
        if event == "os.rename":
            self.operations.append(("rename", *paths))
        elif event == "os.remove" and os.path.exists(paths[0]):
            self.operations.append(("remove", paths[0]))
        elif event == "os.mkdir" and not os.path.exists(paths[0]):
            self.operations.append(("make", paths[0]))
        elif event == "open" and not os.path.exists(paths[0]):
            self.operations.append(("create", paths[0]))

    def flushed(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(os.path.dirname(self.root)):
            self.operations.append(("flush", path, Path(path).read_bytes() if os.path.isfile(path) else None))


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _listening and event in ("open", "os.rename", "os.remove", "os.mkdir"):
        for recorder in _listening:
            recorder.heard(event, arguments)


@contextmanager
def recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Record what happens below a folder."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_audit)  # for good: Python has no way to take it back
        _hooked = True
    recorder = Recorder(root)
    fsync = os.fsync

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        recorder.flushed(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flush)
        _listening.append(recorder)
        try:
            yield recorder
        finally:
            _listening.remove(recorder)


class Disk:
    """What of a recorded order of operations has surely, and what has perhaps, reached the disk."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.names: dict[str, int | None] = {}  # path -> file, None for a folder; as if all had been kept
        self.kept: dict[str, int | None] = {}
        self.waiting: list[tuple[Any, ...]] = []  # changes of names whose folder was not flushed
        self.contents: dict[int, bytes] = {}  # of flushed files
        self.files = 0

    def do(self, operation: tuple[Any, ...]) -> None:
        kind, path, *rest = operation
        if kind == "flush":
            if rest[0] is None:
                for change in [change for change in self.waiting if os.path.dirname(change[1]) == path]:
                    _change(self.kept, change)
                    self.waiting.remove(change)
            else:
                self._know(path)
                file = self.names[path]
                assert file is not None
                self.contents[file] = rest[0]
            return
        if kind == "rename":
            self._know(path)
            change = ("name", rest[0], self.names[path], path)
        elif kind == "remove":
            change = ("remove", path)
        else:
            self.files += kind == "create"
            change = ("name", path, self.files if kind == "create" else None, None)
        _change(self.names, change)
        self.waiting.append(change)

    def _know(self, path: str) -> None:
        """A file that a library has made, which nobody heard."""
        if path not in self.names:
            self.do(("create", path))

    def images(self) -> Iterator[dict[str, bytes | None]]:
        """Every state that the disk may be in: path -> content, None for a folder."""
        seen = []
        for chosen in product((False, True), repeat=len(self.waiting)):
            names = dict(self.kept)
            for change, done in zip(self.waiting, chosen, strict=True):
                if done:
                    _change(names, change)
            reachable = {path: file for path, file in names.items() if self._is_reachable(path, names)}
            if reachable in seen:
                continue
            seen.append(reachable)
            lost = [file for file in reachable.values() if file is not None and file not in self.contents]
            for remains in (b"", b"PK\x03\x04 half of it") if lost else (b"",):
                yield {
                    path: None if file is None else self.contents.get(file, remains) for path, file in reachable.items()
                }

    def _is_reachable(self, path: str, names: dict[str, int | None]) -> bool:
        folder = os.path.dirname(path)
        return folder == self.root or (folder in names and self._is_reachable(folder, names))


def _change(names: dict[str, int | None], change: tuple[Any, ...]) -> None:
    if change[0] == "remove":
        names.pop(change[1], None)
        return
    _, path, file, source = change
    names[path] = file
    if source is not None and names.get(source) == file:
        del names[source]


def lay_out(image: dict[str, bytes | None], root: str, folder: Path) -> None:
    """Make the files of an image in a fresh folder."""
    for path, content in sorted(image.items()):
        place = folder / os.path.relpath(path, root)
        if content is None:
            place.mkdir()
        else:
            place.write_bytes(content)
