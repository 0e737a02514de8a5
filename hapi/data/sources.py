"""Data that can be indexed a whole batch at a time: tensors, arrays, and the data sets of `hapi.datasets`.

Those of torchvision's that can are in `torchvisions.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch.utils.data import Subset, TensorDataset

from hapi.batch import is_array, leaves, lies_as_in_torch, map_tensors, tensor_of


class BatchSource(Protocol):
    """A data set that gives a batch in one call."""

    def __len__(self) -> int: ...

    def fetch_batch(self, indices: torch.Tensor | range) -> Any:
        """The batch of these (B,) int64 indices, on the CPU."""

    def finish_batch(self, batch: Any) -> Any:
        """What is left to do once the batch lies on the device, such as converting and normalizing images."""


def rows_of(column: torch.Tensor, indices: torch.Tensor | range) -> torch.Tensor:
    """Rows of a tensor, copied: what the network does to them in place must not reach the user's data.

    They lie row by row, in whatever layout the column is and however they are asked for: it decides about last bits.
    """
    if isinstance(indices, range) and column.layout is torch.strided:
        return column[indices.start : indices.stop].clone(memory_format=torch.contiguous_format)
    if isinstance(indices, range):
        indices = torch.arange(indices.start, indices.stop, device=column.device)
    return column.index_select(0, indices)


def batch_of(columns: Any, indices: torch.Tensor | range) -> Any:
    """Rows of each column, copied: a batch of the columns' own form."""
    # The usual cases first: this runs once a step.
    if isinstance(columns, torch.Tensor):
        return rows_of(columns, indices)
    if isinstance(columns, tuple):
        return tuple([rows_of(column, indices) for column in columns])
    return map_tensors(lambda column: rows_of(column, indices), columns)


class Columns:
    """Tensors of equal length, side by side, as one data set: `x`, `(x, y)`, or a dict of them.

    Args:
        columns: Tensors or arrays.
        floats: What float64 arrays become; see `hapi.batch.tensor_of`.
    """

    def __init__(self, columns: Any, floats: torch.dtype | None = None) -> None:
        self._columns = (
            {name: _as_stored(column, floats) for name, column in columns.items()}
            if isinstance(columns, Mapping)
            else tuple(_as_stored(column, floats) for column in columns)
            if isinstance(columns, tuple)
            else _as_stored(columns, floats)
        )
        lengths = [len(column) for column in leaves(self._columns)]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"Columns of different lengths arrived: {lengths}. A sample is one row of each, so they must agree. "
                "Pass (x, y) with len(x) == len(y); a list, [batch, batch, ...], is taken as batches."
            )
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    @property
    def last_column(self) -> torch.Tensor | None:
        """The last of several columns: the labels, unless Model was told otherwise."""
        several = isinstance(self._columns, tuple) and len(self._columns) > 1
        return self._columns[-1] if several else None

    is_random = False

    @property
    def columns(self) -> Any:
        """What `fetch_batch` takes rows of."""
        return self._columns

    def fetch_batch(self, indices: torch.Tensor | range) -> Any:
        """The rows, copied."""
        return batch_of(self._columns, indices)

    def finish_batch(self, batch: Any) -> Any:
        """Nothing is left to do."""
        return batch


class SubsetSource:
    """A `torch.utils.data.Subset` of a batch source.

    Args:
        dataset: What it is a subset of.
        subset: Whose indices are read, and again by `read_indices`, since they may be replaced.
    """

    def __init__(self, dataset: BatchSource, subset: Subset[Any]) -> None:
        self.dataset = dataset
        self._subset = subset
        self.read_indices()

    def read_indices(self) -> None:
        """Called before each epoch."""
        if isinstance(self.dataset, SubsetSource):
            self.dataset.read_indices()
        chosen = places_of(self._subset.indices)
        self._is_odd = chosen is None
        if chosen is not None:
            # Counted from the end, as a data set of one's own may take them.
            self.indices = torch.where(chosen < 0, chosen + len(self.dataset), chosen)

    def over(self, rows: BatchSource) -> SubsetSource:
        """The same subset of other rows, as it is now."""
        within = self.dataset.over(rows) if isinstance(self.dataset, SubsetSource) else rows
        return SubsetSource(within, Subset(cast(Any, within), cast(Any, self.indices)))

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def is_random(self) -> bool:
        """Whether batches are drawn by chance."""
        return getattr(self.dataset, "is_random", True)

    @property
    def unbatched(self) -> Any:
        """What is to be read sample by sample where the underlying source can no longer be read in batches; or None."""
        return self._subset if self._is_odd or getattr(self.dataset, "unbatched", None) is not None else None

    def fetch_batch(self, indices: torch.Tensor | range) -> Any:
        """The rows of the underlying source."""
        return self.dataset.fetch_batch(rows_of(self.indices, indices))

    def finish_batch(self, batch: Any) -> Any:
        """As the underlying source does."""
        return self.dataset.finish_batch(batch)


