"""IDX files, the format of MNIST: a magic number, the dimensions, then the bytes; all numbers big-endian."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hapi.datasets.files import Broken

_UINT8 = 0x08
_DEFLATE_MOST = 1032
"""Bytes that one byte of a .gz file can unpack to, at most."""


class Idx(NamedTuple):
    """The content of an IDX file."""

    values: Tensor
    """uint8, of the shape that the file names."""
    md5: str
    """Of the whole unpacked file."""


def read_idx(path: Path, item: tuple[int, ...]) -> Idx:
    """Read an IDX file of bytes; where only `path`.gz is usable, that.

    Args:
        path: The unpacked file.
        item: Shape of one entry: `(28, 28)` for images, `()` for labels.

    Returns:
        The values, of shape (n, *item) with n >= 1, and the md5.

    Raises:
        FileNotFoundError: Neither file is there.
        Broken: The file is cut short, too long, or of another kind or shape.
    """
    packed = path.with_name(path.name + ".gz")
    try:
        with path.open("rb") as stream:
            return _read_whole(stream, item, path.stat().st_size)
    except (Broken, FileNotFoundError):
        if not packed.exists():
            raise
    try:
        with gzip.open(packed, "rb") as unpacked:
            return _read_whole(unpacked, item, packed.stat().st_size * _DEFLATE_MOST)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Broken(f"lies there packed as {packed.name}, which cannot be unpacked ({error})") from error


def read_idx_stream(stream: BufferedIOBase, item: tuple[int, ...], most: int) -> Idx:
    """Read one IDX content from a stream that may go on behind it.

    Args:
        stream: Positioned at the magic number.
        item: Shape of one entry.
        most: Bytes that the stream can hold. A header that announces more is refused before memory is taken.

    Raises:
        Broken: See `read_idx`.
    """
    header, shape = _read_header(stream, item)
    count = math.prod(shape)
    if len(header) + count > most:
        raise Broken(f"is cut short: at most {most} bytes where its header announces {len(header) + count}")
    body = bytearray(count)
    got = stream.readinto(body)
    if got != count:
        raise Broken(f"is cut short: {got} values where its header announces {count}")
    digest = hashlib.md5(header, usedforsecurity=False)
    digest.update(body)
    return Idx(torch.frombuffer(body, dtype=torch.uint8).view(shape), digest.hexdigest())


def _read_whole(stream: BufferedIOBase, item: tuple[int, ...], most: int) -> Idx:
    content = read_idx_stream(stream, item, most)
    if stream.read(1):
        raise Broken(f"goes on behind the {content.values.numel()} values that its header announces")
    return content


def _read_header(stream: BufferedIOBase, item: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
    dims = 1 + len(item)
    header = stream.read(4 + 4 * dims)
    if len(header) < 4 + 4 * dims:
        raise Broken(f"is cut short: its {len(header)} bytes are not even a header")
    magic, *shape = struct.unpack(f">{1 + dims}I", header)
    expected = _UINT8 << 8 | dims
    if magic != expected:
        raise Broken(f"begins with {magic:#010x} instead of {expected:#010x}, so it is no such IDX file")
    if tuple(shape[1:]) != item or shape[0] == 0:
        wanted = ", ".join(["samples", *map(str, item)])
        raise Broken(f"holds values of shape {tuple(shape)} instead of ({wanted})")
    return header, tuple(shape)
