"""The process group under plain names: only it, `objects.py` and `parallel.py` speak to torch.distributed.

Every function has a meaning in one process (rank 0, world size 1, a reduction is the identity), so callers
never ask whether they run alone. Every collective here is called by all ranks or by none.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils.data

from hapi.device import current_device
from hapi.distributed import contents, excepthook
from hapi.distributed.launchers import OWNER, LaunchInfo, detect, owner_mark, placed, told

T = TypeVar("T")

_BROADCAST_BUCKET_BYTES = 25 << 20
_launch: LaunchInfo | None = None
_own: Any = None
_pid: int | None = None
_control: tuple[Any, tuple[Any, bool]] | None = None
_store: Any = None
_timeout: float | None = None
_threads: int | None = None
_has_said = False


def start() -> None:
    """Join the process group that the launcher asks for; nothing to do when alone or when already joined."""
    global _launch, _own, _store, _timeout, _threads
    if is_initialized():
        # The user's own, or Ray's: used as it is, and left to whoever made it.
        _take_the_rank()
        return
    launch = detect()
    if launch is None:
        return
    device = current_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _take_the_rank()
    # Only for a process among others.
    from hapi.distributed import rendezvous

    _timeout = rendezvous.chosen_timeout()
    store = rendezvous.meet(launch, dist.TCPStore)  # type: ignore[attr-defined]  # torch does not list it
    try:
        dist.init_process_group(
            os.environ.get("HAPI_BACKEND") or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=_limit(),
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {launch.rank} of {launch.world_size} ({launch.launcher}) found the others at {launch.address}, but "
            f"they cannot connect to each other: {error}. Set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the "
            "interface between the hosts, and open its ports."
        ) from error
    _launch, _own, _store = launch, dist.group.WORLD, store
    atexit.register(_stop)
    if launch.world_size > 1:
        from hapi.distributed import threads

        _threads = threads.share_out(gather_objects)


def _take_the_rank() -> None:
    """Leave word that this process is the rank which the environment speaks of: its children inherit it all."""
    # Only for a process among others.
    from hapi.distributed import forks

    global _pid
    excepthook.watch()
    forks.watch()
    os.environ[OWNER] = owner_mark()
    _pid = os.getpid()


def _limit() -> datetime.timedelta | None:
    return datetime.timedelta(seconds=_timeout) if _timeout else None


def _stop() -> None:
    global _own, _control, _store
    # After an exception the others are gone or will be: nothing is to be agreed with them any more.
    if excepthook.has_failed() or _pid != os.getpid():
        return
    if is_initialized() and dist.group.WORLD is _own:
        dist.destroy_process_group()
    if not is_initialized():
        # The last references, where the script has destroyed the group too: with them its threads end, now. One that
        # lets go of a tensor while the interpreter is taken down aborts the process.
        _own = _control = _store = None


def _control_group() -> tuple[Any, bool]:
    """A group of our own, on the CPU, for counts, flags and objects; whether ranks compare where they are before each.

    It keeps them apart from DDP's collectives, beside which they would have to be issued in the same order on every
    rank, and off the device, whose whole queue a read would wait for. It is made by the first collective that needs it.
    """
    global _control
    world = dist.group.WORLD
    if _control is None or _control[0] is not world:
        made: Any = dist.new_group(backend="gloo", timeout=_limit())
        # Set on one host, it holds for all: who compares would wait for who does not.
        compares = torch.tensor(int(bool(os.environ.get("HAPI_DEBUG"))))
        dist.all_reduce(compares, op=dist.ReduceOp.MAX, group=made)
        _control = world, (made, bool(compares))
    return _control[1]


def _meeting() -> Any:
    """The control group, for a collective that all ranks begin now."""
    control, compares = _control_group()
    if compares:
        _refuse_strays(control)
    return control


def compares_places() -> bool:
    """Whether ranks compare where they are before each collective: HAPI_DEBUG is set for one. The first call is one."""
    return is_initialized() and _control_group()[1]


def meet() -> None:
    """Called before torch's own collectives: with HAPI_DEBUG set all ranks see that they begin them together.

    Raises:
        RuntimeError: They are in different places.
    """
    if compares_places():
        _refuse_strays(_control_group()[0])


def _refuse_strays(control: Any) -> None:
    """Raise on all ranks unless they have come to the same place; else they would wait, or mix up values."""
    # Whoever called the function of this module that called.
    caller = sys._getframe(3)
    where = f"{sys._getframe(2).f_code.co_name} in {caller.f_globals['__name__']}.{caller.f_code.co_name}"
    from hapi.distributed import objects  # only for who looks for a fault

    ranks = objects.gather(where, control)
    if len(set(ranks)) > 1:
        places = "; ".join(f"rank {rank} to {place}" for rank, place in enumerate(ranks))
        raise RuntimeError(
            f"The ranks have come to different collectives: {places}. Each has to be reached by all ranks alike. Call "
            "fit, evaluate, predict and the like on every rank, not under a condition that holds on some of them."
        )


@contextmanager
def naming_the_lost() -> Iterator[None]:
    """Around a call that all ranks make: where one fails, the others say which and of what.

    Raises:
        RuntimeError: A collective has failed since a rank is gone, or did not come in time.
    """
    global _has_said
    if _has_said:
        from hapi.distributed import lost

        lost.take_back(_store, get_rank())
        _has_said = False
    try:
        yield
    except Exception as error:
        if _store is None or not is_initialized() or get_world_size() == 1:
            raise
        # Only where something has failed.
        from hapi.distributed import lost

        cause = lost.explained(error, _store, get_rank(), get_world_size(), _timeout)
        _has_said = True
        if cause is not None:
            raise cause from error
        lost.leave_word(error, _store, get_rank())
        raise


def is_initialized() -> bool:
    """Whether this process has joined a process group."""
    # What a fork finds in its memory is its parent's.
    return dist.is_available() and dist.is_initialized() and _pid in (None, os.getpid())


class RankReads:
    """Whether anybody has asked for the rank or the world size."""

    was_read = False


_reads = RankReads()


@contextmanager
def watched_rank() -> Iterator[RankReads]:
    """Watch whether the code within asks for its rank, from here or from torch.distributed.

    A data set that does is taken to share itself out.
    """
    global _reads
    reads = RankReads()
    originals = {name: getattr(dist, name) for name in ("get_rank", "get_world_size")}

    def watched(name: str) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            reads.was_read = True
            return originals[name](*args, **kwargs)

        return ask

    outer, _reads = _reads, reads
    for name in originals:
        setattr(dist, name, watched(name))
    try:
        yield reads
    finally:
        _reads = outer
        for name, original in originals.items():
            setattr(dist, name, original)


def get_rank() -> int:
    """This process's number among all processes, from 0."""
    _reads.was_read = True
    return _place()[0]