def as_batch_source(data: Any, floats: torch.dtype | None = None) -> BatchSource | None:
    """The data as a batch source, or None where it has to be read sample by sample.

    Args:
        data: Columns or a data set.
        floats: What float64 arrays become.
    """
    if is_columns(data):
        return Columns(data, floats)
    if type(data) is TensorDataset:
        return Columns(data.tensors)
    if type(data) is Subset:
        source = as_batch_source(data.dataset)
        return SubsetSource(source, data) if source is not None and places_of(data.indices) is not None else None
    if type(data).__module__.startswith("torchvision.datasets."):
        # Only for who has such data.
        from hapi.data.torchvisions import source_of

        return source_of(data)
    if getattr(data, "batched", False) and hasattr(data, "fetch_batch"):
        return cast(BatchSource, data)
    return None


def places_of(indices: Any) -> torch.Tensor | None:
    """A Subset's indices; None where they are no whole numbers, which only the data set itself may know to take."""
    try:
        places = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError):
        return None
    is_whole = not (places.is_floating_point() or places.is_complex() or places.dtype == torch.bool)
    return places.to(torch.int64) if places.dim() == 1 and (is_whole or not len(places)) else None


def whole_of(source: Any) -> Any:
    """What a source is a subset of, however often; itself where it is none."""
    while isinstance(source, SubsetSource):
        source = source.dataset
    return source


def over(source: Any, rows: BatchSource) -> BatchSource:
    """The source, of other rows than those of what it is a subset of."""
    return source.over(rows) if isinstance(source, SubsetSource) else rows


def columns_of(source: Any) -> Any:
    """The tensors whose rows a source's batches are before `finish_batch`; None where that is not known."""
    return getattr(whole_of(source), "columns", None)


def labels_of(source: Any) -> torch.Tensor | None:
    """The last column of a source where it holds class numbers, (n,) int64; else None."""
    if isinstance(source, SubsetSource):
        labels = labels_of(source.dataset)
        return labels[source.indices] if labels is not None else None
    labels = source.last_column if isinstance(source, Columns) else getattr(source, "targets", None)
    if isinstance(labels, torch.Tensor) and labels.dtype == torch.int64 and labels.dim() == 1:
        return labels
    return None


def is_columns(data: Any) -> bool:
    """Whether the data is a tensor or array, or a tuple or dict of them."""
    if isinstance(data, torch.Tensor) or is_array(data):
        return True
    parts = list(data.values()) if isinstance(data, Mapping) else data if isinstance(data, tuple) else []
    return bool(parts) and all(isinstance(item, torch.Tensor) or is_array(item) for item in parts)


def viewed(array: Any, floats: torch.dtype | None) -> torch.Tensor:
    """As `tensor_of`, but of a read-only array without a copy: a memory map may be larger than the memory.

    Nobody may write to the tensor.
    """
    if array.flags.writeable or not array.ndim or not lies_as_in_torch(array):
        return tensor_of(array, floats)
    with warnings.catch_warnings():
        # torch's, that it must not be written to.
        warnings.simplefilter("ignore")
        shared = torch.as_tensor(array)
    return shared.to(tensor_of(array[:0], floats).dtype)


def _as_stored(column: Any, floats: torch.dtype | None) -> torch.Tensor:
    if is_array(column):
        _refuse_objects(column)
        # Who wants doubles passes a tensor.
        tensor = viewed(column, floats)
    else:
        tensor = column
    if tensor.dim() == 0:
        raise ValueError(
            f"A tensor without dimensions arrived as data ({column!r}), which has no rows to train on. "
            "Pass tensors whose first dimension counts the samples."
        )
    return tensor.detach().cpu()


def _refuse_objects(column: Any) -> None:
    if column.dtype.kind in "OUSVMm":
        raise TypeError(
            f"An array of dtype {column.dtype} and shape {column.shape} arrived as data, which is no array of numbers, "
            'so no tensor can be made of it. Write x.astype("float32"), or turn categories into class numbers: '
            "classes, y = numpy.unique(y, return_inverse=True)."
        )
