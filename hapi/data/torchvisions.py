"""torchvision's own MNIST and CIFAR data sets, read a batch at a time where that gives the very bits of their samples.

Imported with the first data set of torchvision's, not by `import hapi`. torchvision itself is never imported here: a
data set of its can only be met where it already is.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hapi.data import epochs
from hapi.data.sources import batch_of, viewed
from hapi.datasets.pipeline import Pipeline
from hapi.datasets.recognise import recognise

# Exact classes, by the modules that they stand in: a subclass may read its samples otherwise.
_CLASSES = {"mnist": ("MNIST", "FashionMNIST", "KMNIST"), "cifar": ("CIFAR10", "CIFAR100")}
_WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Contents(NamedTuple):
    """What a data set holds, without a copy of its images."""

    images: Tensor
    """(N, C, H, W) uint8, in whatever layout."""
    labels: Tensor
    """(N,) int64."""
    changes_unseen: bool
    """Whether some of it lies in an array or a list, of which torch does not know when it was written to."""


class TorchvisionSource:
    """A data set of torchvision's as a batch source.

    Whether it can be one is looked at anew before each epoch, since its transform, images and labels are anybody's to
    replace. Where it no longer can, `unbatched` is what is to be read instead.

    Args:
        dataset: Of a class of `_CLASSES`.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._length = len(dataset)
        self._contents: _Contents | None = None
        self._pipeline: Pipeline | None = None
        self._look()

    def __len__(self) -> int:
        return self._length

    @property
    def batched(self) -> bool:
        """Whether batches have the bits of samples that were read one by one."""
        self._look()
        return self._contents is not None

    @property
    def is_random(self) -> bool:
        """Whether anything may be drawn for a sample."""
        return self._contents is None

    @property
    def unbatched(self) -> Any:
        """The data set itself where it has to be read sample by sample; None where `fetch_batch` can be called."""
        return self._dataset if self._contents is None else None

    @property
    def columns(self) -> tuple[Tensor, Tensor] | None:
        """The raw images and the labels, whose rows `fetch_batch` gives."""
        return None if self._contents is None else (self._contents.images, self._contents.labels)

    @property
    def changes_unseen(self) -> bool:
        """Whether the columns may have been written to without a trace."""
        return self._contents is not None and self._contents.changes_unseen

    @property
    def targets(self) -> Tensor | None:
        """The labels, (N,) int64, as they are now."""
        self._look()
        return None if self._contents is None else self._contents.labels

    def fetch_batch(self, indices: Tensor | range) -> Any:
        """Raw images, (B, C, H, W) uint8, and labels, (B,) int64. Images may be the data set's own memory."""
        assert self._contents is not None, "unbatched is to be read"
        images, labels = self._contents[:2]
        if isinstance(indices, range) and _lies_in_rows(images):
            # The transform's first step copies.
            return images[indices.start : indices.stop], batch_of(labels, indices)
        return batch_of((images, labels), indices)

    def finish_batch(self, batch: Any) -> Any:
        """Transform a fetched batch on the device to which it was moved; samples that were collated are done."""
        if self._pipeline is None:
            return batch
        images, labels = batch
        return self._pipeline.transform(images), labels

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch: the data set is looked at anew, and told if it wants to be."""
        epochs.set_epoch(self._dataset, epoch)
        self._look()

    def _look(self) -> None:
        before, known = self._contents, self._pipeline
        contents = _contents_of(self._dataset)
        pipeline = None
        if contents is not None and len(contents.images) == self._length:
            pipeline = recognise(self._dataset.transform, contents.images.shape[1:], known)
        if contents is None or pipeline is None or any(step.random for step in pipeline.steps):
            self._contents = self._pipeline = None
            return
        are_the_same = before is not None and _are_one(before.images, contents.images)
        if before is not None and are_the_same:
            # The view that was there: a copy on a device is known by it.
            contents = contents._replace(images=before.images)
        self._contents, self._pipeline = contents, pipeline
        if not (are_the_same and pipeline is known) and not self._agrees():
            self._contents = self._pipeline = None

    def _agrees(self) -> bool:
        """Whether the first and the last sample, read by the data set itself, make the batch that is made here.

        They do with the torchvision that this was written for; one that reads otherwise is not imitated.
        """
        places = [0, self._length - 1]
        try:
            theirs = default_collate([self._dataset[place] for place in places])
        except Exception:
            # Any may be raised in there; it will be again where the sample is read for use.
            return False
        ours = self.finish_batch(self.fetch_batch(torch.tensor(places)))
        return len(theirs) == 2 and all(map(_are_equal, theirs, ours))


def source_of(dataset: Any) -> TorchvisionSource | None:
    """A data set of torchvision's as a batch source; None where it has to be read sample by sample."""
    # Its length is asked for only where it is known to be the data's.
    if _contents_of(dataset) is None:
        return None
    source = TorchvisionSource(dataset)
    return source if source.unbatched is None else None


