"""Ways in which a file of a checkpoint comes back from a disk, a network or an enemy other than it was written."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import subprocess
import warnings
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

Mutation = Callable[[random.Random, bytes], bytes]
Member = tuple[str, bytes]

MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def members(content: bytes) -> list[Member]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def directory(content: bytes) -> list[tuple[str, int, int]]:
    """Of each member: its name, the place of its entry in the directory, and its own place."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos, place, found = archive.infolist(), archive.start_dir, []
    for info in infos:
        found.append((info.filename, place, info.header_offset))
        place += 46 + sum(struct.unpack_from("<HHH", content, place + 28))
    return found


def packed(parts: Sequence[Member], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive whose checksums are right, whatever the parts are."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Names that stand twice are meant.
        for name, content in parts:
            archive.writestr(name, content)
    return buffer.getvalue()


def unsealed(draw: random.Random, parts: list[Member]) -> list[Member]:
    """At times without the sum over all parts, as old archives are, so that what lies behind that check is met too."""
    return [part for part in parts if "/." not in part[0]] if draw.random() < 0.5 else parts


def span(draw: random.Random, content: bytes, longest: int = 400) -> tuple[int, int]:
    start = draw.randrange(len(content))
    return start, min(len(content), start + draw.randint(1, longest))


# What a disk does.


@mutation
def cut_short(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.choice([0, 1, draw.randrange(len(content)), draw.randrange(len(content)), len(content) - 1])]


@mutation
def one_bit(draw: random.Random, content: bytes) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


@mutation
def several_bits(draw: random.Random, content: bytes) -> bytes:
    for _ in range(draw.randint(2, 9)):
        content = one_bit(draw, content)
    return content


@mutation
def bit_of_the_directory(draw: random.Random, content: bytes) -> bytes:
    start = directory(content)[0][1]
    return content[:start] + one_bit(draw, content[start:])


@mutation
def bit_of_the_pickle(draw: random.Random, content: bytes) -> bytes:
    return content[:64] + one_bit(draw, content[64:1264]) + content[1264:]


@mutation
def zeroed(draw: random.Random, content: bytes) -> bytes:
    start, stop = span(draw, content, 4096)
    return content[:start] + b"\0" * (stop - start) + content[stop:]


@mutation
def zeroed_to_the_end(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content))
    return content[:start] + b"\0" * (len(content) - start)


@mutation
def overwritten(draw: random.Random, content: bytes) -> bytes:
    start, stop = span(draw, content)
    return content[:start] + draw.randbytes(stop - start) + content[stop:]


@mutation
def blocks_exchanged(draw: random.Random, content: bytes) -> bytes:
    size = draw.choice([16, 64, 512])
    blocks = [content[place : place + size] for place in range(0, len(content), size)]
    one, other = draw.sample(range(len(blocks)), 2)
    blocks[one], blocks[other] = blocks[other], blocks[one]
    return b"".join(blocks)


@mutation
def bytes_lost(draw: random.Random, content: bytes) -> bytes:
    start, stop = span(draw, content)
    return content[:start] + content[stop:]


@mutation
def bytes_added(draw: random.Random, content: bytes) -> bytes:
    place = draw.choice([0, draw.randrange(len(content)), len(content)])
    return content[:place] + draw.randbytes(draw.choice([1, 22, 98, 70_000])) + content[place:]


@mutation
def written_twice(draw: random.Random, content: bytes) -> bytes:
    return draw.choice([content + content, content + content[-98:], content + content[-22:], content[:100] + content])


@mutation
def noise(draw: random.Random, content: bytes) -> bytes:
    start = draw.choice([b"", b"PK\x03\x04", b"\x80\x02", b"PK\x05\x06" + b"\0" * 18])
    return start + draw.randbytes(draw.randrange(2000))


OF_ANY_FORMAT = tuple(kind for kind in MUTATIONS if kind not in ("bit_of_the_directory", "bit_of_the_pickle"))

# What a tool does, with checksums that are right.


@mutation
def contents_exchanged(draw: random.Random, content: bytes) -> bytes:
    parts = members(content)
    one, other = draw.sample([n for n, (name, _) in enumerate(parts) if "/data/" in name], 2)
    parts[one], parts[other] = (parts[one][0], parts[other][1]), (parts[other][0], parts[one][1])
    return packed(parts)


@mutation
def names_exchanged(draw: random.Random, content: bytes) -> bytes:
    """Of two tensors, in the members themselves and in the directory; nothing else is touched."""
    data = bytearray(content)
    entries = [entry for entry in directory(content) if "/data/" in entry[0]]
    one, other = draw.sample([entry for entry in entries if len(entry[0]) == len(entries[0][0])], 2)
    for (_, entry, start), name in ((one, other[0]), (other, one[0])):
        for place in (entry + 46, start + 30):
            data[place : place + len(name)] = name.encode()
    return bytes(data)


@mutation
def content_changed(draw: random.Random, content: bytes) -> bytes:
    parts = members(content)
    place = draw.choice([n for n, (_, part) in enumerate(parts) if part])
    parts[place] = parts[place][0], draw.choice([one_bit, bytes_lost, zeroed, overwritten])(draw, parts[place][1])
    return packed(parts)


