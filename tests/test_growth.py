"""What must not grow: memory with the data, for its order, and with epochs. All world sizes read the same order."""

import gc
import json
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import hapi
import hapi.heap
from hapi.data.order import _MOST_IN_MEMORY, GlobalOrder
from hapi.data.permutation import LazyPermutation
from hapi.heap import Heap
from hapi.predictions import Kept

MANY = 10**8


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 100, 65536, 65537, 200001])
def test_a_lazy_permutation_is_one(length):
    order = LazyPermutation(length, 7 * length)
    numbers = order[slice(0, length)]
    assert torch.equal(numbers.sort().values, torch.arange(length))
    pieces = [order[slice(first, min(first + 999, length))] for first in range(0, length, 999)]
    assert torch.equal(torch.cat(pieces), numbers)
    assert order[slice(3, 3)].shape == (0,)


def test_its_orders_are_spread_evenly_and_differ_by_key():
    numbers = LazyPermutation(200001, 5)[slice(0, 200001)]
    table = torch.histogramdd(torch.stack([numbers.double(), torch.arange(200001.0)], 1), [20, 20]).hist
    expected = 200001 / 400
    # Chi squared over its degrees of freedom: 1 on average, with a deviation of 0.07.
    assert 0.75 < float(((table - expected) ** 2 / expected).sum() / 361) < 1.25
    assert int((LazyPermutation(200001, 6)[slice(0, 200001)] == numbers).sum()) < 10
    short = {tuple(LazyPermutation(4, key)[slice(0, 4)].tolist()) for key in range(500)}
    assert len(short) == 24


@pytest.mark.parametrize("length", [_MOST_IN_MEMORY, MANY])
def test_ranks_share_the_order_of_one(length):
    alone = GlobalOrder(length, 96, 1, 0, shuffle=True, drop_last=False, seed=3)
    ranks = [GlobalOrder(length, 96, 3, rank, shuffle=True, drop_last=False, seed=3) for rank in range(3)]
    for start in (0, 1000):
        ours = next(alone.shares(2, start)).indices
        theirs = [next(order.shares(2, start)).indices for order in ranks]
        assert torch.equal(torch.cat(theirs), ours)
        assert len(set(ours.tolist())) == 96


SCRIPT = f"""
import json
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset
import hapi

class Many(Dataset):
    def __len__(self):
        return {MANY}
    def __getitem__(self, index):
        seen.append(index)
        return torch.ones(4), index % 3

def peak():
    # Not by getrusage, which counts what the process that started this one has held.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024

def fit(data, **options):
    seen.clear()
    net = nn.Linear(4, 3)
    model = hapi.Model(net).prepare("sgd", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    model.fit(data, batch_size=8, num_iters=3, verbose=2, seed=0, **options)
    return list(seen)

seen = []
fit((torch.ones(40, 4), torch.zeros(40, dtype=torch.int64)))
before = peak()
drawn = fit(Many())
print(json.dumps({{"grown": peak() - before, "drawn": drawn, "in turn": fit(Many(), shuffle=False)}}))
"""


def test_a_hundred_million_samples_take_no_memory():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    found = json.loads(done.stdout.splitlines()[-1])
    # 800 MB where the order is a tensor.
    assert found["grown"] < 50
    # The data set is looked at by three samples on several ranks alone.
    assert len(set(found["drawn"])) == 24 and max(found["drawn"]) > MANY // 2
    assert found["in turn"] == list(range(24))


def in_memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def free_in_pieces():
    """Leave 40 MB of holes in the heap, none at its end, and return what keeps it so."""
    # Below the size for which the C library asks the system each time.
    large, small = [], []
    for _ in range(1024):
        large.append(torch.ones(10_000))
        small.append(torch.ones(16))
    return small


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_an_epoch_has_left_free_goes_back_to_the_system():
    heap = Heap()
    kept = [free_in_pieces()]
    before = in_memory()
    heap.end_epoch(True)
    assert before - in_memory() > 30
    # What is needed in each epoch stays: it would only have to be asked for again.
    kept.append(free_in_pieces())
    before = in_memory()
    heap.end_epoch(False)
    heap.end_epoch(False)
    assert abs(before - in_memory()) < 5
    assert len(kept) == 2


