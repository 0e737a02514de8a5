"""Where a plot goes: to a file, to the screen, or into the notebook. Imported when something is drawn."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hapi import kinds
from hapi.distributed import get_rank


def show(owner: type[Any], path: str | os.PathLike[str] | None, example: str, draw: Callable[[Any], None]) -> None:
    """Make a figure of matplotlib's, on rank 0 alone: all ranks have the same values, and one file is for one of them.

    Args:
        owner: The class whose `plot` it is, for messages.
        path: As `plot` received it.
        example: A file's name, for messages.
        draw: Draws into the figure.

    Raises:
        ImportError: matplotlib is not installed.
        RuntimeError: There is nowhere to show it.
        TypeError: ``path`` is none.
        ValueError: The file cannot be written.
    """
    name = owner.__name__
    kinds.check(owner.plot, {"path": path})
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{name}.plot draws with matplotlib, which is not installed. Install it: pip install torch-hapi[plot]"
        ) from error
    if path is None and matplotlib.get_backend().lower() == "agg":
        raise RuntimeError(
            f"{name}.plot was to show the curves, but there is no screen here. Write them to a file: plot('{example}')."
        )
    if get_rank() != 0:
        return
    if path is not None:
        figure = Figure(layout="constrained")
        draw(figure)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name}.plot received path={os.fspath(path)!r}, which cannot be written: {error}. Write another path, "
                f"plot({example!r})."
            ) from error
        return
    from matplotlib import pyplot

    draw(pyplot.figure(layout="constrained"))
    pyplot.show()
