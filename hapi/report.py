"""The start line: what runs where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hapi.arguments import FitOptions
from hapi.data import Feed
from hapi.data.make import DEFAULT_BATCH_SIZE
from hapi.distributed import group

if TYPE_CHECKING:
    from hapi.step import Stepper


def announce(stepper: Stepper, train: Feed, options: FitOptions) -> None:
    """Print the start line, on rank 0 and unless silent."""
    if not group.speaks_for_all() or options.verbose == 0:
        return
    count = group.get_world_size()
    processes = "1 process" if count == 1 else f"{count} processes"
    if group.is_initialized():
        processes += f" ({group.launcher_name()}, {group.backend_name()})"
    parts = [f"{processes} on {stepper.device}"]
    if train.samples is not None:
        per_process, overall = _batch(options, count)
        parts.append(f"batch {per_process} per process, {overall} global")
        parts.append(f"{train.samples} samples")
    if train.steps is not None:
        parts.append(f"{train.steps} steps per epoch")
    if options.accumulate_grad_batches > 1:
        parts.append(f"{options.accumulate_grad_batches} steps per update")
    print("hapi: " + "; ".join(parts) + "\n", end="", flush=True)


def _batch(options: FitOptions, count: int) -> tuple[str, int]:
    if options.global_batch_size is not None:
        base, extra = divmod(options.global_batch_size, count)
        return (f"{base}-{base + 1}" if extra else str(base)), options.global_batch_size
    size = options.train_batch or DEFAULT_BATCH_SIZE
    return str(size), size * count
