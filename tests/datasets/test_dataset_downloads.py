"""Downloads from local mirrors, good and bad, by one process and by several at once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torchvision
from local_mirror import (
    ARCHIVES,
    FILES,
    Behaviour,
    Mirror,
    assert_whole,
    cut,
    fails,
    garbage,
    missing,
    resources,
    running,
    silent,
    stalls,
)
from made_files import cifar_batch, cifar_names, packed, tar_gz, write

from hapi.datasets import CIFAR10, MNIST, download, files, store
from hapi.datasets.cifar import _BatchFile

pytestmark = pytest.mark.filterwarnings("ignore:.*byte for byte")

IMAGES = "train-images-idx3-ubyte"


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """A running server; /good/ holds the four archives of a tiny MNIST."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    with running() as server:
        yield server


@pytest.fixture
def published(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make torchvision's table of MNIST name the given folders of the server."""

    def publish(*folders: str) -> None:
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"{mirror.url}{name}/" for name in folders])
        monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources())

    return publish


def test_a_download_brings_both_parts_once(tmp_path: Path, mirror: Mirror, published: Callable[..., None]) -> None:
    published("good")
    root = tmp_path / "not" / "there" / "yet"
    data = MNIST(root)
    assert data.data.numpy().tobytes() == FILES[IMAGES][16:]
    assert len(MNIST(root, mode="test")) == 6
    assert mirror.hits == {f"/good/{name}": 1 for name in ARCHIVES}
    assert_whole(root)


@pytest.mark.parametrize("behaviour", [missing, fails, garbage, cut, silent, stalls])
def test_a_bad_mirror_leads_to_the_next(
    tmp_path: Path,
    mirror: Mirror,
    published: Callable[..., None],
    behaviour: Behaviour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 1.0)
    first, *others = ARCHIVES
    mirror.routes[f"/bad/{first}"] = behaviour
    mirror.routes.update({f"/bad/{name}": ARCHIVES[name] for name in others})
    published("bad", "good")
    begin = time.monotonic()
    assert len(MNIST(tmp_path)) == 12
    assert time.monotonic() - begin < 10
    assert mirror.hits == {f"/good/{first}": 1, **{f"/bad/{name}": 1 for name in ARCHIVES}}
    assert_whole(tmp_path)


def test_an_archive_of_wrong_structure_leads_to_the_next_mirror_whatever_its_checksum(
    tmp_path: Path, mirror: Mirror, published: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = packed(FILES[IMAGES][:-1])
    mirror.routes[f"/bad/{IMAGES}.gz"] = wrong
    published("bad", "good")
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources({**ARCHIVES, f"{IMAGES}.gz": wrong}))
    with pytest.raises(RuntimeError, match=f"/bad/{IMAGES}.gz: is cut short"):
        MNIST(tmp_path)
    assert not (tmp_path / "MNIST").exists()


def test_without_a_good_mirror_the_error_names_files_folder_and_mirrors(
    tmp_path: Path, mirror: Mirror, published: Callable[..., None]
) -> None:
    mirror.routes.update({f"/worse/{name}": garbage for name in ARCHIVES})
    published("bad", "worse")
    with pytest.raises(RuntimeError) as caught:
        MNIST(tmp_path)
    message = str(caught.value)
    assert f"{IMAGES} (is missing)" in message
    assert f"{mirror.url}bad/{IMAGES}.gz: HTTP Error 404" in message
    assert f"{mirror.url}worse/{IMAGES}.gz: sent 26 bytes with md5" in message
    assert f"put {', '.join(FILES)} into {tmp_path / 'MNIST' / 'raw'}" in message
    assert [path.name for path in tmp_path.iterdir()] == [".MNIST.lock"]


