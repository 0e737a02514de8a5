"""Launchers started from a process that has imported torch already, so that one costs a tenth of a second."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

_processes = multiprocessing.get_context("forkserver")
PATIENCE = 180.0


class Launch:
    """One `hapirun`, in a folder of its own: `Launch(tmp_path, script, "--nproc_per_node", "2").wait()`.

    Args:
        folder: Where it runs. The script is written there as s.py, its log folder is `log`.
        script: The script's text.
        options: The command line before the script's name.
        arguments: After it.
        environment: Additions to this process's.
        console: What its stdout is, by default a file.
        host: The name of a network namespace to be in, with the host name of that.
        ignored: A signal that the launcher is started to ignore, as nohup does it.
    """

    def __init__(self, folder, script, *options, arguments=(), environment=None, console=None, host=None, ignored=None):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        (self.folder / "s.py").write_text(textwrap.dedent(script))
        self._out = str(console or self.folder / "out")
        command = [*options, "s.py", *arguments]
        variables = {"CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        _processes.set_forkserver_preload(["torch", "hapi", "hapi.distributed.launch.run"])
        self.began = time.time()
        setting = (str(self.folder), variables, self._out, host, ignored)
        self._process = _processes.Process(target=_launch, args=(command, *setting))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, timeout=PATIENCE / 2):
        """The exit code."""
        self._process.join(timeout)
        self.seconds = time.time() - self.began
        if self._process.exitcode is None:
            self.kill(signal.SIGKILL)
            raise AssertionError(f"the launcher has not ended in {timeout} s\n{self.out}\n{self.err}")
        return self._process.exitcode

    def kill(self, number):
        os.kill(self.pid, number)

    def end(self):
        """See that it has ended."""
        if self._process.is_alive():
            self.kill(signal.SIGKILL)
            self._process.join()

    def until(self, name, timeout=PATIENCE):
        """Wait for a file that the script makes; its text. A launcher that ends without it is not waited for."""
        path = self.folder / name

        def there():
            running = self._process.exitcode is None
            text = path.read_text() if path.exists() else ""
            assert text or running, f"the launcher has ended ({self._process.exitcode}) without {name}\n{self.err}"
            return text

        return eventually(there, timeout, lambda: f"{name}\n{self.err}")

    @property
    def out(self):
        return Path(self._out).read_bytes().decode()

    @property
    def err(self):
        path = self.folder / "err"
        return path.read_text() if path.exists() else ""

    def log(self, rank):
        return (self.folder / "log" / f"workerlog.{rank}").read_bytes().decode()

    def since(self, name):
        """Seconds from a moment that the script wrote into a file to the launcher's end."""
        return self.began + self.seconds - float((self.folder / name).read_text())


def eventually(condition, timeout=PATIENCE, what="it"):
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout} s: {what() if callable(what) else what}")


def is_gone(pid):
    """Ended; a container's first process may not reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _enter(host):
    libc = ctypes.CDLL(None, use_errno=True)
    new_network, new_names = 0x40000000, 0x04000000
    with open(f"/var/run/netns/{host}") as namespace:
        if libc.setns(namespace.fileno(), new_network) or libc.unshare(new_names):
            raise OSError(ctypes.get_errno(), host)
    socket.sethostname(host)


def _launch(command, folder, variables, out, host, ignored):
    os.setsid()
    # The tests themselves may run under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if ignored is not None:
        signal.signal(ignored, signal.SIG_IGN)
    if host:
        _enter(host)
    os.chdir(folder)
    os.environ.update(variables)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY
    for path, number in ((out, 1), ("err", 2)):
        descriptor = os.open(path, flags, 0o600)
        os.dup2(descriptor, number)
    sys.__stderr__ = sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)

    from hapi.distributed.launch import main

    code = main(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
