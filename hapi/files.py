"""Files that are whole or absent, and reads that never run code and never take a damaged value for a good one."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import re
import threading
import time
import uuid
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
# Nearly all that a checkpoint holds beside tensors: training waits while it is looked through.
_PLAIN_AT_ONCE = {type(None), bool, float, str}
_EXACT: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
}
_LARGEST_INT_BITS = 1000
_DEEPEST = 100
# The names of `draft`, and the endings that are asked for.
_DRAFT = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.part(\.onnx)?", re.DOTALL)
_LEFT_FOR_GOOD = 3600.0


def write(path: Path, content: Any) -> None:
    """Write an object that `read` takes: to a temporary file beside the target, then renamed into place.

    The file and the folder are flushed to the disk, so that not even a power cut leaves half of it.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the message names the path and the cause.
    """
    with draft(path, lambda temporary: save_object(content, temporary)) as new:
        rename(new, path)


# In older versions of torch the option of checksums is the whole process's; a thread may write beside another save.
_saving = threading.Lock()


def save_object(content: Any, path: Path) -> None:
    """torch.save, with checksums whatever the script has set: without them `read` would refuse the file."""
    with _saving:
        chosen = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(True)
        try:
            with opened(path) as file:
                torch.save(content, file)
        finally:
            torch.serialization.set_crc32_options(chosen)


class _Sink:
    """A file whose errors come out at its end.

    An error within torch's writer would be hidden behind another one of its own, and may end the process when the
    writer is collected.
    """

    def __init__(self, file: io.RawIOBase) -> None:
        self.file: Any = file
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        """Write, unless an earlier write has failed."""
        rest = memoryview(data).cast("B")
        while len(rest) and self.error is None:
            try:
                rest = rest[self.file.write(rest) :]
            except BaseException as error:
                self.error = error
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A new file that torch may write to.

    Raises:
        OSError: It could not be written.
    """
    # Unbuffered: a buffer would try again to write what did not fit when it is closed.
    with open(path, "wb", buffering=0) as file:
        sink = _Sink(file)
        yield sink
        if sink.error is not None:
            raise sink.error


@contextmanager
def draft(path: Path, write_to: Callable[[Path], None], suffix: str = "") -> Iterator[Path]:
    """A new file, written beside `path` and flushed to the disk, to be renamed into place. What is not, goes.

    Args:
        path: Where it is to go; missing folders are made.
        write_to: Writes it, to the path that it gets.
        suffix: What the temporary name must end with; `sweep` has to know it.

    Raises:
        OSError: It cannot be written; the message names the path and the cause.
    """
    # Another run may write here at this moment, on another host with the same process id.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part{suffix}")
    try:
        with _explained(path):
            _make_folder(path.parent)
            write_to(temporary)
            _flush(temporary)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename in one stroke, lastingly, over what is there.

    Raises:
        OSError: It cannot be; the message names the path and the cause.
    """
    with _explained(target):
        os.replace(source, target)
    try:
        _flush_folder(target.parent)
    except OSError as error:
        raise OSError(
            f"{target} is in its place, but the folder could not be flushed to the disk ({_first_line(error)}): a "
            "power cut may still bring back what was there before. Check the disk, or save to another place."
        ) from error


def sweep(folder: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote, an hour ago or longer.

    Another run may be writing here at this moment, even from another host.
    """
    for leftover in folder.glob(".*.part*"):
        # Of this very form: other programs and people have hidden files too.
        if _DRAFT.fullmatch(leftover.name) and is_left(leftover):
            with contextlib.suppress(OSError):
                leftover.unlink()


def is_left(path: Path) -> bool:
    """Whether a file is so old that no process is still about to rename it."""
    try:
        return time.time() - path.stat().st_mtime > _LEFT_FOR_GOOD
    except OSError:
        return False


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
        with open(path, "rb") as file, warnings.catch_warnings():
            # A warning (of how sparse tensors are read) is no reason to take the file for damaged under -W error.
            warnings.simplefilter("ignore")
            return _archive().load(file)
    except PermissionError as error:
        raise PermissionError(
            f"{path} may not be read by this user ({error.strerror}), so nothing was loaded from it. "
            "Change its permissions, or load another checkpoint."
        ) from error
    except Exception as error:  # Damage shows as a dozen types; each means the same to the user.
        raise ValueError(
            f"{path} is not a whole checkpoint ({type(error).__name__}: {_first_line(error)}), so nothing was loaded "
            "from it. Load another checkpoint; if the file comes from elsewhere, save it anew with "
            "torch.save(network.state_dict(), path)."
        ) from error


def peek(path: Path) -> Any:
    """The same without reading the tensors: they stay on the disk, unverified, until they are looked at.

    Raises:
        Exception: It cannot be read; damage shows as a dozen types.
    """
    with open(path, "rb") as file:
        _archive().verify(file, contents=False)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def why_not_writable(folder: Path) -> str | None:
    """What stands against writing into a folder, which need not be there yet; None if nothing. Nothing is touched."""
    try:
        place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not place.is_dir():
            return f"{place} is a file"
    except OSError as error:
        return str(error)
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} is read-only for this user"


