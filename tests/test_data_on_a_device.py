"""Small data is kept on the device from its second pass on. The "device" is the CPU here: what is read is the same."""

from contextlib import contextmanager

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Subset
from torchvision.transforms import Compose, RandomCrop, ToTensor

import hapi
from hapi.data import in_memory, pinned, resident, side_stream
from hapi.data.order import GlobalOrder
from hapi.data.sources import as_batch_source, whole_of
from hapi.datasets import FashionMNIST

CPU = torch.device("cpu")
ROWS = torch.arange(300, dtype=torch.float32).reshape(100, 3)
CLASSES = torch.arange(100) % 10


def feed_of(data, keep, shuffle=True):
    source = as_batch_source(data, torch.float32)
    order = GlobalOrder(len(source), 16, 1, 0, shuffle=shuffle, drop_last=False, seed=3)
    feed = in_memory.SourceFeed(source, order, CPU)
    feed._resident = resident.Resident(source, CPU) if keep else None
    return feed


def pinned_feed_of(data, shuffle):
    feed = feed_of(data, False, shuffle)
    feed._pinned = pinned.Pinned(whole_of(feed._source))
    return feed


def batches(feed, epoch):
    given = []
    for piece in feed.pieces(epoch):
        torch.manual_seed(piece.position)
        given.append(feed.place(piece.batch))
    return given


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return len(one) == len(other) and all(map(same, one, other))


def cropped():
    return FashionMNIST(mode="test", sample=True, transform=Compose([RandomCrop(28, padding=4), ToTensor()]))


DATA = [
    lambda: ROWS,
    lambda: (ROWS, CLASSES),
    lambda: {"x": ROWS, "y": CLASSES},
    lambda: Subset(Subset(torch.utils.data.TensorDataset(ROWS, CLASSES), range(50, 0, -1)), range(3, 40)),
    cropped,
    lambda: Subset(cropped(), range(40)),
]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("data", DATA)
def test_what_is_kept_is_read_as_it_would_be(data, shuffle):
    kept, plain = feed_of(data(), True, shuffle), feed_of(data(), False, shuffle)
    for epoch in range(3):
        assert same(batches(kept, epoch), batches(plain, epoch))
        assert (kept._rows is kept._source) == (epoch == 0)


@pytest.fixture
def made(monkeypatch):
    """What is asked for of pinned memory, which only a machine with a card has: in its place, any."""
    shapes = []
    monkeypatch.setattr(
        pinned, "_room", lambda shape, dtype: shapes.append(shape) or torch.full(shape, 77, dtype=dtype)
    )
    return shapes


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("data", [*DATA, lambda: (ROWS.T.contiguous().T, ROWS.to(torch.complex64), CLASSES)])
def test_rows_are_indexed_into_pinned_memory(data, shuffle, made):
    read, plain = pinned_feed_of(data(), shuffle), feed_of(data(), False, shuffle)
    for epoch in range(2):
        assert same(batches(read, epoch), batches(plain, epoch))
    # Nothing was copied there besides.
    assert made and not read._pin


def test_what_cannot_be_indexed_there_is_copied_there(made, monkeypatch):
    copied = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: copied.append(tensor) or tensor)
    data = FashionMNIST(mode="test", sample=True)
    feed = pinned_feed_of(Subset(data, range(40)), False)
    first = batches(feed, 0)
    assert made and not copied
    # A transform of the user's makes the batches.
    data.transform = lambda image: ToTensor()(image)
    made.clear()
    assert same(batches(feed, 1), first)
    assert len(copied) == 2 * len(first) and not made
    copied.clear()
    rows = ROWS.to_sparse(1)
    feed = pinned_feed_of((rows, CLASSES), True)
    assert sum(len(x) for x, _ in batches(feed, 0)) == 100
    assert all(tensor.is_sparse for tensor in copied) and len(copied) == 7
    assert sum(shape[0] for shape in made) == 100


def test_what_was_changed_since_is_copied_anew():
    rows = ROWS.clone()
    feed = feed_of((rows, CLASSES), True)
    for epoch in range(2):
        batches(feed, epoch)
    before = feed._rows
    batches(feed, 2)
    assert feed._rows is before
    rows.mul_(-1)
    changed = torch.cat([x for x, _ in batches(feed, 3)])
    assert torch.equal(changed.sort(0).values, rows.sort(0).values)
    assert feed._rows is not before


def test_a_batch_may_be_written_to():
    feed = feed_of((ROWS.clone(), CLASSES), True, shuffle=False)
    first = [x.clone() for x, _ in batches(feed, 0)]
    for x, _ in batches(feed, 1):
        x.zero_()
    assert same([x for x, _ in batches(feed, 2)], first)


