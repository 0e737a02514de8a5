"""Where a run that was ended goes on: which checkpoint, and what is taken over from it."""

from __future__ import annotations

from pathlib import Path

import torch

from hapi import checkpoint
from hapi.arguments import FitOptions
from hapi.distributed import group


def find(options: FitOptions) -> str | None:
    """The checkpoint that fit goes on from, the same on every rank; None for a fresh start.

    What was passed over in the search, and why, is printed by rank 0.
    """
    if options.resume is False or (options.resume is None and not group.was_restarted()):
        return None
    folder = options.save_dir
    if options.resume is not None and not isinstance(options.resume, bool):
        given = str(options.resume)
        if not group.broadcast_object(Path(given).is_dir() and not checkpoint.weights_path(given).exists()):
            return given
        folder = given
    if folder is None:
        return None
    # Rank 0 writes the files, and may be the only one to see them whole at this moment.
    found, passed_over = group.broadcast_object(checkpoint.newest(folder) if group.speaks_for_all() else (None, []))
    if group.speaks_for_all() and options.verbose:
        lines = [f"hapi: passed over {line}\n" for line in passed_over]
        lines.append(f"hapi: resuming from {found}\n" if found else f"hapi: no checkpoint in {folder} yet\n")
        print("".join(lines), end="", flush=True)
    return found


def restore_threads(position: dict[str, object]) -> None:
    """Compute with as many threads as before: sums come out in other bits with another number."""
    threads = position["threads"]
    if isinstance(threads, int) and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
