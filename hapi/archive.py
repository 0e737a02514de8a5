"""torch's archives, checked before anything in them is believed: torch itself looks at no checksum.

What torch.save writes is a zip archive of uncompressed members. Only that much of the format is taken: one way to read
the file, so that Python, which verifies here, and torch, which loads afterwards, see the same bytes.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, BinaryIO

import torch

_CHUNK = 1 << 20
_END, _END_64 = 22, 76  # bytes; the second holds a record of 56 and its locator of 20
_IS_FOLDER = 0x10  # a bit of a member's attributes
_SPLIT_MEMBER = b"PK\x07\x08"
# The one call of a safe load that makes something large of nothing.
_ALLOCATION = re.compile(rb"c(builtins|__builtin__)\nbytearray\n")


def load(file: BinaryIO) -> Any:
    """What an archive holds, verified to the last byte, with every tensor on the CPU.

    Raises:
        ValueError: It is no such archive, or is damaged.
        Exception: The same, found by torch or by the zip reader.
    """
    size = verify(file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not _torch_compares_sizes():
        needed = sum(storage.nbytes() for storage in {s.data_ptr(): s for s in _storages(loaded)}.values())
        if needed != size:
            raise ValueError(f"its tensors take {needed} bytes, and it has {size} for them")
    return loaded


def verify(file: BinaryIO, contents: bool = True) -> int:
    """See that a file is an archive as torch writes them, to the last byte.

    Args:
        file: Open for reading.
        contents: Also read every tensor, for its checksum. Without it only the objects' structure is verified.

    Returns:
        The bytes that it has for tensors.

    Raises:
        ValueError: It is not, or is damaged.
        zipfile.BadZipFile: The same, found by the zip reader.
    """
    entries, directory = _end_of(file)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if not members or len(members) != entries:
            raise ValueError(f"its directory names {len(members)} parts, and should name {entries}")
        _verify_directory(members, directory)
        if contents:
            _verify_contents(archive, members)
        for member in members:
            if member.filename.endswith("/data.pkl") and _ALLOCATION.search(archive.read(member)):
                raise ValueError("it holds a bytearray, which could be of any size")
    return sum(member.file_size for member in members if re.search(r"/data/\d+$", member.filename))


def _end_of(file: BinaryIO) -> tuple[int, int]:
    """How many members there are, and where their directory starts. Nothing may stand before, between or behind."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_64 - _END))
    tail = file.read()
    end = tail[-_END:]
    if end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":
        raise ValueError(
            "it does not end as an archive of torch does: it was cut short or added to, or is of the old format that "
            "has no checksum"
        )
    entries, length, start = struct.unpack_from("<HLL", end, 10)
    directory_end = size - _END
    if tail[-_END - 20 :][:4] == b"PK\x06\x07":
        directory_end -= _END_64
        if tail[:4] != b"PK\x06\x06" or struct.unpack_from("<Q", tail, 56 + 8) != (directory_end,):
            raise ValueError("the place of its directory is damaged")
        entries, length, start = struct.unpack_from("<QQQ", tail, 32)
    if start + length != directory_end:
        raise ValueError("its directory is not where it should be")
    return entries, start


def _verify_directory(members: list[zipfile.ZipInfo], directory: int) -> None:
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it has compressed members, which torch does not write")
    if any(member.is_dir() or member.external_attr & _IS_FOLDER for member in members):
        # For such a member torch hands out memory that was never written.
        raise ValueError("a member is marked as a folder, which torch does not write")
    # torch finds members without regard to upper and lower case.
    if len({member.filename.lower() for member in members}) < len(members):
        raise ValueError("two of its members have the same name")
    sizes = math.fsum(member.file_size for member in members)
    if sizes > directory or any(member.file_size != member.compress_size for member in members):
        raise ValueError("its members claim to be larger than the file")
    starts = [member.header_offset for member in members] + [directory]
    for member, following in zip(members, starts[1:], strict=True):
        if member.header_offset + 30 + len(member.filename) + member.file_size > following or starts[0] != 0:
            raise ValueError("its members overlap, or are not in their order")


def _verify_contents(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo]) -> None:
    if len(members) > 1 and not any(member.CRC for member in members):
        raise ValueError("it was written without checksums (torch.serialization.set_crc32_options)")
    if not _is_in_order(archive, members) and _torch_numbers_archives():
        raise ValueError("its parts were exchanged or rewritten after torch had written it")


def _is_in_order(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo]) -> bool:
    """Read all of it. Each member may be right by its own checksum and yet stand in another's place.

    torch keeps a sum over all checksums, as the second half of an identity. Archives of before 2023 have none; those
    that say which format they are of came later, and do.
    """
    sums, expected = 0, None
    for member in members:
        with archive.open(member) as part:  # raises where the checksum is wrong
            first = part.read(_CHUNK)
            while part.read(_CHUNK):
                pass
        if member.filename.endswith("/.data/serialization_id"):
            expected = b"%020d" % sums == first[20:]
        if len(first) >= 8 and first.startswith(_SPLIT_MEMBER):
            # What torch takes for the checksum of a member, and adds.
            sums = _combined(sums, int.from_bytes(first[4:8], "little"))
        if member.file_size:
            sums = _combined(sums, member.CRC)
    if expected is None:
        return not any(member.filename.endswith("/.format_version") for member in members)
    keys = [key for key in (member.filename.partition("/data/")[2] for member in members) if key]
    return expected and keys in (sorted(keys), sorted(keys, key=lambda key: (len(key), key)))


@cache
def _torch_numbers_archives() -> bool:
    """Whether this torch computes that sum as we do: a later version's files must not be refused."""
    sample = io.BytesIO()
    torch.save([torch.zeros(1), torch.ones(1)], sample)
    with zipfile.ZipFile(sample) as archive:
        return _is_in_order(archive, archive.infolist())


@cache
def _torch_compares_sizes() -> bool:
    """Whether torch itself refuses a part that is not as long as its tensor; older ones take what comes first of it."""
    sample, longer = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(1), sample)
    with zipfile.ZipFile(sample) as archive, zipfile.ZipFile(longer, "w") as changed:
        for member in archive.infolist():
            rest = bytes(60) if member.filename.endswith("/data/0") else b""
            changed.writestr(member.filename, archive.read(member) + rest)
    longer.seek(0)
    try:
        torch.load(longer, weights_only=True)
    except RuntimeError:
        return True
    return False


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The memory behind all tensors of a nest, of each as often as it is shared."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.sparse_coo:
            yield from _storages([value._indices(), value._values()])
        elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from _storages([value.crow_indices(), value.col_indices(), value.values()])
        elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
            yield from _storages([value.ccol_indices(), value.row_indices(), value.values()])
        else:
            yield value.untyped_storage()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _storages(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _storages(item)


def _combined(sums: int, checksum: int) -> int:
    mixed: int = sums ^ ((checksum + 0x9E3779B9 + (sums << 6) + (sums >> 2)) & 0xFFFFFFFFFFFFFFFF)
    return mixed
