"""MNIST and Fashion-MNIST: four IDX files each. A sample of Fashion-MNIST is shipped with the package."""

from __future__ import annotations

import io
import lzma
import os
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from hapi import kinds
from hapi.datasets.download import Archive
from hapi.datasets.files import Broken, Loaded, Unusable, default_root, read_each
from hapi.datasets.idx import Idx, read_idx, read_idx_stream
from hapi.datasets.images import ImageDataset, check_mode, check_root, check_switch, check_transform
from hapi.datasets.store import Published, load

_PREFIX = {"train": "train", "test": "t10k"}
_IMAGE = (28, 28)


class _IdxImages(ImageDataset):
    """What MNIST and Fashion-MNIST share."""

    _name: ClassVar[str]
    _classes: ClassVar[tuple[str, ...]]
    # Of the unpacked files; torchvision's table has those of the packed ones.
    _md5: ClassVar[Mapping[str, str]]

    @classmethod
    def _read(cls, root: str | os.PathLike[str] | None, mode: str, download: bool) -> tuple[Loaded, Path]:
        base = default_root() if root is None else Path(root).expanduser()
        published = Published(cls._name, f"{cls._name}/raw", tuple(cls._md5), _read_file, cls._archives)
        return load(published, base, lambda folder: cls._read_part(folder, mode), download), base

    @classmethod
    def _read_part(cls, folder: Path, mode: str) -> Loaded:
        names = [f"{_PREFIX[mode]}-images-idx3-ubyte", f"{_PREFIX[mode]}-labels-idx1-ubyte"]
        contents = read_each(folder, names, _read_file)
        images, labels = (contents[name] for name in names)
        if len(images.values) != len(labels.values):
            reason = f"holds {len(images.values)} images, but there are {len(labels.values)} labels"
            raise Unusable({names[0]: reason, names[1]: "goes with it"})
        unpublished = [name for name in names if contents[name].md5 != cls._md5[name]]
        return cls._loaded(images, labels, unpublished)

    @classmethod
    def _loaded(cls, images: Idx, labels: Idx, unpublished: list[str]) -> Loaded:
        data, targets = images.values.unsqueeze(1), labels.values.to(torch.int64)
        return Loaded(data, targets, list(cls._classes), unpublished)

    @classmethod
    def _archives(cls) -> list[Archive]:
        import torchvision

        table = getattr(torchvision.datasets, cls._name)
        return [
            Archive(name, tuple(mirror + name for mirror in table.mirrors), md5, (name.removesuffix(".gz"),))
            for name, md5 in table.resources
        ]


def _read_file(path: Path) -> Idx:
    if "images" in path.name:
        return read_idx(path, _IMAGE)
    labels = read_idx(path, ())
    if int(labels.values.max()) > 9:
        raise Broken(f"holds the label {int(labels.values.max())}, outside 0..9")
    return labels


class MNIST(_IdxImages):
    """MNIST, handwritten digits: 60,000 and 10,000 images of 28 x 28 gray pixels in 10 classes.

    Args:
        root: Folder of all data sets, laid out as torchvision does (`root/MNIST/raw`). Default:
            `$HAPI_DATA_HOME`, else `hapi` in the user's cache folder.
        mode: `"train"` or `"test"`.
        transform: Called with a PIL image, or done per batch where that is the same (`ImageDataset.batched`).
            Default: (1, 28, 28) float32 in [0, 1].
        download: Whether files that are missing or broken may be fetched. One process per host does, the
            others wait.

    Raises:
        ValueError: `mode` names no part.
        TypeError: `root` or `transform` cannot be one.
        RuntimeError: Files are missing or broken, and could not be fetched; the message says where to put
        them.

    Local files whose checksum is not the published one are used, with a warning, if their structure is right.
    """

    _name = "MNIST"
    _classes = (
        "0 - zero", "1 - one", "2 - two", "3 - three", "4 - four",
        "5 - five", "6 - six", "7 - seven", "8 - eight", "9 - nine",
    )  # fmt: skip
    _md5: ClassVar[Mapping[str, str]] = {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    }

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        mode: str = "train",
        transform: Callable[[Any], Any] | None = None,
        download: bool = True,
        **unknown: NoReturn,
    ) -> None:
        kinds.refuse_unknown(type(self), unknown)
        check_mode(self._name, mode)
        check_root(self._name, root)
        check_transform(self._name, transform)
        check_switch(self._name, download=download)
        loaded, base = self._read(root, mode, download)
        super().__init__(loaded, mode, base, transform)


class FashionMNIST(_IdxImages):
    """Fashion-MNIST, photographs of clothes: 60,000 and 10,000 images of 28 x 28 gray pixels in 10 classes.

    Args:
        root: As for `MNIST`; the files lie in `root/FashionMNIST/raw`.
        mode: `"train"` or `"test"`.
        transform: As for `MNIST`.
        download: As for `MNIST`.
        sample: Use the sample that is shipped with the package: 10,000 and 2,000 of the images, the first
            ones of each class in their original order. It needs neither files nor network, so `root` and
            `download` play no part.

    Raises:
        ValueError: `mode` names no part, or both `root` and `sample` were given.
        TypeError: `root` or `transform` cannot be one.
        RuntimeError: Files are missing or broken, and could not be fetched; the message says where to put
        them.
    """

    _name = "FashionMNIST"
    _classes = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
        "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip
    _md5: ClassVar[Mapping[str, str]] = {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    }

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        mode: str = "train",
        transform: Callable[[Any], Any] | None = None,
        download: bool = True,
        *,
        sample: bool = False,
        **unknown: NoReturn,
    ) -> None:
        kinds.refuse_unknown(type(self), unknown)
        check_mode(self._name, mode)
        check_root(self._name, root)
        check_transform(self._name, transform)
        check_switch(self._name, download=download, sample=sample)
        if sample and root is not None:
            raise ValueError(
                f"FashionMNIST received root={str(root)!r} and sample=True, but the sample lies in the "
                "package, in no root. Leave out one of the two."
            )
        if sample:
            super().__init__(self._read_sample(mode), mode, None, transform)
            return
        loaded, base = self._read(root, mode, download)
        super().__init__(loaded, mode, base, transform)

    @classmethod
    def _read_sample(cls, mode: str) -> Loaded:
        """The sample: images and labels as two IDX contents, one behind the other, packed with xz."""
        packed = resources.files("hapi.datasets") / "samples" / f"fashion-mnist-{mode}.xz"
        content = lzma.decompress(packed.read_bytes())
        stream = io.BytesIO(content)
        images = read_idx_stream(stream, _IMAGE, len(content))
        labels = read_idx_stream(stream, (), len(content))
        return cls._loaded(images, labels, [])
