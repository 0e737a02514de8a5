"""The outputs of a prediction, brought together in the data set's order on every rank."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import pairwise
from typing import Any

import torch

from hapi.batch import map_tensors
from hapi.distributed import group

Positioned = tuple[int | torch.Tensor, int, Any]
"""The position of a batch's rows, its samples, its outputs on the CPU."""
Named = dict[tuple[Any, ...], torch.Tensor]
"""The tensors of a batch's outputs, by their place in them."""


_SMALL = 1 << 16
"""So many numbers at most are copied with others of their kind into one memory, which holds sixteen times as many."""


class Kept:
    """Keeps the outputs of a pass, on the CPU.

    Small ones are copied into memory that is made for several at once: if each stayed where it was computed, between
    the large tensors of its step, the C library could not use what they leave for those of the next one.
    """

    def __init__(self) -> None:
        self._form: Any = None
        self._made = 0
        self._places: Iterator[torch.Tensor] = iter(())

    def __call__(self, outputs: Any) -> Any:
        """A batch's outputs, to be kept in place of these."""
        if type(outputs) is not torch.Tensor or not outputs.is_cpu:
            return map_tensors(torch.Tensor.cpu, outputs)
        plain = outputs.layout is torch.strided and not (outputs.is_nested or outputs.is_quantized)
        if not plain or not 0 < outputs.numel() <= _SMALL:
            return outputs
        form = outputs.shape, outputs.dtype
        if form != self._form:
            self._form, self._made, self._places = form, 0, iter(())
            return outputs
        place = next(self._places, None)
        if place is None:
            place = self._more(outputs)
        return place.copy_(outputs.detach() if outputs.requires_grad else outputs)

    def _more(self, outputs: torch.Tensor) -> torch.Tensor:
        # Twice as many each time, so that few pieces lie between steps, and little is made in vain.
        # At least two, so that `_on_its_own` knows each for a view: autograd lets nobody write to one in place.
        self._made = min(max(2, 2 * self._made), 16 * _SMALL // outputs.numel())
        self._places = iter(outputs.new_empty((self._made, *outputs.shape)).unbind())
        return next(self._places)


def in_batches(parts: list[Positioned], ordered: bool) -> list[Any]:
    """One entry per batch, in the data set's order; rank by rank where any rank's part has no place in one."""
    # Before they travel: with a view goes all that it is a view of.
    own = [(position, size, map_tensors(_on_its_own, outputs)) for position, size, outputs in parts]
    ranks = group.gather_objects((own, ordered))
    gathered = [part for parts, _ in ranks for part in parts]
    if _agreed_order([ordered for _, ordered in ranks]):
        gathered.sort(key=lambda part: int(part[0].min()) if isinstance(part[0], torch.Tensor) else part[0])
    return [outputs for _, _, outputs in gathered]


def _on_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, without the rest of what it is a view of: of a part of the input, several batches' inputs."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def stacked(parts: list[Positioned], ordered: bool) -> Any:
    """All rows stacked, in the network's own output structure; in the same order as `in_batches`.

    Raises:
        ValueError: Outputs differ in structure, rows in shape, or an output has no row for each sample.
    """
    named = [_named(outputs) for *_, outputs in parts]
    problem = _why_not_stackable(parts, named)
    own = _without_rows(parts[0][2], named) if parts and problem is None else None
    is_all = group.get_world_size() == 1 and _is_in_order(parts)
    ranks = group.gather_objects((problem, own, None if is_all else _row_keys(parts), ordered))
    templates = [template for _, template, *_ in ranks if template is not None]
    _refuse_unequal([problem for problem, *_ in ranks], templates)
    columns = _columns(named, templates)
    if not is_all:
        keys = [keys for *_, keys, _ in ranks if keys is not None]
        order = _order_of(torch.cat(keys)) if _agreed_order([ordered for *_, ordered in ranks]) else None
        columns = [_joined(column, list(map(len, keys)), order) for column in columns]
    whole = iter(columns)
    return map_tensors(lambda _: next(whole), templates[0])


def _is_in_order(parts: list[Positioned]) -> bool:
    numbers = [position for position, *_ in parts if isinstance(position, int)]
    return len(numbers) == len(parts) and all(one < next_one for one, next_one in pairwise(numbers))


def _without_rows(first: Any, named: list[Named]) -> Any:
    """The first batch's structure, with a tensor of no rows for each of its own, of a dtype that holds all batches'."""
    dtypes = iter([_common_dtype([entry[path] for entry in named]) for path in named[0]])
    return map_tensors(lambda tensor: tensor.new_empty((0, *tensor.shape[1:]), dtype=next(dtypes)), first)


def _columns(named: list[Named], templates: list[Any]) -> list[torch.Tensor]:
    """This rank's rows, a tensor for each of the first template's, in its order, of a dtype that holds all ranks'."""
    alike = list(map(_named, templates))
    columns = []
    for path, empty in alike[0].items():
        dtype = _common_dtype([template[path] for template in alike])
        columns.append(torch.cat([empty.to(dtype), *(entry[path] for entry in named)]))
    return columns


def _common_dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors})