def test_without_network_the_error_comes_at_once(
    tmp_path: Path, published: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    published("good")
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    with pytest.raises(RuntimeError, match=r"no mirror gave them.*Connection refused.*Try again where the network"):
        MNIST(tmp_path)


@pytest.mark.parametrize("damage", [lambda text: text[:100], lambda text: b"\1" + text, lambda text: b""])
def test_a_broken_local_file_is_fetched_anew_and_the_others_are_kept(
    tmp_path: Path, mirror: Mirror, published: Callable[..., None], damage: Callable[[bytes], bytes]
) -> None:
    published("good")
    raw = write(tmp_path / "MNIST" / "raw", FILES)
    (raw / IMAGES).write_bytes(damage(FILES[IMAGES]))
    with pytest.raises(RuntimeError, match=f"{IMAGES} .*Pass download=True"):
        MNIST(tmp_path, download=False)
    assert len(MNIST(tmp_path)) == 12
    assert mirror.hits == {f"/good/{IMAGES}.gz": 1}
    assert_whole(tmp_path)


def test_complete_data_is_only_read(
    tmp_path: Path, mirror: Mirror, published: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    published("good")
    raw = write(tmp_path / "MNIST" / "raw", FILES)
    (raw / "t10k-labels-idx1-ubyte").unlink()

    def forbidden(*arguments: Any) -> None:
        raise AssertionError("a root that holds what is read is not to be locked")

    monkeypatch.setattr(store, "host_lock", forbidden)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert len(MNIST(tmp_path)) == 12
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert not mirror.hits


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path, published: Callable[..., None]) -> None:
    published("good")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RuntimeError, match=r"none can be written .*Name a folder that can be written, by root="):
        MNIST(tmp_path / "file" / "below")


def test_without_locks_each_process_works_in_a_folder_of_its_own(
    tmp_path: Path, published: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    published("good")
    monkeypatch.setattr(download, "_locked", lambda descriptor: False)
    other = tmp_path / f".MNIST.{download.socket.gethostname()}.partial-other"
    other.mkdir()
    assert len(MNIST(tmp_path)) == 12
    assert other.exists(), "another process may still be working there"


class TinyCifar10(CIFAR10):
    _files: ClassVar = {"data_batch_1": _BatchFile("train", 4, ""), "test_batch": _BatchFile("test", 2, "")}


def test_an_archive_of_several_files_is_unpacked_by_bare_names(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "cifar-10-batches-py"
    good = {
        f"{folder}/data_batch_1": cifar_batch(4),
        f"../../{folder}/test_batch": cifar_batch(2),
        f"{folder}/batches.meta": cifar_names(),
        "../../outside": b"x",
        f"{folder}/readme.html": b"not wanted",
    }
    archive = tar_gz(good)
    mirror.routes["/cifar.tar.gz"] = archive
    table = torchvision.datasets.CIFAR10
    monkeypatch.setattr(table, "url", f"{mirror.url}cifar.tar.gz")
    monkeypatch.setattr(table, "tgz_md5", hashlib.md5(archive).hexdigest())
    root = tmp_path / "a" / "b"
    kept = write(root / folder, {"test_batch": cifar_batch(2, seed=9)})
    assert len(TinyCifar10(root)) == 4
    assert {path.name for path in kept.iterdir()} == {"data_batch_1", "test_batch", "batches.meta"}
    assert (kept / "test_batch").read_bytes() == cifar_batch(2, seed=9), "a usable file was replaced"
    assert not list(tmp_path.rglob("outside"))
    (kept / "test_batch").write_bytes(b"broken")
    assert len(TinyCifar10(root, mode="test")) == 2
    assert mirror.hits["/cifar.tar.gz"] == 2

    incomplete = tar_gz({f"{folder}/batches.meta": cifar_names()})
    mirror.routes["/cifar.tar.gz"] = incomplete
    monkeypatch.setattr(table, "tgz_md5", hashlib.md5(incomplete).hexdigest())
    (kept / "test_batch").unlink()
    with pytest.raises(RuntimeError, match=r"no mirror gave them: .*cifar.tar.gz: .*data_batch_1"):
        TinyCifar10(root, mode="test")


def test_the_time_out_is_not_for_ever() -> None:
    assert 5 <= download.TIMEOUT <= 60


def test_faults_of_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(files.Unusable) as caught:
        files.read_each(tmp_path, ["absent", "folder"], Path.read_bytes)
    assert caught.value.problems["absent"] == "is missing"
    assert caught.value.problems["folder"].startswith("cannot be read (")