def _contents_of(dataset: Any) -> _Contents | None:
    """What a data set holds; None where it may do with it something else than its class says."""
    kind = _kind_of(dataset)
    if kind is None:
        return None
    data, targets = getattr(dataset, "data", None), getattr(dataset, "targets", None)
    images = _gray(data) if kind == "mnist" else _colour(data)
    # The one calls int, the other gives them as they are.
    labels = _labels(targets, _WHOLE_NUMBERS if kind == "mnist" else (torch.int64,))
    if images is None or labels is None or not len(images) == len(labels) > 0:
        return None
    seen = [kind == "mnist", isinstance(targets, Tensor) and targets.dtype == torch.int64]
    return _Contents(images, labels, not all(seen))


def _kind_of(dataset: Any) -> str | None:
    for kind, names in _CLASSES.items():
        module = sys.modules.get(f"torchvision.datasets.{kind}")
        if module is not None and any(type(dataset) is vars(module).get(name) for name in names):
            return kind if _reads_as_written(dataset, vars(module)) else None
    return None


def _reads_as_written(dataset: Any, module: dict[str, Any]) -> bool:
    """Whether samples are read by the class's own methods, and only their images are transformed."""
    methods = ("__getitem__", "__len__")
    standard = getattr(sys.modules.get("torchvision.datasets.vision"), "StandardTransform", None)
    return (
        # A function that was put in their place may bear the same names, but stands in another text.
        all(getattr(getattr(type(dataset), name), "__globals__", None) is module for name in methods)
        and not any(name in vars(dataset) for name in methods)
        and not hasattr(dataset, "__getitems__")
        # Without a transform samples are PIL's images.
        and getattr(dataset, "transform", None) is not None
        and getattr(dataset, "target_transform", None) is None
        and type(getattr(dataset, "transforms", None)) in (type(None), standard)
    )


def _gray(data: Any) -> Tensor | None:
    """MNIST's images, (N, H, W) uint8, as (N, 1, H, W)."""
    if type(data) is not Tensor or data.layout is not torch.strided or data.device.type != "cpu":
        return None
    return data.unsqueeze(1) if data.dtype == torch.uint8 and data.dim() == 3 else None


def _colour(data: Any) -> Tensor | None:
    """CIFAR's images, an array of (N, H, W, 3) uint8, as (N, 3, H, W)."""
    if not _is_exact_array(data) or data.dtype != "uint8" or data.ndim != 4 or data.shape[3] != 3:
        return None
    # A reversed view would have to be copied.
    return viewed(data, None).permute(0, 3, 1, 2) if min(data.strides) >= 0 else None


def _labels(targets: Any, dtypes: tuple[torch.dtype, ...]) -> Tensor | None:
    try:
        if type(targets) is list:
            return torch.tensor(targets, dtype=torch.int64) if {*map(type, targets)} == {int} else None
        found = viewed(targets, None) if _is_exact_array(targets) else targets
    except (TypeError, ValueError, RuntimeError):
        # Numbers too large: whatever torch does not take.
        return None
    if type(found) is not Tensor or found.layout is not torch.strided or found.device.type != "cpu":
        return None
    return found.to(torch.int64) if found.dtype in dtypes and found.dim() == 1 else None


def _is_exact_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _lies_in_rows(images: Tensor) -> bool:
    """Whether rows lie one after the other as those of a collated batch do, dimensions of size 1 included."""
    return images.stride() == torch.empty(images.shape, device="meta").stride()


def _are_one(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def _are_equal(one: Any, other: Tensor) -> bool:
    return (
        type(one) is type(other)
        and (one.dtype, one.stride()) == (other.dtype, other.stride())
        and torch.equal(one, other)
    )
