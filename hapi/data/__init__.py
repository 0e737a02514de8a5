"""Whatever the user passes as data -> this process's `Feed`."""

from __future__ import annotations

from hapi.data.feeds import BEGINNING, Feed, Piece, Start
from hapi.data.make import Request, make_feed

__all__ = ["BEGINNING", "Feed", "Piece", "Request", "Start", "make_feed"]
