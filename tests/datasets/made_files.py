"""Tiny files in the formats of the published data sets, made byte by byte."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path

import torch

PIXELS = 3072


def idx(values: torch.Tensor) -> bytes:
    header = struct.pack(f">{1 + values.dim()}I", 0x0800 | values.dim(), *values.shape)
    return header + bytes(values.flatten().tolist())


def idx_files(count: int = 12, seed: int = 0) -> dict[str, bytes]:
    """The four files of an MNIST of `count` training and `count // 2` test images."""
    generator = torch.Generator().manual_seed(seed)
    files = {}
    for prefix, size in (("train", count), ("t10k", count // 2)):
        images = torch.randint(0, 256, (size, 28, 28), dtype=torch.uint8, generator=generator)
        files[f"{prefix}-images-idx3-ubyte"] = idx(images)
        files[f"{prefix}-labels-idx1-ubyte"] = idx((torch.arange(size) % 10).to(torch.uint8))
    return files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def tar_gz(files: dict[str, bytes]) -> bytes:
    """A .tar.gz of files by their whole names, folders included."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def short(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def python2_array(raw: bytes, shape: tuple[int, int], code: str = "u1", module: str = "numpy.core") -> bytes:
    """The opcodes by which Python 2 wrote an array of bytes."""
    kind = b"cnumpy\ndtype\n" + short(code) + b"K\x00K\x01\x87R"
    kind += b"(K\x03" + short("|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    empty = f"c{module}.multiarray\n_reconstruct\ncnumpy\nndarray\n".encode()
    empty += b"K\x00\x85" + short("b") + b"\x87R"
    rows = number(shape[0]) + number(shape[1]) + b"\x86"
    return empty + b"(K\x01" + rows + kind + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"


def python2_dict(entries: dict[str, bytes]) -> bytes:
    """A pickled dict whose values are given as opcodes."""
    return b"\x80\x02}(" + b"".join(short(key) + value for key, value in entries.items()) + b"u."


def python2_list(items: list[int] | list[str]) -> bytes:
    codes = [short(item) if isinstance(item, str) else number(item) for item in items]
    return b"](" + b"".join(codes) + b"e"


def cifar_batch(rows: int, key: str = "labels", classes: int = 10, seed: int = 0) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows * PIXELS,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    labels = [index % classes for index in range(rows)]
    return python2_dict({"data": python2_array(raw, (rows, PIXELS)), key: python2_list(labels)})


def cifar_names(key: str = "label_names", classes: int = 10) -> bytes:
    return python2_dict({key: python2_list([f"class{index}" for index in range(classes)])})
