"""Batches of data in memory, indexed into memory from which a card copies them by itself, while it computes.

Imported where the network computes on a card, not by `import hapi`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hapi.batch import map_tensors
from hapi.data.sources import BatchSource, columns_of, rows_of


class Pinned:
    """A source whose batches lie in pinned memory, which torch uses again once the card has copied them.

    Args:
        source: The source. Batches may be fetched where its `columns` are its rows as they are.
    """

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def fetch_batch(self, indices: torch.Tensor | range) -> Any:
        """The rows, copied once."""
        return map_tensors(partial(_pinned_rows, indices), columns_of(self._source))

    def finish_batch(self, batch: Any) -> Any:
        """As the source does."""
        return self._source.finish_batch(batch)


def _pinned_rows(indices: torch.Tensor | range, column: torch.Tensor) -> torch.Tensor:
    if column.layout is not torch.strided or column.is_quantized:
        return rows_of(column, indices).pin_memory()
    rows = _room((len(indices), *column.shape[1:]), column.dtype)
    if isinstance(indices, range):
        return rows.copy_(column[indices.start : indices.stop])
    return torch.index_select(column, 0, indices, out=rows)


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)
