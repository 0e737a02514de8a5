"""What is read from local files, and what is refused."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from made_files import (
    PIXELS,
    cifar_batch,
    cifar_names,
    idx,
    idx_files,
    packed,
    python2_array,
    python2_dict,
    python2_list,
    write,
)

from hapi.datasets import CIFAR10, CIFAR100, MNIST, FashionMNIST, store
from hapi.datasets.cifar import _BatchFile

UNPUBLISHED = "ignore:.*byte for byte"
made = pytest.mark.filterwarnings(UNPUBLISHED)
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


class TinyCifar10(CIFAR10):
    """CIFAR-10 of 6 training and 4 test images."""

    _files: ClassVar = {
        "data_batch_1": _BatchFile("train", 4, ""),
        "data_batch_2": _BatchFile("train", 2, ""),
        "test_batch": _BatchFile("test", 4, ""),
    }


@pytest.fixture
def tiny_cifar(tmp_path: Path) -> Path:
    files = {
        "data_batch_1": cifar_batch(4, seed=1),
        "data_batch_2": cifar_batch(2, seed=2),
        "test_batch": cifar_batch(4, seed=3),
        "batches.meta": cifar_names(),
    }
    write(tmp_path / "cifar-10-batches-py", files)
    return tmp_path


def mnist(root: Path, mode: str = "train") -> MNIST:
    return MNIST(root, mode=mode, download=False)


@made
def test_idx_files_become_images_and_labels(tmp_path: Path) -> None:
    files = idx_files(12)
    write(tmp_path / "MNIST" / "raw", files)
    data = mnist(tmp_path)
    assert data.data.shape == (12, 1, 28, 28)
    assert data.data.dtype == torch.uint8
    assert data.data.is_contiguous()
    assert data.data.numpy().tobytes() == files[IMAGES][16:]
    assert data.targets.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert data.targets.dtype == torch.int64
    assert len(mnist(tmp_path, "test")) == 6
    assert repr(data) == f"MNIST(mode='train', 12 samples, root={str(tmp_path)!r})"


@made
def test_packed_idx_files_are_read_where_the_unpacked_ones_are_missing_or_broken(tmp_path: Path) -> None:
    files = idx_files(12)
    raw = write(tmp_path / "MNIST" / "raw", {f"{name}.gz": packed(text) for name, text in files.items()})
    data = mnist(tmp_path)
    assert data.data.numpy().tobytes() == files[IMAGES][16:]
    (raw / IMAGES).write_bytes(files[IMAGES][:500])
    assert torch.equal(mnist(tmp_path).data, data.data)


FAULTS = {
    "cut": (lambda text: text[:500], "is cut short"),
    "cut within the header": (lambda text: text[:9], "not even a header"),
    "empty": (lambda text: b"", "not even a header"),
    "too long": (lambda text: text + b"\0", "goes on behind"),
    "wrong magic": (lambda text: b"\0\0\x0d\x03" + text[4:], "begins with 0x00000d03 instead of 0x00000803"),
    "a web page": (lambda text: b"<html>not found</html>", "begins with"),
    "another shape": (
        lambda text: text[:8] + struct.pack(">2I", 32, 32) + text[16:],
        r"shape \(12, 32, 32\)",
    ),
    "no images": (lambda text: text[:4] + struct.pack(">3I", 0, 28, 28), r"shape \(0, 28, 28\)"),
    "a header that lies": (
        lambda text: text[:4] + struct.pack(">3I", 2**32 - 1, 28, 28) + text[16:],
        "is cut short",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("form", ["raw", "gz"])
def test_broken_idx_files_are_named_with_fault_and_cure(tmp_path: Path, fault: str, form: str) -> None:
    damage, reason = FAULTS[fault]
    files = idx_files(12)
    broken = damage(files.pop(IMAGES))
    raw = write(tmp_path / "MNIST" / "raw", files)
    (raw / (IMAGES if form == "raw" else f"{IMAGES}.gz")).write_bytes(broken if form == "raw" else packed(broken))
    with pytest.raises(RuntimeError, match=f"{IMAGES} .*{reason}.*Pass download=True, or put .*{IMAGES}"):
        mnist(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 40, -20, -1])
def test_a_cut_packed_file_is_refused(tmp_path: Path, size: int) -> None:
    files = idx_files(12)
    whole = packed(files.pop(IMAGES))
    raw = write(tmp_path / "MNIST" / "raw", files)
    (raw / f"{IMAGES}.gz").write_bytes(whole[:size])
    with pytest.raises(RuntimeError, match=f"{IMAGES} .*(cannot be unpacked|is cut short)"):
        mnist(tmp_path)


def test_labels_out_of_range_and_counts_that_differ_are_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "MNIST" / "raw", idx_files(12))
    (raw / LABELS).write_bytes(idx(torch.tensor([0] * 11 + [10], dtype=torch.uint8)))
    with pytest.raises(RuntimeError, match=f"{LABELS} .holds the label 10, outside 0..9"):
        mnist(tmp_path)
    (raw / LABELS).write_bytes(idx(torch.zeros(11, dtype=torch.uint8)))
    with pytest.raises(RuntimeError, match="holds 12 images, but there are 11 labels"):
        mnist(tmp_path)


def test_all_missing_files_are_named_with_the_folder_and_their_origin(tmp_path: Path) -> None:
    import torchvision

    with pytest.raises(RuntimeError) as caught:
        mnist(tmp_path)
    message = str(caught.value)
    assert f"{IMAGES} (is missing), {LABELS} (is missing)" in message
    assert f"t10k-labels-idx1-ubyte into {tmp_path / 'MNIST' / 'raw'}" in message
    assert f"{torchvision.datasets.MNIST.mirrors[0]}{IMAGES}.gz" in message
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_not_the_published_ones_are_used_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_warned", set())
    folder = write(tmp_path / "FashionMNIST" / "raw", idx_files(12))
    with pytest.warns(UserWarning, match="byte for byte") as caught:
        FashionMNIST(tmp_path, download=False)
        FashionMNIST(tmp_path, mode="test", download=False)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert str(folder) in message
    assert "\n" not in message
    assert caught[0].filename == __file__


def test_the_published_files_raise_no_warning(data_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_warned", set())
    for kind in (MNIST, FashionMNIST):
        for mode, size in (("train", 60_000), ("test", 10_000)):
            assert len(kind(data_home, mode=mode, download=False)) == size


def test_published_checksums_are_those_of_torchvision() -> None:
    import torchvision

    for ours in (CIFAR10, CIFAR100):
        theirs = getattr(torchvision.datasets, ours.__name__)
        assert {name: batch.md5 for name, batch in ours._files.items() if batch.mode == "train"} == dict(
            theirs.train_list
        )
        assert {name: batch.md5 for name, batch in ours._files.items() if batch.mode == "test"} == dict(
            theirs.test_list
        )
        assert (ours._folder, ours._meta, ours._names_key) == (
            theirs.base_folder,
            theirs.meta["filename"],
            theirs.meta["key"],
        )
    for ours in (MNIST, FashionMNIST):
        theirs = getattr(torchvision.datasets, ours.__name__)
        assert [f"{name}.gz" for name in ours._md5] == [name for name, _ in theirs.resources]
        assert list(ours._classes) == theirs.classes


@made
def test_cifar_batches_become_images_and_labels(tiny_cifar: Path) -> None:
    data = TinyCifar10(tiny_cifar, download=False)
    assert data.data.shape == (6, 3, 32, 32)
    assert data.data.is_contiguous()
    expected = cifar_batch(4, seed=1), cifar_batch(2, seed=2)
    pixels = data.data.numpy().tobytes()
    assert pixels[: 4 * PIXELS] in expected[0]
    assert pixels[4 * PIXELS :] in expected[1]
    assert data.targets.tolist() == [0, 1, 2, 3, 0, 1]
    assert data.targets.dtype == torch.int64
    assert data.classes == [f"class{index}" for index in range(10)]
    assert len(TinyCifar10(tiny_cifar, mode="test", download=False)) == 4


@made
def test_cifar_100_reads_fine_labels_from_a_file_of_full_size(tmp_path: Path) -> None:
    files = {
        "test": cifar_batch(10_000, key="fine_labels", classes=100),
        "meta": cifar_names("fine_label_names", 100),
    }
    write(tmp_path / "cifar-100-python", files)
    data = CIFAR100(tmp_path, mode="test", download=False)
    assert data.data.shape == (10_000, 3, 32, 32)
    assert data.targets[:250].tolist() == [index % 100 for index in range(250)]
    assert len(data.classes) == 100


@made
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batches_that_todays_numpy_wrote_are_read_or_refused_but_never_misread(tiny_cifar: Path, protocol: int) -> None:
    values = np.arange(4 * PIXELS, dtype=np.uint8).reshape(4, PIXELS)
    path = tiny_cifar / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(pickle.dumps({"data": values, "labels": [3, 2, 1, 0]}, protocol))
    if protocol == 2:  # Bytes go through a function of the codecs there.
        with pytest.raises(RuntimeError, match=r"_codecs\.encode is not allowed"):
            TinyCifar10(tiny_cifar, mode="test", download=False)
        return
    data = TinyCifar10(tiny_cifar, mode="test", download=False)
    assert data.data.numpy().tobytes() == values.tobytes()
    assert data.targets.tolist() == [3, 2, 1, 0]


class Malicious:
    """Makes a folder when it is unpickled without care."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("place", ["alone", "in the dict", "in an object array"])