def _named(outputs: Any) -> Named:
    """The tensors of a nest in `map_tensors`' order, by their place in it: keys may come in another order."""
    return {(): outputs} if isinstance(outputs, torch.Tensor) else dict(_within(outputs, ()))


def _within(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _within(item, (*path, key))
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _within(item, (*path, number))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _within(getattr(value, field.name), (*path, field.name))


def _agreed_order(ranks: list[bool]) -> bool:
    """Whether rows have places in one order on all ranks: one without any batch cannot tell by itself."""
    if not all(ranks) and len(ranks) > 1 and group.get_rank() == 0:
        warnings.warn(
            "predict received data that shards itself among the processes, whose order nobody else knows: its rows "
            "come rank by rank, rank 0's first. For the order of the data set predict on one that does not shard "
            "itself.",
            stacklevel=2,
        )
    return all(ranks)


def _order_of(keys: torch.Tensor) -> torch.Tensor | None:
    """How rows with these keys are put in order; None: they are."""
    return None if bool((keys[1:] > keys[:-1]).all()) else torch.argsort(keys, stable=True)


def _joined(column: torch.Tensor, counts: list[int], order: torch.Tensor | None) -> torch.Tensor:
    if group.get_world_size() == 1 and order is None:
        return column
    rows = torch.cat(group.gather_rows(column, counts))
    return rows if order is None else rows[order]


def _row_keys(parts: list[Positioned]) -> torch.Tensor:
    """(rows,) int64 that sort as the rows do in the data set: the batch's number, then the row's place in it."""
    if any([isinstance(position, torch.Tensor) for position, *_ in parts]):
        return torch.cat(
            [
                position if isinstance(position, torch.Tensor) else torch.arange(size) + (position << 32)
                for position, size, _ in parts
            ]
        )
    # Not batch by batch, which would be a few calls for each.
    numbers, sizes = (torch.tensor([part[index] for part in parts], dtype=torch.int64) for index in (0, 1))
    first = (numbers << 32) - (sizes.cumsum(0) - sizes)
    return first.repeat_interleave(sizes) + torch.arange(int(sizes.sum()))


def _why_not_stackable(parts: list[Positioned], named: list[Named]) -> str | None:
    first: dict[tuple[Any, ...], torch.Size] | None = None
    for (_, size, outputs), tensors in zip(parts, named, strict=True):
        if not tensors:
            return f"The network gave {type(outputs).__name__} without any tensor"
        shapes = {path: tensor.shape for path, tensor in tensors.items()}
        for path, shape in shapes.items():
            if not shape or shape[0] != size:
                where = f" as {_place(path)}" if path else ""
                return f"The network gave an output of shape {tuple(shape)}{where} for {size} samples, not one row each"
            shapes[path] = shape[1:]
        if first is None:
            first = shapes
        elif shapes != first:
            return _difference(first, shapes, "batches")
    return None


def _difference(one: dict[tuple[Any, ...], Any], other: dict[tuple[Any, ...], Any], between: str) -> str:
    if one.keys() != other.keys():
        shown = [", ".join(map(_place, shapes)) for shapes in (one, other)]
        return f"The outputs differ in structure between {between} ({shown[0]} and {shown[1]})"
    path = next(path for path in one if one[path] != other[path])
    where = f" of {_place(path)}" if path else ""
    return f"Rows differ in shape between {between} ({tuple(one[path])} and {tuple(other[path])}{where})"


def _place(path: tuple[Any, ...]) -> str:
    return "outputs" + "".join(f"[{key!r}]" for key in path)


def _refuse_unequal(problems: list[str | None], templates: list[Any]) -> None:
    problem = next((problem for problem in problems if problem is not None), None)
    if problem is None:
        shapes = [{path: t.shape[1:] for path, t in _named(template).items()} for template in templates]
        unequal = next((other for other in shapes if other != shapes[0]), None)
        problem = _difference(shapes[0], unequal, "processes") if unequal is not None else None
    if problem is not None:
        raise ValueError(
            f"{problem}, so the predictions cannot be stacked. Pass stack_outputs=False for a list with one entry per "
            "batch, or pad the rows to one shape in the network's forward."
        )
