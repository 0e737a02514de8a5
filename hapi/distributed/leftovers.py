"""Variables of which no launcher's set is complete: an error where several processes were meant, else a warning."""

from __future__ import annotations

from hapi.distributed.environment import ALONE_HINT, OVERRIDE, Environ, are_not, number

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STARTERS = (("SLURM_NTASKS", "srun python"), ("PET_NNODES", "torchrun"), ("PET_NPROC_PER_NODE", "torchrun"))

# Rank, number of processes, and what else had to be there for a launcher's row to fit.
HALVES = (
    ("RANK", "WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT")),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ()),
    ("PMI_RANK", "PMI_SIZE", ("MPI_LOCALNRANKS",)),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ()),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", ()),
    ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", ("PADDLE_TRAINER_ENDPOINTS",)),
    ("HOROVOD_RANK", "HOROVOD_SIZE", ()),
)


def refuse_half_set(environ: Environ) -> None:
    """Raise where several processes were meant, by a size above 1 or a rank above 0, though no launcher's set is whole.

    Raises:
        RuntimeError: What is there, and what is missing.
    """
    for rank, size, others in HALVES:
        told = [name for name, least in ((size, 2), (rank, 1)) if environ.get(name) and number(environ, name) >= least]
        missing = [name for name in (rank, size, *others) if not environ.get(name)]
        if told and missing:
            raise RuntimeError(
                f"{told[0]}={environ[told[0]]} is set, but {are_not(missing)}: several processes were meant, and this "
                "one cannot find the others. Start the script by `torchrun --nproc-per-node N script.py`, set all of "
                f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or {ALONE_HINT}."
            )


def left_over(environ: Environ) -> str | None:
    """The warning for a process that is alone, though something in its environment speaks of several."""
    if environ.get("WORLD_SIZE") != "1":
        names = [name for name in ("LOCAL_RANK", *RENDEZVOUS) if environ.get(name)]
        if names:
            return (
                f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} set without the rest of RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT: taken as left over, this is one process. For several, start the script "
                f"by `torchrun --nproc-per-node N script.py`; {OVERRIDE}=off silences this."
            )
    for name, starter in _STARTERS:
        if environ.get(name, "1") != "1":
            return (
                f"{name}={environ[name]} is set, but this process was not started by {starter.split()[0]}: it is one "
                f"process. For several, write `{starter} script.py`; {OVERRIDE}=off silences this."
            )
    return None
