"""The launcher's environment variables, read into a `LaunchInfo`: one table, without torch.

Each launcher is a row of `_ROWS`; the first whose variables are all there decides. The order matters: torchrun started
by srun or mpirun has both kinds, and the outer ones describe the agents; mpirun inside a Slurm job starts its daemons
by srun, so that Slurm's variables then number the daemons.
"""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from hapi.distributed.environment import (
    ALONE_HINT,
    OVERRIDE,
    Environ,
    Process,
    are_not,
    first_host,
    first_number,
    number,
    task_counts,
)
from hapi.distributed.leftovers import HALVES, RENDEZVOUS, left_over, refuse_half_set

OWNER = "HAPI_OWNER"

_PSEUDO_STEPS = 0xFFFFFFF0  # Slurm's steps from here on are batch scripts and shells, not what srun was given.


@dataclass(frozen=True)
class LaunchInfo:
    """Where a launcher has put this process.

    Attributes:
        launcher: ``"torchrun"``, ``"env"``, ``"openmpi"``, ``"hydra"``, ``"mvapich"``, ``"slurm"``, ``"lsf"``,
            ``"paddle"``, ``"horovod"``, or ``"hapirun"``.
        rank: Number among all processes.
        world_size: How many processes there are.
        local_rank: Number among the processes of this host.
        local_world_size: Processes of this host; the least possible number where the launcher does not say.
        node_rank: Number of this host; counted from the rank where the launcher does not say.
        address: Where rank 0 is found; None where several hosts take part and the environment names none.
        port: The port that rank 0 serves; the same on all ranks where it is derived. None as above.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    address: str | None
    port: int | None


def detect(environ: Environ | None = None, process: Process | None = None) -> LaunchInfo | None:
    """Say which launcher started this process.

    Args:
        environ: The environment to read; by default that of this process.
        process: What else is known of the process; by default this one.

    Returns:
        Rank, world size and the rest, or None for a process that is alone; a warning, once, where the variables
        could make a user expect otherwise.

    Raises:
        RuntimeError: The variables contradict each other, or say that there are several processes, but not which of
            them this is.
        ValueError: HAPI_LAUNCHER names no launcher.
    """
    process = Process() if process is None else process
    launch, remark = decide(environ, process)
    if remark is not None and not process.is_worker and remark not in _warned:
        _warned.add(remark)
        warnings.warn(remark, stacklevel=2)
    return launch


_warned: set[str] = set()


def told(environ: Environ | None = None, process: Process | None = None) -> LaunchInfo | None:
    """As `detect`, where no group is to be joined: of a set of variables that is not whole nothing is said.

    Who makes a process group by hand often sets a few of them.
    """
    return decide(environ, process, joins=False)[0]


def decide(
    environ: Environ | None = None, process: Process | None = None, joins: bool = True
) -> tuple[LaunchInfo | None, str | None]:
    """As `detect`, without the warning: its text is returned instead."""
    environ = os.environ if environ is None else environ
    process = Process() if process is None else process
    forced = environ.get(OVERRIDE, "")
    if forced == "off":
        return None, None
    row = _forced_row(forced, environ) if forced else next((row for row in _ROWS if row.fits(environ)), None)
    if row is None:
        if joins:
            refuse_half_set(environ)
        return None, left_over(environ)
    if _is_inherited(row, environ, process):
        return None, _CHILD
    if not forced and row.name == "slurm" and _in_terminal_shell(environ, process):
        return None, left_over(environ)
    launch = row.read(environ, process)
    _check(launch, row, environ)
    if launch.world_size == 1 and row.name != "torchrun":
        return None, left_over(environ)
    return launch, None


def placed(environ: Environ | None = None) -> LaunchInfo | None:
    """As `detect`, but a child process gets the place of the rank that started it, without a warning.

    For what only wants to know the number, as a dataset does in a worker of a DataLoader; never for joining a group.
    """
    return decide(environ, Process(is_worker=False, pid=_owner(os.environ if environ is None else environ)))[0]


def owner_mark(environ: Environ | None = None, process: Process | None = None) -> str:
    """What the process that takes the rank leaves in HAPI_OWNER: its pid, and which launch it is the rank of.

    A child inherits it, together with the launcher's variables; it has another pid, and is no rank. Ranks that it
    launches in its turn have other variables.
    """
    environ = os.environ if environ is None else environ
    pid = (Process() if process is None else process).pid
    return f"{pid}:{_identity(environ)}"


# --- the table ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """One launcher: the variables that must all be there, rank and world size first, and how they are read."""

    name: str
    needs: tuple[str, ...]
    read: Callable[[Environ, Process], LaunchInfo]
    least_size: int = 1

    def fits(self, environ: Environ) -> bool:
        if not all(environ.get(name) for name in self.needs):
            return False
        return self.least_size == 1 or number(environ, self.needs[1]) >= self.least_size


def _torchrun(environ: Environ, process: Process) -> LaunchInfo:
    return _plain(environ, process, "torchrun")


def _plain(environ: Environ, process: Process, name: str = "env") -> LaunchInfo:
    rank, size, address = number(environ, "RANK"), number(environ, "WORLD_SIZE"), environ["MASTER_ADDR"]
    one_host = address in ("localhost", "127.0.0.1", "::1")
    local_rank = number(environ, "LOCAL_RANK", rank if one_host else 0)
    # LOCAL_SIZE and CROSS_RANK are DeepSpeed's names, NODE_RANK is Azure's and Ray's.
    local_size = first_number(environ, ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), size if one_host else local_rank + 1)
    node = first_number(environ, ("GROUP_RANK", "NODE_RANK", "CROSS_RANK"), max(0, rank - local_rank) // local_size)
    # Our own launchers use the same variables, and leave their name.
    name = environ.get("HAPI_LAUNCHED_BY") or name
    return LaunchInfo(name, rank, size, local_rank, local_size, node, address, number(environ, "MASTER_PORT"))


def _openmpi(environ: Environ, process: Process) -> LaunchInfo:
    namespace = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    # mpirun's own host: in its address (version 4), or in the name of the run, prterun-HOST-PID@1 (version 5).
    own = re.search(r"tcp://([^:,;]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    own = own or re.match(r"prterun-(.+)-\d+@\d+$", namespace or "")
    return _by_names(environ, "openmpi", "OMPI_COMM_WORLD_{}", own and own[1], namespace)


def _hydra(environ: Environ, process: Process) -> LaunchInfo:
    step = _slurm_step(environ)
    launch = _numbered(
        "hydra",
        number(environ, "PMI_RANK"),
        number(environ, "PMI_SIZE"),
        number(environ, "MPI_LOCALRANKID", 0),
        number(environ, "MPI_LOCALNRANKS"),
    )
    nodes = environ.get("SLURM_STEP_NODELIST")
    # The proxy of this host is the parent of all its ranks, and no name is given to the run. On several hosts only
    # Slurm, by which hydra then starts its proxies, gives one.
    seed = f"hydra {process.ancestor('hydra')}" if launch.local_world_size == launch.world_size else step
    return _with_address(launch, environ, first_host(nodes) if nodes else None, seed)


def _mvapich(environ: Environ, process: Process) -> LaunchInfo:
    return _by_names(environ, "mvapich", "MV2_COMM_WORLD_{}", None, f"mvapich {process.ancestor('mpi')}")


def _slurm(environ: Environ, process: Process) -> LaunchInfo:
    node = number(environ, "SLURM_NODEID", 0)
    counts = task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_rank = number(environ, "SLURM_LOCALID", 0)
    launch = LaunchInfo(
        launcher="slurm",
        rank=number(environ, "SLURM_PROCID"),
        world_size=number(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=local_rank,
        local_world_size=counts[node] if node < len(counts) else local_rank + 1,
        node_rank=node,
        address=None,
        port=None,
    )
    nodes = environ.get("SLURM_STEP_NODELIST")
    return _with_address(launch, environ, first_host(nodes) if nodes else None, _slurm_step(environ))


def _lsf(environ: Environ, process: Process) -> LaunchInfo:
    # The hosts stand in a file, LSB_DJOB_RANKFILE; whoever joins the group reads it.
    local_rank = number(environ, "JSM_NAMESPACE_LOCAL_RANK", 0)
    rank, size = number(environ, "JSM_NAMESPACE_RANK"), number(environ, "JSM_NAMESPACE_SIZE")
    launch = LaunchInfo("lsf", rank, size, local_rank, local_rank + 1, 0, None, None)
    return _with_address(launch, environ, None, environ.get("LSB_JOBID"))


def _paddle(environ: Environ, process: Process) -> LaunchInfo:
    launch = _numbered(
        "paddle",
        number(environ, "PADDLE_TRAINER_ID"),
        number(environ, "PADDLE_TRAINERS_NUM"),
        number(environ, "PADDLE_LOCAL_RANK", 0),
        number(environ, "PADDLE_LOCAL_SIZE", number(environ, "PADDLE_LOCAL_RANK", 0) + 1),
    )
    host, _, port = environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].rpartition(":")
    return replace(launch, address=host, port=number({"PADDLE_TRAINER_ENDPOINTS": port}, "PADDLE_TRAINER_ENDPOINTS"))


def _horovod(environ: Environ, process: Process) -> LaunchInfo:
    # The port that Horovod gives is that of its own server; it serves to tell two runs apart.
    seed = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    launch = _by_names(environ, "horovod", "HOROVOD_{}", environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), seed)
    return replace(launch, node_rank=number(environ, "HOROVOD_CROSS_RANK", launch.node_rank))


_ROWS: tuple[_Row, ...] = (
    _Row("torchrun", (*RENDEZVOUS, "TORCHELASTIC_RUN_ID"), _torchrun),
    _Row("env", RENDEZVOUS, _plain, least_size=2),
    _Row("openmpi", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), _openmpi),
    # srun --mpi=pmi2 sets the first two as well.
    _Row("hydra", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"), _hydra),
    _Row("mvapich", ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), _mvapich),
    _Row("slurm", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"), _slurm),
    _Row("lsf", ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"), _lsf),
    _Row("paddle", ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS"), _paddle),
    _Row("horovod", ("HOROVOD_RANK", "HOROVOD_SIZE"), _horovod),
)


def _forced_row(name: str, environ: Environ) -> _Row:
    for row in _ROWS:
        if row.name != name:
            continue
        missing = [needed for needed in row.needs if not environ.get(needed)]
        if missing:
            raise RuntimeError(
                f"{OVERRIDE}={name} is set, but {are_not(missing)}: {name} did not start this process. "
                f"Start it by {name}, or unset {OVERRIDE}."
            )
        return row
    raise ValueError(
        f"{OVERRIDE}={name!r} is set, but no launcher of that name is known. "
        f"Write one of {', '.join(row.name for row in _ROWS)}, or off for one process."
    )


# --- reading variables -------------------------------------------------------------------------------------------


def _numbered(name: str, rank: int, size: int, local_rank: int, local_size: int) -> LaunchInfo:
    return LaunchInfo(name, rank, size, local_rank, local_size, rank // max(1, local_size), None, None)


def _by_names(environ: Environ, name: str, pattern: str, host: str | None, seed: str | None) -> LaunchInfo:
    rank, size, local_rank = (pattern.format(part) for part in ("RANK", "SIZE", "LOCAL_RANK"))
    own = number(environ, local_rank, 0)
    local_size = number(environ, pattern.format("LOCAL_SIZE"), own + 1)
    launch = _numbered(name, number(environ, rank), number(environ, size), own, local_size)
    return _with_address(launch, environ, host, seed)


def _with_address(launch: LaunchInfo, environ: Environ, host: str | None, seed: str | None) -> LaunchInfo:
    """Fill in where rank 0 is: as MASTER_ADDR and MASTER_PORT say, else this host if it is the only one, else `host`.

    The port is drawn from `seed`, which is the same on all ranks of a run and another one in another run.
    """
    one_host = launch.local_world_size == launch.world_size
    drawn = None if seed is None else 20000 + zlib.crc32(seed.encode()) % 10000
    port = number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else drawn
    return replace(launch, address=environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else host), port=port)


def _slurm_step(environ: Environ) -> str | None:
    job = environ.get("SLURM_JOB_ID")
    return f"{job}.{environ.get('SLURM_STEP_ID', '')}" if job else None


# --- contradictions, shells and children -----------------------------------------------------------------------


def _check(launch: LaunchInfo, row: _Row, environ: Environ) -> None:
    rank, size = row.needs[:2]
    if launch.rank >= launch.world_size:
        _contradict(f"{rank}={launch.rank} and {size}={launch.world_size} are set", "ranks run from 0 below the size")
    if launch.local_rank >= launch.local_world_size:
        _contradict(
            f"a local rank of {launch.local_rank} and a local size of {launch.local_world_size} are set ({row.name})",
            "local ranks run from 0 below the local size",
        )
    if launch.local_world_size > launch.world_size:
        _contradict(
            f"{size}={launch.world_size} and a local size of {launch.local_world_size} are set ({row.name})",
            "a host has no more processes than all hosts together",
        )
    if launch.port is not None and not 0 < launch.port < 65536:
        _contradict(f"a port of {launch.port} is set ({row.name})", "ports run from 1 to 65535")


def _contradict(found: str, why: str) -> None:
    raise RuntimeError(
        f"{found}, but {why}: this process has no place among the others. "
        f"Correct the variables, start the script anew by its launcher, or {ALONE_HINT}."
    )


def _in_terminal_shell(environ: Environ, process: Process) -> bool:
    """Whether Slurm's task is a shell at a terminal, in which someone has started this process."""
    if number(environ, "SLURM_STEP_ID") >= _PSEUDO_STEPS:
        return True
    # SLURM_PTY_PORT alone proves nothing: real steps inherit it from the shell that they were started in.
    is_task = environ.get("SLURM_TASK_PID") == str(process.pid)
    return bool(environ.get("SLURM_PTY_PORT")) and not is_task and process.has_terminal


_CHILD = (
    "The launcher's variables were inherited from the process that holds the rank, which started this one: it is one "
    f"process of its own. What shall run on all ranks is started by the launcher; {OVERRIDE}=off silences this."
)

_IDENTITY = (
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "PADDLE_TRAINER_ENDPOINTS",
    *(name for rank, size, _ in HALVES for name in (rank, size)), "SLURM_PROCID",
)  # fmt: skip


def _identity(environ: Environ) -> str:
    return f"{zlib.crc32(repr([environ.get(name) for name in _IDENTITY]).encode()):08x}"


def _is_inherited(row: _Row, environ: Environ, process: Process) -> bool:
    """Whether the rank is that of an ancestor of this process."""
    owner, _, identity = environ.get(OWNER, "").partition(":")
    if owner and identity in ("", _identity(environ)):
        return owner != str(process.pid)
    # Nobody has taken the rank. A child made by multiprocessing takes it only if the rank was set in the child itself.
    return process.is_worker and all(environ.get(name) == process.started_with().get(name) for name in row.needs)


def _owner(environ: Environ) -> int:
    pid = environ.get(OWNER, "").partition(":")[0]
    return int(pid) if pid.isdecimal() else os.getpid()
