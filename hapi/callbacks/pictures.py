"""Images with a few words each, drawn into one picture. Imported when a callback is to write some."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# The least height of an image as it is drawn, and that of a line of text, in pixels.
_HEIGHT, _LINE = 84, 14
# The least width: a word must have room.
_WIDTH = 112
_GAP = 6
_BLACK, _RED, _WHITE = (0, 0, 0), (190, 0, 0), (255, 255, 255)


class Captioned(NamedTuple):
    """An image and what is written below it."""

    image: Any
    """Numbers of the shape (C, H, W) or (H, W), or an image of PIL."""
    label: str
    predicted: str | None = None
    """Written in red, if given."""


class Labelled:
    """Images with their labels, read one at a time.

    Args:
        owner: The callback's name, for messages.
        data: A data set of pairs, or `(images, labels)` as tensors or arrays.
        classes: The classes' names; None: the data's own `classes` if it has any, else their numbers.

    Attributes:
        data: The data, columns as a tuple.

    Raises:
        TypeError: The data cannot be indexed; when they are drawn: a label is no number.
    """

    def __init__(self, owner: str, data: Any, classes: Sequence[str] | None) -> None:
        self._columns = tuple(data) if isinstance(data, tuple | list) else None
        if self._columns is None:
            unpaired = hasattr(data, "shape")
        else:
            unpaired = len(self._columns) != 2 or not hasattr(self._columns[0], "shape")
        if unpaired or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
            raise TypeError(
                f"{owner} received images of type {type(data).__name__}, of which no single image with its label can "
                "be taken. Pass a data set whose items are (image, label), or (images, labels) as two tensors."
            )
        # As `predict` takes it, to which a list is one of batches.
        self._owner, self.data = owner, data if self._columns is None else self._columns
        inner: Any = data
        while classes is None and inner is not None:
            classes, inner = getattr(inner, "classes", None), getattr(inner, "dataset", None)
        self._classes = classes

    def __len__(self) -> int:
        return len(self.data if self._columns is None else self._columns[0])

    def samples(self, count: int) -> list[Captioned]:
        """The first of them."""
        return [self._captioned(index) for index in range(min(count, len(self)))]

    def wrong(self, outputs: Any, count: int) -> list[Captioned]:
        """The first whose label is not what the network says.

        Args:
            outputs: The network's, a row of scores for each image.
            count: At most so many.

        Raises:
            ValueError: The outputs are no scores of classes.
        """
        if not isinstance(outputs, Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
            shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ValueError(
                f"{self._owner} was to show wrong predictions, but the network's outputs ({shape}) are no row of "
                "scores for each image. Leave images= out, or write the pictures in a callback of your own."
            )
        found: list[Captioned] = []
        for index, predicted in enumerate(outputs.argmax(1).tolist()):
            if len(found) == count:
                break
            if self._label(index) != predicted:
                found.append(self._captioned(index, predicted))
        return found

    def _pair(self, index: int) -> tuple[Any, Any]:
        if self._columns is not None:
            return self._columns[0][index], self._columns[1][index]
        image, label = self.data[index]
        return image, label

    def _label(self, index: int) -> int:
        return self._number(self._columns[1][index] if self._columns is not None else self._pair(index)[1])

    def _number(self, label: Any) -> int:
        try:
            return int(label)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = f" and shape {tuple(label.shape)}" if hasattr(label, "shape") else ""
            raise TypeError(
                f"{self._owner} received images with a label of type {type(label).__name__}{shape}, which is not the "
                "number of a class. Write images=(x, y.argmax(1)) if labels are one-hot, or leave images= out."
            ) from error

    def _captioned(self, index: int, predicted: int | None = None) -> Captioned:
        image, label = self._pair(index)
        return Captioned(image, self._name(self._number(label)), None if predicted is None else self._name(predicted))

    def _name(self, label: int) -> str:
        named = self._classes is not None and 0 <= label < len(self._classes)
        return str(self._classes[label]) if named and self._classes is not None else str(label)


def draw(captioned: Sequence[Captioned], columns: int = 4) -> Tensor:
    """One picture of all of them.

    Args:
        captioned: The images.
        columns: Images in a row.

    Returns:
        (3, height, width), uint8.
    """
    images = [_image(each.image) for each in captioned]
    width = max(_WIDTH, *(image.width for image in images)) + _GAP
    below = _LINE * (2 if any(each.predicted is not None for each in captioned) else 1)
    height = max(image.height for image in images) + below + _GAP
    columns = min(columns, len(images))
    sheet = Image.new("RGB", (width * columns, height * -(-len(images) // columns)), _WHITE)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for place, (image, each) in enumerate(zip(images, captioned, strict=True)):
        left, top = place % columns * width, place // columns * height
        sheet.paste(image, (left + (width - image.width) // 2, top))
        lines = [(each.label, _BLACK)] if each.predicted is None else [(f"is {each.label}", _BLACK)]
        if each.predicted is not None:
            lines.append((f"seen as {each.predicted}", _RED))
        for line, (text, color) in enumerate(lines):
            middle, under = left + width // 2, top + height - below - _GAP + line * _LINE
            pen.text((middle, under), text, fill=color, font=font, anchor="ma")
    pixels = torch.frombuffer(bytearray(sheet.tobytes()), dtype=torch.uint8)
    return pixels.reshape(sheet.height, sheet.width, 3).permute(2, 0, 1)


def _image(image: Any) -> Any:
    """As PIL's, in whole multiples of its size where it is small."""
    if not isinstance(image, Image.Image):
        image = Image.frombytes("RGB", *_bytes(torch.as_tensor(image).detach().cpu()))
    times = max(1, -(-_HEIGHT // image.height))
    return image.convert("RGB").resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


def _bytes(pixels: Tensor) -> tuple[tuple[int, int], bytes]:
    """Width and height, and the colors of each pixel."""
    if pixels.dim() == 2:
        pixels = pixels[None]
    if pixels.dim() != 3 or not pixels.numel():
        raise ValueError(
            f"An image has the shape {tuple(pixels.shape)}, which cannot be drawn: an image is (C, H, W) or (H, W), "
            "none of them 0. Pass images of such a shape, or leave images= out."
        )
    if pixels.shape[0] not in (1, 3) and pixels.shape[2] in (1, 3):
        pixels = pixels.permute(2, 0, 1)
    pixels = pixels[:3] if pixels.shape[0] >= 3 else pixels[:1].expand(3, -1, -1)
    if pixels.dtype != torch.uint8:
        pixels = pixels.float().nan_to_num()
        low, high = pixels.min(), pixels.max()
        if low < 0 or high > 1:  # normalized for the network: stretched for the eye
            pixels = (pixels - low) / (high - low).clamp(min=1e-12)
        pixels = (pixels * 255).round().to(torch.uint8)
    height, width = pixels.shape[1:]
    return (width, height), pixels.permute(1, 2, 0).contiguous().numpy().tobytes()
