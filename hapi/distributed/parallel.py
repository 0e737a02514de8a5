"""How a network is wrapped, and where gradients meet: torch's DistributedDataParallel around network and loss.

DDP wraps a small module that holds the network *and* what computes the loss from it, so that a loss that uses
parameters of its own, or calls methods of the network, is reduced rightly.

DDP waits for a gradient of every parameter. Which ones a batch has reached is seen after its backward pass, by their
gradients; where there are others, a second, tiny pass gives zeros to them, and `Replica.marks` tells the other ranks
which they were. So nothing is searched for, no flag is asked of the user, and a parameter that no rank has reached
keeps no gradient, as in one process: optimizers leave it alone.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hapi.distributed import contents, group

_trains = attrgetter("requires_grad")


class Replica(nn.Module):
    """The network together with the computation of its loss: one forward pass of training.

    Args:
        network: The user's network.
        companions: Modules besides the network that hold parameters or buffers (a loss), or None.
        compute: What the forward pass calls. It gets the forward's arguments and returns any nest of tensors.
    """

    marks: nn.Parameter
    """Zeros, whose gradients travel in the same all-reduce as the others of their dtype, float32 in networks of half
    precision: for each trained parameter the part of the ranks that have reached it, and at last the weight of what was
    summed, for losses that tell it after the forward."""

    def __init__(self, network: nn.Module, companions: nn.Module | None, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.network = network
        self.companions = companions
        self._compute = compute
        first = next((p for p in network.parameters()), None)
        # Sums of weights grow beyond what half precision counts.
        dtype = torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32
        self.marks = nn.Parameter(torch.zeros(0, dtype=dtype, device=first.device if first is not None else None))
        # The ids of parameters of which DDP shall expect sparse gradients.
        self.sparse: set[int] = set()

    def forward(self, *arguments: Any) -> Any:
        """The computation; without arguments, for a rank without samples, nothing."""
        return self._compute(*arguments) if arguments else None

    def own(self) -> list[nn.Parameter]:
        """The parameters of network and companions."""
        return [p for p in self.parameters() if p is not self.marks]


_EXCHANGED = (
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
"""Dtypes that both gloo and NCCL know."""


def left_to_us(module: nn.Module) -> dict[str, torch.Tensor]:
    """What DDP fails on where it gives all ranks rank 0's, by name; `group.broadcast_tensors` does not.

    Dtypes that backends do not know, and tensors that are not each number at a place of its own. What needs a gradient
    is not among them: that has to be reduced, too.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return {name: tensor for name, tensor in [*named, *module.named_buffers()] if not _is_known(tensor)}


