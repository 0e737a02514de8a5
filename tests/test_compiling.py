"""compile=True: what is compiled, and which batches are computed uncompiled.

A backend that counts stands in for torch's: what is asked is which shapes are compiled, not how.
"""

from functools import partialmethod
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import hapi
from hapi.data.order import GlobalOrder

FEATURES = 3
generator = torch.Generator().manual_seed(3)
X, Y = torch.randn(20, FEATURES, generator=generator), torch.randn(20, 2, generator=generator)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each graph is for that is compiled."""
    compiled: list[int] = []

    def backend(graph, examples):
        compiled.extend(len(e) for e in examples if isinstance(e, Tensor) and not isinstance(e, nn.Parameter))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    return compiled


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 2))


def prepared(net: nn.Module, kind: type[hapi.Model] = hapi.Model, compile: bool = True, amp: str | None = None):
    return kind(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss(), amp_configs=amp, compile=compile)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("amp", [None, "bf16"])
def test_training_and_evaluation_compile_once_each_over_data_with_a_short_batch(rows, amp, accumulate):
    def run(compile):
        model = prepared(make_net(), compile=compile, amp=amp)
        return model.fit(
            (X, Y), (X[:13], Y[:13]), batch_size=8, epochs=3, seed=0, verbose=0, accumulate_grad_batches=accumulate
        ).history

    compiled = run(True)
    assert rows == [8, 8]
    uncompiled = run(False)
    for name in ("loss", "val_loss"):
        assert compiled[name] == pytest.approx(uncompiled[name], rel=1e-5)


# To build machine code takes half a minute where nothing of it is kept.
@pytest.mark.slow
@pytest.mark.parametrize("amp", [None, "bf16"])
def test_the_machine_code_for_full_batches_and_none_for_the_short_one(amp):
    torch._dynamo.reset()
    histories = []
    for compile in (True, False):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        model = prepared(make_net(), compile=compile, amp=amp)
        histories.append(model.fit((X, Y), (X, Y), batch_size=8, epochs=3, seed=0, verbose=0).history["val_loss"])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == (2 if compile else 0)
    # What is fused is not rounded to 8 bits in between.
    assert histories[0] == pytest.approx(histories[1], rel=1e-5 if amp is None else 1e-2)


def test_evaluate_and_predict_have_batch_sizes_of_their_own(rows):
    net = make_net()
    model = prepared(net)
    loss = model.evaluate((X, Y), batch_size=6, verbose=0)["loss"]
    outputs = model.predict(X, batch_size=7, verbose=0)
    assert rows == [6, 7]
    plain = make_net()(X).detach()
    torch.testing.assert_close(outputs, plain)
    assert loss == pytest.approx(float(nn.functional.mse_loss(plain, Y)))


def test_data_smaller_than_one_batch_is_compiled(rows):
    prepared(make_net()).fit((X[:6], Y[:6]), batch_size=8, epochs=2, verbose=0)
    prepared(make_net()).fit(DataLoader(TensorDataset(X[:5], Y[:5]), batch_size=8), epochs=2, verbose=0)
    assert rows == [6, 5]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


class Lengthless(Sampler):
    def __iter__(self):
        yield from range(20)


def two_views(items):
    x, y = map(torch.stack, zip(*items, strict=True))
    return torch.cat([x, -x]), torch.cat([y, y])


DATA = TensorDataset(X, Y)
KNOWN = {
    "a loader": lambda: DataLoader(DATA, batch_size=8, shuffle=True),
    "a loader of workers": lambda: DataLoader(DATA, batch_size=8, num_workers=1),
    "a batch sampler of torch's": lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(X), 8, False)),
    "a sampler without a length": lambda: DataLoader(DATA, batch_size=8, sampler=Lengthless()),
    "a sampler that shards": lambda: DataLoader(DATA, batch_size=8, sampler=DistributedSampler(DATA, 1, 0)),
    "torchdata's loader": lambda: StatefulDataLoader(DATA, batch_size=8),
    "a stream in a loader": lambda: DataLoader(Stream(), batch_size=8),
}
UNKNOWN = {
    "a list of batches": lambda: list(zip(X.split(8), Y.split(8), strict=True)),
    "batches as they are listed": lambda: DataLoader(DATA, batch_sampler=[range(8), range(8, 16), range(16, 20)]),
}


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        *((make, [8]) for make in KNOWN.values()),
        *((make, [8, 4]) for make in UNKNOWN.values()),
        (lambda: DataLoader(DATA, batch_size=8, collate_fn=two_views), [16]),
        (lambda: DataLoader(DATA, batch_size=8, sampler=DistributedSampler(X, 1, 0), collate_fn=two_views), [16]),
        (lambda: DataLoader(DATA, batch_size=8, sampler=Lengthless(), collate_fn=two_views), [16, 8]),
        (lambda: DataLoader(Stream(), batch_size=8, collate_fn=two_views), [16, 8]),
    ],
    ids=[*KNOWN, *UNKNOWN, "rows of a collate function", "a part of them", "nobody knows how many", "a stream of them"],
)
def test_batches_whose_size_is_known_beforehand(rows, data, expected):
    prepared(make_net()).fit(data(), epochs=2, verbose=0)
    assert rows == expected


def test_an_iterable_data_set_is_cut_by_us(rows):
    prepared(make_net()).fit(Stream(), batch_size=8, epochs=2, verbose=0)
    assert rows == [8]


def test_single_batches_compile_for_each_shape(rows):
    model = prepared(make_net())
    for size in (8, 4, 8):
        model.train_batch(X[:size], Y[:size])
    model.eval_batch(X[:5], Y[:5])
    model.predict_batch(X[:6])
    assert rows == [8, 4, 5, 6]


def test_a_step_that_calls_the_network_with_parts(rows):
    class InHalves(hapi.Model):
        def train_step(self, inputs, labels):
            outputs = torch.cat([self.network(half) for half in inputs[0].chunk(2)])
            return nn.functional.mse_loss(outputs, labels), outputs

    prepared(make_net(), InHalves).fit((X[:18], Y[:18]), batch_size=8, epochs=2, verbose=0)
    assert rows == [4]


def test_what_the_user_has_compiled_is_run_as_the_user_has_compiled_it(rows):
    net = make_net()
    net.compile(dynamic=False)
    prepared(net).fit((X, Y), batch_size=8, epochs=2, verbose=0)
    assert rows == [8, 4]


# Torch's own, of what it looks at when it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_what_else_the_user_has_compiled_is_run_so_beside_it(rows):
    compiled_by_user = []

    def backend(graph, examples):
        compiled_by_user.append(max(len(e) for e in examples if isinstance(e, Tensor)))
        return graph.forward

    loss = torch.compile(lambda outputs, labels: ((outputs - labels) ** 2).mean(), backend=backend, dynamic=False)
    net = make_net()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.1), loss, compile=True)
    model.fit((X, Y), batch_size=8, epochs=2, verbose=0)
    assert rows == [8] and compiled_by_user == [8, 4]


class Checkpointed(nn.Module):
    """Its layer is called again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.net[0], x, use_reentrant=False)
        return self.net[2](self.net[1](hidden))