def test_code_in_a_batch_is_refused_and_not_run(tiny_cifar: Path, protocol: int, place: str) -> None:
    target = tiny_cifar / "run"
    bait = Malicious(target)
    content = {
        "alone": bait,
        "in the dict": {"data": b"\0" * 4 * PIXELS, "labels": bait},
        "in an object array": {"data": np.array([bait], dtype=object), "pad": b"\0" * 4 * PIXELS},
    }[place]
    text = pickle.dumps(content, protocol)
    # In protocols 0 and 1 the padding is spelled out, and the size alone would refuse it.
    text += b"\0" * max(0, 4 * PIXELS - len(text))
    path = tiny_cifar / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(text)
    with pytest.raises(RuntimeError, match=r"test_batch .*(is not allowed|bytes, where 4 images)"):
        TinyCifar10(tiny_cifar, mode="test", download=False)
    assert not target.exists()
    pickle.loads(text)
    assert target.exists(), "the bait is no bait"


BAD_BATCHES = {
    "another shape": ({"data": python2_array(b"\0" * 4 * PIXELS, (2, 2 * PIXELS))}, r"shape \(2, 6144\)"),
    "fewer bytes than the shape": (
        {
            "data": python2_array(b"\0" * 3 * PIXELS, (4, PIXELS)),
            "pad": python2_array(b"\0" * PIXELS, (1, 1)),
        },
        "'data' of shape",
    ),
    "floats": ({"data": python2_array(b"\0" * 4 * PIXELS, (4, PIXELS), code="f4")}, "no array of bytes"),
    "no array": ({"pad": python2_array(b"\0" * 4 * PIXELS, (4, PIXELS))}, "no array of bytes"),
    "an array made without state": (
        {"data": b"cnumpy\nndarray\n)\x81", "pad": python2_array(b"\0" * 4 * PIXELS, (4, PIXELS))},
        "no array of bytes",
    ),
    "no labels": ({"data": python2_array(b"\0" * 4 * PIXELS, (4, PIXELS))}, "no list of 4 labels"),
    "few labels": (
        {"data": python2_array(b"\0" * 4 * PIXELS, (4, PIXELS)), "labels": python2_list([0, 1])},
        "no list of 4 labels",
    ),
    "label 10": (
        {"data": python2_array(b"\0" * 4 * PIXELS, (4, PIXELS)), "labels": python2_list([0, 1, 2, 10])},
        r"labels outside 0\.\.9",
    ),
    "negative label": (
        {"data": python2_array(b"\0" * 4 * PIXELS, (4, PIXELS)), "labels": python2_list([0, 1, 2, -1])},
        r"labels outside 0\.\.9",
    ),
    "names as labels": (
        {
            "data": python2_array(b"\0" * 4 * PIXELS, (4, PIXELS)),
            "labels": python2_list(["0", "1", "2", "3"]),
        },
        r"labels outside 0\.\.9",
    ),
}