def was_restarted() -> bool:
    """Whether the launcher started this process in the place of one that ended, within the same run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0


def run_name() -> str | None:
    """What tells this run from others, the same after a launcher's restart; None without a launcher that restarts."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    # torchrun's static meeting calls every run "none": then the launcher's own process tells.
    return f"none:{os.getppid()}" if name == "none" else name


def speaks_for_all() -> bool:
    """Whether this process is the one that writes files and speaks to the terminal."""
    return get_rank() == 0


def get_world_size() -> int:
    """How many processes there are."""
    _reads.was_read = True
    return _place()[1]


def _place() -> tuple[int, int]:
    # A DataLoader's worker stands where its rank does: a dataset may share itself out by these numbers.
    in_worker = torch.utils.data.get_worker_info() is not None
    if is_initialized() or (in_worker and dist.is_available() and dist.is_initialized()):
        return dist.get_rank(), dist.get_world_size()
    launch = placed() if in_worker else detect()
    return (launch.rank, launch.world_size) if launch is not None else (0, 1)


def launch_info() -> LaunchInfo | None:
    """What the launcher has told; beside a process group of the script's own, only if all of it is there."""
    return told() if is_initialized() else detect()


def launcher_name() -> str:
    """The launcher's name, ``"none"`` for a process started by hand."""
    launch = _launch or launch_info()
    if launch is not None:
        return launch.launcher
    return "process group" if is_initialized() else "none"


