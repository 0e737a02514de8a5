"""One `hapirun`, from its options to its exit code."""

from __future__ import annotations

import logging
import os
import signal
import uuid

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from hapi.distributed.launch.agent import Agent, worker_spec
from hapi.distributed.launch.console import say
from hapi.distributed.launch.devices import Placement, place, threads_for
from hapi.distributed.launch.job import Job, Told
from hapi.distributed.launch.logs import WorkerLogs
from hapi.distributed.launch.options import Options
from hapi.distributed.launch.stores import serve

_LOOPBACK = "127.0.0.1"


def run(options: Options) -> int:
    """Start the workers, wait for their end, and say what the launcher's exit code is.

    Raises:
        UsageError: This host cannot do what was asked for; nothing was started.
    """
    placement = place(options.devices, options.processes)
    job_id = options.job_id or uuid.uuid4().hex[:8]
    logs = WorkerLogs(options.log_dir, _environment(placement))
    _quieten_torch()
    job = Job()
    try:
        return _run(options, placement, logs, job, job_id)
    finally:
        logs.close()


def _run(options: Options, placement: Placement, logs: WorkerLogs, job: Job, job_id: str) -> int:
    store = serve(_LOOPBACK)
    parameters = RendezvousParameters("static", f"{_LOOPBACK}:{store.port}", job_id, 1, 1, rank=0)
    spec = worker_spec(options, placement.processes, get_rendezvous_handler(parameters))
    agent = Agent(spec, logs, job, options, _LOOPBACK)
    say(_start_table(options, placement, job_id))
    try:
        result = agent.run()
    except Told:
        logs.stop_showing()
        say(f"{signal.Signals(job.signal or 0).name} received, all processes have ended; exit code {job.status}")
        return job.status
    if not result.is_failed():
        return 0
    return agent.first.status if agent.first is not None else 1


def _environment(placement: Placement) -> dict[str, str]:
    environment = {
        **placement.environment,
        "HAPI_LAUNCHED_BY": "hapirun",
        # The workers are clients of the store that the launcher keeps.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # What the launcher sets for itself is not for a torchrun that a worker may start.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(threads_for(placement.processes))
    return environment


def _start_table(options: Options, placement: Placement, job_id: str) -> str:
    script = f"-m {options.script}" if options.is_module else options.script
    return (
        f"{script} as {placement.processes} process{'es' if placement.processes > 1 else ''} on this host, "
        f"{placement.devices}\n"
        f"  logs  {os.path.join(options.log_dir, 'workerlog.N')}   job  {job_id}"
    )


def _quieten_torch() -> None:
    # What they report at length is reported here, in a few words and with the traceback.
    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.nn.jit"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Signals are ours: torch would install handlers that raise wherever the main thread is.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
