"""torchvision's own data sets are read a batch at a time, and give the very bits of reading them sample by sample."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torchvision
from made_files import idx_files, write
from made_images import AUGMENT, MEAN, STD, v2_float
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from torchvision.datasets import CIFAR10, CIFAR100, KMNIST, MNIST, FashionMNIST
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

import hapi
from hapi.callbacks import Callback
from hapi.data import in_memory, resident
from hapi.data.feeds import DatasetFeed
from hapi.data.make import Request, make_feed
from hapi.data.order import GlobalOrder
from hapi.data.sources import as_batch_source, labels_of

CPU = torch.device("cpu")
COUNT = 90


def gray() -> Any:
    return v1.Compose([v1.ToTensor(), v1.Normalize((0.1307,), (0.3081,))])


def colour() -> Any:
    return v2.Compose([*v2_float(), v2.Normalize(MEAN, STD)])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with made files of all five, which torchvision reads without asking for the published checksums."""
    for number, kind in enumerate((MNIST, FashionMNIST, KMNIST)):
        write(tmp_path / kind.__name__ / "raw", idx_files(COUNT, seed=number))
    for kind, key in ((CIFAR10, "labels"), (CIFAR100, "fine_labels")):
        names = [name for name, _ in kind.train_list + kind.test_list]
        files = {name: _cifar_file(key, seed) for seed, name in enumerate(names)}
        meta = {**kind.meta, "md5": None}
        files[meta["filename"]] = pickle.dumps({meta["key"]: [str(label) for label in range(100)]})
        write(tmp_path / kind.base_folder, files)
        for part in ("train_list", "test_list"):
            monkeypatch.setattr(kind, part, [[name, None] for name, _ in getattr(kind, part)])
        monkeypatch.setattr(kind, "meta", meta)
    return tmp_path


def _cifar_file(key: str, seed: int) -> bytes:
    drawn = numpy.random.default_rng(seed)
    rows = drawn.integers(0, 256, (20, 3072), dtype="uint8")
    return pickle.dumps({"data": rows, key: drawn.integers(0, 10, 20).tolist()})


class AsOwn(Dataset[Any]):
    """A data set of the user's own around another: what is in it nobody can know, so it is read sample by sample."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Seen(nn.Module):
    """A small network with dropout that keeps what it was given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(size, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 100))
        self.given: list[Any] = []

    def forward(self, images: torch.Tensor) -> Any:
        self.given.append((images.detach().clone(), images.dtype, images.stride()))
        return self.layers(images)


