"""One `hapirun`, from its options to its exit code."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import uuid

from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from hapi.distributed.environment import OVERRIDE
from hapi.distributed.launch.agent import Agent, worker_spec
from hapi.distributed.launch.channel import Channel, Lost
from hapi.distributed.launch.console import say
from hapi.distributed.launch.devices import Placement, place, threads_for
from hapi.distributed.launch.failures import report
from hapi.distributed.launch.hosts import Hosts, find_hosts
from hapi.distributed.launch.job import Job, Told
from hapi.distributed.launch.logs import WorkerLogs
from hapi.distributed.launch.options import Options
from hapi.distributed.launch.stores import serve
from hapi.distributed.launchers import OWNER

# A host that is gone is noticed within 3 x 2 s, and not waited for: the last call is longer than that.
_ELASTIC = {"keep_alive_interval": 2, "keep_alive_max_attempt": 3, "last_call_timeout": 8}
_NEWS_WITHIN = 2.0


def run(options: Options) -> int:
    """Start the workers, wait for their end, and say what the launcher's exit code is.

    Raises:
        UsageError: This host cannot do what was asked for; nothing was started.
    """
    placement = place(options.devices, options.processes)
    hosts = find_hosts(options)
    logs = WorkerLogs(options.log_dir, _environment(placement))
    _quieten_torch()
    current = _Run(options, placement, hosts, logs)
    try:
        code = current.go()
    finally:
        logs.close()
    if current.channel is not None and not current.channel.has_ended():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class _Run:
    """What its parts share."""

    def __init__(self, options: Options, placement: Placement, hosts: Hosts, logs: WorkerLogs) -> None:
        self.options, self.placement, self.hosts, self.logs = options, placement, hosts, logs
        self.job = Job()
        self.job_id = options.job_id or (uuid.uuid4().hex[:8] if hosts.alone else "hapi")
        self.channel: Channel | None = None
        self.agent: Agent | None = None

    def go(self) -> int:
        say(self._start_table())
        self.job.concludes_by(self._conclude)
        try:
            if not self.hosts.alone:
                watches = self.options.max_restart == 0 and not self.hosts.is_elastic
                self.channel = Channel(self.hosts, self.job, self.job_id, watches, self.options.timeout)
                self.channel.gather(self.hosts.least)
            handler = self._handler()
            spec = worker_spec(self.options, self.placement.processes, handler)
            self.agent = Agent(spec, self.logs, self.job, self.options, self.hosts, self.channel)
            failed = self._run_agent(self.agent)
            if self.hosts.place is None:
                handler.shutdown()
        except Told:
            failed = True
        except Lost as problem:
            say(str(problem))
            return 1
        if failed:
            return self._conclude()
        self._leave()
        return 0

    def _run_agent(self, agent: Agent) -> bool:
        """Whether it failed."""
        try:
            result = agent.run()
        except (RendezvousError, RuntimeError) as error:
            if self.hosts.alone:
                raise
            # Most often another host is gone, which the channel will say in better words.
            until = time.monotonic() + _NEWS_WITHIN
            while not self.job.is_told and time.monotonic() < until:
                time.sleep(0.05)
            self.job.lose(f"the hosts do not meet any more ({str(error).splitlines()[0]})")
            raise Told from error
        finally:
            self.job.answer()
        if result is None:  # torch has it so for one who comes to a meeting that is closed
            raise Lost(f"The job {self.job_id!r} at {self.hosts.master} has ended. Start it anew on each host.")
        return bool(result.is_failed())

    def _handler(self) -> RendezvousHandler:
        hosts = self.hosts
        if hosts.place is None:
            # Shared between rounds, torch's store keeps the first round's address, and no host can join later.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            parameters = RendezvousParameters(
                "c10d", f"{hosts.master}:{hosts.port}", self.job_id, hosts.least, hosts.most, hosts.address,
                is_host=hosts.keeps_store, join_timeout=int(self.options.timeout), **_ELASTIC,
            )  # fmt: skip
            return get_rendezvous_handler(parameters)
        if hosts.alone:
            self._store = serve(hosts.master)
        port = self._store.port if hosts.alone else hosts.port
        parameters = RendezvousParameters(
            "static", f"{hosts.master}:{port}", self.job_id, hosts.most, hosts.most,
            rank=hosts.place, timeout=int(self.options.timeout),
        )  # fmt: skip
        return get_rendezvous_handler(parameters)

    def _conclude(self) -> int:
        """After the workers' end: say why, the same on each host. Returns the exit code."""
        self.logs.stop_showing()
        job = self.job
        if job.signal is not None:
            where = "" if job.is_mine else " on another host"
            say(f"{signal.Signals(job.signal).name} received{where}, all processes have ended; exit code {job.status}")
            self._leave(self.options.grace)
            return job.status
        failures = self.agent.failures() if self.agent is not None else []
        if job.is_lost or (self.channel is not None and self.channel.is_lost):
            say(f"{job.elsewhere}, all processes of {socket.gethostname()} have ended; exit code 1")
            return 1
        if self.channel is not None:
            failures = self.channel.exchange(failures)
        if not failures:
            say(f"{job.elsewhere or 'the processes have ended without a result'}; exit code 1")
        code, text = report(failures, self.logs.shows_rank_0) if failures else (1, "")
        if text:
            say(text)
        self._leave()
        return code

    def _leave(self, patience: float = 0.0) -> None:
        if self.channel is not None:
            self.channel.leave(patience)

    def _start_table(self) -> str:
        options, count = self.options, self.placement.processes
        script = f"-m {options.script}" if options.is_module else options.script
        hosts, lines = self.hosts, []
        if not hosts.alone:
            number = str(hosts.most) if hosts.least == hosts.most else f"{hosts.least} to {hosts.most}"
            own = "" if hosts.place is None else f", this is number {hosts.place}"
            lines = [f"  hosts {number}, meeting at {hosts.master}:{hosts.port}{own}"]
        return "\n".join(
            [
                f"{script} as {count} process{'es' if count > 1 else ''} on this host, {self.placement.devices}",
                *lines,
                f"  logs  {os.path.join(options.log_dir, 'workerlog.N')}   job  {self.job_id}",
            ]
        )


def _environment(placement: Placement) -> dict[str, str]:
    environment = {
        **placement.environment,
        "HAPI_LAUNCHED_BY": "hapirun",
        # What holds for the shell that this was typed into, or for a rank that started it: empty is as if not set.
        **dict.fromkeys((OVERRIDE, OWNER), ""),
        # The workers are clients of the store that the launcher keeps.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # What the launcher sets for itself is not for a torchrun that a worker may start.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(threads_for(placement.processes))
    return environment


def _quieten_torch() -> None:
    # What they report at length is reported here, in a few words and with the traceback.
    for name in [*logging.root.manager.loggerDict, "torch.distributed.elastic"]:
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Signals are ours: torch would install handlers that raise wherever the main thread is.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
