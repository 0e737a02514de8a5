"""A script as a function, for launchers that start functions."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence


def run(command: Sequence[str], folder: str | None = None) -> None:
    """Run a script as `python SCRIPT [ARGUMENT ...]` does, in the folder."""
    if folder is not None:
        os.chdir(folder)
    sys.argv[:] = command
    runpy.run_path(command[0], run_name="__main__")
