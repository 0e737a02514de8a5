"""Whatever the user passes as data -> this process's `Feed`."""

from __future__ import annotations

from hapi.data.feeds import Feed, Piece
from hapi.data.make import Request, make_feed

__all__ = ["Feed", "Piece", "Request", "make_feed"]
