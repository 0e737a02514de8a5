"""torch's elastic agent, with an eye on the workers, their first failure kept, and their end made quick and certain."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler

from hapi.distributed.launch import stub
from hapi.distributed.launch.console import say
from hapi.distributed.launch.failures import Failure, describe, first_of
from hapi.distributed.launch.job import Job
from hapi.distributed.launch.logs import WorkerLogs
from hapi.distributed.launch.options import Options
from hapi.distributed.launch.stores import serve
from hapi.distributed.launch.watch import GRACE_AFTER_FAILURE, Watch, Worker

# Seconds between two looks at the workers.
_INTERVAL = 0.05
# Hosts that are done wait for the others, who may still write a checkpoint.
_EXIT_BARRIER = 24 * 3600.0


def worker_spec(options: Options, processes: int, handler: RendezvousHandler) -> WorkerSpec:
    """What torch's agent starts on this host."""
    kind = "module" if options.is_module else "script"
    words = [str(Path(stub.__file__).absolute()), kind, options.script, *options.arguments]
    return WorkerSpec(
        role="default",
        local_world_size=processes,
        entrypoint=sys.executable,
        # torch substitutes ${local_rank} in arguments; ours are to arrive as they are.
        args=tuple(word.replace("$", "$$") for word in words),
        rdzv_handler=handler,
        max_restarts=options.max_restart,
        monitor_interval=_INTERVAL,
    )


class Agent(LocalElasticAgent):
    """Runs the workers of this host through all rounds.

    Args:
        spec: From `worker_spec`.
        logs: The workers' logs.
        job: What the job has been told from outside.
        options: The command line.
        address: Where workers on other hosts reach this one.
    """

    def __init__(self, spec: WorkerSpec, logs: WorkerLogs, job: Job, options: Options, address: str) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=_EXIT_BARRIER)
        self.first: Failure | None = None
        """The failure that ended the last round, None while there is none."""
        self._logs, self._job, self._options, self._address = logs, job, options, address
        self._watch: Watch | None = None
        self._rounds = 0
        self._meeting: Any = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        self._logs.round = self._rounds
        self._rounds += 1
        # The workers' store is a new one in each round, since they would meet the addresses of the dead in an old
        # one, and its port is taken before it is named.
        self._meeting = serve(self._address)
        group: Any = worker_group  # torch declares the next two as None for ever
        group.master_addr, group.master_port = self._address, self._meeting.port

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        identifiers: dict[int, Any] = super()._start_workers(worker_group)
        assert isinstance(self._pcontext, SubprocessContext)
        workers = []
        for local_rank, handler in self._pcontext.subprocess_handlers.items():
            rank = worker_group.workers[local_rank].global_rank
            workers.append(Worker(rank, handler.proc, self._logs.error_file(rank), self._logs.path(rank)))
        self._watch = Watch(workers)
        return identifiers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._job.raise_if_told()
        if self._watch is not None and self._watch.has_failed():
            self._watch.settle()
            self._watch.end(signal.SIGTERM, min(self._options.grace, GRACE_AFTER_FAILURE), self._is_hurried)
            self._report(self._watch.failures())
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *arguments: Any, **options: Any) -> None:
        # Instead of torch's: its signal reaches data workers too, and its patience is its own.
        self._job.answer()
        if self._watch is not None:
            self._watch.end(self._job.for_workers or death_sig, self._options.grace, self._is_hurried)
        super()._shutdown(death_sig, *arguments, **options)

    def _is_hurried(self) -> bool:
        return self._job.hurry

    def _report(self, failures: list[Failure]) -> None:
        self._logs.stop_showing()
        self.first = first = first_of(failures)
        if first is None:
            return
        shown = first.rank == 0 or any(f.rank == 0 and f.message == first.message != "" for f in failures)
        say(describe(first, failures, shown))
        if self._remaining_restarts > 0:
            count = self._options.max_restart - self._remaining_restarts + 1
            say(f"starting all processes anew ({count} of {self._options.max_restart} restarts)")