def as_plain(value: Any, where: str, depth: int = 0) -> Any:
    """The value made of what a safe load takes.

    NumPy's numbers and arrays become numbers and tensors; subclasses of plain types (enumerations, named tuples) keep
    their value and lose their class. Keys of dicts likewise.

    Args:
        value: Any nest of dicts, lists, tuples and sets.
        where: The key under which it is saved, for the message.
        depth: How deep in the nest it is.

    Raises:
        TypeError: It holds something else, which would save now and be refused when loaded.
    """
    if type(value) in _PLAIN_AT_ONCE:
        return value
    if depth > _DEEPEST:
        raise TypeError(
            f"{where:.200}... lies more than {_DEEPEST} lists and dicts deep, or holds itself: it could not be "
            "written. Keep what is saved flat."
        )
    if isinstance(value, Mapping):
        items = {
            key if type(key) is str else as_plain(key, f"{where}: its key {key!r}", depth + 1): as_plain(
                item, f"{where}[{key!r}]", depth + 1
            )
            for key, item in value.items()
        }
        # A scheduler's milestones are one, and it needs their methods.
        return Counter(items) if type(value) is Counter else items
    for container in (list, tuple, set):
        if isinstance(value, container) and not isinstance(value, torch.Size):
            return container(as_plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value))
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, where)
    return _plain_value(value, where)


def state_dict_of(entries: Mapping[str, Any], metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Entries as torch's modules give and take them, with what they say of themselves beside."""
    state: Any = OrderedDict(entries)
    # An attribute that torch hangs on it, and no type knows of.
    state._metadata = OrderedDict(metadata)
    return cast("OrderedDict[str, Any]", state)


def with_own_tensors(value: Any, copies: dict[int, Any]) -> Any:
    """What `as_plain` gave with copies of its tensors, whose other parts nobody else holds.

    Args:
        value: The nest.
        copies: Of its tensors, as `copy.deepcopy` keeps them: tensors that share memory go on doing so.
    """
    if isinstance(value, torch.Tensor):
        return _own_tensor(value, copies)
    if isinstance(value, dict):
        items = {key: with_own_tensors(item, copies) for key, item in value.items()}
        return Counter(items) if type(value) is Counter else items
    if type(value) in (list, tuple, set):
        return type(value)(with_own_tensors(item, copies) for item in value)
    return value


def _own_tensor(value: torch.Tensor, copies: dict[int, Any]) -> torch.Tensor:
    if id(value) not in copies:
        # Of the memory alone: a gradient would be copied with it, and a parameter's own copy shares memory with no
        # other. What is copied must live as long as its id is looked up.
        own = copy.deepcopy(value.detach(), copies)
        is_parameter = type(value) is torch.nn.Parameter
        if is_parameter:
            own = torch.nn.Parameter(own, value.requires_grad)
        copies[id(value)] = own if is_parameter else own.requires_grad_(value.requires_grad)
    copied: torch.Tensor = copies[id(value)]
    return copied


def _plain_tensor(value: torch.Tensor, where: str) -> torch.Tensor:
    if is_lazy(value) or value.is_meta:
        raise TypeError(
            f"{where} has no values yet, so there is nothing to save. "
            "Let the network see a batch first (lazy layers), or put it on a device (meta tensors)."
        )
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return value.as_subclass(torch.Tensor).detach()
    # Attributes that someone has hung on it would be saved with it, and be refused. What it was computed from has no
    # place in a file, and lets nobody copy it.
    return value.detach() if vars(value) or not value.is_leaf else value


def _plain_value(value: Any, where: str) -> Any:
    plain = value
    if any(base.__module__ == "numpy" for base in type(value).__mro__):
        plain = _without_numpy(value)
    elif type(value) not in _PLAIN:
        # Not by calling the class: an enumeration's str() is its name.
        plain = next((exact(value) for base, exact in _EXACT.items() if isinstance(value, base)), value)
    too_large = isinstance(plain, int) and plain.bit_length() > _LARGEST_INT_BITS
    if type(plain) in (*_PLAIN, torch.Tensor) and not too_large:
        return plain
    raise TypeError(
        f"{where} is of type {type(value).__name__}, which a safe load refuses: the file could be written, and never "
        "read. Keep only numbers, text, tensors, and lists and dicts of them in what is saved."
    )


def _without_numpy(value: Any) -> Any:
    """A number for a number, a tensor for an array; the value itself if neither can be."""
    if not hasattr(value, "astype"):
        return value
    if value.ndim == 0:
        return value.item()
    try:
        return torch.tensor(value.astype(value.dtype.newbyteorder("="), order="C"))
    except TypeError:  # of objects, texts or dates
        return value


def _make_folder(folder: Path) -> None:
    missing = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        _flush_folder(made.absolute().parent)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch reports a full disk as a RuntimeError of its zip writer.
        if not isinstance(error, OSError) and "PytorchStreamWriter" not in str(error):
            raise
        raise OSError(
            f"{path} could not be written ({_first_line(error)}); what was there before is untouched. "
            "Check that the folder exists, may be written to and has space left, or save to another place."
        ) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems flush no folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    # torch underlines by escape codes, and goes on for a page.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return (plain.splitlines() or ["no message"])[0].partition(" In PyTorch 2.6")[0][:200]


def _archive() -> Any:
    # Only for a process that reads checkpoints.
    from hapi import archive

    return archive