def _is_known(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _EXCHANGED and contents.is_plain(tensor) and contents.lying_once(tensor) is tensor


class _FixedBuckets(DistributedDataParallel):
    """DDP whose buckets are laid out at construction, from the last layer to the first.

    DDP itself lays them out anew after its first step. gloo and NCCL add up an element in an order that depends on its
    place in the bucket, so from three ranks on a run that starts in the middle would compute other bits.
    """

    def _build_params_for_reducer(self) -> Any:
        parameters, _ = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        # The marks, which the replica names first, go into the bucket of the first layer: alone they would be an
        # exchange more.
        marks, *others = range(len(parameters))
        order = [*others[:0:-1], marks, *others[:1]]
        return [parameters[index] for index in order], [id(parameters[index]) in self.module.sparse for index in order]

    def forward(self, *arguments: Any) -> Any:
        """DDP's own steps, without the region that it opens for a profiler, unless one runs.

        Opening and closing it takes 1 to 3 % of a small network's step.
        """
        # The first asks for this thread, the second for a profiler of all threads.
        profiled = torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled
        if profiled or self._delay_all_reduce_all_params:
            return super().forward(*arguments)  # type: ignore[no-untyped-call]
        arguments, keywords = self._pre_forward(*arguments)  # type: ignore[no-untyped-call]
        return self._post_forward(self._run_ddp_forward(*arguments, **keywords))  # type: ignore[no-untyped-call]

    def fix_buckets(self) -> None:
        """Do now what DDP would do after its first step, where this build of torch lets us."""
        if hasattr(self.reducer, "_push_all_rebuilt_params"):
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def buckets(self) -> list[list[torch.Tensor]]:
        """The parameters of each bucket, in the order in which they are sent; none where this build does not tell."""
        if not hasattr(self.reducer, "_push_all_rebuilt_params") or getattr(self, "bucket_bytes_cap_list", None):
            return []
        parameters, sparse = self._build_params_for_reducer()
        given: Any = dist
        first = given._DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else self.bucket_bytes_cap
        places = list(range(len(parameters)))
        found, _ = given._compute_bucket_assignment_by_size(parameters, [first, self.bucket_bytes_cap], sparse, places)
        return [[parameters[index] for index in bucket] for bucket in found]


class GradientExchange:
    """Runs a replica's passes so that after the last one of a window its gradients are the mean over the ranks.

    For several processes; `begin` comes first. Then, for each window: `begin_window`, `forward` and `backward` for each
    of its batches, `complete`.

    Args:
        replica: What to run.
        options: Further options of DistributedDataParallel, as `checked_options` gives them, or None.
    """

    def __init__(self, replica: Replica, options: dict[str, Any] | None = None) -> None:
        self.replica = replica
        self._options = options or {}
        self._wrapped: _FixedBuckets | None = None
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Start anew, with the parameters that the network has now. Called on every rank or on none."""
        self._unwrap()
        # Walking the modules takes longer than a small network's step.
        self._own = self.replica.own()
        self._meets = group.compares_places()

    def begin_window(self) -> None:
        """Called before each window, on every rank: a parameter that was frozen or freed needs a new wrap."""
        self._passes, self._marked = 0, False
        if self._meets:
            group.meet()
        layout = list(map(_trains, self._own))
        if self._wrapped is None or layout != self._layout:
            self._unwrap()
            self._wrapped = self._wrap(layout)

    def forward(self, last: bool, *arguments: Any) -> Any:
        """The forward pass of one batch.

        Args:
            last: Whether the window ends with it: only then gradients are exchanged.
            arguments: What `Replica` takes; none: the part of a rank without samples, after which no `backward` comes.
        """
        assert self._wrapped is not None
        self._passes += 1
        if not last:
            with self._wrapped.no_sync():
                return self._wrapped.forward(*arguments)
        # Of a window that was broken off.
        self._marks.grad = None
        # What earlier passes have left tells, once it is the same after the last one, that this one did not reach it.
        self._before = [_Contents.of(p) for p in self._trained] if self._passes > 1 else self._nothing_before
        return self._wrapped.forward(*arguments)

    def backward(self, objective: torch.Tensor, last: bool, weight: torch.Tensor | None) -> None:
        """The backward pass of one batch.

        Args:
            objective: Where it starts, 0-dim.
            last: Whether the window ends with it.
            weight: What this rank's part of the window weighs, 0-dim; None: nobody asks.
        """
        if not last or not self._marks_along:
            torch.autograd.backward(objective)
            return
        # Usually a batch reaches every parameter, and with the marks DDP then has all that it waits for.
        self._marked = True
        torch.autograd.backward([objective, self._marks], [None, self._marked_all(weight)])

    def complete(self, weight: torch.Tensor | None) -> torch.Tensor:
        """Called after the last backward of each window, on every rank: closes what DDP still waits for.

        Args:
            weight: As of `backward`; None too where this rank has had no sample in the window.

        Returns:
            The gradient of `Replica.marks`, the mean over the ranks.
        """
        marks = self._marks
        reached = [parameter.grad is not None for parameter in self._trained]
        everything = all(reached)
        if not (self._marked and everything and self._passes == 1):
            self._close(reached, everything, weight)
        received, marks.grad = marks.grad, None
        assert received is not None
        return received

    def _close(self, reached: list[bool], everything: bool, weight: torch.Tensor | None) -> None:
        marks = self._marks
        pairs = zip(self._trained, self._before, strict=True)
        waiting = [p for p, before in pairs if p.grad is None or (before is not None and before.still_of(p))]
        roots, zeros = list(waiting), [self._zero(p) for p in waiting]
        if not self._marked:
            own = self._marked_all(weight)
            roots, zeros = [marks, *roots], [own if everything else own * own.new_tensor([*reached, True]), *zeros]
        elif not everything and marks.grad is not None:
            # Their bucket is the last one, which is not sent before all others are.
            marks.grad.mul_(marks.new_tensor([*reached, True]))
        if roots:
            torch.autograd.backward(roots, zeros)
        if not everything and marks.grad is not None:
            for parameter, part in zip(self._trained, marks.grad.tolist(), strict=False):
                if part == 0:
                    parameter.grad = None

    def _marked_all(self, weight: torch.Tensor | None) -> torch.Tensor:
        """The gradient of the marks where a batch has reached all parameters."""
        return self._all_reached if weight is None else torch.cat([self._all_reached[:-1], weight.reshape(1)])

    def _wrap(self, layout: list[bool]) -> _FixedBuckets:
        self._layout = layout
        self._trained = [parameter for parameter in self._own if parameter.requires_grad]
        self._nothing_before = [None] * len(self._trained)
        self.replica.sparse, tied = _sparse_and_tied(self.replica)
        self._hooks = [p.register_post_accumulate_grad_hook(_make_dense) for p in tied]  # type: ignore[no-untyped-call]
        self._all_reached = self.replica.marks.new_ones(len(self._trained) + 1)
        self._all_reached[-1] = 0
        # Beside the replica, whose attributes are a module's: to look one up there takes longer.
        self._marks = self.replica.marks = nn.Parameter(torch.zeros_like(self._all_reached))
        # `Stepper.sync` has sent them.
        ignored: Any = list(left_to_us(self.replica))
        self.replica._ddp_params_and_buffers_to_ignore = ignored
        wrapped = _FixedBuckets(self.replica, **{"gradient_as_bucket_view": True, **self._options})
        wrapped.fix_buckets()
        # They are put right in DDP's own memory, where it is the gradient's too, as long as their bucket is not sent.
        # That need not be the last one where each of several dtypes or devices has its own, or where a bucket was full
        # with the marks and one for the first layer has followed.
        last = wrapped.buckets()[-1:]
        lies_last = any(parameter is self._marks for bucket in last for parameter in bucket)
        self._marks_along = lies_last and bool(wrapped.gradient_as_bucket_view)
        return wrapped

    def _unwrap(self) -> None:
        if self._wrapped is not None:
            self._wrapped = None
            for hook in self._hooks:
                hook.remove()
            # The reducer lets go of its hooks on the parameters when it is collected.
            gc.collect()

    def _zero(self, parameter: nn.Parameter) -> torch.Tensor:
        if id(parameter) in self.replica.sparse:
            rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            none = parameter.new_empty((0, *parameter.shape[1:]))
            return torch.sparse_coo_tensor(rows, none, parameter.shape, check_invariants=True)
        return torch.zeros_like(parameter)


class _Contents(NamedTuple):
    """What changes when a backward pass reaches a parameter that has a gradient: the tensor, or what is in it."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Contents | None:
        return None if parameter.grad is None else cls(parameter.grad, parameter.grad._version)

    def still_of(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is self.tensor and self.tensor._version == self.version


def _sparse_and_tied(replica: Replica) -> tuple[set[int], list[nn.Parameter]]:
    """The ids of parameters whose gradients are sparse tensors, and those that would be, had they no other use.

    A weight of an embedding with `sparse=True` that another kind of layer holds too, as the last one of a language
    model, has a dense gradient as soon as a batch has come through both.
    """
    uses: dict[nn.Parameter, set[bool]] = {}
    for module in replica.modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for parameter in module.parameters(recurse=False):
            uses.setdefault(parameter, set()).add(is_sparse)
    sparse = {id(parameter) for parameter, kinds in uses.items() if kinds == {True}}
    return sparse, [parameter for parameter, kinds in uses.items() if len(kinds) == 2 and parameter.requires_grad]


def _make_dense(parameter: torch.Tensor) -> None:
    """Called when a backward pass has reached a parameter, before DDP sees its gradient."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def checked_options(options: dict[str, Any] | None) -> dict[str, Any]:
    """The options of DistributedDataParallel that `prepare` was given.

    Raises:
        TypeError: They are no dict.
        ValueError: One is unknown, or contradicts how hapi uses DDP.
    """
    if options is not None and not isinstance(options, dict):
        raise TypeError(
            f"ddp_options received {options!r:.60}, of type {type(options).__name__}, which names no options of "
            'DistributedDataParallel. Write ddp_options={"bucket_cap_mb": 50}.'
        )
    options = dict(options or {})
    refused = [name for name in ("find_unused_parameters", "static_graph") if options.pop(name, False)]
    if refused:
        raise ValueError(
            f"ddp_options received {', '.join(f'{name}=True' for name in refused)}, which changes how DDP waits for "
            "parameters that a batch does not reach: hapi sees to them by itself, in steps that need it. Leave it out."
        )
    known = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(
            f"ddp_options received {unknown}, which DistributedDataParallel does not know. "
            f"It takes: {', '.join(sorted(known))}."
        )
    return options
