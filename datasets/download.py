"""Getting published archives: whole or absent, with a time-out, by one process per host.

torchvision's tables say what is published where; its download functions are not used, since a silent mirror
holds them for ever, and a process that is killed leaves a cut file which they take for a good one.
"""

from __future__ import annotations

import gzip
import os
import shutil
import socket
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from hapi.datasets.files import Broken, md5_of

TIMEOUT = 30.0
"""Seconds without any data after which the next mirror is tried."""

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Archive:
    """A file that can be downloaded: a .gz that holds one file, or a .tar.gz that holds several."""

    name: str
    urls: tuple[str, ...]
    """The same file on each mirror, in the order in which they are tried."""
    md5: str
    members: tuple[str, ...]
    """Names of the files in it that are wanted, without folders."""


class DownloadFailed(Exception):
    """No mirror gave a good archive; the message says why, mirror by mirror."""


def fetch(archive: Archive, stage: Path, check: Callable[[Path], object]) -> None:
    """Download and unpack an archive.

    Args:
        archive: What to get.
        stage: An empty folder of this process's own; the members end up there.
        check: Reads one unpacked member; raises `Broken` if its structure is wrong.

    Raises:
        DownloadFailed: No mirror gave it.
    """
    reasons = []
    for url in archive.urls:
        try:
            packed = stage / archive.name
            _download(url, packed, archive.md5)
            _unpack(packed, archive.members, stage)
            for member in archive.members:
                check(stage / member)
            packed.unlink()
            return
        except urllib.error.HTTPError as error:
            error.close()
            reasons.append(f"{url}: {error}")
        except Exception as error:  # Whatever a mirror did wrong, the next one may do right.
            reasons.append(f"{url}: {error or type(error).__name__}")
    raise DownloadFailed("; ".join(reasons))


def place(source: Path, target: Path) -> None:
    """Move a checked file to its final name, in one step, once its bytes are on the disk."""
    with source.open("rb") as stream:
        os.fsync(stream.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)


@contextmanager
def host_lock(path: Path) -> Iterator[bool]:
    """Hold a lock that one process per host can hold; the kernel frees it when its holder dies.

    Args:
        path: The lock file. It stays: removing it would let two processes lock two files of the same name.

    Yields:
        Whether there is a lock. Windows and some network file systems have none: there several processes may
        download the same file, each in a folder of its own, and the last one's copy stays.
    """
    with path.open("a") as handle:
        yield _locked(handle.fileno())


def _locked(descriptor: int) -> bool:
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


@contextmanager
def staging(root: Path, name: str, locked: bool) -> Iterator[Path]:
    """A folder in the root (so that files can be renamed out of it) that is removed afterwards.

    Args:
        root: The data sets' root.
        name: Which data set.
        locked: Whether this process holds the host's lock. If so, what killed processes of this host left is
            removed first.
    """
    prefix = f".{name}.{socket.gethostname()}.partial-"
    if locked:
        for entry in root.iterdir():
            if entry.name.startswith(prefix):
                shutil.rmtree(entry, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _download(url: str, target: Path, md5: str) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "hapi"})
    with (
        urllib.request.urlopen(request, timeout=TIMEOUT) as response,
        target.open("wb") as out,
        # disable=None: shown on a terminal only.
        tqdm(total=response.length, desc=target.name, unit="B", unit_scale=True, disable=None) as bar,
    ):
        while chunk := response.read(_CHUNK):
            out.write(chunk)
            bar.update(len(chunk))
    found = md5_of(target)
    if found != md5:
        raise Broken(f"sent {target.stat().st_size} bytes with md5 {found} instead of {md5}")


def _unpack(packed: Path, members: tuple[str, ...], stage: Path) -> None:
    if not packed.name.endswith((".tar.gz", ".tgz")):
        with gzip.open(packed, "rb") as source, (stage / members[0]).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        return
    with tarfile.open(packed, "r:gz") as tar:
        for entry in tar:
            # Only the bare name is used: no entry can be written outside the stage.
            name = PurePosixPath(entry.name).name
            content = tar.extractfile(entry) if name in members and entry.isfile() else None
            if content is not None:
                with content, (stage / name).open("wb") as target:
                    shutil.copyfileobj(content, target, 1 << 20)