@pytest.mark.parametrize("fault", BAD_BATCHES)
def test_a_batch_of_another_structure_is_refused(tiny_cifar: Path, fault: str) -> None:
    entries, reason = BAD_BATCHES[fault]
    (tiny_cifar / "cifar-10-batches-py" / "test_batch").write_bytes(python2_dict(entries))
    with pytest.raises(RuntimeError, match=f"test_batch .*{reason}"):
        TinyCifar10(tiny_cifar, mode="test", download=False)


def test_a_cut_batch_is_refused_at_every_length(tiny_cifar: Path) -> None:
    path = tiny_cifar / "cifar-10-batches-py" / "test_batch"
    whole = path.read_bytes()
    for size in (0, 1, 100, 4 * PIXELS - 1, 4 * PIXELS, 4 * PIXELS + 100, len(whole) - 20, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RuntimeError, match=r"test_batch .*(bytes, where 4 images|cannot be unpickled)"):
            TinyCifar10(tiny_cifar, mode="test", download=False)


def test_a_batch_of_another_size_is_refused_before_it_is_read(tiny_cifar: Path) -> None:
    path = tiny_cifar / "cifar-10-batches-py" / "test_batch"
    for content in (pickle.dumps({}), path.read_bytes() + b"\0" * 100_000):
        path.write_bytes(content)
        with pytest.raises(RuntimeError, match=f"test_batch .has {len(content)} bytes, where 4 images take 12288"):
            TinyCifar10(tiny_cifar, mode="test", download=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (cifar_names(classes=9), "no list of 10 names"),
        (python2_dict({"label_names": python2_list(list(range(10)))}), "something else than names"),
        (pickle.dumps([1, 2]), "holds a list instead of a dict"),
        (b"\0" * 100_000, "has 100000 bytes"),
        (cifar_names()[:-3], "cannot be unpickled"),
    ],
)
def test_a_broken_file_of_names_is_refused(tiny_cifar: Path, content: bytes, reason: str) -> None:
    (tiny_cifar / "cifar-10-batches-py" / "batches.meta").write_bytes(content)
    with pytest.raises(RuntimeError, match=rf"batches\.meta .*{reason}"):
        TinyCifar10(tiny_cifar, mode="test", download=False)