class Machine:
    """A time that goes on where it is told to, and a process that grows."""

    def __init__(self, monkeypatch, takes):
        self.now, self.takes = 1000.0, takes
        self.used, self.free = 900.0, 0.0
        self.trimmed = []
        monkeypatch.setattr(hapi.heap, "_trim", lambda: self.trim)
        monkeypatch.setattr(hapi.heap, "_held", lambda: int((self.used + self.free) * 2**20))
        monkeypatch.setattr(hapi.heap.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(hapi.heap, "of_process", Heap())

    def trim(self, keep):
        self.trimmed.append(self.now)
        self.now += self.takes
        self.free = keep


def test_it_takes_a_hundredth_of_the_time_at_most(monkeypatch):
    machine, heap = Machine(monkeypatch, takes=0.25), Heap()
    for epoch in range(100):
        machine.free += 1.0
        heap.end_epoch(epoch == 0)
        machine.now += 1.0
    # Each 25 seconds, and once at first.
    assert machine.trimmed == [1000.0, 1025.25, 1050.5, 1075.75]


# Megabytes: what an epoch takes and lets go; how much more of that each does; how much more of it stays in use.
@pytest.mark.parametrize(
    "takes, more, kept, epochs",
    [
        (20.0, 0.0, 0.0, [0]),
        (20.0, 0.0, 1.0, [0, *range(2, 100, 2)]),
        (20.0, 0.01, 0.0, [0, *range(27, 100)]),
        (20.0, 0.0, 0.1, [0, *range(4, 100, 4)]),
    ],
)
def test_it_is_done_where_the_process_has_grown(takes, more, kept, epochs, monkeypatch):
    machine, heap, done = Machine(monkeypatch, takes=0.0), Heap(), []
    for epoch in range(100):
        machine.used += kept
        machine.free = max(machine.free, takes + more * epoch)
        before = len(machine.trimmed)
        heap.end_epoch(epoch == 0)
        done += [epoch] * (len(machine.trimmed) - before)
    assert done == epochs


def test_it_is_done_after_the_first_epoch_of_each_fit(monkeypatch):
    machine = Machine(monkeypatch, takes=0.0)
    handed, epochs = [], []

    class Ends(hapi.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            machine.free += 1.0
            handed.append(len(machine.trimmed))

        def on_epoch_end(self, epoch, logs=None):
            epochs.append(epoch)

    network = nn.Linear(4, 3)
    model = hapi.Model(network).prepare("sgd", nn.CrossEntropyLoss())
    data = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)
    for _ in range(2):
        model.fit(data, epochs=4, batch_size=2, verbose=0, callbacks=[Ends()])
    # The second epoch shows what one needs; the third takes more.
    assert handed == [0, 1, 1, 2, 2, 3, 3, 4]
    assert epochs == list(range(8))


def test_many_short_fits_do_not_each_begin_by_paying(monkeypatch):
    machine = Machine(monkeypatch, takes=1000.0)
    network = nn.Linear(4, 3)
    model = hapi.Model(network).prepare("sgd", nn.CrossEntropyLoss())
    data = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)
    for _ in range(3):
        model.fit(data, epochs=1, batch_size=2, verbose=0)
    assert machine.trimmed == [1000.0]


class Without:
    """A C library that has no such function."""

    def __init__(self, name):
        assert name is None


def refused(name):
    raise PermissionError("no dlopen")


@pytest.mark.parametrize("library", [Without, refused])
def test_without_the_c_library_s_function_nothing_is_done(library, monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", library)
    assert hapi.heap._trim.__wrapped__() is None


def test_elsewhere_and_where_the_user_has_said_what_is_kept_nothing_is_done(monkeypatch):
    looked_up = hapi.heap._trim.__wrapped__
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert looked_up() is None
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    assert (looked_up() is None) == (platform.libc_ver()[0] != "glibc")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert looked_up() is None
    monkeypatch.undo()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert looked_up() is None


def test_no_tensor_of_a_step_lives_on_in_later_ones():
    alive = {}

    def count(*_):
        if (step := len(alive)) in (300, 330):
            gc.collect()
            alive[step] = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
        else:
            alive[step] = 0

    network = nn.Linear(8192, 3)
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(count)
    model = hapi.Model(network).prepare("sgd", loss, hapi.metrics.Accuracy())
    # So large that one batch is read at a time.
    data = torch.ones(1, 8192).expand(340 * 32, 8192), torch.zeros(340 * 32, dtype=torch.int64)
    model.fit(data, batch_size=32, verbose=0)
    assert alive[300] == alive[330] > 0


def test_small_outputs_of_a_prediction_lie_together():
    kept, batches = Kept(), [torch.rand(4, 3) for _ in range(100)]
    held = [kept(batch) for batch in batches]
    assert all(map(torch.equal, held, batches))
    assert len({each.untyped_storage().data_ptr() for each in held}) < 10
    large = [torch.rand(300, 300) for _ in range(3)]
    assert [kept(batch).data_ptr() for batch in large] == [batch.data_ptr() for batch in large], "these are not copied"
    others = torch.rand(2, 3), torch.arange(6).reshape(2, 3), torch.ones(2, 3, requires_grad=True), torch.rand(0, 3)
    for batch in (*others, *(other for other in others for _ in range(3)), torch.tensor(1.0), torch.tensor(2.0)):
        assert torch.equal(kept(batch), batch)
    with warnings.catch_warnings():
        # It calls itself a prototype.
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2)])
    sparse = torch.eye(2).to_sparse()
    assert [kept(odd) is odd for odd in (nested, nested, sparse, sparse)] == [True] * 4
    pair = kept((others[0], {"a": others[1]}))
    assert pair[0] is others[0] and pair[1]["a"] is others[1]
