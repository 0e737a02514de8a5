"""Each launcher, started for real: one function a launcher, from a `Task` to a `Job`. `LAUNCHERS` lists them all.

job = LAUNCHERS["torchrun"].start(Task(folder, ["script.py"], environment()))
codes = job.wait(60)
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import install
from cluster import Cluster
from namespaces import Hosts

HERE = Path(__file__).parent
_LEFT_OVER = re.compile(
    "RANK|WORLD_SIZE|LOCAL_|MASTER_|GROUP_|ROLE_|(HAPI|TORCHELASTIC|OMPI|PMI|PMIX|SLURM|PADDLE|PET)_"
)


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what a launcher has set in it, one thread a process, and additions."""
    kept = {name: value for name, value in os.environ.items() if name == "HAPI_DATA_HOME" or not _LEFT_OVER.match(name)}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


@dataclass(frozen=True)
class Task:
    """What is to be started.

    Attributes:
        folder: Where it runs, and where its outputs go. Made if it is not there.
        command: The script and its arguments.
        environment: All variables, as of `environment()`.
        processes: How many.
        cluster: For Slurm.
        hosts: For launchers on two hosts.
    """

    folder: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    processes: int = 2
    cluster: Cluster | None = None
    hosts: Hosts | None = None


@dataclass
class Job:
    """A launch that is under way: the processes that were started here, not those which they start in turn.

    Attributes:
        apart: Rank -> the file that holds the output of this rank alone, where the launcher keeps ranks apart.
    """

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    consoles: list[Path] = field(default_factory=list)
    apart: dict[int, Path] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    seconds: float = 0.0
    cleanup: Callable[[], None] = lambda: None

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> Path:
        """Start one of its processes; the file that gets its output, errors included."""
        console = self.folder / f"console{len(self.consoles)}"
        with open(console, "wb") as out:
            self.processes.append(
                subprocess.Popen(
                    list(command),
                    cwd=self.folder,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        self.consoles.append(console)
        return console

    def wait(self, timeout: float) -> list[int]:
        """The exit codes, one for each process that was started here (-s: by signal s)."""
        until = time.monotonic() + timeout
        try:
            codes = [process.wait(max(0.1, until - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended in {timeout:g} s\n{self.text()}") from None
        finally:
            self.end()
        self.seconds = time.time() - self.began
        return codes

    def end(self) -> None:
        """Tell what still runs to end, and see that it does."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.cleanup()

    def text(self) -> str:
        """All that was written to its consoles."""
        return "\n".join(console.read_text(errors="replace") for console in self.consoles)


def _job(task: Task, *launcher: object, more: Mapping[str, str] | None = None) -> Job:
    """One process: the launcher's words, then the script's."""
    task.folder.mkdir(parents=True, exist_ok=True)
    job = Job(task.folder)
    job.run([*map(str, launcher), *task.command], {**task.environment, **(more or {})})
    return job


def _beside_python(name: str, module: str) -> list[str]:
    """A console script of the environment that runs this, else its module."""
    path = Path(sys.executable).with_name(name)
    return [str(path)] if path.exists() else [sys.executable, "-m", module]


# --- one function a launcher -----------------------------------------------------------------------------------------


def python(task: Task) -> Job:
    return _job(task, sys.executable)


def torchrun(task: Task) -> Job:
    return _job(task, *_beside_python("torchrun", "torch.distributed.run"), "--nproc-per-node", task.processes)


def torch_distributed_run(task: Task) -> Job:
    return _job(task, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", task.processes)


def hapirun(task: Task) -> Job:
    command = _beside_python("hapirun", "hapi.distributed.launch")
    job = _job(task, *command, "--nproc_per_node", task.processes)
    job.apart = _logs(task)
    return job


def spawn(task: Task) -> Job:
    return _job(task, sys.executable, HERE / "by_spawn.py", task.processes)


def srun(task: Task) -> Job:
    return _srun(task, "-n", task.processes)


def srun_on_two_nodes(task: Task) -> Job:
    return _srun(task, "-N", 2, "-n", task.processes)


def _srun(task: Task, *options: object) -> Job:
    if task.cluster is None:
        raise ValueError("srun needs a task with a cluster")
    command = (install.find("srun") or "srun", "--quiet", "--kill-on-bad-exit=1", *options, sys.executable)
    return _job(task, *command, more=task.cluster.environment)


def openmpi(task: Task) -> Job:
    # Open MPI refuses root and more processes than cores unless told, and ties each process to one core.
    options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", task.processes)
    return _job(task, install.find("mpirun.openmpi") or "mpirun.openmpi", *options, sys.executable)


def mpich(task: Task) -> Job:
    return _job(task, install.find("mpiexec.mpich") or "mpiexec.mpich", "-n", task.processes, sys.executable)


def paddle(task: Task) -> Job:
    command = (install.python_of("paddle"), "-m", "paddle.distributed.launch")
    # It cannot read an empty list of cards.
    task = replace(task, environment={n: v for n, v in task.environment.items() if n != "CUDA_VISIBLE_DEVICES" or v})
    job = _job(task, *command, "--nproc_per_node", task.processes, "--log_dir", "log")
    job.apart = _logs(task)
    return job


def accelerate(task: Task) -> Job:
    command = (install.python_of("accelerate").with_name("accelerate"), "launch", "--multi_gpu")
    return _job(task, *command, "--num_processes", task.processes, "--main_process_port", free_port())


def ray(task: Task) -> Job:
    # Ray's sockets lie far within its folder, and a socket's path is at most 107 characters long.
    folder = tempfile.mkdtemp(prefix="ray")
    settings = {
        "RAY_FOLDER": folder,
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # It gives way to all other programs, and workers that import torch are then not there within its 60 seconds.
        "RAY_worker_niceness": "0",
        # Else each line that a script prints comes twice.
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
    }
    job = _job(task, install.python_of("ray"), HERE / "by_ray.py", task.processes, more=settings)
    job.cleanup = lambda: shutil.rmtree(folder, ignore_errors=True)
    return job


def by_hand(task: Task) -> Job:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return _two(task, [{**meeting, "LOCAL_RANK": str(rank)} for rank in (0, 1)])


def pytorchjob(task: Task) -> Job:
    """What Kubernetes' operator sets: no local rank; the master's name, here that of this host."""
    meeting = {"MASTER_ADDR": _own_name(), "MASTER_PORT": str(free_port()), "PYTHONUNBUFFERED": "0"}
    return _two(task, [meeting, meeting])


def _own_name() -> str:
    name = socket.gethostname()
    try:
        socket.gethostbyname(name)
    except OSError:
        return "127.0.0.1"  # a host that does not know itself, as containers may be
    return name


def pytorchjob_on_two_hosts(task: Task) -> Job:
    """A pod a host; the master's is told to be at localhost, as old releases of the operator do."""
    if task.hosts is None:
        raise ValueError("two hosts need a task with hosts")
    meeting = {"MASTER_PORT": "23456", "PYTHONUNBUFFERED": "0"}
    return _two(task, [{**meeting, "MASTER_ADDR": name} for name in ("localhost", task.hosts.names[0])])


def _two(task: Task, variables: Sequence[Mapping[str, str]]) -> Job:
    """A process a rank, started here."""
    task.folder.mkdir(parents=True, exist_ok=True)
    job = Job(task.folder)
    for rank, own in enumerate(variables):
        command = [sys.executable, *task.command]
        if task.hosts is not None:
            command = task.hosts.command(rank, command)
        numbers = {"RANK": str(rank), "WORLD_SIZE": str(len(variables))}
        job.apart[rank] = job.run(command, {**task.environment, **numbers, **own})
    return job


def hapirun_on_two_hosts(task: Task) -> Job:
    if task.hosts is None:
        raise ValueError("two hosts need a task with hosts")
    task.folder.mkdir(parents=True, exist_ok=True)
    job = Job(task.folder)
    options = ["--ips", ",".join(task.hosts.addresses), "--nproc_per_node", str(task.processes // 2)]
    command = [*_beside_python("hapirun", "hapi.distributed.launch"), *options, *task.command]
    for number in (0, 1):
        job.run(task.hosts.command(number, command), task.environment)
    job.apart = _logs(task)
    return job


def _logs(task: Task) -> dict[int, Path]:
    return {rank: task.folder / "log" / f"workerlog.{rank}" for rank in range(task.processes)}


def free_port() -> int:
    """A port of this host that nobody serves."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launcher:
    """One way to start a script.

    Attributes:
        start: From a task to a job.
        says: The launcher's name in hapi's start line.
        version: Of what starts the processes.
        needs: Commands and environments of `install`.
        place: Where it runs: "cluster" and "hosts" are fields that its task must have.
        processes: How many there are.
    """

    start: Callable[[Task], Job]
    says: str
    version: Callable[[], str]
    needs: tuple[str, ...] = ()
    place: str = ""
    processes: int = 2


def _package(name: str, environment: str | None = None) -> Callable[[], str]:
    def version() -> str:
        where = install.python_of(environment).parents[1].glob("lib/python*/site-packages") if environment else ()
        found = metadata.distributions(name=name, path=[str(path) for path in where]) if environment else None
        return f"{name} {next(iter(found)).version if found is not None else metadata.version(name)}"

    return version


def _command(name: str, called: str, *arguments: str) -> Callable[[], str]:
    def version() -> str:
        command = [install.find(name) or name, *(arguments or ("--version",))]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        number = re.search(r"\d+\.\d+[\w.]*", said)
        return f"{called} {number[0] if number else '?'}"

    return version


def _python() -> str:
    return f"Python {sys.version.split()[0]}"


def _hapi() -> str:
    text = (HERE.parents[1] / "hapi" / "_version.py").read_text()
    return "hapi " + text.rpartition("=")[2].strip(' "\n')


_SLURM, _TORCH = _command("slurmctld", "Slurm", "-V"), _package("torch")
_SLURM_PARTS = ("srun", "slurmctld", "slurmd", "munged")

LAUNCHERS: dict[str, Launcher] = {
    "python": Launcher(python, "no launcher", _python, processes=1),
    "torchrun": Launcher(torchrun, "torchrun", _TORCH),
    "torch.distributed.run": Launcher(torch_distributed_run, "torchrun", _TORCH),
    "hapirun": Launcher(hapirun, "hapirun", _hapi),
    "spawn": Launcher(spawn, "spawn", _hapi),
    "srun, 1 node": Launcher(srun, "slurm", _SLURM, _SLURM_PARTS, place="cluster"),
    "srun, 2 nodes": Launcher(srun_on_two_nodes, "slurm", _SLURM, _SLURM_PARTS, place="cluster"),
    "Open MPI": Launcher(openmpi, "openmpi", _command("mpirun.openmpi", "Open MPI"), ("mpirun.openmpi",)),
    "MPICH": Launcher(mpich, "hydra", _command("mpiexec.mpich", "MPICH"), ("mpiexec.mpich",)),
    "Paddle": Launcher(paddle, "paddle", _package("paddlepaddle", "paddle"), ("paddle",)),
    "accelerate": Launcher(accelerate, "torchrun", _package("accelerate", "accelerate"), ("accelerate",)),
    "Ray Train": Launcher(ray, "env", _package("ray", "ray"), ("ray",)),
    "by hand": Launcher(by_hand, "env", _python),
    "PyTorchJob": Launcher(pytorchjob, "env", _python),
    "PyTorchJob, 2 hosts": Launcher(pytorchjob_on_two_hosts, "env", _python, ("ip",), place="hosts"),
    "hapirun, 2 hosts": Launcher(hapirun_on_two_hosts, "hapirun", _hapi, ("ip",), place="hosts"),
}
