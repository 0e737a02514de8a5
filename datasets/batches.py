"""CIFAR's batch files: pickles, read without importing or running anything that they name.

The three NumPy names in them are given stand-ins that only record what the file says; every other name is
refused. What was recorded is then checked against what a batch must be.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from hapi.datasets.files import Broken

PIXELS = 3 * 32 * 32
_META_MOST = 1 << 16


class _RecordedType:
    """Stands in for `numpy.dtype`."""

    # Of the class: a pickle can make an object without calling `__init__`.
    code: Any = None

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, which bytes do not have."""


class _RecordedArray:
    """Stands in for `numpy.ndarray` and for the function that makes an empty one."""

    shape: Any = None
    code: Any = None
    fortran: Any = None
    raw: Any = None

    def __init__(self, *_: Any) -> None:
        """Accept what NumPy's own would be given: an empty shape and a type code, which the state overrides."""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, kind, self.fortran, self.raw = state
        self.code = kind.code


# The second spelling is that of files which NumPy 2 wrote.
_ALLOWED: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _RecordedArray,
    ("numpy", "dtype"): _RecordedType,
    ("numpy.core.multiarray", "_reconstruct"): _RecordedArray,
    ("numpy._core.multiarray", "_reconstruct"): _RecordedArray,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _ALLOWED[module, name]


def read_batch(path: Path, rows: int, labels: str, classes: int) -> tuple[bytes, list[int]]:
    """Read one batch file.

    Args:
        path: The file.
        rows: Images that it must hold.
        labels: Key of the labels, `labels` or `fine_labels`.
        classes: Labels lie in `range(classes)`.

    Returns:
        The rows * 3072 bytes (per image: red, green, blue, each 32 rows of 32), and the labels.

    Raises:
        FileNotFoundError: The file is missing.
        Broken: It is cut short, of another kind, or names what a batch does not need.
    """
    size = path.stat().st_size
    pixels = rows * PIXELS
    # Before anything is read: a pickle can ask for any amount of memory.
    if not pixels <= size <= pixels + pixels // 20 + _META_MOST:
        raise Broken(f"has {size} bytes, where {rows} images take {pixels} and little more")
    content = _unpickle(path)
    array, targets = content.get("data"), content.get(labels)
    if not isinstance(array, _RecordedArray) or array.code not in ("u1", b"u1") or array.fortran:
        raise Broken("holds no array of bytes as 'data'")
    if array.shape != (rows, PIXELS) or not isinstance(array.raw, bytes) or len(array.raw) != pixels:
        raise Broken(f"holds 'data' of shape {array.shape} instead of {(rows, PIXELS)}")
    if not isinstance(targets, list) or len(targets) != rows:
        raise Broken(f"holds no list of {rows} labels as {labels!r}")
    if not all(type(target) is int and 0 <= target < classes for target in targets):
        raise Broken(f"holds labels outside 0..{classes - 1}")
    return array.raw, targets


def read_names(path: Path, key: str, classes: int) -> list[str]:
    """Read the names of the classes from a meta file.

    Args:
        path: The file.
        key: `label_names` or `fine_label_names`.
        classes: How many there must be.

    Raises:
        FileNotFoundError: The file is missing.
        Broken: It is cut short or of another kind.
    """
    size = path.stat().st_size
    if size > _META_MOST:
        raise Broken(f"has {size} bytes, where a list of names takes less than {_META_MOST}")
    names = _unpickle(path).get(key)
    if not isinstance(names, list) or len(names) != classes:
        raise Broken(f"holds no list of {classes} names as {key!r}")
    if not all(isinstance(name, (str, bytes)) for name in names):
        raise Broken(f"holds something else than names as {key!r}")
    return [_text(name) for name in names]


def _unpickle(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        try:
            # Python 2 wrote these: its strings stay bytes, so that the pixels are not decoded and encoded
            # again.
            content = _Unpickler(stream, encoding="bytes").load()
        except OSError:
            raise
        except Exception as error:  # A damaged pickle may raise anything, MemoryError included.
            raise Broken(f"cannot be unpickled ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict):
        raise Broken(f"holds a {type(content).__name__} instead of a dict")
    return {_text(key): value for key, value in content.items() if isinstance(key, (str, bytes))}


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value
