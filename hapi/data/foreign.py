"""Data of other libraries: what has to be known of it, found out without importing any of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate

# Of Hugging Face's features: what arrives as Python's lists unless a format is set.
_LISTS = ("List", "LargeList", "Sequence", "Array2D", "Array3D", "Array4D", "Array5D", "list")


def refuse(data: Any, name: str, world_size: int) -> None:
    """Raise for data that would be misread, or fail in words that are not about it.

    Args:
        data: As the user gave it.
        name: The argument's name.
        world_size: How many processes share it.

    Raises:
        TypeError: A frame, or several splits.
        ValueError: A data set without a format, or a pipeline that several processes would all refuse.
    """
    if isinstance(data, DataLoader):
        if data.collate_fn is default_collate:
            _refuse_unformatted(data.dataset, name)
        return
    parts = list(data.values()) if type(data) is dict else data if isinstance(data, tuple) else (data,)
    for part in parts:
        if _library(part) in ("pandas", "polars"):
            raise TypeError(
                f"{name} holds a {type(part).__name__} of {_library(part)}, whose columns have names and dtypes of "
                'their own and are no tensors. Write a dict of arrays, {"x": frame[numeric].to_numpy("float32"), '
                '"kind": frame["kind"].cat.codes.to_numpy("int64"), "label": frame["label"].to_numpy("int64")}, of '
                "which forward gets those that it names, or a tuple of them."
            )
    if isinstance(data, Mapping) and _library(data) == "datasets":
        raise TypeError(
            f"{name} is a {type(data).__name__}, which holds the splits {list(data)} and is none. Write "
            f"data[{next(iter(data), 'train')!r}]."
        )
    _refuse_unformatted(data, name)
    if world_size > 1 and any(getattr(stage, "__name__", "") == "single_node_only" for stage in _stages(data)):
        raise ValueError(
            f"{name} is a WebDataset that {world_size} processes would all read whole, which it refuses. Write "
            "webdataset.WebDataset(urls, nodesplitter=webdataset.split_by_node), with at least a shard for each worker "
            "of each process."
        )


def _refuse_unformatted(data: Any, name: str) -> None:
    if _library(data) != "datasets" or isinstance(data, Mapping):
        return
    form = getattr(data, "format", None) or {"type": getattr(getattr(data, "_formatting", None), "format_type", None)}
    lists = [key for key, kind in (getattr(data, "features", None) or {}).items() if type(kind).__name__ in _LISTS]
    if lists and form["type"] is None:
        raise ValueError(
            f"{name} is a {type(data).__name__} of Hugging Face's without a format, whose columns {lists} arrive as "
            'lists of Python\'s, of which torch makes no tensor. Write data.with_format("torch"), or give a DataLoader '
            "with a collate_fn that knows them."
        )


def cure_for(data: Any) -> str:
    """What more there is to write in place of what is no data at all; nothing where that cannot be told."""
    if isinstance(data, str | PathLike):
        return (
            "; of a path torchvision.datasets.ImageFolder(path) for images, datasets.load_from_disk(path) for a folder "
            "of Hugging Face's, arrays of pandas.read_csv(path) for a table"
        )
    if isinstance(data, Mapping) and any(isinstance(part, Dataset | DataLoader) for part in data.values()):
        return "; of a dict of several, each in its own place: fit(data['train'], eval_data=data['test'])"
    if isinstance(data, Mapping):
        return '; of a dict its columns as arrays or tensors: {"x": torch.tensor(x), "label": torch.tensor(labels)}'
    if callable(data):
        name = getattr(data, "__name__", "function")
        return (
            "; of a function that makes a generator an object that begins anew each time: class Batches: def "
            f"__iter__(self): return {name}()"
        )
    return ""


def is_batched_pipeline(data: Any) -> bool:
    """Whether it is webdataset's WebLoader, a pipeline over a DataLoader: what it gives are batches."""
    return _is_pipeline(data) and any(isinstance(stage, DataLoader) for stage in _stages(data))


def splits_among_ranks(data: Any) -> bool:
    """Whether it is a pipeline of webdataset that takes this rank's shards alone, or draws shards at random.

    It reads the rank from the environment, where nobody sees it.
    """
    return any(
        getattr(stage, "__name__", "") == "split_by_node" or type(stage).__name__ == "ResampledShards"
        for stage in _stages(data)
    )


def _stages(data: Any) -> Iterator[Any]:
    """The stages of a pipeline, of pipelines within and of loaders over them too."""
    if isinstance(data, DataLoader):
        yield data
        yield from _stages(data.dataset)
    elif _is_pipeline(data):
        for stage in data.pipeline:
            yield from _stages(stage)
    elif data is not None:
        yield data


def _is_pipeline(data: Any) -> bool:
    return isinstance(getattr(data, "pipeline", None), list) and any(
        kind.__name__ == "DataPipeline" and kind.__module__.startswith("webdataset.") for kind in type(data).__mro__
    )


def _library(data: Any) -> str:
    return type(data).__module__.partition(".")[0]


def holds_no_place(state: Any) -> bool:
    """Whether torchdata's StatefulDataLoader has found no state in its iterable data set, nor in an iterator over it.

    Then it counts batches, and those that it passes over as it loads a state twice: what is saved after that would
    leave some out. Reading them again without it is right.

    Args:
        state: Of its `state_dict`; that of another loader holds no such entries.
    """
    names, waiting, found = ("dataset_state", "dataset_iter_state"), [state], list[Any]()
    while waiting:
        entries = waiting.pop()
        if isinstance(entries, dict):
            found += [value for name, value in entries.items() if name in names]
            waiting += [value for name, value in entries.items() if name not in names]
    return bool(found) and all(value is None for value in found)