def shared_out_threads() -> int | None:
    """How many threads this process was given of those of its cores; None: that was left as it was."""
    return _threads


def backend_name() -> str:
    """The backend of the process group, ``"none"`` without one."""
    return str(dist.get_backend()) if is_initialized() else "none"


def barrier() -> None:
    """Wait until every process has come here."""
    if is_initialized():
        dist.barrier(_meeting())


def broadcast_object(value: T) -> T:
    """Rank 0's value on every rank. Plain Python values and common tensors; they are pickled."""
    if not is_initialized():
        return value
    from hapi.distributed import objects  # only for a process among others

    shared: T = objects.broadcast(value, _meeting())
    return shared


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank."""
    if not is_initialized():
        return [value]
    from hapi.distributed import objects  # only for a process among others

    return objects.gather(value, _meeting())


class Pending:
    """What the ranks have begun to put together: it goes round while the caller computes."""

    def __init__(self, values: torch.Tensor, work: Any) -> None:
        self._values, self._work = values, work

    def wait(self) -> list[Any]:
        """The values over all ranks."""
        if self._work is not None:
            self._work.wait()
        values: list[Any] = self._values.tolist()
        return values


def begin_max(values: Sequence[float]) -> Pending:
    """The largest of each value over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_meeting(), async_op=True) if is_initialized() else None
    return Pending(tensor, work)


def begin_sum(value: int) -> Pending:
    """The sum over the ranks of one whole number."""
    tensor = torch.tensor([value], dtype=torch.int64)
    work = dist.all_reduce(tensor, group=_meeting(), async_op=True) if is_initialized() else None
    return Pending(tensor, work)


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors, in place, with rank 0's. Order, shapes and dtypes must agree between the ranks."""
    if not is_initialized():
        return
    meet()
    bucket: list[torch.Tensor] = []
    filled = 0
    with torch.no_grad():
        for given in tensors:
            if not contents.is_plain(given):
                # They are rare: a graph's edges, say.
                contents.write_whole(given, broadcast_object(contents.whole(given)))
                continue
            tensor = contents.lying_once(given)
            if bucket and (tensor.device != bucket[0].device or filled > _BROADCAST_BUCKET_BYTES):
                _broadcast_bucket(bucket)
                bucket, filled = [], 0
            bucket.append(tensor)
            filled += tensor.numel() * tensor.element_size()
        if bucket:
            _broadcast_bucket(bucket)


def gather_rows(rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Every rank's rows, (n_r, ...) of rank r, on every rank.

    Args:
        rows: (n_r, ...) on the CPU; all but the first size, and the dtype, equal on all ranks.
        counts: n_r of each rank.
    """
    if not is_initialized():
        return [rows]
    # As bytes: gloo knows few dtypes, and nothing is computed here.
    longest = max(counts)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    raw = padded.contiguous().reshape(-1).view(torch.uint8)
    gathered = [torch.empty_like(raw) for _ in counts]
    dist.all_gather(gathered, raw, group=_meeting())
    return [piece.view(rows.dtype).reshape(padded.shape)[:count] for piece, count in zip(gathered, counts, strict=True)]


def _broadcast_bucket(bucket: list[torch.Tensor]) -> None:
    pieces = [contents.raw(tensor) for tensor in bucket]
    if len(bucket) == 1 and contents.lies_as_it_is(bucket[0]):
        dist.broadcast(pieces[0], src=0)
        return
    flat = torch.cat(pieces)
    dist.broadcast(flat, src=0)
    for tensor, piece in zip(bucket, torch.split(flat, [len(piece) for piece in pieces]), strict=True):
        contents.write_raw(tensor, piece)
