"""Files that are whole or absent, and reads that never run code and never take a damaged value for a good one."""

from __future__ import annotations

import contextlib
import math
import os
import time
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_BASES: tuple[Any, ...] = (int, float, str, bytes)
_LARGEST_INT_BITS = 1000
_LEFT_FOR_GOOD = 3600.0
# The bit of a zip member's attributes.
_IS_FOLDER = 0x10


def write(path: Path, content: Any) -> None:
    """Write an object that `read` takes: to a temporary file beside the target, then renamed into place.

    The file and the folder are flushed to the disk, so that not even a power cut leaves half of it.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the message names the path and the cause.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        # torch reports a full disk as a RuntimeError of its zip writer.
        if not isinstance(error, OSError) and "PytorchStreamWriter" not in str(error):
            raise
        raise OSError(
            f"{path} could not be written ({error}); what was there before is untouched. "
            "Check that the folder exists, may be written to and has space left, or save to another place."
        ) from error


def rename(source: Path, target: Path) -> None:
    """Rename in one stroke, lastingly, over what is there."""
    os.replace(source, target)
    _flush_folder(target.parent)


def sweep(folder: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote, an hour ago or longer.

    Another run may be writing here at this moment, even from another host.
    """
    for leftover in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _LEFT_FOR_GOOD:
                leftover.unlink()


def read(path: Path) -> Any:
    """Read what torch.save wrote, checked to the last byte, with every tensor on the CPU.

    torch itself verifies no checksum: most flipped bits load silently. Compressed members, which torch never writes,
    could unpack to any size; the old format that is no zip archive has no checksum at all. Both are refused.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, of a refused kind, or holds more than plain values and tensors.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist, so nothing can be loaded from it. "
            "Give the path that was given to save, without .pt, and check the folder."
        )
    try:
        _verify_archive(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # Damage shows as a dozen types; each means the same to the user.
        raise ValueError(
            f"{path} is not a whole checkpoint ({type(error).__name__}: {_first_line(error)}), so nothing was loaded "
            "from it. Load another checkpoint; if the file comes from elsewhere, save it anew with "
            "torch.save(network.state_dict(), path)."
        ) from error


def why_not_writable(folder: Path) -> str | None:
    """What stands against writing into a folder, which need not be there yet; None if nothing. Nothing is touched."""
    try:
        place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not place.is_dir():
            return f"{place} is a file"
    except OSError as error:
        return str(error)
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} is read-only for this user"


def as_plain(value: Any, where: str) -> Any:
    """The value made of what a safe load takes.

    NumPy's numbers and arrays become numbers and tensors; subclasses of plain types (enumerations, named tuples) keep
    their value and lose their class. Keys of dicts likewise.

    Args:
        value: Any nest of dicts, lists, tuples and sets.
        where: The key under which it is saved, for the message.

    Raises:
        TypeError: It holds something else, which would save now and be refused when loaded.
    """
    if isinstance(value, Mapping):
        items = {
            as_plain(key, f"{where}: its key {key!r}"): as_plain(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
        # A scheduler's milestones are one, and it needs their methods.
        return Counter(items) if type(value) is Counter else items
    for container in (list, tuple, set):
        if isinstance(value, container) and not isinstance(value, torch.Size):
            return container(as_plain(item, f"{where}[{n}]") for n, item in enumerate(value))
    if type(value).__module__ == "numpy":
        return value.item() if getattr(value, "ndim", None) == 0 else torch.as_tensor(value)
    if isinstance(value, torch.Tensor):
        return value if type(value) in (torch.Tensor, torch.nn.Parameter) else value.as_subclass(torch.Tensor)
    if type(value) in _PLAIN and not (isinstance(value, int) and value.bit_length() > _LARGEST_INT_BITS):
        return value
    for base in _BASES:
        if isinstance(value, base) and type(value) is not base:
            return base(value)
    raise TypeError(
        f"{where} is of type {type(value).__name__}, which a safe load refuses: the file could be written, and never "
        "read. Keep only numbers, text, tensors, and lists and dicts of them in what is saved."
    )


def _verify_archive(path: Path) -> None:
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("it has compressed members, which torch does not write")
        if any(member.is_dir() or member.external_attr & _IS_FOLDER for member in members):
            # For such a member torch hands out memory that was never written.
            raise ValueError("a member is marked as a folder, which torch does not write")
        if len({member.filename for member in members}) < len(members):
            raise ValueError("two of its members have the same name")
        if math.fsum(member.file_size for member in members) > size:
            raise ValueError("its members claim to be larger than the file")
        broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"the checksum of its part {broken!r} is wrong")


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
