"""What processes are told to do by `test_detection.py`. Reads the table without importing torch."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]

for name in ("hapi", "hapi.distributed"):
    # Empty packages in place of those whose __init__ imports torch.
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
    sys.modules[name] = package

from hapi.distributed.launchers import detect  # noqa: E402


def set_and_detect(changes: dict[str, str]) -> tuple[bool, bool]:
    """Whether this process is a rank, before and after it has changed its environment."""
    before = detect() is not None
    os.environ.update(changes)
    return before, detect() is not None