def test_all_faults_of_a_data_set_are_named_at_once(tiny_cifar: Path) -> None:
    folder = tiny_cifar / "cifar-10-batches-py"
    (folder / "data_batch_1").write_bytes(b"")
    (folder / "data_batch_2").unlink()
    (folder / "batches.meta").unlink()
    (folder / "batches.meta").mkdir()
    with pytest.raises(RuntimeError, match=r"data_batch_1 .*data_batch_2 \(is missing\), batches\.meta"):
        TinyCifar10(tiny_cifar, download=False)


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, CIFAR10, CIFAR100])
def test_bad_arguments_are_refused_before_anything_is_read(tmp_path: Path, kind: type) -> None:
    with pytest.raises(ValueError, match=r"mode='valid'.*two parts.*Write \w+\(mode=\"train\"\)"):
        kind(tmp_path, mode="valid")
    with pytest.raises(TypeError, match=r"root=3.*cannot name a folder.*leave root out"):
        kind(3)
    with pytest.raises(TypeError, match=r"transform='ToTensor'.*cannot be called.*Pass a function"):
        kind(tmp_path, transform="ToTensor")
    assert list(tmp_path.iterdir()) == []


@made
def test_the_root_is_found_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAPI_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "home" / "MNIST" / "raw", idx_files(12))
    write(tmp_path / "cache" / "hapi" / "MNIST" / "raw", idx_files(14))
    write(tmp_path / ".cache" / "hapi" / "MNIST" / "raw", idx_files(16))
    assert len(MNIST(download=False)) == 12
    monkeypatch.delenv("HAPI_DATA_HOME")
    assert len(MNIST(download=False)) == 14
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(MNIST(download=False)) == 16


def test_a_gzip_bomb_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    header = struct.pack(">4I", 0x0803, 2**31, 28, 28)
    files = idx_files(12)
    del files[IMAGES]
    raw = write(tmp_path / "MNIST" / "raw", files)
    with gzip.open(raw / f"{IMAGES}.gz", "wb") as stream:
        stream.write(header + b"\0" * 1000)
    with pytest.raises(RuntimeError, match=f"{IMAGES} .*header announces 1683627180048"):
        mnist(tmp_path)
