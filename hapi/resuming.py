"""Where a run that was ended goes on: which checkpoint, and what is taken over from it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hapi import checkpoint, files
from hapi.arguments import FitOptions
from hapi.callbacks.terminal import say
from hapi.distributed import group


def find(options: FitOptions, network: nn.Module) -> str | None:
    """The checkpoint that fit goes on from, the same on every rank; None for a fresh start.

    What was passed over in the search, and why, is printed by rank 0.
    """
    if options.save_dir is not None and group.speaks_for_all():
        files.sweep(Path(options.save_dir))
    if options.resume is False or (options.resume is None and not group.was_restarted()):
        return None
    # Unasked, only what this very run has saved is gone on from.
    run = group.run_name() if options.resume is None else None
    folder = options.save_dir
    if options.resume is not None and not isinstance(options.resume, bool):
        given = str(options.resume)
        if not group.broadcast_object(Path(given).is_dir() and not checkpoint.weights_path(given).exists()):
            return given
        folder = given
    if folder is None:
        return None
    # Rank 0 writes the files, and may be the only one to see them whole at this moment.
    search = checkpoint.newest(folder, network, run) if group.speaks_for_all() else (None, [])
    found, passed_over = group.broadcast_object(search)
    if options.verbose:
        for line in passed_over:
            say(f"hapi: passed over {line}")
        say(f"hapi: resuming from {found}" if found else f"hapi: no checkpoint in {folder} to resume from")
    return found


def restore_threads(position: dict[str, object]) -> None:
    """Compute with as many threads as before: sums come out in other bits with another number."""
    threads = position["threads"]
    if isinstance(threads, int) and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