def test_checkpointed_layers_are_called_again(rows):
    net, plain = Checkpointed(), make_net()
    compiled = prepared(net).fit((X, Y), batch_size=8, epochs=2, seed=0, verbose=0)
    assert rows and set(rows) == {8}
    uncompiled = prepared(plain, compile=False).fit((X, Y), batch_size=8, epochs=2, seed=0, verbose=0)
    assert compiled.history["loss"] == pytest.approx(uncompiled.history["loss"], rel=1e-5)


def test_find_lr_compiles_once(rows):
    hapi.find_lr(prepared(make_net()), (X, Y), batch_size=8, steps=6, max_lr=1e-3)
    assert rows == [8]


class Refusing(nn.Module):
    """Fails on the short batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 4:
            raise LookupError("too few")
        return self.layer(x)


def test_after_an_error_in_a_short_batch_others_are_compiled(rows):
    model = prepared(Refusing())
    with pytest.raises(LookupError, match="too few"):
        model.fit((X, Y), batch_size=8, verbose=0)
    model.evaluate((X, Y), batch_size=10, verbose=0)
    assert rows == [8, 10]


def test_the_first_part_of_a_rank_tells_all_others_of_full_global_batches():
    for length, batch, world in product((1, 2, 5, 12, 23), (1, 2, 5, 8), (1, 2, 3, 4)):
        for even, rank in product((True, False), range(world)):
            order = GlobalOrder(
                length, batch, world, rank, shuffle=False, drop_last=False, seed=0, even=even
            )  # fmt: skip
            shares = list(order.shares(0))
            whole = {len(share.indices) for share in shares if share.total == batch}
            assert whole <= {order.first_size} and len(shares[0].indices) == order.first_size
