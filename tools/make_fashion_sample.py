"""Make the Fashion-MNIST sample that hapi ships, to the byte.

    python tools/make_fashion_sample.py ROOT [--out FOLDER]

ROOT holds FashionMNIST/raw with the published files; others are refused. FOLDER gets fashion-mnist-train.xz
(10,000 images) and fashion-mnist-test.xz (2,000): the first images of each class, equally many, in their
original order. Each file is two IDX contents, images and labels, one behind the other, packed with xz.
"""

from __future__ import annotations

import argparse
import lzma
import struct
import sys
import warnings
from pathlib import Path

import torch

from hapi.datasets import FashionMNIST

SIZES = {"train": 10_000, "test": 2_000}
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "datasets" / "samples"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Make the Fashion-MNIST sample that hapi ships.")
    parser.add_argument("root", help="folder that holds FashionMNIST/raw")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: datasets/samples")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for mode, size in SIZES.items():
        content = sample(options.root, mode, size)
        # The preset is part of the format: another one gives other bytes.
        packed = lzma.compress(content, preset=6)
        target = options.out / f"fashion-mnist-{mode}.xz"
        target.write_bytes(packed)
        print(f"{target}: {size} images, {len(packed)} bytes")


def sample(root: str, mode: str, size: int) -> bytes:
    """The first images of each class of one part, with their labels, as two IDX contents."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # hapi warns of files that are not the published ones.
        full = FashionMNIST(root, mode=mode, download=False)
    classes = len(full.classes)
    chosen = torch.cat([(full.targets == label).nonzero()[: size // classes, 0] for label in range(classes)])
    chosen = chosen.sort().values
    images, labels = full.data[chosen, 0], full.targets[chosen].to(torch.uint8)
    return idx(images) + idx(labels)


def idx(values: torch.Tensor) -> bytes:
    """The IDX content of a uint8 tensor."""
    header = struct.pack(f">{1 + values.dim()}I", 0x0800 | values.dim(), *values.shape)
    return header + bytes(values.flatten().tolist())


if __name__ == "__main__":
    main(sys.argv[1:])
