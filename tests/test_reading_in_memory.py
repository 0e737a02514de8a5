"""Data in memory: several small batches are read at once, and a step gets exactly what it would get by itself."""

import weakref
import zlib

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import hapi
from hapi.data import sameness
from hapi.data.feeds import Start
from hapi.data.in_memory import SourceFeed
from hapi.data.order import GlobalOrder
from hapi.data.sources import Columns
from hapi.datasets import FashionMNIST
from hapi.metrics import classification

CPU = torch.device("cpu")


class Counted(Columns):
    """Columns that count how often they are read."""

    fetches = 0

    def fetch_batch(self, indices):
        self.fetches += 1
        return super().fetch_batch(indices)


def order_of(length, batch, ranks=1, rank=0, shuffle=True, even=True):
    return GlobalOrder(length, batch * ranks, ranks, rank, shuffle=shuffle, drop_last=False, seed=5, even=even)


@pytest.mark.parametrize(("length", "width", "batch"), [(1000, 16, 32), (1000, 3, 7), (33, 16, 32), (70, 5000, 16)])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("ranks", "even"), [(1, True), (3, True), (3, False)])
def test_each_step_gets_its_own_rows_wherever_an_epoch_starts(length, width, batch, shuffle, ranks, even):
    columns = torch.arange(length * width, dtype=torch.float32).reshape(length, width), torch.arange(length)
    for rank in range(ranks):
        order = order_of(length, batch, ranks, rank, shuffle, even)
        shares = list(order.shares(3))
        feed = SourceFeed(Columns(columns), order, CPU)
        for step in (0, len(shares) // 2):
            pieces = list(feed.pieces(3, Start(step, step * order.global_batch)))
            assert len(pieces) == len(shares) - step
            for number, (piece, share) in enumerate(zip(pieces, shares[step:], strict=True), step):
                rows = torch.tensor(share.listed(), dtype=torch.int64)
                assert (piece.size, piece.total, piece.position) == (len(rows), share.total, number * ranks + rank)
                if piece.size:
                    x, y = feed.place(piece.batch)
                    assert torch.equal(x, columns[0][rows])
                    assert torch.equal(y, rows)
                    # What is computed may depend on it in its last bits, so it must not on where an epoch starts.
                    assert x.data_ptr() % 64 == y.data_ptr() % 64 == 0
                else:
                    assert piece.batch is None


def test_small_batches_are_read_several_at_a_time_and_large_ones_alone():
    small = Counted((torch.zeros(4096, 16), torch.zeros(4096, dtype=torch.int64)))
    assert len(list(SourceFeed(small, order_of(4096, 32), CPU).pieces(0))) == 128
    assert small.fetches == 1 + 4
    large = Counted(torch.zeros(64, 20000))
    assert len(list(SourceFeed(large, order_of(64, 8), CPU).pieces(0))) == 8
    assert large.fetches == 8


class CountedImages(FashionMNIST):
    """Images whose batches are counted as they are read and as they are transformed."""

    fetches = finishes = 0

    def fetch_batch(self, indices):
        self.fetches += 1
        return super().fetch_batch(indices)

    def finish_batch(self, batch):
        self.finishes += 1
        return super().finish_batch(batch)


@pytest.mark.parametrize(("shuffle", "ranks"), [(True, 1), (False, 1), (False, 2)])
def test_rows_that_need_no_copy_are_read_for_many_batches_and_transformed_for_few(shuffle, ranks):
    data = CountedImages(mode="test", sample=True)
    data.data, data.targets = data.data.repeat(40, 1, 1, 1)[:9600], data.targets.repeat(40)[:9600]
    order = order_of(9600, 192, ranks, 0, shuffle, even=False)
    given = list(SourceFeed(data, order, CPU).pieces(0))
    # 192 images are more numbers than half of what is handled at once.
    assert data.finishes == len(given) == 50 // ranks
    # Two ranks take turns: what each reads does not lie side by side.
    assert data.fetches == (1 + 2 if not shuffle and ranks == 1 else 50 // ranks)
    rows = [torch.tensor(share.listed()) for share in order.shares(0)]
    for own, piece in zip(rows, given, strict=True):
        assert torch.equal(piece.batch[0], data.data[own] / 255)
        assert torch.equal(piece.batch[1], data.targets[own])


class Adding(nn.Module):
    """Adds a parameter to what it is given in place, as a table of positions may be added."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(4))
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        x += self.position
        return self.layer(x)


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_a_batch_through_which_a_gradient_has_flown_is_apart_from_the_next_one(form):
    torch.manual_seed(0)
    x, y = torch.rand(128, 4), torch.randint(3, (128,))
    network, by_hand = Adding(), Adding()
    by_hand.load_state_dict(network.state_dict())
    model = hapi.Model(network, **({} if form == "tuple" else {"inputs": ["x"], "labels": ["y"]}))
    model.prepare(torch.optim.SGD(network.parameters(), lr=0.1), nn.CrossEntropyLoss())
    model.fit((x, y) if form == "tuple" else {"x": x, "y": y}, epochs=1, batch_size=16, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for rows, labels in zip(x.split(16), y.split(16), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(rows.clone()), labels).backward()
        optimizer.step()
    for ours, theirs in zip(network.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 3))

    def forward(self, x):
        return torch.sparse.mm(x, self.weight)


@pytest.mark.parametrize("batch_size", [5, 16])
def test_sparse_columns_are_read_a_batch_at_a_time(batch_size):
    torch.manual_seed(0)
    dense, y = torch.rand(50, 16).mul(2).sub(1).relu(), torch.randint(3, (50,))
    histories = []
    for x, network in ((dense.to_sparse(), Sparse()), (dense, Sparse())):
        if x is dense:
            network.forward = lambda rows, network=network: rows @ network.weight
        model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.1), nn.CrossEntropyLoss())
        data = TensorDataset(x, y)
        histories.append(model.fit(data, Subset(data, range(40)), epochs=2, batch_size=batch_size, seed=0, verbose=0))
    for name, values in histories[0].history.items():
        assert values == pytest.approx(histories[1].history[name], rel=1e-6)


class Nested(Dataset):
    """A data set of the user's own that gives whole batches: a pair of columns, and nothing as label."""

    batched, is_random = True, False

    def __init__(self, form):
        self.form, self.rows = form, torch.arange(400.0).reshape(100, 4)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.fetch_batch([index])

    def fetch_batch(self, indices):
        rows = self.rows[torch.as_tensor(list(indices))]
        return self.form(rows, rows + 1), None

    def finish_batch(self, batch):
        return batch


@pytest.mark.parametrize("form", [lambda a, b: {"a": a, "b": b}, lambda a, b: (a, b)])
def test_batches_that_are_read_together_have_the_form_of_one(form):
    class Summing(nn.Module):
        def forward(self, pair):
            a, b = pair.values() if isinstance(pair, dict) else pair
            return a + b

    data = Nested(form)
    given = hapi.Model(Summing(), inputs=1, labels=1).predict(data, batch_size=16, stack_outputs=True, verbose=0)
    assert torch.equal(given, data.rows * 2 + 1)


class Watched(Columns):
    """Columns that look whether the batch before is still there when the next one is read."""

    def __init__(self, columns):
        super().__init__(columns)
        self.last, self.still_there = lambda: None, []

    def fetch_batch(self, indices):
        self.still_there.append(self.last() is not None)
        x, y = super().fetch_batch(indices)
        self.last = weakref.ref(x)
        return x, y


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_batch_is_let_go_before_the_next_one_is_read(call, monkeypatch):
    # What it is read into is then still in the processor's cache.
    data = Watched((torch.zeros(40, 20000), torch.zeros(40, dtype=torch.int64)))
    monkeypatch.setattr("hapi.data.make.as_batch_source", lambda *_: data)
    model = hapi.Model(nn.Linear(20000, 2)).prepare("sgd", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    getattr(model, call)(torch.zeros(40, 1), batch_size=8, verbose=0)
    assert data.still_there == [False] * 5


def columns_of_any_layout():
    images = torch.randn(60, 5, 5, 3).permute(0, 3, 1, 2)
    table = torch.randn(16, 60).T
    return {"channels last": images, "column by column": table, "every second": torch.randn(120, 8)[::2]}


@pytest.mark.parametrize("layout", columns_of_any_layout())
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_lie_one_after_the_other_in_whatever_layout_the_column_is(layout, shuffle):
    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.strides = nn.Parameter(torch.zeros(())), set()

        def forward(self, x):
            self.strides.add(x.stride())
            # As networks do it.
            return x.view(len(x), -1).sum(1, keepdim=True) * self.weight

    column, network = columns_of_any_layout()[layout], Seen()
    model = hapi.Model(network).prepare("sgd", nn.MSELoss())
    data = (column, torch.zeros(60, 1))
    model.fit(data, batch_size=16, shuffle=shuffle, verbose=0)
    model.evaluate(data, batch_size=16, verbose=0)
    model.predict(column, batch_size=16, verbose=0)
    assert network.strides == {column.contiguous().stride()}


def test_sparse_columns_are_predicted_in_their_order():
    class Dense(nn.Module):
        def forward(self, x):
            return x.to_dense()

    rows = torch.rand(50, 6).mul(2).sub(1).relu()
    assert torch.equal(hapi.Model(Dense()).predict(rows.to_sparse(), batch_size=16, verbose=0), rows)


def test_an_output_that_is_a_part_of_its_input_holds_nothing_else():
    class First(nn.Module):
        def forward(self, x):
            return x[:, :1]

    outputs = hapi.Model(First()).predict(torch.rand(64, 100), batch_size=2, stack_outputs=False, verbose=0)
    assert [output.untyped_storage().nbytes() for output in outputs] == [8] * 32


def test_what_is_drawn_for_a_batch_is_drawn_in_its_step():
    from torchvision.transforms import Compose, RandomCrop, ToTensor

    data = FashionMNIST(mode="test", sample=True, transform=Compose([RandomCrop(28, padding=4), ToTensor()]))
    feed = SourceFeed(data, order_of(len(data), 32), CPU)
    given = []
    for piece in feed.pieces(0):
        torch.manual_seed(int(piece.position))
        given.append(feed.place(piece.batch)[0])
    indices = [torch.tensor(share.listed()) for share in order_of(len(data), 32).shares(0)]
    for number, (rows, images) in enumerate(zip(indices, given, strict=True)):
        torch.manual_seed(number)
        assert torch.equal(data.finish_batch(data.fetch_batch(rows))[0], images)


class Spoiling(nn.Module):
    """Writes into what it is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.mul_(0).add_(1))


def spoiling_loss(outputs, labels):
    labels.fill_(0)
    return nn.functional.cross_entropy(outputs, labels)


def test_what_is_written_into_a_batch_does_not_reach_the_data():
    x, y = torch.rand(100, 4), torch.randint(1, 3, (100,))
    kept = x.clone(), y.clone()
    network = Spoiling()
    model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.1), spoiling_loss)
    model.fit((x, y), eval_data=(x, y), epochs=1, batch_size=16, shuffle=False, verbose=0)
    model.evaluate((x, y), batch_size=16, verbose=0)
    model.predict((x, y), batch_size=16)
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])


@pytest.mark.parametrize(("ignored", "holes"), [(-100, False), (2, False), (None, False), (-100, True), (None, True)])
def test_labels_that_are_left_out_are_looked_for_only_where_there_may_be_some(ignored, holes, monkeypatch):
    looked = []
    is_counted = classification.is_counted
    monkeypatch.setattr(classification, "is_counted", lambda *args: looked.append(1) or is_counted(*args))
    torch.manual_seed(0)
    x, y = torch.rand(100, 4), torch.randint(0, 3, (100,))
    if holes:
        y[::7] = -100
    network = nn.Linear(4, 3)
    metrics = hapi.metrics.Accuracy(ignore_index=ignored)
    model = hapi.Model(network).prepare(loss=nn.CrossEntropyLoss(), metrics=metrics)
    logs = model.evaluate((x, y), batch_size=16, verbose=0)
    counted = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
    right = network(x).argmax(1).eq(y) & counted
    assert logs["acc"] == int(right.sum()) / int(counted.sum())
    assert bool(looked) == (ignored is not None and (holes or ignored == 2))
    # A metric by itself knows nothing of the data.
    metrics.update(network(x).detach(), y)
    assert metrics.compute() == logs["acc"]


def test_a_read_only_map_of_a_file_is_not_copied(tmp_path, recwarn):
    whole = numpy.random.default_rng(0).random((50, 4), dtype="float32")
    numpy.save(tmp_path / "rows.npy", whole)
    mapped = numpy.load(tmp_path / "rows.npy", mmap_mode="r")
    stored = Columns((mapped, numpy.arange(50.0))).columns
    assert stored[0].data_ptr() == mapped.__array_interface__["data"][0]
    assert torch.equal(stored[0], torch.from_numpy(whole)) and stored[1].dtype == torch.float32
    # A batch is a copy, which may be written to; what cannot be taken as it is is copied as ever.
    Columns(mapped).fetch_batch(range(8)).zero_()
    assert numpy.array_equal(mapped, whole)
    assert torch.equal(Columns(mapped[::-1]).columns, torch.from_numpy(whole[::-1].copy()))
    assert Columns(mapped.astype("float64")).columns.dtype == torch.float32
    assert not recwarn.list


def test_checksums_are_taken_piece_by_piece(monkeypatch):
    for tensor in (torch.rand(50, 4), torch.rand(4, 50).T, torch.rand(3, 0), torch.rand(0, 3), torch.rand(())):
        whole = sameness._checksum(tensor)
        monkeypatch.setattr(sameness, "_PIECE_BYTES", 100)
        assert sameness._checksum(tensor) == whole == zlib.crc32(tensor.contiguous().numpy().tobytes())
        monkeypatch.undo()
