"""torch's elastic agent, with an eye on the workers, their failures kept, and their end made quick and certain."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler

from hapi.distributed.launch import stub
from hapi.distributed.launch.channel import Channel
from hapi.distributed.launch.console import say
from hapi.distributed.launch.failures import Failure, report
from hapi.distributed.launch.hosts import Hosts
from hapi.distributed.launch.job import Job
from hapi.distributed.launch.logs import WorkerLogs
from hapi.distributed.launch.options import Options
from hapi.distributed.launch.stores import connect, serve
from hapi.distributed.launch.watch import GRACE_AFTER_FAILURE, Watch, Worker

# Seconds between two looks at the workers.
_INTERVAL = 0.05
# And at whether the other hosts are done too.
_DONE_INTERVAL = 0.1
_MEETING = "hapi/workers"
_ROUNDS = "hapi/rounds"
_MEMBER = "hapi/member"
_DONE = "hapi/done"


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
        hosts: Who takes part.
        channel: To the other hosts, None where there are none.
    """

    def __init__(
        self, spec: WorkerSpec, logs: WorkerLogs, job: Job, options: Options, hosts: Hosts, channel: Channel | None
    ) -> None:
        super().__init__(spec, logs)
        self._logs, self._job, self._options, self._hosts, self._channel = logs, job, options, hosts, channel
        self._watch: Watch | None = None
        self._rounds = 0
        self._meeting: Any = None
        self._shared: Any = None

    def failures(self) -> list[Failure]:
        """Those of the last round. To be asked after its end."""
        return self._watch.failures() if self._watch is not None else []

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        group: Any = worker_group  # torch declares some of what is set here as None for ever
        # The workers' store is a new one in each round, since they would meet the addresses of the dead in an old
        # one, and its port is taken before it is named.
        if group.group_rank == 0:
            self._meeting = serve(self._hosts.address)
            place = f"{self._hosts.address} {self._meeting.port} {self._count_round()}"
            group.store.set(_MEETING, place)
        else:
            place = group.store.get(_MEETING).decode()
        group.master_addr, port, number = place.split()
        group.master_port, self._logs.round = int(port), int(number)

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> Any:
        channel = self._channel
        if channel is None:
            return super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        # Said before torch waits for word of all hosts: afterwards all have said it, also one that has died since.
        store.set(f"{_MEMBER}/{group_rank}", str(channel.number))
        workers = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        channel.begin_round(int(store.get(f"{_MEMBER}/{place}")) for place in range(group_world_size))
        return workers

    def _count_round(self) -> int:
        """How often the job's workers have been started before. Each host's own count may differ from another's."""
        if self._hosts.alone:
            self._rounds += 1
            return self._rounds - 1
        if self._shared is None:
            self._shared = connect(self._hosts.master, self._hosts.port, self._options.timeout)
        count: int = self._shared.add(_ROUNDS, 1)
        return count - 1

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        identifiers: dict[int, Any] = super()._start_workers(worker_group)
        assert isinstance(self._pcontext, SubprocessContext)
        workers = []
        for local_rank, handler in self._pcontext.subprocess_handlers.items():
            rank = worker_group.workers[local_rank].global_rank
            log, output = self._logs.path(rank), self._logs.held(rank)
            workers.append(Worker(rank, handler.proc, self._logs.error_file(rank), log, output))
        self._watch = Watch(workers)
        return identifiers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._job.raise_if_told()
        if self._channel is not None and self._channel.is_short():
            return self._go_on_without(worker_group)
        if self._watch is not None and self._watch.has_failed():
            is_last = self._remaining_restarts == 0
            if self._channel is not None and is_last:
                self._channel.tell_failing()
            self._watch.settle()
            self._watch.end(signal.SIGTERM, self._grace_after_failure(), self._is_hurried)
            if not is_last:
                self._say_restart(self._watch.failures())
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _go_on_without(self, worker_group: WorkerGroup) -> RunResult:
        """A host is lost, and workers that are not in a collective do not notice. As torch does when one comes."""
        if self._watch is not None:
            self._watch.end(signal.SIGTERM, self._grace_after_failure(), self._is_hurried)
        say("a host is lost; starting all processes anew with those that are left")
        self._restart_workers(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        """Wait for the other hosts, who may still write a checkpoint; as long as they live, where torch has a limit."""
        channel = self._channel
        if channel is None:
            return
        group: Any = self._worker_group
        group.store.add(_DONE, 1)
        while group.store.add(_DONE, 0) < group.group_world_size:
            self._job.raise_if_told()
            if channel.is_short():
                say("a host is lost before its processes have ended; those of this host have done so without a fault")
                return
            time.sleep(_DONE_INTERVAL)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *arguments: Any, **options: Any) -> None:
        # Instead of torch's: its signal reaches data workers too, and its patience is its own.
        if self._job.is_told:
            self._job.answer()
        if self._watch is not None:
            grace = self._grace_after_failure() if self._job.elsewhere else self._options.grace
            self._watch.end(self._job.for_workers, grace, self._is_hurried)
        super()._shutdown(death_sig, *arguments, **options)

    def _grace_after_failure(self) -> float:
        return min(self._options.grace, GRACE_AFTER_FAILURE)

    def _is_hurried(self) -> bool:
        return self._job.hurry

    def _say_restart(self, failures: list[Failure]) -> None:
        self._logs.stop_showing()
        if failures:
            say(report(failures, self._logs.shows_rank_0)[1])
        count = self._options.max_restart - self._remaining_restarts + 1
        say(f"starting all processes anew ({count} of {self._options.max_restart} restarts)")
