"""Transforms for whole batches, with the arithmetic of torchvision's per-sample ones.

What is deterministic gives the same bits: the same operations in the same order. What is random is drawn per
sample, from the global torch CPU generator on every device, in one call per batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


class Step(ABC):
    """One transform of a batch of images, (B, C, H, W) -> (B, C, H', W')."""

    random = False

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Transform the images; the argument may be overwritten only if it is of a floating dtype."""


@dataclass(frozen=True)
class Scale(Step):
    """uint8 0..255 -> floating 0..1.

    Attributes:
        dtype: Of the result; None: torch's default dtype.
        divide: Divide by 255, as v1's `ToTensor`; otherwise multiply by 1/255, as v2's `ToDtype`. The two
            differ in the last bit.
    """

    dtype: torch.dtype | None = None
    divide: bool = True

    def __call__(self, images: Tensor) -> Tensor:
        """See `Step`."""
        scaled = images.to(self.dtype or torch.get_default_dtype())
        if not self.divide:
            return scaled.mul_(1.0 / 255)
        if scaled.is_cpu:
            return scaled.div_(255)
        # Devices turn a division by a number of the host into a multiplication by its reciprocal: other bits.
        return scaled.div_(_constant((255.0,), scaled.dtype, scaled.device))


@dataclass(frozen=True)
class Normalize(Step):
    """Subtract the mean and divide by the standard deviation, per channel, as two operations."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """See `Step`."""
        images = images.sub_(_constant(self.mean, images.dtype, images.device))
        return images.div_(_constant(self.std, images.dtype, images.device))


@dataclass(frozen=True)
class Window(Step):
    """Pad with zeros, cut a window at a random place, then mirror it left to right with some probability.

    Attributes:
        padding: Left, top, right, bottom.
        size: Height and width of the window.
        flip: Probability of mirroring.
    """

    padding: tuple[int, int, int, int]
    size: tuple[int, int]
    flip: float = 0.0

    random = True

    def __call__(self, images: Tensor) -> Tensor:
        """See `Step`."""
        return self.cut(images, *self.draw(images.shape))

    def draw(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        """Draw for a batch of this shape.

        Returns:
            Rows and columns of the windows' upper left corners in the padded images, (B,) int64; which
            windows are mirrored, (B,) bool.
        """
        count, _, height, width = shape
        left, top, right, bottom = self.padding
        rows = height + top + bottom - self.size[0] + 1
        columns = width + left + right - self.size[1] + 1
        place = torch.zeros(count, dtype=torch.int64)
        if rows * columns > 1:
            place.random_(rows * columns)
        mirrored = torch.rand(count) < self.flip if self.flip else torch.zeros(count, dtype=torch.bool)
        return place.div(columns, rounding_mode="floor"), place.remainder(columns), mirrored

    def cut(self, images: Tensor, rows: Tensor, columns: Tensor, mirrored: Tensor) -> Tensor:
        """Cut the windows that were drawn.

        All windows of all padded images, mirrored images behind the others, are one overlapping view of the
        padded bytes; the windows wanted are selected from it in one call. Of the ways tried this is the
        fastest in torch, and it runs on devices as it is: only (B,) numbers go there.
        """
        count, channels = images.shape[:2]
        height, width = self.size
        if count == 0:
            return images.new_empty(0, channels, height, width)
        canvas = self._canvas(images)
        row, plane = canvas.stride(2), canvas.stride(1)
        image = channels * plane
        last = canvas.numel() - ((channels - 1) * plane + (height - 1) * row + width)
        windows = canvas.as_strided((last + 1, channels, height, width), (1, plane, row, 1))
        start = torch.arange(count) * image + rows * row
        if self.flip:
            # The mirrored canvas has the window at the mirrored place.
            start += torch.where(mirrored, count * image + row - width - columns, columns)
        else:
            start += columns
        return windows.index_select(0, _to_device(start, images.device))

    def _canvas(self, images: Tensor) -> Tensor:
        """The padded images, and behind them the mirrored ones if any may be mirrored; contiguous."""
        left, top, right, bottom = self.padding
        if not self.flip:
            return F.pad(images, (left, right, top, bottom)) if any(self.padding) else images.contiguous()
        count, channels, height, width = images.shape
        canvas = images.new_zeros(2 * count, channels, height + top + bottom, width + left + right)
        canvas[:count, :, top : top + height, left : left + width] = images
        canvas[count:, :, top : top + height, right : right + width] = images.flip(-1)
        return canvas


class Pipeline:
    """Steps one after the other.

    Attributes:
        steps: The steps.
        transform: Transforms a batch, (B, C, H, W) uint8, on the device where it lies. The argument is not changed.
    """

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        # Called for each batch, of which a call of Python's more can be seen.
        self.transform: Callable[[Tensor], Tensor] = steps[0] if len(steps) == 1 else self._one_after_the_other

    def _one_after_the_other(self, images: Tensor) -> Tensor:
        for step in self.steps:
            images = step(images)
        return images


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kept, since each copy to a device would wait for it.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


def _to_device(indices: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return indices.pin_memory().to(device, non_blocking=True)
    return indices.to(device)
