"""What a step costs the ranks, counted: exchanges between them, values read from the device, tensors kept alive."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closed_form import Ramp, mean_output, prepared, ramp
from ranks import Ranks, same
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import hapi
from hapi import agreement
from hapi.distributed import group

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "scatter", "send", "recv",
)  # fmt: skip


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count gradient exchanges ("gradients"), exchanges of buffers ("buffers") and all other collectives by name.

    The ranks' meetings ("all_reduce MAX") come after steps 1, 3, 7, 15, ... here, whatever time steps take.
    """
    counts: Counter[str] = Counter()

    def count_gradients(state, bucket):
        counts["gradients"] += 1
        # The hook's own call, counted below as well.
        counts["all_reduce async"] -= 1
        return allreduce_hook(dist.group.WORLD, bucket)

    def wrap(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.register_comm_hook(None, count_gradients)

    def sync_buffers(self: Any) -> None:
        counts["buffers"] += 1
        synced(self)

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            kind = "MAX" if kwargs.get("op") == dist.ReduceOp.MAX else "async" if kwargs.get("async_op") else ""
            counts[f"{name} {kind}".strip()] += 1
            return call(*args, **kwargs)

        return wrapped

    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    seconds, agreement._SECONDS = agreement._SECONDS, 1e9
    made, synced = DistributedDataParallel.__init__, DistributedDataParallel._sync_buffers
    DistributedDataParallel.__init__, DistributedDataParallel._sync_buffers = wrap, sync_buffers
    for name, call in originals.items():
        setattr(dist, name, counting(name, call))
    try:
        yield counts
    finally:
        agreement._SECONDS = seconds
        DistributedDataParallel.__init__, DistributedDataParallel._sync_buffers = made, synced
        for name, call in originals.items():
            setattr(dist, name, call)


class Stream(IterableDataset):
    """So many items."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return iter(Ramp(self.n)[number] for number in range(self.n))


def small_net(batchnorm: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4) if batchnorm else nn.Tanh(), nn.Linear(4, 1))


def count_fit(kind: str, steps: int, accumulate: int, batchnorm: bool, counts_losses: bool) -> dict[str, int]:
    """The collectives of a fit of so many steps on two ranks."""
    net = small_net(batchnorm)
    loss: Any = mean_output if not counts_losses else lambda o, _: (o.sum(), len(o))
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.01), loss, hapi.metrics.MeanSquaredError())
    n = 4 * steps
    data, options = {
        "tensors": (ramp(n), {"batch_size": 2}),
        "data set": (Ramp(n), {"batch_size": 2}),
        "loader": (DataLoader(Ramp(n), batch_size=2, shuffle=True), {}),
        "batches": (list(zip(*(column.split(2) for column in ramp(n)), strict=True)), {}),
        "iterable": (Stream(n), {"batch_size": 2}),
    }[kind]
    with counted() as counts:
        model.fit(data, accumulate_grad_batches=accumulate, verbose=0, **options)
    return dict(counts)


def without(counts: dict[str, int], *names: str) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name not in names}


@pytest.mark.parametrize("counts_losses", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", ["tensors", "data set", "loader", "batches"])
def test_an_optimizer_step_costs_one_exchange_of_gradients_and_nothing_else(ranks, kind, accumulate, counts_losses):
    few, many = (same(ranks(2).run(count_fit, kind, steps, accumulate, False, counts_losses)) for steps in (15, 60))
    assert (few["gradients"], many["gradients"]) == (15 // accumulate, 60 // accumulate)
    # The meetings, which come ever more rarely; all else comes once a fit or once an epoch.
    meetings = many["all_reduce MAX"] - few["all_reduce MAX"]
    assert meetings == (60 // accumulate + 1).bit_length() - (15 // accumulate + 1).bit_length()
    assert without(few, "gradients", "all_reduce MAX") == without(many, "gradients", "all_reduce MAX")


def test_an_iterable_costs_one_sum_more_that_nobody_waits_for(ranks):
    few, many = (same(ranks(2).run(count_fit, "iterable", steps, 1, False, False)) for steps in (15, 60))
    assert (few["gradients"], many["gradients"]) == (15, 60)
    assert (few["all_reduce async"], many["all_reduce async"]) == (16, 61)
    rest = ("gradients", "all_reduce async", "all_reduce MAX")
    assert without(few, *rest) == without(many, *rest)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_buffers_are_exchanged_once_an_optimizer_step(ranks, accumulate):
    counts = same(ranks(2).run(count_fit, "tensors", 15, accumulate, True, False))
    assert counts["buffers"] == counts["gradients"] == 15 // accumulate


def count_epochs(epochs: int, *kinds: str) -> dict[str, int]:
    made = {"stopping": lambda: hapi.callbacks.EarlyStopping("loss", patience=99, save_best_model=False, verbose=0)}
    with counted() as counts:
        prepared().fit(ramp(4), batch_size=2, epochs=epochs, callbacks=[made[kind]() for kind in kinds], verbose=0)
    return dict(counts)


def test_an_epoch_costs_one_meeting_for_each_early_stopping(ranks):
    def an_epoch(*kinds: str) -> int:
        few, many = (same(ranks(2).run(count_epochs, epochs, *kinds))["all_reduce MAX"] for epochs in (8, 15))
        return many - few

    assert an_epoch("stopping") - an_epoch() == 7
    assert an_epoch("stopping", "stopping") - an_epoch() == 2 * 7


def count_passes(batches: int) -> list[dict[str, int]]:
    model = prepared(metrics=[hapi.metrics.MeanAbsoluteError(), hapi.metrics.MeanSquaredError()])
    found = []
    for call in (model.evaluate, model.predict):
        for data in (ramp(4 * batches), Ramp(4 * batches), Stream(4 * batches)):
            with counted() as counts:
                call(data, batch_size=2, verbose=0)
            found.append(dict(counts))
    return found


def test_evaluation_and_prediction_meet_at_their_ends_only(ranks):
    few, many = (same(ranks(2).run(count_passes, batches)) for batches in (3, 50))
    assert few == many
    assert all(sum(counts.values()) < 20 for counts in few)


def value_to_exchange(rank: int, size: int) -> dict[str, Any]:
    return {"rank": rank, "text": str(rank) * size, "numbers": torch.full((2,), float(rank))}


def exchange_objects(sizes: list[int]) -> list[int]:
    """Exchange a text of this size a rank, and something besides; how many exchanges that takes, by either function."""
    values = [value_to_exchange(rank, size) for rank, size in enumerate(sizes)]
    taken = []
    for exchange, wanted in (
        (group.gather_objects, values),
        (lambda value: [group.broadcast_object(value)], values[:1]),
    ):
        wanted = copy.deepcopy(wanted)
        with counted() as counts:
            received = exchange(copy.deepcopy(values[group.get_rank()]))
        taken.append(sum(counts.values()))
        for one, other in zip(received, wanted, strict=True):
            assert torch.equal(one.pop("numbers"), other.pop("numbers"))
        assert received == wanted
    return taken


def exchange_objects_around(bytes_in_all: int) -> list[list[int]]:
    """The same of values that, with their length before them, take nearly so many bytes."""
    besides = 8 + len(pickle.dumps(value_to_exchange(0, 1000))) - 1000
    return [exchange_objects([bytes_in_all - besides + more, 1]) for more in range(-3, 4)]


def test_a_small_value_takes_one_exchange_and_a_large_one_two(ranks):
    for sizes, taken in (
        ([0, 0], [1, 1]),
        ([10, 1900], [1, 1]),
        ([5000, 3], [2, 2]),
        ([3, 5000], [2, 1]),
        ([100_000, 4090], [2, 2]),
    ):
        assert same(ranks(2).run(exchange_objects, sizes)) == taken
    assert same(ranks(2).run(exchange_objects_around, 4096)) == [[1, 1]] * 4 + [[2, 2]] * 3


def an_epoch_s_end(epochs: int) -> dict[str, int]:
    model = prepared(metrics=[hapi.metrics.MeanSquaredError()])
    with counted() as counts:
        model.fit(ramp(4), batch_size=2, epochs=epochs, verbose=0)
    return dict(counts)


def test_an_epoch_s_values_take_two_exchanges(ranks):
    few, many = (same(ranks(2).run(an_epoch_s_end, epochs)) for epochs in (8, 12))
    # One step each. Besides, at its end, the ranks ask twice who stops, and may meet within it.
    more = Counter(without(many, "all_reduce MAX")) - Counter(few)
    assert more == {"gradients": 4, "all_gather": 4, "broadcast": 4}
    assert many["all_reduce MAX"] - few["all_reduce MAX"] <= 12


def count_buckets(ours: bool) -> tuple[int, list[float]]:
    """Two steps of a network whose gradients fill two of DDP's buckets; exchanges, and some of the weights."""
    torch.manual_seed(0)
    net = nn.Linear(1, 400_000)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    x, y = ramp(8)
    with counted() as counts:
        if ours:
            hapi.Model(net).prepare(optimizer, mean_output).fit((x, y), batch_size=2, shuffle=False, verbose=0)
        else:
            wrapped = DistributedDataParallel(net)
            for rows in x.split(4):
                optimizer.zero_grad()
                mean_output(wrapped(rows.chunk(2)[group.get_rank()])).backward()
                optimizer.step()
    return counts["gradients"], net.weight[:3, 0].tolist()


def test_a_large_network_s_gradients_travel_in_as_many_pieces_as_plain_ddp_s(ranks):
    exchanges, weights = same(ranks(2).run(count_buckets, True))
    plain_exchanges, plain_weights = same(ranks(2).run(count_buckets, False))
    # Plain DDP lays out its buckets after its first step, in which it has one.
    assert (exchanges, plain_exchanges) == (2 + 2, 1 + 2)
    assert weights == pytest.approx(plain_weights)


def exchanges_begun() -> tuple[int, int]:
    """Exchanges of a backward pass that have begun when it comes to the first layer, and all of them."""
    net = nn.Sequential(nn.Linear(1, 600), *(nn.Linear(600, 600) for _ in range(3)), nn.Linear(600, 1))
    begun: list[int] = []
    net[0].weight.register_hook(lambda _: begun.append(counts["gradients"]))
    model = hapi.Model(net).prepare("sgd", mean_output, ddp_options={"bucket_cap_mb": 1})
    with counted() as counts:
        model.fit(ramp(2), batch_size=1, verbose=0)
    assert len(begun) == 1
    return begun[0], counts["gradients"]


def test_gradients_travel_while_others_are_computed(ranks):
    begun, exchanges = same(ranks(2).run(exchanges_begun))
    # All but the bucket of the first layer.
    assert (begun, exchanges) == (3, 4)


READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")


def count_reads(steps: int) -> int:
    """How often a fit asks for the value of a tensor, as each would wait for a device."""
    model = prepared(metrics=[hapi.metrics.MeanAbsoluteError()])
    reads = [0]

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            reads[0] += 1
            return call(*args, **kwargs)

        return wrapped

    originals = {name: getattr(torch.Tensor, name) for name in READS}
    with counted():
        for name, call in originals.items():
            setattr(torch.Tensor, name, counting(call))
        try:
            model.network.seen = _Nothing()
            model.fit(ramp(4 * steps), batch_size=2, log_freq=1000, verbose=2)
        finally:
            for name, call in originals.items():
                setattr(torch.Tensor, name, call)
    return reads[0]


class _Nothing(list):
    """Keeps nothing: what a test's network notes is not the library's reading."""

    def extend(self, values: Any) -> None:
        """Let go."""


def test_no_step_reads_a_value(ranks):
    few, many = (max(ranks(2).run(count_reads, steps)) for steps in (15, 60))
    # `Line` itself calls tolist once a step; each of the two meetings more reads a few numbers.
    assert many - few <= 45 + 2 * 12


def graphs_alive() -> list[int]:
    """Tensors with a graph behind them that are alive after steps 20 and 100."""
    net = small_net()
    model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters()), mean_output, hapi.metrics.MeanSquaredError())
    found: list[int] = []

    class Look(hapi.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            if step in (20, 100):
                gc.collect()
                tensors = [entry for entry in gc.get_objects() if issubclass(type(entry), torch.Tensor)]
                found.append(sum(tensor.grad_fn is not None for tensor in tensors))

    model.fit(ramp(4 * 101), batch_size=2, callbacks=Look(), verbose=0)
    return found


def test_no_step_leaves_a_graph_behind(ranks):
    for early, late in ranks(2).run(graphs_alive):
        assert late == early


class OnOneRank(hapi.callbacks.Callback):
    """Asks one rank alone for what needs all of them."""

    def __init__(self, rank: int, hook: str, call: str) -> None:
        self.rank, self.hook, self.call = rank, hook, call

    def on_epoch_begin(self, epoch, logs=None):
        self._ask("on_epoch_begin")

    def on_eval_begin(self, logs=None):
        self._ask("on_eval_begin")

    def on_epoch_end(self, epoch, logs=None):
        self._ask("on_epoch_end")

    def _ask(self, hook: str) -> None:
        if (group.get_rank(), hook) == (self.rank, self.hook):
            getattr(self.model, self.call)(ramp(3), verbose=0)


def meet_otherwise(rank: int, hook: str, call: str) -> str:
    try:
        prepared().fit(ramp(4), ramp(2), batch_size=1, callbacks=OnOneRank(rank, hook, call), verbose=0)
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


def regions_of_steps(steps: int, profiles: bool) -> int:
    """How often DDP's region for a profiler is opened in a fit of so many steps."""
    opened: list[str] = []
    region = torch.autograd.profiler.record_function

    class Counted(region):
        def __init__(self, name: str, *args: Any) -> None:
            opened.append(name)
            super().__init__(name, *args)

    torch.autograd.profiler.record_function = Counted
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities) if profiles else nullcontext()
    try:
        with profile:
            prepared().fit(ramp(2 * steps), batch_size=1, verbose=0)
    finally:
        torch.autograd.profiler.record_function = region
    return opened.count("DistributedDataParallel.forward")


