"""`python -m hapi.distributed.launch`, the same as `hapirun`."""

from __future__ import annotations

import sys

from hapi.distributed.launch import main

if __name__ == "__main__":
    sys.exit(main())
