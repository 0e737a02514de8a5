"""Data in memory that is kept on the device, where it is small: a batch is then indexed there, and nothing is copied.

Imported where the network computes on a card, not by `import hapi`.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hapi.batch import leaves, map_tensors
from hapi.data.sources import BatchSource, batch_of, columns_of, over, whole_of

SWITCH = "HAPI_KEEP_DATA"
# Bytes, and the part of the device's free memory, that data may take there at most.
_MOST = 1 << 30
_PART = 8


class Resident:
    """The rows of a source on a device, from its second pass on; copied anew if they were changed since the last one.

    In its first pass batches are copied one by one: most data is read only once by evaluate or predict.

    Args:
        source: The source, whose `columns` are its rows as they are.
        device: Where to.
    """

    def __init__(self, source: BatchSource, device: torch.device) -> None:
        self._source, self._device = source, device
        self._copied: BatchSource | None = None
        self._marks: list[tuple[int, int]] = []
        self._was_read = False

    def source(self) -> BatchSource:
        """What to fetch batches from in the pass that starts."""
        columns = columns_of(self._source) if self._was_read else None
        self._was_read = True
        if columns is None:
            # Also where a transform that was exchanged since asks for each sample.
            self._copied = None
            return self._source
        # Of a tensor that came under inference mode, or lies in an array, nobody knows whether it was changed.
        unseen = _changes_unseen(self._source)
        marks = [(id(t), -1 if unseen or t.is_inference() else t._version) for t in leaves(columns)]
        if self._copied is None or marks != self._marks or any(version < 0 for _, version in marks):
            self._copied = None
            self._copied, self._marks = _OnDevice(whole_of(self._source), columns, self._device), marks
        return over(self._source, self._copied)


class _OnDevice:
    """A source whose rows lie on a device."""

    def __init__(self, source: BatchSource, columns: Any, device: torch.device) -> None:
        self._source, self._device = source, device
        self._columns = map_tensors(lambda column: column.to(device), columns)

    def __len__(self) -> int:
        return len(self._source)

    def fetch_batch(self, indices: torch.Tensor | range) -> Any:
        """The rows, copied, on the device."""
        if isinstance(indices, torch.Tensor):
            if self._device.type == "cuda":
                indices = indices.pin_memory()
            indices = indices.to(self._device, non_blocking=True)
        return batch_of(self._columns, indices)

    def finish_batch(self, batch: Any) -> Any:
        """As the source does."""
        return self._source.finish_batch(batch)


def kept_bytes(source: BatchSource, device: torch.device) -> int | None:
    """How many bytes of a source are to be kept on a device; None: it stays where it is.

    Raises:
        ValueError: HAPI_KEEP_DATA says neither yes nor no.
    """
    wanted = os.environ.get(SWITCH, "1")
    if wanted not in ("0", "1"):
        raise ValueError(
            f"{SWITCH}={wanted!r} is set, which says neither that small data is to be kept on the device nor that it "
            f"is not. Write {SWITCH}=0 to leave it in the host's memory, or unset it."
        )
    columns = columns_of(source)
    # What may be written to without a trace would have to be copied as a whole for each pass.
    if wanted == "0" or columns is None or _changes_unseen(source):
        return None
    size = sum(column.numel() * column.element_size() for column in leaves(columns))
    return size if size <= min(_MOST, _free(device) // _PART) else None


def _changes_unseen(source: BatchSource) -> bool:
    return getattr(whole_of(source), "changes_unseen", False)


def _free(device: torch.device) -> int:
    """Bytes that are free on a card; 0 for any other device."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
