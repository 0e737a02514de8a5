"""What callbacks write: on rank 0 alone, each line at once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from hapi.distributed import get_rank


def say(text: str) -> None:
    """Write a line to stdout on global rank 0, as one string: lines of several processes must not mix."""
    # A service has no stdout, and a pipe's reader may have gone: neither is a reason to end a training.
    if get_rank() == 0 and sys.stdout is not None and not sys.stdout.closed:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def note(verbose: int, params: Mapping[str, Any], text: str) -> None:
    """Write a callback's line, unless it or the whole call is to be silent."""
    if verbose and params.get("verbose", 1):
        say(text)


def number(value: float, name: str = "") -> str:
    """A value as text, of even width where it can be."""
    if name == "lr":
        return f"{value:.4g}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3e}"
