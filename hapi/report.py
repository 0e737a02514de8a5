"""The start line: what runs where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hapi.arguments import FitOptions
from hapi.callbacks.terminal import say
from hapi.data import Feed
from hapi.distributed import group

if TYPE_CHECKING:
    from hapi.step import Stepper


def announce(stepper: Stepper, train: Feed, options: FitOptions) -> None:
    """Print the start line, on rank 0 and unless silent."""
    if options.verbose == 0:
        return
    count = group.get_world_size()
    processes = "1 process" if count == 1 else f"{count} processes"
    launched = f"{group.launcher_name()}, {group.backend_name()}" if group.is_initialized() else "no launcher"
    parts = [f"{processes} ({launched}) on {stepper.device}"]
    if train.global_batch is not None:
        base, extra = divmod(train.global_batch, count)
        per_process = f"{base}-{base + 1}" if extra else str(base)
        parts.append(f"batch {per_process} per process, {train.global_batch} global")
    if train.samples is not None:
        parts.append(f"{train.samples} sample{'' if train.samples == 1 else 's'}")
    if train.steps is not None:
        parts.append(f"{train.steps} step{'' if train.steps == 1 else 's'} per epoch")
    if train.kept_bytes is not None:
        size = f"{train.kept_bytes / 2**20:.3g} MB"
        parts.append(f"{size} of data kept on the device from the second epoch on (HAPI_KEEP_DATA=0: not)")
    threads = group.shared_out_threads()
    if threads is not None:
        parts.append(f"{threads} thread{'s' if threads > 1 else ''} per process (OMP_NUM_THREADS decides otherwise)")
    if options.accumulate_grad_batches > 1:
        parts.append(f"{options.accumulate_grad_batches} steps per update")
    say("hapi: " + "; ".join(parts))
