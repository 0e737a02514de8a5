"""What a batch looks like: any nesting of tensors. Walk it, count its samples, move it, split it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

Inputs = tuple[Any, ...] | dict[str, Any]

# NumPy's kinds of dtype that tensors have too: bool, int, unsigned, float, complex. Text stays as it is.
_NUMERIC = "biufc"


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any, floats: torch.dtype | None = None) -> Any:
    """Apply a function to every tensor of a nest, keeping the types of its containers.

    Mappings, tuples, named tuples, lists and dataclasses are entered; NumPy arrays count as tensors; what is none of
    these (text, numbers, None) stays as it is.

    Args:
        fn: The function.
        value: The nest.
        floats: What float64 arrays become; see `tensor_of`.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if _is_packed(value):
        # The sizes of its time steps stay as they are: torch keeps them on the CPU wherever the data is.
        data, sizes, *order = value
        return value.__class__(fn(data), sizes, *(None if part is None else fn(part) for part in order))
    if isinstance(value, Mapping):
        return rebuilt_mapping(value, {key: map_tensors(fn, item, floats) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value.__class__(*(map_tensors(fn, item, floats) for item in value))
    if isinstance(value, tuple | list):
        return value.__class__(map_tensors(fn, item, floats) for item in value)
    if is_record(value):
        return rebuilt_record(value, lambda name: map_tensors(fn, getattr(value, name), floats))
    if is_array(value) and value.dtype.kind in _NUMERIC:
        return fn(tensor_of(value, floats))
    return value


def is_record(value: Any) -> bool:
    """Whether it is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def rebuilt_record(record: Any, field: Callable[[str], Any]) -> Any:
    """A copy of a dataclass's object with each field as a function of its name gives it."""
    rebuilt = copy.copy(record)
    for each in dataclasses.fields(record):
        # The object's own setter refuses on a frozen dataclass; the copy is ours.
        object.__setattr__(rebuilt, each.name, field(each.name))
    return rebuilt


def tensor_of(array: Any, floats: torch.dtype | None = None) -> torch.Tensor:
    """A NumPy array as a tensor: a copy where torch cannot share its memory, or it is not to be written to.

    Args:
        array: The array.
        floats: What float64 becomes, which NumPy makes unasked and few layers take; None: torch's default dtype.
    """
    shares = array.flags.writeable and lies_as_in_torch(array)
    tensor = torch.as_tensor(array if shares else array.astype(array.dtype.newbyteorder("="), order="C"))
    return tensor.to(floats or torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def lies_as_in_torch(array: Any) -> bool:
    """Whether a tensor can share an array's memory: not if it is reversed, packed or in another order of bytes."""
    fits = array.dtype.isnative and array.flags.aligned
    return bool(fits) and all(stride >= 0 and stride % (array.itemsize or 1) == 0 for stride in array.strides)


def floats_for(network: nn.Module) -> torch.dtype:
    """What float64 becomes that nobody asked for (NumPy's, Python's): torch's default, or float64 if that it takes."""
    held = next((p.dtype for p in network.parameters() if p.is_floating_point()), None)
    return torch.float64 if held == torch.float64 else torch.get_default_dtype()


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nest, in order."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, value)
    return iter(found)


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array, found out without importing NumPy."""
    return type(value).__module__ == "numpy" and hasattr(value, "__array__") and hasattr(value, "shape")


def is_counted(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """Which labels are not the one to ignore."""
    return labels != ignored if _holds(labels.dtype, ignored) else torch.ones_like(labels, dtype=torch.bool)


@lru_cache
def _holds(dtype: torch.dtype, number: int) -> bool:
    """Whether a tensor can hold the number. One that it cannot hold would be compared as another number."""
    return dtype.is_floating_point or dtype == torch.bool or torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def size_of(batch: Any) -> int:
    """How many samples a batch holds: the first size of its first tensor that has one; none where it is None.

    Raises:
        TypeError: The batch holds no tensor with a batch dimension.
    """
    # The common case first: this runs once per step.
    first = batch[0] if _is_several(batch) and batch else batch
    if isinstance(first, torch.Tensor) and first.dim() > 0:
        return first.shape[0]
    if (size := 0 if batch is None else _first_size(batch)) is None:
        raise TypeError(
            f"A batch of type {type(batch).__name__} holds no tensor with a batch dimension, so its samples cannot be "
            "counted. Pass tensors, as torch.tensor(x) makes them of lists of numbers, or give the DataLoader a "
            "collate_fn that makes them."
        )
    return size


def move(batch: Any, device: torch.device, floats: torch.dtype | None = None) -> Any:
    """The batch on a device, NumPy arrays as tensors.

    On the CPU nothing is copied; to an accelerator, pinned memory is copied asynchronously.

    Args:
        batch: Any nest.
        device: Where to.
        floats: As for `tensor_of`.
    """
    if device.type == "cpu":
        return map_tensors(lambda tensor: tensor, batch, floats) if _holds_arrays(batch) else batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()), batch, floats)


def split_positional(batch: Sequence[Any], inputs: int | None, labels: int | None) -> tuple[Inputs, Any]:
    """Split a tuple batch into its inputs and its labels.

    Args:
        batch: The elements.
        inputs: How many leading elements are inputs, or None.
        labels: How many trailing elements are labels, or None.

    Returns:
        The inputs as a tuple; the labels: None, the only one itself, or a tuple.
    """
    count = len(batch)
    if inputs is None:
        inputs = count - labels if labels is not None else max(1, count - 1)
    stop = count if labels is None else inputs + labels
    if inputs < 1 or inputs > count or stop > count:
        raise ValueError(
            f"A batch of {count} elements arrived, but Model(inputs={inputs}, labels={labels}) asks for more than that "
            "(or leaves no input). Give Model the numbers that fit the data, such as inputs=1, labels=1."
        )
    return tuple(batch[:inputs]), _labels_of(batch[inputs:stop])


class Splitter:
    """Splits a batch into the network's inputs and the labels, as `Model(network, inputs, labels)` says."""

    def __init__(
        self, network: nn.Module, inputs: int | Sequence[str] | None, labels: int | Sequence[str] | None
    ) -> None:
        self.is_default = inputs is None and labels is None
        self._inputs = _checked_spec("inputs", inputs)
        self._labels = _checked_spec("labels", labels)
        parameters = inspect.signature(network.forward).parameters.values()
        self._takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def __call__(self, batch: Any, needs_labels: bool = True) -> tuple[Inputs, Any]:
        """The inputs (a tuple, or a dict for dict batches) and the labels (None, one, or a tuple).

        Args:
            batch: A batch as the data gives it.
            needs_labels: False: to predict, where data may well have none.
        """
        # The usual cases first: this runs once a step.
        if isinstance(batch, torch.Tensor):
            return (batch,), None
        if self.is_default and type(batch) in (tuple, list) and len(batch) == 2 and isinstance(batch[1], torch.Tensor):
            return (batch[0],), batch[1]
        if (fields := _named_fields(batch)) is not None:
            return self._split_named(fields, needs_labels)
        if not _is_several(batch):
            return (batch,), None
        if isinstance(self._inputs, tuple) or isinstance(self._labels, tuple):
            raise TypeError(
                f"A batch of type {type(batch).__name__} arrived, but Model was given names "
                f"(inputs={self._inputs}, labels={self._labels}), which belong to dict batches. "
                "Write numbers instead, such as Model(network, inputs=1, labels=1)."
            )
        inputs, labels = self._inputs, self._labels
        if not needs_labels and labels is not None:
            # As many inputs as with labels, and of labels what is there.
            inputs = inputs if inputs is not None else max(1, len(batch) - labels)
            labels = min(labels, max(0, len(batch) - inputs))
        return split_positional(batch, inputs, labels)

    def as_inputs(self, value: Any) -> Inputs:
        """What a user passes as `inputs` of train_batch: one tensor, a tuple or list of several, or a dict."""
        if isinstance(value, Mapping):
            return dict(value)
        return tuple(value) if _is_several(value) else (value,)

    def as_labels(self, value: Any) -> Any:
        """What a user passes as `labels` of train_batch: None, one, or a tuple or list of several."""
        value = _as_column(value)
        return _labels_of(value) if _is_several(value) else value

    def _split_named(self, batch: Mapping[str, Any], needs_labels: bool) -> tuple[Inputs, Any]:
        keys = list(batch)
        labels = self._labels
        if isinstance(self._inputs, int) or isinstance(labels, int):
            raise TypeError(
                f"A batch with the keys {keys} arrived, but Model was given numbers (inputs={self._inputs}, "
                f"labels={labels}), which belong to tuple batches. Write names instead: "
                f"Model(network, inputs=[{keys[0]!r}], labels=[{keys[-1]!r}])."
            )
        if isinstance(self._inputs, tuple):
            inputs = list(self._inputs)
        elif self._takes_any_name:
            inputs = [key for key in keys if not isinstance(labels, tuple) or key not in labels]
        else:
            inputs = [key for key in keys if key in self._names]
        chosen = list(labels) if isinstance(labels, tuple) else [key for key in keys if key not in inputs]
        if not needs_labels:
            chosen = [key for key in chosen if key in batch]
        missing = [key for key in [*inputs, *chosen] if key not in batch]
        if missing or not inputs:
            raise ValueError(
                f"A batch with the keys {keys} arrived; network.forward takes {self._names}"
                + (f", and the keys {missing} are not in the batch. " if missing else ", none of which is a key. ")
                + f"Name the keys: {self._suggested(batch)}."
            )
        taken_by_name = self._takes_any_name or all(key in self._names for key in inputs)
        values: Inputs = {key: batch[key] for key in inputs} if taken_by_name else tuple(batch[key] for key in inputs)
        return values, _labels_of([batch[key] for key in chosen])

    def _suggested(self, batch: Mapping[str, Any]) -> str:
        """What to write for the keys of a batch: those that `forward` names, and one that is no text as the label."""
        keys = list(batch)
        inputs = [key for key in keys if key in self._names] or keys[:1]
        others = [key for key in keys if key not in inputs]
        labels = [key for key in others if isinstance(batch[key], torch.Tensor) or is_array(batch[key])] or others
        return f"Model(network, inputs={inputs!r}, labels={labels[-1:]!r})"


def call_network(network: nn.Module, inputs: Inputs) -> Any:
    """network(*inputs), or network(**inputs) for a dict.

    Raises:
        TypeError: The network takes another number of inputs, or other names.
        ValueError: An input's dtype is not that of the network's parameters, or a layer takes another width.
    """
    try:
        return network(**inputs) if isinstance(inputs, dict) else network(*inputs)
    except (TypeError, RuntimeError) as error:
        from hapi import refused

        dtypes = [tensor.dtype for tensor in leaves(inputs)]
        cause = refused.inputs(network, inputs, dtypes, str(error)) or refused.width(network, error)
        if cause is not None:
            raise cause from error
        raise


def as_arguments(value: Any) -> tuple[Any, ...]:
    """Outputs or labels as positional arguments of a loss: several are spread, one is passed as it is."""
    if value is None:
        return ()
    return tuple(value) if _is_several(value) else (value,)


def _named_fields(batch: Any) -> Mapping[str, Any] | None:
    if isinstance(batch, Mapping):
        return batch
    if is_record(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _checked_spec(name: str, spec: Any) -> int | tuple[str, ...] | None:
    if spec is None or (isinstance(spec, int) and not isinstance(spec, bool) and spec >= (name == "inputs")):
        return spec
    if isinstance(spec, tuple | list) and spec and all(isinstance(key, str) for key in spec):
        return tuple(spec)
    raise TypeError(
        f"Model received {name}={spec!r}, which says neither how many elements of a tuple batch nor which keys of a "
        f'dict batch are {name}. Write a number ({name}=1) or a list of keys ({name}=["x"]).'
    )


def _labels_of(parts: Sequence[Any]) -> Any:
    """None, the only one, or all of them; an only one may itself be a list of one, as [1.0] is by default_collate."""
    values: Any = tuple(parts)
    while _is_several(values) and len(values) == 1:
        values = _as_column(values[0])
    if not _is_several(values):
        return values
    columns = list(map(_as_column, values))
    return values.__class__(*columns) if hasattr(values, "_fields") else tuple(columns) or None


def rebuilt_mapping(original: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the original's type with these values; a plain dict where that type cannot be written to."""
    if type(original) is dict:
        return items
    try:
        if isinstance(original, dict) or hasattr(type(original), "__copy__"):
            rebuilt = copy.copy(original)
        else:
            # A shallow copy of a wrapper would share the dict within, and the user's own batch would change.
            rebuilt = copy.deepcopy(original, {id(value): value for value in original.values()})
        for key, item in items.items():
            rebuilt[key] = item
        return rebuilt
    except (TypeError, AttributeError):
        # A read-only mapping: a plain dict has the same keys.
        return items


def _is_packed(value: Any) -> bool:
    return isinstance(value, nn.utils.rnn.PackedSequence)


def _is_several(value: Any) -> bool:
    # A packed sequence is a tuple to Python, but one value to a network; so is a column of text to a loss.
    return isinstance(value, tuple | list) and not _is_packed(value) and not is_text(value)


def is_text(value: Any) -> bool:
    """Whether it is a text for each sample, as `Splitter` gives labels that are text: a list of str or bytes."""
    return isinstance(value, list) and _holds_text(value)


def _holds_text(values: Sequence[Any]) -> bool:
    # The first alone tells nearly always, and this runs in steps.
    return bool(values) and isinstance(values[0], str | bytes) and all([isinstance(v, str | bytes) for v in values])


def _as_column(part: Any) -> Any:
    """A part of a batch; as a list where it is a column of text: a tuple, as default_collate leaves it, or an array."""
    if is_array(part) and part.dtype.kind in "US" and part.ndim == 1:
        return part.tolist()
    return list(part) if type(part) is tuple and _holds_text(part) else part


def _first_size(value: Any) -> int | None:
    """Samples as the first part of a nest tells them that has a batch dimension."""
    if _is_packed(value):
        return int(value.batch_sizes[0])
    if isinstance(value, torch.Tensor) or is_array(value):
        return int(value.shape[0]) if value.ndim else None
    named = _named_fields(value)
    parts = named.values() if named is not None else value if isinstance(value, tuple | list) else ()
    return next((size for part in parts if (size := _first_size(part)) is not None), None)


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, tuple | list):
        return any([not isinstance(item, torch.Tensor) and _holds_arrays(item) for item in value])
    if isinstance(value, Mapping):
        return any(map(_holds_arrays, value.values()))
    return is_array(value) or is_record(value)
