"""The outputs of a prediction, brought together in the data set's order on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hapi.batch import leaves, map_tensors
from hapi.distributed import group

Positioned = tuple[int | torch.Tensor, int, Any]
"""The position of a batch's rows, its samples, its outputs on the CPU."""


def in_batches(parts: list[Positioned], ordered: bool) -> list[Any]:
    """One entry per batch, in the data set's order; rank by rank where any rank's part has no place in one."""
    ranks = group.gather_objects((parts, ordered))
    gathered = [part for parts, _ in ranks for part in parts]
    if _agreed_order([ordered for _, ordered in ranks]):
        gathered.sort(key=lambda part: int(part[0].min()) if isinstance(part[0], torch.Tensor) else part[0])
    return [outputs for _, _, outputs in gathered]


def stacked(parts: list[Positioned], ordered: bool) -> Any:
    """All rows stacked, in the network's own output structure; in the same order as `in_batches`.

    Raises:
        ValueError: Rows differ in shape, or an output has no row for each sample.
    """
    problem = _why_not_stackable(parts)
    local = None
    if problem is None and parts:
        columns = list(zip(*(list(leaves(outputs)) for _, _, outputs in parts), strict=True))
        local = [torch.cat(column) for column in columns]
    shapes = None if local is None else [(tuple(column.shape[1:]), column.dtype) for column in local]
    structure = parts[0][2] if parts else None
    template = map_tensors(lambda tensor: tensor[:0], structure) if local is not None else None
    ranks = group.gather_objects((problem, shapes, template, _row_keys(parts), ordered))
    _refuse_unequal(ranks)
    keys = torch.cat([keys for *_, keys, _ in ranks])
    order = torch.argsort(keys, stable=True) if _agreed_order([ordered for *_, ordered in ranks]) else None
    template = next(template for _, shapes, template, *_ in ranks if shapes is not None)
    if local is None:
        local = [leaf.clone() for leaf in leaves(template)]
    counts = [len(keys) for *_, keys, _ in ranks]
    whole = iter([_joined(column, counts, order) for column in local])
    return map_tensors(lambda _: next(whole), template)


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


def _joined(column: torch.Tensor, counts: list[int], order: torch.Tensor | None) -> torch.Tensor:
    if group.get_world_size() == 1 and (order is None or bool((order[1:] > order[:-1]).all())):
        return column
    rows = torch.cat(group.gather_rows(column, counts))
    return rows if order is None else rows[order]


def _row_keys(parts: list[Positioned]) -> torch.Tensor:
    """(rows,) int64 that sort as the rows do in the data set: the batch's number, then the row's place in it."""
    keys = [
        position if isinstance(position, torch.Tensor) else (position << 32) + torch.arange(size)
        for position, size, _ in parts
    ]
    return torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64)


def _why_not_stackable(parts: list[Positioned]) -> str | None:
    first: list[tuple[int, ...]] | None = None
    for _, size, outputs in parts:
        tensors = list(leaves(outputs))
        if not tensors:
            return f"The network gave {type(outputs).__name__} without any tensor"
        for tensor in tensors:
            if tensor.dim() == 0 or len(tensor) != size:
                return f"The network gave an output of shape {tuple(tensor.shape)} for {size} samples, not one row each"
        shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
        if first is not None and shapes != first:
            return f"Rows differ in shape between batches ({first} and {shapes})"
        first = shapes
    return None


def _refuse_unequal(ranks: list[Any]) -> None:
    problem = next((problem for problem, *_ in ranks if problem is not None), None)
    shapes = [shapes for _, shapes, *_ in ranks if shapes is not None]
    if problem is None and any(other != shapes[0] for other in shapes):
        problem = f"Rows differ in shape between processes ({shapes[0]} and others)"
    if problem is not None:
        raise ValueError(
            f"{problem}, so the predictions cannot be stacked. Pass stack_outputs=False for a list with one entry per "
            "batch, or pad the rows to one shape in the network's forward."
        )
