"""A local mirror of a tiny MNIST, that answers as it is told to."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from made_files import idx_files, packed

Behaviour = Callable[["Request"], None]
FILES = idx_files(12)
ARCHIVES = {f"{name}.gz": packed(content) for name, content in FILES.items()}


class Request(BaseHTTPRequestHandler):
    """Answers as the server's `routes` say; anything else is missing."""

    server: Mirror

    def do_GET(self) -> None:
        self.server.hits[self.path] += 1
        answer = self.server.routes.get(self.path, missing)
        if isinstance(answer, bytes):
            self.send(answer)
        else:
            answer(self)

    def send(self, content: bytes, announced: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) if announced is None else announced))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


class Mirror(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.routes: dict[str, bytes | Behaviour] = {}
        self.hits: Counter[str] = Counter()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, *arguments: Any) -> None:
        """A client that goes away early is part of the tests."""


def missing(request: Request) -> None:
    request.send_error(404)


def fails(request: Request) -> None:
    request.send_error(503)


def garbage(request: Request) -> None:
    request.send(b"<html>Please log in</html>")


def cut(request: Request) -> None:
    whole = ARCHIVES[request.path.rsplit("/", 1)[-1]]
    request.send(whole[: len(whole) // 2], announced=len(whole))


def silent(request: Request) -> None:
    request.server.released.wait(20)


def stalls(request: Request) -> None:
    cut(request)
    request.server.released.wait(20)


def slow(content: bytes) -> Behaviour:
    def answer(request: Request) -> None:
        time.sleep(0.3)
        request.send(content)

    return answer


@contextmanager
def running() -> Iterator[Mirror]:
    with Mirror() as server:
        server.routes.update({f"/good/{name}": content for name, content in ARCHIVES.items()})
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def resources(archives: dict[str, bytes] = ARCHIVES) -> list[tuple[str, str]]:
    return [(name, hashlib.md5(content).hexdigest()) for name, content in archives.items()]


def assert_whole(root: Path) -> None:
    """The four files lie there, and nothing but them and the lock."""
    raw = root / "MNIST" / "raw"
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == FILES
    assert {path.name for path in root.iterdir()} == {"MNIST", ".MNIST.lock"}
