"""`ImageDataset`: images and labels in memory, indexed one by one or a batch at a time."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from hapi.datasets.files import Loaded
from hapi.datasets.pipeline import Pipeline
from hapi.datasets.recognise import as_pil, recognise


class ImageDataset(Dataset[tuple[Any, int]]):
    """Images and labels in memory.

    A sample is `(x, y)`: x the transformed image, y an int. Without a transform x is what `ToTensor` gives:
    (C, H, W) in [0, 1], of torch's default dtype (float32).

    Where the transform can be done for whole batches (see `batched`), it always is, also for single samples:
    what is random in it is drawn per sample from torch's global CPU generator, but not in torchvision's
    order. Any other transform is called once per sample with a PIL image.

    Attributes:
        data: (N, C, H, W) uint8.
        targets: (N,) int64.
        classes: Names of the labels.
        mode: `train` or `test`.
        root: The root that it was read from; None for the shipped sample.
    """

    def __init__(self, loaded: Loaded, mode: str, root: Path | None, transform: Callable[[Any], Any] | None) -> None:
        self.data = loaded.data
        self.targets = loaded.targets
        self.classes = loaded.classes
        self.mode = mode
        self.root = root
        self._pipeline: Pipeline | None = None
        self.transform = transform

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """What each image goes through; may be replaced at any time."""
        return self._transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        check_transform(type(self).__name__, transform)
        self._transform = transform
        self._recognise()

    @property
    def batched(self) -> bool:
        """Whether the whole transform can be done per batch.

        It can for None and for torchvision's ToTensor, Normalize, RandomCrop (padded with zeros),
        RandomHorizontalFlip, v2.ToImage, v2.ToDtype(torch.float32, scale=True) and Compose, of exactly these
        types.
        """
        return self._recognise() is not None

    @property
    def is_random(self) -> bool:
        """Whether the transform draws something for each sample, as far as is known."""
        return self._pipeline is None or any(step.random for step in self._pipeline.steps)

    @property
    def columns(self) -> tuple[Tensor, Tensor] | None:
        """The raw images and the labels, whose rows `fetch_batch` gives if `batched`; None otherwise."""
        return (self.data, self.targets) if self._pipeline is not None else None

    def fetch_batch(self, indices: Tensor | range) -> Any:
        """The batch of some indices, on the CPU.

        Args:
            indices: (B,) int64, none negative; or a range.

        Returns:
            The images and labels, (B, ...) and (B,) int64. Images are raw, (B, C, H, W) uint8, if `batched`;
            otherwise they are what the transform made of each, collated as a DataLoader does.

        Raises:
            IndexError: An index is out of range.
            TypeError: The transform gives what cannot be collated.
        """
        if self._pipeline is not None:
            if not isinstance(indices, range):
                return self.data.index_select(0, indices), self.targets.index_select(0, indices)
            rows = slice(indices.start, indices.stop)
            # The steps copy; what nobody copies must not be written to.
            images = self.data[rows] if self._pipeline.steps else self.data[rows].clone()
            return images, self.targets[rows].clone()
        samples = [self[index] for index in (indices if isinstance(indices, range) else indices.tolist())]
        try:
            return tuple(default_collate(samples))
        except TypeError as error:
            raise TypeError(
                f"The transform of {type(self).__name__} gives {type(samples[0][0]).__name__}, of which no "
                f"batch can be made ({error}). Let it end in a tensor: Compose([..., ToTensor()])."
            ) from error

    def finish_batch(self, batch: Any) -> Any:
        """Transform a fetched batch, on the device to which it was moved. The argument is not changed.

        Args:
            batch: What `fetch_batch` gave.

        Returns:
            The transformed images and the labels.
        """
        if self._pipeline is None:
            return batch
        images, targets = batch
        return self._pipeline.transform(images), targets

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch: a transform that was changed in place is looked at anew."""
        self._recognise()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """One sample.

        Args:
            index: From 0, or negative from the end.

        Returns:
            The transformed image and its label.

        Raises:
            IndexError: There is no such sample.
        """
        position = self._position(index)
        if self.batched:
            return self.__getitems__([position])[0]
        image = as_pil(self.data[position])
        return (self._transform(image) if self._transform else image), int(self.targets[position])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        """Several samples, transformed together where that can be; what a DataLoader calls for each batch."""
        if not self.batched:
            return [self[index] for index in indices]
        positions = torch.tensor([self._position(index) for index in indices], dtype=torch.int64)
        images, targets = self.finish_batch(self.fetch_batch(positions))
        return list(zip(images.unbind(0), targets.tolist(), strict=True))

    def __repr__(self) -> str:
        source = "the shipped sample" if self.root is None else f"root={str(self.root)!r}"
        return f"{type(self).__name__}(mode={self.mode!r}, {len(self)} samples, {source})"

    def _recognise(self) -> Pipeline | None:
        # Asked anew each time, since a Compose can be changed in place; 10 us.
        self._pipeline = recognise(self._transform, self.data.shape[1:], self._pipeline)
        return self._pipeline

    def _position(self, index: int) -> int:
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(
                f"{type(self).__name__} received index {position}, but it holds {len(self)} samples. "
                f"Use 0 to {len(self) - 1}, or -{len(self)} to -1 from the end."
            )
        return position % len(self)


def check_switch(name: str, **switches: Any) -> None:
    """Raise TypeError unless all of them are True or False."""
    for switch, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"{name} received {switch}={value!r:.60}, of type {type(value).__name__}, which is neither True nor "
                f"False. Write {switch}=True, or leave it out."
            )


def check_mode(name: str, mode: Any) -> None:
    """Raise ValueError unless the mode names a part."""
    if mode not in ("train", "test"):
        raise ValueError(
            f"{name} received mode={mode!r}, but there are two parts, 'train' and 'test'. "
            f'Write {name}(mode="train") or {name}(mode="test").'
        )


def check_root(name: str, root: Any) -> None:
    """Raise TypeError unless the root can be a folder's name."""
    if root is not None and (not isinstance(root, (str, os.PathLike)) or root == ""):
        raise TypeError(
            f"{name} received root={root!r}, a {type(root).__name__}, which cannot name a folder. "
            f'Write {name}("path/to/data"), or leave root out for $HAPI_DATA_HOME or the user\'s cache.'
        )


def check_transform(name: str, transform: Any) -> None:
    """Raise TypeError unless the transform can be called."""
    if transform is not None and not callable(transform):
        raise TypeError(
            f"{name} received transform={transform!r}, which cannot be called with an image. "
            "Pass a function or a torchvision transform; several go into transforms.Compose([...])."
        )