def test_a_transform_that_is_exchanged_is_followed():
    data = FashionMNIST(mode="test", sample=True)
    feed = feed_of(data, True)
    for epoch in range(2):
        batches(feed, epoch)
    data.transform = lambda image: torch.zeros(1)
    assert all(not x.any() and x.shape[1:] == (1,) for x, _ in batches(feed, 2))


def test_only_small_data_is_kept_and_only_where_it_is_wanted(monkeypatch):
    source = as_batch_source((ROWS, CLASSES), None)
    size = ROWS.numel() * 4 + CLASSES.numel() * 8
    device = torch.device("cuda")
    monkeypatch.setattr(resident, "_free", lambda device: 8 * size)
    assert resident.kept_bytes(source, device) == size
    assert resident.kept_bytes(as_batch_source(Subset(cropped(), range(9)), None), device) is None
    monkeypatch.setattr(resident, "_free", lambda device: 8 * size - 1)
    assert resident.kept_bytes(source, device) is None
    monkeypatch.setattr(resident, "_free", lambda device: 1 << 40)
    assert resident.kept_bytes(source, device) == size
    monkeypatch.setattr(resident, "_MOST", size - 1)
    assert resident.kept_bytes(source, device) is None
    monkeypatch.setattr(resident, "_MOST", size)
    monkeypatch.setenv("HAPI_KEEP_DATA", "0")
    assert resident.kept_bytes(source, device) is None
    monkeypatch.setenv("HAPI_KEEP_DATA", "no")
    with pytest.raises(ValueError, match=r"HAPI_KEEP_DATA='no' is set.*Write HAPI_KEEP_DATA=0"):
        resident.kept_bytes(source, device)
    # Where nothing is known of the memory, nothing is kept.
    monkeypatch.undo()
    assert resident.kept_bytes(source, torch.device("mps")) is None


def test_a_fit_has_the_same_bits_and_says_what_is_kept(monkeypatch, capfd):
    def trained():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        model = hapi.Model(network).prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
        data = cropped()
        history = model.fit(data, data, epochs=3, batch_size=32, seed=1)
        return history.history, network.state_dict()

    history, weights = trained()
    assert "kept on the device" not in capfd.readouterr().out
    init, made = in_memory.SourceFeed.__init__, []

    def keeping(self, source, order, device):
        init(self, source, order, device)
        self._resident, self.kept_bytes = resident.Resident(source, device), 2**20
        made.append(self)

    monkeypatch.setattr(in_memory.SourceFeed, "__init__", keeping)
    kept_history, kept_weights = trained()
    assert "1 MB of data kept on the device from the second epoch on (HAPI_KEEP_DATA=0: not)" in capfd.readouterr().out
    assert len(made) == 2 and all(feed._rows is not feed._source for feed in made)
    assert kept_history == history
    assert same(kept_weights, weights)


class FakeCuda:
    """The streams of a card: what is done is told in order, with the stream that it is done on."""

    def __init__(self, monkeypatch):
        self.told, self.current = [], "computing"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("computing", self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        to, record = torch.Tensor.to, lambda tensor, stream: self.told.append((tensor.shape, "used by", stream.name))
        monkeypatch.setattr(torch.Tensor, "record_stream", record)
        monkeypatch.setattr(
            torch.Tensor, "to", lambda *args, **kw: self.told.append((args[0].shape, self.current)) or to(*args, **kw)
        )

    @contextmanager
    def on(self, stream):
        self.current, before = stream.name, self.current
        yield
        self.current = before


class FakeStream:
    def __init__(self, name, cuda):
        self.name, self.cuda = name, cuda

    def wait_stream(self, other):
        self.cuda.told.append((self.name, "waits for", other.name))


def test_copies_go_by_a_stream_of_their_own(monkeypatch):
    # No card is needed to see in which order it would be told; benchmarks/gpu_checks.py looks at one.
    card = torch.device("meta")
    there = torch.zeros(3, device=card)
    side = side_stream.SideStream(card)
    cuda = FakeCuda(monkeypatch)
    batch = {"x": torch.zeros(1), "there": there, "y": (numpy.zeros(2, dtype="float32"), "text")}
    moved = side.move(batch, torch.float32)
    assert moved["x"].device == moved["y"][0].device == card
    assert moved["y"][1] == "text" and moved["there"] is there
    x, y, z = torch.Size([1]), torch.Size([2]), torch.Size([3])
    assert cuda.told == [
        *((x, "side"), (z, "computing"), (y, "side")),
        ("computing", "waits for", "side"),
        *((x, "used by", "computing"), (y, "used by", "computing")),
    ]
    # What is there already, and what torch cannot be told of who uses its memory.
    for tensor in (there, torch.ones(3).to_sparse()):
        cuda.told.clear()
        side.move((tensor,), torch.float32)
        assert cuda.told == [(z, "computing")]