def test_ddp_opens_its_region_where_a_profiler_sees_it(ranks):
    assert same(ranks(2).run(regions_of_steps, 3, False)) == 0
    assert same(ranks(2).run(regions_of_steps, 3, True)) == 3


def ask_on_rank_1() -> None:
    os.environ["HAPI_DEBUG"] = "1" if group.get_rank() else ""
    group._control = None


def test_a_debug_mode_names_collectives_that_not_all_ranks_have_come_to():
    pool = Ranks(2, HAPI_DEBUG="1")
    try:
        # All that a run does passes under it.
        for kind in ("tensors", "data set", "loader", "batches", "iterable"):
            assert same(pool.run(count_fit, kind, 3, 1, True, True))["gradients"] == 3
        same(pool.run(count_passes, 3))
        for rank, hook, call in ((0, "on_epoch_end", "evaluate"), (1, "on_epoch_end", "predict"),
                                 (1, "on_epoch_begin", "evaluate"), (0, "on_eval_begin", "evaluate")):  # fmt: skip
            said = same(pool.run(meet_otherwise, rank, hook, call))
            assert "rank 0 to " in said and "rank 1 to " in said
            # The one compares its arguments; where the others are depends on the hook.
            assert f"rank {rank} to gather_objects in hapi.arguments" in said
            if hook == "on_epoch_end":
                assert f"rank {1 - rank} to begin_max in hapi.agreement._ask" in said
            assert "on every rank" in said
        # On a host of several it is asked for on all of them.
        pool.run(ask_on_rank_1)
        said = same(pool.run(meet_otherwise, 0, "on_epoch_end", "evaluate"))
        assert "rank 0 to gather_objects" in said and "rank 1 to begin_max" in said
    finally:
        pool.close()
