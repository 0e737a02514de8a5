"""CIFAR-10 and CIFAR-100: batch files of pickled arrays, and a file with the names of the classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from hapi import kinds
from hapi.datasets.batches import PIXELS, read_batch, read_names
from hapi.datasets.download import Archive
from hapi.datasets.files import Loaded, default_root, md5_of, read_each
from hapi.datasets.images import ImageDataset, check_mode, check_root, check_switch, check_transform
from hapi.datasets.store import Published, load


class _BatchFile:
    """A batch file: the part that it belongs to, how many images it holds, and the published md5."""

    def __init__(self, mode: str, rows: int, md5: str) -> None:
        self.mode = mode
        self.rows = rows
        self.md5 = md5


class _Cifar(ImageDataset):
    """What CIFAR-10 and CIFAR-100 share."""

    _name: ClassVar[str]
    _folder: ClassVar[str]
    _files: ClassVar[Mapping[str, _BatchFile]]
    _labels_key: ClassVar[str]
    _meta: ClassVar[str]
    _names_key: ClassVar[str]
    _class_count: ClassVar[int]

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
        base = default_root() if root is None else Path(root).expanduser()
        files = (*self._files, self._meta)
        published = Published(self._name, self._folder, files, self._read_file, self._archives)
        loaded = load(published, base, lambda folder: self._read_part(folder, mode), download)
        super().__init__(loaded, mode, base, transform)

    @classmethod
    def _read_part(cls, folder: Path, mode: str) -> Loaded:
        batches = {name: batch for name, batch in cls._files.items() if batch.mode == mode}
        pixels = bytearray(PIXELS * sum(batch.rows for batch in batches.values()))
        targets: list[int] = []
        names: list[str] = []

        def read(path: Path) -> None:
            # Into its place at once: the bytes of one file at a time are held twice.
            content = cls._read_file(path)
            if isinstance(content, tuple):
                start = PIXELS * len(targets)
                pixels[start : start + len(content[0])] = content[0]
                targets.extend(content[1])
            else:
                names.extend(content)

        read_each(folder, [*batches, cls._meta], read)
        unpublished = [name for name, batch in batches.items() if md5_of(folder / name) != batch.md5]
        data = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 3, 32, 32)
        return Loaded(data, torch.tensor(targets), names, unpublished)

    @classmethod
    def _read_file(cls, path: Path) -> tuple[bytes, list[int]] | list[str]:
        if path.name == cls._meta:
            return read_names(path, cls._names_key, cls._class_count)
        return read_batch(path, cls._files[path.name].rows, cls._labels_key, cls._class_count)

    @classmethod
    def _archives(cls) -> list[Archive]:
        import torchvision

        table = getattr(torchvision.datasets, cls._name)
        return [Archive(table.filename, (table.url,), table.tgz_md5, (*cls._files, cls._meta))]


class CIFAR10(_Cifar):
    """CIFAR-10: 50,000 and 10,000 images of 32 x 32 RGB pixels in 10 classes.

    Args:
        root: Folder of all data sets, laid out as torchvision does (`root/cifar-10-batches-py`). Default:
            `$HAPI_DATA_HOME`, else `hapi` in the user's cache folder.
        mode: `"train"` or `"test"`.
        transform: Called with a PIL image, or done per batch where that is the same (`ImageDataset.batched`).
            Default: (3, 32, 32) float32 in [0, 1].
        download: Whether files that are missing or broken may be fetched. One process per host does, the
            others wait.

    Raises:
        ValueError: `mode` names no part.
        TypeError: `root` or `transform` cannot be one.
        RuntimeError: Files are missing or broken, and could not be fetched; the message says where to put
        them.

    Local files whose checksum is not the published one are used, with a warning, if their structure is right.
    No code in them is run.
    """

    _name = "CIFAR10"
    _folder = "cifar-10-batches-py"
    _files: ClassVar[Mapping[str, _BatchFile]] = {
        "data_batch_1": _BatchFile("train", 10_000, "c99cafc152244af753f735de768cd75f"),
        "data_batch_2": _BatchFile("train", 10_000, "d4bba439e000b95fd0a9bffe97cbabec"),
        "data_batch_3": _BatchFile("train", 10_000, "54ebc095f3ab1f0389bbae665268c751"),
        "data_batch_4": _BatchFile("train", 10_000, "634d18415352ddfa80567beed471001a"),
        "data_batch_5": _BatchFile("train", 10_000, "482c414d41f54cd18b22e5b47cb7c3cb"),
        "test_batch": _BatchFile("test", 10_000, "40351d587109b95175f43aff81a1287e"),
    }
    _labels_key = "labels"
    _meta = "batches.meta"
    _names_key = "label_names"
    _class_count = 10


class CIFAR100(_Cifar):
    """CIFAR-100: 50,000 and 10,000 images of 32 x 32 RGB pixels in 100 classes (the fine labels).

    Args:
        root: As for `CIFAR10`; the files lie in `root/cifar-100-python`.
        mode: `"train"` or `"test"`.
        transform: As for `CIFAR10`.
        download: As for `CIFAR10`.

    Raises:
        ValueError: `mode` names no part.
        TypeError: `root` or `transform` cannot be one.
        RuntimeError: Files are missing or broken, and could not be fetched; the message says where to put
        them.
    """

    _name = "CIFAR100"
    _folder = "cifar-100-python"
    _files: ClassVar[Mapping[str, _BatchFile]] = {
        "train": _BatchFile("train", 50_000, "16019d7e3df5f24257cddd939b257f8d"),
        "test": _BatchFile("test", 10_000, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
    }
    _labels_key = "fine_labels"
    _meta = "meta"
    _names_key = "fine_label_names"
    _class_count = 100