@mutation
def member_renamed(draw: random.Random, content: bytes) -> bytes:
    parts = members(content)
    place = draw.randrange(len(parts))
    name = parts[place][0]
    new = draw.choice([name.upper(), name + "0", name[:-1], "/" + name, "../../" + name, name + "/", "other/data/0"])
    parts[place] = new, parts[place][1]
    return packed(parts)


@mutation
def member_lost(draw: random.Random, content: bytes) -> bytes:
    parts = members(content)
    del parts[draw.randrange(len(parts))]
    return packed(parts)


@mutation
def member_twice(draw: random.Random, content: bytes) -> bytes:
    parts = members(content)
    name, part = draw.choice(parts)
    name = draw.choice([name, name.upper(), name.title()])
    parts.insert(draw.randint(0, len(parts)), (name, draw.choice([part, one_bit(draw, part), b""]) if part else b"x"))
    return packed(unsealed(draw, parts))


@mutation
def members_overlapping(draw: random.Random, content: bytes) -> bytes:
    """Two entries of the directory that point at one place."""
    data = bytearray(content)
    one, other = draw.sample([place for _, place, _ in directory(content)], 2)
    data[one + 42 : one + 46] = data[other + 42 : other + 46]
    if draw.random() < 0.5:
        data[one + 16 : one + 28] = data[other + 16 : other + 28]
    return bytes(data)


@mutation
def compressed(draw: random.Random, content: bytes) -> bytes:
    parts = [*members(content), ("archive/data/99", b"\0" * 1_000_000)]
    return packed(parts, draw.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))


@mutation
def size_field(draw: random.Random, content: bytes) -> bytes:
    """A size, offset or count of the directory, far too large or slightly wrong."""
    data = bytearray(content)
    fields = [place + field for _, place, _ in directory(content) for field in (20, 24, 42)]
    fields += [len(data) - 22 + field for field in (12, 16)] + [len(data) - 98 + field for field in (24, 32, 40, 48)]
    place = draw.choice(fields)
    (value,) = struct.unpack_from("<L", data, place)
    values = [0xFFFFFFFF, 0x7FFFFFFF, 0, value + 1, value - 1, value * 2, value ^ (1 << draw.randrange(32))]
    struct.pack_into("<L", data, place, draw.choice(values) & 0xFFFFFFFF)
    return bytes(data)


@mutation
def size_in_the_pickle(draw: random.Random, content: bytes) -> bytes:
    """With right checksums; the sum over all parts stays as it was."""
    return packed(_with_a_large_number(draw, members(content)))


def unsealed_size_in_the_pickle(draw: random.Random, content: bytes) -> bytes:
    """As an enemy writes it: nothing in the file tells that it was changed."""
    return packed([part for part in _with_a_large_number(draw, members(content)) if "/." not in part[0]])


def _with_a_large_number(draw: random.Random, parts: list[Member]) -> list[Member]:
    """The number of elements, a shape, a stride, or bytes made of nothing."""
    name, pickled = parts[0]
    numbers = [place for place in range(len(pickled) - 1) if pickled[place : place + 1] == b"K"]
    place = draw.choice(numbers)
    number = draw.choice([b"J\xff\xff\xff\x7f", b"\x8a\x06\0\0\0\0\0\x10", b"\x8a\x08" + b"\xff" * 8, b"K\xff"])
    allocated = b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R0"
    if draw.random() < 0.3:
        pickled = pickled[:2] + allocated + pickled[2:]
    else:
        pickled = pickled[:place] + number + pickled[place + 2 :]
    parts[0] = name, pickled
    return parts


# What an enemy does.


class Call:
    """Pickled, it calls a function when read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.what


def hostile(draw: random.Random, sentinel: str) -> bytes:
    """A pickle that makes the file `sentinel` where it is run."""
    calls = [
        Call(os.system, f"touch {sentinel}"),
        Call(exec, f"open({sentinel!r}, 'w')"),
        Call(open, sentinel, "w"),
        Call(subprocess.Popen, ["touch", sentinel]),
        Call(os.mkdir, sentinel),
    ]
    made = draw.choice(calls)
    content = draw.choice(
        [made, {"0.weight": made}, [made], {made: 1}, torch.nn.Parameter(torch.ones(1)), (made, made)]
    )
    if isinstance(content, torch.nn.Parameter):
        content.__dict__["attribute"] = made
    return pickle.dumps(content, protocol=draw.choice([0, 1, 2, 4, 5]))


def code_in_a_member(draw: random.Random, content: bytes, sentinel: str) -> bytes:
    parts = members(content)
    place = draw.randrange(len(parts)) if draw.random() < 0.6 else 0
    parts[place] = parts[place][0], hostile(draw, sentinel)
    if draw.random() < 0.2:
        parts.append(
            (draw.choice(["archive/constants.pkl", "archive/code/a.py", "archive/data.pkl2"]), parts[place][1])
        )
    return packed(unsealed(draw, parts))


def code_alone(draw: random.Random, content: bytes, sentinel: str) -> bytes:
    pickled = hostile(draw, sentinel)
    return draw.choice([pickled, pickled + content, content + pickled, packed([("data.pkl", pickled)])])


def code_in_the_old_format(draw: random.Random, content: bytes, sentinel: str) -> bytes:
    pickled = hostile(draw, sentinel)
    header = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    header.insert(draw.randint(0, 3), pickled)
    return b"".join(header)


HOSTILE = {made.__name__: made for made in (code_in_a_member, code_alone, code_in_the_old_format)}
