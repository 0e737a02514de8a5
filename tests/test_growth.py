"""What must not grow: memory with the data, for its order, and with epochs. All world sizes read the same order."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hapi
import hapi.heap
from hapi.data.order import _MOST_IN_MEMORY, GlobalOrder
from hapi.data.permutation import LazyPermutation
from hapi.heap import Heap

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
import json, resource
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

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
    heap = Heap(steps=100)
    kept = free_in_pieces()
    before = in_memory()
    heap.end_epoch(149)
    assert abs(in_memory() - before) < 1
    heap.end_epoch(150)
    assert before - in_memory() > 30
    assert len(kept) == 1024


@pytest.mark.parametrize(("per_epoch", "after"), [(60, [1, 2, 3, 4]), (20, [3]), (50, [1, 2, 3, 4])])
def test_it_goes_back_between_epochs_and_not_after_each_short_one(per_epoch, after, monkeypatch):
    handed, epochs = [], []
    monkeypatch.setattr(hapi.heap, "_trim", lambda: lambda keep: handed.append(len(epochs)))

    class Ends(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            epochs.append(epoch)

    network = nn.Linear(4, 3)
    model = hapi.Model(network).prepare("sgd", nn.CrossEntropyLoss())
    data = torch.ones(2 * per_epoch, 4), torch.zeros(2 * per_epoch, dtype=torch.int64)
    model.fit(data, epochs=4, batch_size=2, verbose=0, callbacks=[Ends()])
    assert handed == after
    assert len(epochs) == 4


def test_without_the_c_library_s_function_nothing_is_done(monkeypatch):
    hapi.heap._trim.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert hapi.heap._trim()(0) == 0
    hapi.heap._trim.cache_clear()