def trained(data: Any, *callbacks: Any, evaluated: Any = None, **options: Any) -> tuple[Any, ...]:
    """All that a fit, an evaluation and a prediction give."""
    torch.manual_seed(0)
    network = Seen(data[0][0].numel())
    model = hapi.Model(network).prepare(
        torch.optim.Adam(network.parameters(), lr=0.01), nn.CrossEntropyLoss(), hapi.metrics.Accuracy()
    )
    options = {"epochs": 3, "batch_size": 16, **options}
    history = model.fit(data, evaluated, callbacks=[*callbacks], seed=5, verbose=0, **options)
    test = data if evaluated is None else evaluated
    logs = model.evaluate(test, batch_size=7, verbose=0)
    return history.history, network.state_dict(), logs, model.predict(test, batch_size=32, verbose=0), network.given


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_same([*one.values()], [*other.values()])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for part, others in zip(one, other, strict=True):
            assert_same(part, others)
    else:
        assert one == other


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples read so far, whichever of torchvision's readers was called: by what makes images of PIL's for both."""
    from PIL import Image

    found: list[int] = []
    original = Image.fromarray

    def counted(*args: Any, **options: Any) -> Any:
        found.append(1)
        return original(*args, **options)

    monkeypatch.setattr(Image, "fromarray", counted)
    return found


BATCHED: dict[str, Callable[[Path], Any]] = {
    "MNIST": lambda root: MNIST(root, transform=v1.ToTensor()),
    "MNIST, normalized": lambda root: MNIST(root, transform=gray()),
    "FashionMNIST": lambda root: FashionMNIST(root, train=False, transform=v2.Compose(v2_float())),
    "KMNIST": lambda root: KMNIST(root, transform=gray()),
    "CIFAR10": lambda root: CIFAR10(root, transform=colour()),
    "CIFAR10, v1": lambda root: CIFAR10(root, train=False, transform=v1.Compose([v1.ToTensor()])),
    "CIFAR100": lambda root: CIFAR100(root, transform=colour()),
    "Subset": lambda root: Subset(CIFAR10(root, transform=colour()), [5, -1, 7, 7, *range(30, 70)]),
    "random_split": lambda root: torch.utils.data.random_split(
        MNIST(root, transform=gray()), [60, 30], torch.Generator().manual_seed(1)
    )[0],
    "filtered": lambda root: filtered(MNIST(root, transform=gray())),
    "filtered arrays": lambda root: filtered(CIFAR10(root, transform=colour())),
    "an array of labels": lambda root: changed(CIFAR10(root, transform=colour()), targets=numpy.arange(100) % 10),
    "labels as a list": lambda root: changed(MNIST(root, transform=gray()), targets=[3] * COUNT),
    "labels as bytes": lambda root: changed(MNIST(root, transform=gray()), targets=torch.arange(COUNT).byte()),
    "every second column": lambda root: halved(MNIST(root, transform=gray())),
    "rows of an array": lambda root: changed(
        CIFAR10(root, transform=colour()), data=CIFAR10(root).data.copy()[:, 1:, ::2], targets=[1] * 100
    ),
    "read-only": lambda root: read_only(CIFAR10(root, transform=colour())),
}


def filtered(data: Any) -> Any:
    """Only some classes, as scripts leave out others."""
    kept = numpy.asarray(data.targets) < 6
    data.targets = data.targets[kept] if isinstance(data.targets, torch.Tensor) else list(range(int(kept.sum())))
    data.data = data.data[kept]
    return data


def changed(data: Any, /, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(data, name, value)
    return data


def halved(data: Any) -> Any:
    return changed(data, data=data.data[:, :, ::2])


def read_only(data: Any) -> Any:
    data.data.flags.writeable = False
    return data


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("shuffle", [True, False])
def test_all_that_is_computed_has_the_bits_of_reading_sample_by_sample(
    name: str, shuffle: bool, root: Path, calls: list[int]
) -> None:
    data = BATCHED[name](root)
    expected = trained(AsOwn(data), shuffle=shuffle)
    before = len(calls)
    source = as_batch_source(data, torch.float32)
    assert source is not None
    given = trained(data, shuffle=shuffle)
    assert_same(given, expected)
    # One that `trained` reads, and of each of the four sources two samples and what is looked at in transforms.
    assert len(calls) - before <= 1 + 4 * (2 + 1)
    for images, dtype, strides in given[-1]:
        assert images.is_contiguous() and dtype == torch.float32
        assert strides == torch.empty(images.shape).stride()
    assert len(source) == len(data)
    labels = labels_of(source)
    assert labels is not None and labels.dtype == torch.int64
    assert labels.tolist() == [data[index][1] for index in range(len(data))]


def test_evaluation_within_fit_and_an_odd_batch_of_one_have_the_same_bits(root: Path) -> None:
    train, test = MNIST(root, transform=gray()), MNIST(root, train=False, transform=gray())
    options: dict[str, Any] = {"batch_size": 89, "drop_last": False}
    assert_same(trained(train, evaluated=test, **options), trained(AsOwn(train), evaluated=AsOwn(test), **options))
    single = changed(MNIST(root, transform=gray()), data=train.data[:1], targets=train.targets[:1])
    assert as_batch_source(single) is not None
    assert_same(trained(single), trained(AsOwn(single)))


def test_the_default_dtype_is_followed(root: Path) -> None:
    data = CIFAR10(root, transform=v1.ToTensor())
    torch.set_default_dtype(torch.float64)
    try:
        given = trained(data)
        assert_same(given, trained(AsOwn(data)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert given[-1][0][1] == torch.float64


def test_full_files_have_the_same_bits(data_home: Path) -> None:
    data = MNIST(data_home, train=False, transform=gray())
    source = as_batch_source(data)
    assert source is not None
    rows = torch.arange(0, 10_000, 3)
    theirs = default_collate([data[index] for index in rows.tolist()])
    assert_same(source.finish_batch(source.fetch_batch(rows)), tuple(theirs))


def test_samples_are_read_for_the_look_alone_however_many_epochs(root: Path, calls: list[int]) -> None:
    counts = []
    for epochs in (1, 6):
        data = CIFAR100(root, transform=colour())
        before = len(calls)
        model = hapi.Model(Seen(3072)).prepare("sgd", nn.CrossEntropyLoss())
        model.fit(data, data, epochs=epochs, verbose=0)
        counts.append(len(calls) - before)
    # Two feeds, the first and the last sample each, and one image for the transform.
    assert counts == [2 * 3] * 2


def test_nothing_of_the_images_is_copied_for_it(root: Path) -> None:
    for data in (MNIST(root, transform=gray()), CIFAR10(root, transform=colour())):
        source: Any = as_batch_source(data)
        held = torch.as_tensor(data.data)
        assert source.columns[0].data_ptr() == held.data_ptr()
        before = held.clone()
        batch = source.finish_batch(source.fetch_batch(range(8)))
        for part in (batch[0], batch[1], source.fetch_batch(range(8))[1], *source.fetch_batch(torch.arange(8))):
            part.zero_()
        assert torch.equal(torch.as_tensor(data.data), before)
        assert torch.as_tensor(data.targets).any()


class Sub(MNIST):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return 1 - image, label

    @property
    def raw_folder(self) -> str:
        return str(Path(self.root) / "MNIST" / "raw")


def jittered() -> Any:
    return v1.Compose([v1.ColorJitter(0.5), v1.ToTensor()])


PER_SAMPLE: dict[str, Callable[[Path], Any]] = {
    "random": lambda root: CIFAR10(root, transform=AUGMENT),
    "random, Subset": lambda root: Subset(CIFAR10(root, transform=AUGMENT), range(3, 60)),
    "a random transform that is not known": lambda root: MNIST(root, transform=jittered()),
    "a function": lambda root: MNIST(root, transform=lambda image: v1.F.to_tensor(image).sqrt()),
    "target_transform": lambda root: MNIST(root, transform=gray(), target_transform=lambda label: 9 - label),
    "a subclass": lambda root: Sub(root, transform=gray()),
    "an instance's own reader": lambda root: changed(MNIST(root, transform=gray()), __getitem__=lambda index: 0),
    "an instance's own reader of several": lambda root: with_getitems(MNIST(root, transform=gray())),
    "transforms of its own": lambda root: changed(MNIST(root, transform=gray()), transforms=lambda *pair: pair),
    "a subclass of StandardTransform": lambda root: changed(
        MNIST(root, transform=gray()), transforms=type("Own", (StandardTransform,), {})()
    ),
    "labels of another kind": lambda root: changed(MNIST(root, transform=gray()), targets=torch.arange(COUNT) / 1.0),
    "numbers of numpy's": lambda root: changed(CIFAR10(root, transform=colour()), targets=[*numpy.arange(100)]),
    "more labels than images": lambda root: changed(MNIST(root, transform=gray()), targets=torch.arange(COUNT + 1) % 9),
    "reversed images": lambda root: changed(CIFAR10(root, transform=colour()), data=CIFAR10(root).data[::-1]),
    "gray ones": lambda root: changed(CIFAR10(root, transform=v1.ToTensor()), data=CIFAR10(root).data[..., 0].copy()),
    "images of another class": lambda root: changed(
        MNIST(root, transform=gray()), data=MNIST(root).data.as_subclass(type("Own", (torch.Tensor,), {}))
    ),
}


@pytest.mark.parametrize(
    "targets", [[True, 2] * 50, numpy.arange(100, dtype="int32"), torch.arange(100).int(), [2**70] * 100]
)
def test_labels_that_would_not_be_int64_stay_what_they_are(targets: Any, root: Path) -> None:
    assert as_batch_source(changed(CIFAR10(root, transform=colour()), targets=targets)) is None


def with_getitems(data: Any) -> Any:
    return changed(data, __getitems__=lambda indices: [data[index] for index in indices][::-1])


def as_own(data: Any) -> Any:
    own = AsOwn(data)
    if hasattr(data, "__getitems__") and not isinstance(data, Subset):
        own.__getitems__ = data.__getitems__  # type: ignore[attr-defined]
    return own


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_whatever_else_it_may_do_is_left_to_the_data_set(name: str, root: Path) -> None:
    data = PER_SAMPLE[name](root)
    assert as_batch_source(data) is None
    feed = make_feed(data, Request("train_data", batch_size=8), CPU)
    assert isinstance(feed, DatasetFeed)
    assert_same(trained(data), trained(as_own(data)))


@pytest.mark.parametrize(
    "patched", [(MNIST, "__getitem__"), (MNIST, "__len__"), (v1.ToTensor, "__call__"), (MNIST, "__getitems__")]
)
def test_a_class_that_was_patched_is_read_as_it_says(
    patched: tuple[type, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name = patched
    data = MNIST(root, transform=v1.ToTensor())
    original = getattr(kind, name, None)

    def other(self: Any, *args: Any) -> Any:
        if original is None:
            return [self[index] for index in args[0]][::-1]
        if name == "__len__":
            return 50
        found = original(self, *args)
        return found * 0.5 if name == "__call__" else (found[0] + 1, found[1])

    other.__module__, other.__qualname__ = "torchvision.datasets.mnist", f"MNIST.{name}"
    monkeypatch.setattr(kind, name, other, raising=False)
    assert as_batch_source(data) is None
    own = AsOwn(data)
    if name == "__getitems__":
        own.__getitems__ = data.__getitems__  # type: ignore[attr-defined]
    assert_same(trained(data), trained(own))


def test_a_reader_that_reads_otherwise_is_found_by_two_samples(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a version of torchvision that makes its images in another way.
    original = torchvision.datasets.mnist._Image_fromarray
    monkeypatch.setattr(
        torchvision.datasets.mnist, "_Image_fromarray", lambda *args, **kw: original(*args, **kw).rotate(90)
    )
    data = MNIST(root, transform=gray())
    assert as_batch_source(data) is None
    assert_same(trained(data), trained(AsOwn(data)))


def test_without_a_transform_there_is_nothing_to_train_on_as_before(root: Path) -> None:
    messages = []
    for data in (MNIST(root), AsOwn(MNIST(root))):
        assert as_batch_source(data) is None
        model = hapi.Model(Seen(784)).prepare("sgd", nn.CrossEntropyLoss())
        with pytest.raises(TypeError) as caught:
            model.fit(data, verbose=0)
        messages.append(re.sub("0x[0-9A-F]+", "", str(caught.value)))
    assert messages[0] == messages[1]


def test_empty_data_is_told_of_by_its_own_name(root: Path) -> None:
    data = MNIST(root, transform=gray())
    data.data, data.targets = data.data[:0], data.targets[:0]
    model = hapi.Model(Seen(784)).prepare("sgd", nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"train_data is empty \(MNIST of length 0\)"):
        model.fit(data, verbose=0)
    with pytest.raises(ValueError, match="train_data has 90 samples, fewer than one global batch of 100"):
        model.fit(MNIST(root, transform=gray()), batch_size=100, drop_last=True, verbose=0)


class Changing(Callback):
    """Does something to a data set at the end of an epoch."""

    def __init__(self, epoch: int, change: Callable[[Any], Any], data: Any) -> None:
        self.epoch, self.change, self.data = epoch, change, data

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            self.change(self.data)


def append(data: Any) -> None:
    data.transform.transforms.append(v1.Normalize([0.2], [0.7]))


def replace(data: Any) -> None:
    flipped = data.data.flip(0) if isinstance(data.data, torch.Tensor) else data.data[::-1].copy()
    data.data, data.targets = flipped, [*reversed(list(map(int, data.targets)))]


def write_within(data: Any) -> None:
    data.data[:40] = 255 - data.data[:40]
    data.targets[3] = 7


def double(data: Any) -> None:
    join: Any = torch.cat if isinstance(data.data, torch.Tensor) else numpy.concatenate
    data.data, data.targets = join([data.data, data.data]), [*map(int, data.targets)] * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a step more": append,
    "another transform": lambda data: changed(data, transform=v1.ToTensor()),
    "a random one": lambda data: changed(data, transform=v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()])),
    "one of the user's": lambda data: changed(data, transform=lambda image: v1.F.to_tensor(image).sqrt()),
    "target_transform": lambda data: changed(data, target_transform=lambda label: 9 - label),
    "images and labels": replace,
    "written to": write_within,
    "odd labels": lambda data: changed(data, targets=[numpy.int64(label) for label in data.targets]),
    "longer": double,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", ["MNIST", "CIFAR10", "Subset"])
def test_what_is_changed_between_epochs_is_seen_in_the_next(name: str, kind: str, root: Path) -> None:
    results = []
    for own in (False, True):
        whole = CIFAR10(root, transform=_cut()) if kind == "CIFAR10" else MNIST(root, transform=_cut())
        data: Any = Subset(whole, range(5, 77)) if kind == "Subset" else whole
        back = _cut()
        callbacks = [
            Changing(2, CHANGES[name], whole),
            # And back, so that batches can be made again.
            Changing(3, lambda whole, back=back: changed(whole, transform=back, target_transform=None), whole),
        ]
        assert own or as_batch_source(data) is not None
        results.append(trained(AsOwn(data) if own else data, *callbacks, epochs=5))
    assert_same(*results)


@pytest.mark.parametrize("change", [list, lambda places: [*range(72)], lambda places: torch.tensor(places[::-1])])
@pytest.mark.parametrize("kind", [MNIST, "tensors"])
def test_other_indices_hold_from_the_next_epoch_on(kind: Any, change: Any, root: Path) -> None:
    results = []
    for own in (False, True):
        whole: Any = MNIST(root, transform=_cut())
        if kind == "tensors":
            whole = TensorDataset(*map(torch.stack, zip(*((x, torch.tensor(y)) for x, y in whole), strict=True)))
        data: Any = Subset(whole, list(range(5, 77)))
        callbacks = [Changing(2, lambda data: changed(data, indices=change(data.indices)), data)]
        results.append(trained(AsOwn(data) if own else data, *callbacks, epochs=4))
    assert_same(*results)


def _cut() -> Any:
    return v1.Compose([v1.ToTensor()])


def test_data_that_became_too_short_is_read_to_its_end_and_no_further(root: Path) -> None:
    errors = []
    for wrap in (lambda data: data, AsOwn):
        data = MNIST(root, transform=gray())
        model = hapi.Model(Seen(784)).prepare("sgd", nn.CrossEntropyLoss())
        shorter = Changing(1, lambda data: changed(data, data=data.data[:50], targets=data.targets[:50]), data)
        with pytest.raises(IndexError) as caught:
            model.fit(wrap(data), epochs=3, batch_size=16, shuffle=False, callbacks=[shorter], verbose=0)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_its_own_set_epoch_is_told_once_an_epoch(root: Path) -> None:
    told: list[int] = []
    data: Any = changed(MNIST(root, transform=gray()), set_epoch=told.append)
    for part in (data, Subset(data, range(40))):
        model = hapi.Model(Seen(784)).prepare("sgd", nn.CrossEntropyLoss())
        model.fit(part, epochs=3, verbose=0)
    assert [*dict.fromkeys(told)] == [*range(min(told), max(told) + 1)]
    assert len(told) == 6


def feed_of(data: Any, keep: bool) -> Any:
    source: Any = as_batch_source(data)
    order = GlobalOrder(len(source), 16, 1, 0, shuffle=True, drop_last=False, seed=3)
    feed = in_memory.SourceFeed(source, order, CPU)
    feed._resident = resident.Resident(source, CPU) if keep else None
    return feed


@pytest.mark.parametrize("kind", [MNIST, CIFAR10])
@pytest.mark.parametrize("subset", [False, True])
def test_what_is_kept_on_a_device_follows_what_is_changed(kind: Any, subset: bool, root: Path) -> None:
    data = kind(root, transform=_cut())
    given: Any = Subset(data, range(60, 3, -1)) if subset else data
    kept, plain = feed_of(given, True), feed_of(given, False)
    assert kept.draws == plain.draws == "none"
    changes: list[Any] = [None, None, write_within, append, None, replace, CHANGES["one of the user's"], None]
    for epoch, change in enumerate(changes):
        if change is not None:
            change(data)
        of_each = []
        for feed in (kept, plain):
            of_each.append([feed.place(piece.batch) for piece in feed.pieces(epoch)])
        assert_same(*of_each)
        assert (kept._rows is kept._source) == (epoch in (0, 6, 7))
    assert kept.draws == plain.draws == "all"


def test_only_what_torch_sees_written_to_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_free", lambda device: 1 << 40)
    kept = []
    for data in (MNIST(root, transform=_cut()), CIFAR10(root, transform=_cut())):
        for part in (data, Subset(data, range(9))):
            source: Any = as_batch_source(part)
            kept.append(resident.kept_bytes(source, torch.device("cuda")) is not None)
    # To copy all of it anew for each pass would be as much as to copy its batches.
    assert kept == [True, True, False, False]


def test_what_is_kept_on_a_device_follows_an_array_that_was_written_to(root: Path) -> None:
    data = CIFAR10(root, transform=_cut())
    # Of tensors torch knows when they were written to, of arrays it does not.
    data.targets = torch.tensor(data.targets)
    kept, plain = feed_of(data, True), feed_of(data, False)
    copies = []
    for epoch in range(4):
        assert_same(*([feed.place(piece.batch) for piece in feed.pieces(epoch)] for feed in (kept, plain)))
        copies.append(kept._rows)
        data.data[:] = 255 - data.data
    assert len({*map(id, copies)}) == 4


def test_workers_and_loaders_read_it_as_they_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = MNIST(root, transform=gray())
    assert isinstance(make_feed(data, Request("train_data", num_workers=1), CPU), DatasetFeed)
    assert isinstance(make_feed(data, Request("train_data", num_workers=0), CPU), in_memory.SourceFeed)
    assert_same(trained(data, num_workers=1), trained(data))
    loader = DataLoader(data, batch_size=16)
    read: list[int] = []
    monkeypatch.setattr(MNIST, "__getitem__", _noting(read))
    model = hapi.Model(Seen(784)).prepare("sgd", nn.CrossEntropyLoss())
    model.fit(loader, epochs=2, verbose=0)
    assert len(read) >= 2 * COUNT


def _noting(read: list[int]) -> Any:
    original = MNIST.__getitem__

    def noting(self: Any, index: int) -> Any:
        read.append(index)
        return original(self, index)

    return noting


@pytest.mark.parametrize("indices", [[0.0, 1.0], [True, False]])
def test_indices_that_only_the_data_set_knows_are_left_to_it(indices: list[Any], root: Path) -> None:
    assert as_batch_source(Subset(MNIST(root, transform=gray()), indices)) is None
