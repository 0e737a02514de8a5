"""The workers' log files, and what each worker finds in its environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from hapi.distributed.launch import stub
from hapi.distributed.launch.console import Output, show
from hapi.distributed.launch.options import UsageError

_NAME = "workerlog."
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW


class WorkerLogs(LogsSpecs):
    """One file a rank, both streams in it, readable by its owner alone; rank 0's is shown on the console too.

    Args:
        folder: Where they are. It is made.
        environment: What every worker gets besides torch's own variables.

    Raises:
        UsageError: The folder cannot be made or written to.
    """

    def __init__(self, folder: str, environment: Mapping[str, str]) -> None:
        super().__init__(folder)
        self.folder = Path(folder)
        self._environment = dict(environment)
        self._output: Output | None = None
        self._held: dict[int, int] = {}
        self.errors = Path(tempfile.mkdtemp(prefix="hapirun-"))
        self.shows_rank_0 = False
        """Whether what rank 0 wrote in this round stands on this console."""
        self.round = 0
        """How often the workers have been started before, in this job."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            self.close()
            raise UsageError(
                f"--log_dir {folder} cannot be written to ({error.strerror}), and the workers' output goes there. "
                "Write --log_dir with another folder."
            ) from None

    @property
    def root_log_dir(self) -> str:
        """Asked for by torch."""
        return str(self.folder)

    def path(self, rank: int) -> Path:
        """The log of a rank."""
        return self.folder / f"{_NAME}{rank}"

    def held(self, rank: int) -> Path:
        """The same file, by a name that stays this job's own when another job takes the one in the folder."""
        descriptor, path = self._held[rank], self.path(rank).absolute()
        held = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        with contextlib.suppress(OSError):
            if os.path.samestat(held.stat(), os.fstat(descriptor)):
                return held
        return path  # no Linux

    def error_file(self, rank: int) -> Path:
        """Where a rank of this round leaves its exception."""
        return self.errors / f"{self.round}.{rank}.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by torch before each start of the workers: make the files, complete the environments."""
        self.stop_showing()
        self.shows_rank_0 = False
        for environment in envs.values():
            rank = int(environment["RANK"])
            position = self._make(rank)
            environment.update(self._environment)
            environment["TORCHELASTIC_RESTART_COUNT"] = str(self.round)
            environment[stub.ERROR_FILE] = str(self.error_file(rank))
            environment[stub.PARENT] = str(os.getpid())
            environment[stub.LOG] = str(self.path(rank).absolute())
            environment[stub.HELD] = str(self.held(rank))
            if rank == 0:
                self._output = show(self.held(rank), position)
                self.shows_rank_0 = True
                if self._output.target:
                    environment[stub.CONSOLE] = self._output.target
        if self.round == 0:
            self._remove_others(int(envs[0]["WORLD_SIZE"]))
        # The worker itself opens its log. Until then, what its interpreter has to say about a broken installation
        # goes to the console. Errors are read by the launcher, not by torch, which knows whole seconds only.
        return LogsDest(
            stdouts=dict.fromkeys(envs, os.devnull),
            stderrs=dict.fromkeys(envs, ""),
            error_files=dict.fromkeys(envs, os.devnull),
        )

    def _make(self, rank: int) -> int:
        """See that the rank has its file, and say how long it is."""
        path = self.path(rank)
        if rank not in self._held or not path.exists():
            self._let_go(rank)
            descriptor = _create(path) if self.round == 0 else os.open(path, _WRITE | os.O_APPEND, 0o600)
            os.fchmod(descriptor, 0o600)
            self._held[rank] = descriptor
        return os.fstat(self._held[rank]).st_size

    def _let_go(self, rank: int) -> None:
        if rank in self._held:
            os.close(self._held.pop(rank))

    def _remove_others(self, world_size: int) -> None:
        """Logs of an earlier run with more ranks would be taken for this one's."""
        for path in self.folder.glob(f"{_NAME}*"):
            rank = path.name.removeprefix(_NAME)
            if rank.isdecimal() and int(rank) >= world_size:
                path.unlink()

    def stop_showing(self) -> None:
        """Bring the console up to date; rank 0 has ended."""
        if self._output is not None:
            self._output.stop()
            self._output = None
            sys.stdout.flush()

    def close(self) -> None:
        """Remove what no one will read."""
        self.stop_showing()
        for rank in list(self._held):
            self._let_go(rank)
        shutil.rmtree(self.errors, ignore_errors=True)


def _create(path: Path) -> int:
    """A new file of this name. The old one may be that of a job that still runs, which goes on writing to it."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        # Another job may do the same at this moment.
        with contextlib.suppress(FileExistsError):
            return os.open(path, _WRITE | os.O_EXCL, 0o600)
