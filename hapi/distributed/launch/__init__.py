"""`hapirun`, also `python -m hapi.distributed.launch`: starts one script as many processes, on one host or several.

It stands on torch's elastic agent and adds what that lacks: it says who failed first and why, ends all processes at
once on every host, returns that process's exit code, and leaves no process behind.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hapi.distributed.launch import options as _command_line

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Options, script and the script's arguments; by default those of this process.

    Returns:
        The exit code: 0, that of the process that failed first, 143 (SIGTERM), 130 (Ctrl-C), 1 (a host is lost), or
        2 (the command line is wrong; nothing was started).
    """
    try:
        options = _command_line.parse(sys.argv[1:] if arguments is None else arguments)
        if options is None:
            print(_command_line.HELP)
            return 0
        # Here, since it takes a second or more, and what comes before needs none of it.
        from hapi.distributed.launch.run import run

        return run(options)
    except _command_line.UsageError as error:
        print(f"hapirun: {error}", file=sys.stderr)
        return 2
