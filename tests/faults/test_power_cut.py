"""The power goes at any moment, the disk is full, the folder is read-only or gone, two runs write at once.

Whatever happens: the checkpoints that were there stay whole, and a save that has returned is not lost.
"""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disk import Disk, lay_out, recorded
from torch import nn

import hapi
from hapi import checkpoint, files
from hapi.callbacks import Callback, ModelCheckpoint

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def model(width: int = 8) -> hapi.Model:
    return hapi.Model(network(width)).prepare("adam", nn.CrossEntropyLoss())


def fit(subject: hapi.Model, folder: Path, **options: Any) -> None:
    subject.fit((X, Y), batch_size=4, verbose=0, seed=3, save_dir=folder, **options)


def same(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


# The power goes.


def saved_values(folder: Path) -> tuple[str, int, Any] | None:
    """The newest checkpoint's path, its steps and its weights."""
    found, _ = checkpoint.newest(folder, network())
    if found is None:
        return None
    weights = checkpoint.read_weights(found)
    training = checkpoint.read_training(found, weights.identity)
    assert training is not None
    return found, training["counters"]["steps_trained"], weights.state


SERIES = {
    "epochs": {"epochs": 3},
    "some are deleted": {"epochs": 4, "callbacks": lambda: ModelCheckpoint(keep_last=1)},
    "in a thread": {"epochs": 3, "callbacks": lambda: ModelCheckpoint(asynchronous=True)},
}


@pytest.mark.parametrize(
    "name", ["epochs", *(pytest.param(n, marks=pytest.mark.slow) for n in SERIES if n != "epochs")]
)
def test_after_a_power_cut_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    options = {key: value() if callable(value) else value for key, value in SERIES[name].items()}
    weights: dict[int, Any] = {}
    write = checkpoint.write

    def watched(path: Any, snapshot: Any) -> None:
        steps = snapshot.training["counters"]["steps_trained"]
        weights[steps] = {key: value.clone() for key, value in snapshot.weights.items()}
        write(path, snapshot)
        record.operations.append(("saved", str(path), steps))

    monkeypatch.setattr(checkpoint, "write", watched)
    subject = model()
    with recorded(root, monkeypatch) as record:
        fit(subject, root / "new" / "run", **options)
        # The same name again and again: the new pair takes the place of the only whole one.
        for _ in range(2):
            subject.fit((X, Y), batch_size=4, verbose=0, seed=3)
            subject.save(root / "new" / "run" / "final")
    disk, last, looked_at = Disk(root), None, {}
    scratch = tmp_path / "after"
    for operation in record.operations:
        if operation[0] == "saved":
            last = operation[2]
        else:
            disk.do(operation)
        for image in disk.images():
            content = tuple(sorted((path, hash(content)) for path, content in image.items()))
            if content not in looked_at:
                scratch.mkdir()
                lay_out(image, str(root), scratch)
                looked_at[content] = saved_values(scratch / "new" / "run")
                shutil.rmtree(scratch)
            found = looked_at[content]
            if last is not None:
                assert found is not None, f"nothing is left after {operation}"
            if found is not None:
                path, steps, state = found
                assert steps >= (last or 0), f"{path} of step {steps} was found, and step {last} had been saved"
                assert same(state, weights[steps])
    assert last == subject.steps_trained and len(looked_at) > 30


# The disk is full, read-only, or gone.


class SmallDisk:
    """A disk of 8 MB; where this process may not mount one, a folder whose files are held to a size instead."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.limits = folder, resource.getrlimit(resource.RLIMIT_FSIZE)
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def fill(self, left: int) -> None:
        """Leave so many bytes free."""
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (left // 2, self.limits[1]))
            return
        with open(self.folder / "filler", "wb", buffering=0) as file:
            free = os.statvfs(self.folder)
            file.write(b"x" * max(0, free.f_bavail * free.f_bsize - left))

    def empty(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        (self.folder / "filler").unlink(missing_ok=True)

    def set_read_only(self, read_only: bool) -> None:
        if self.mounted:
            option = "remount,ro" if read_only else "remount,rw"
            subprocess.run(["mount", "-o", option, str(self.folder)], check=True, capture_output=True)
        else:
            for place in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
                place.chmod(stat.S_IRUSR | stat.S_IXUSR | (0 if read_only else stat.S_IWUSR))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*") if path.is_file() and path.name != "filler")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "small")
    try:
        yield disk
    finally:
        disk.empty()
        if disk.mounted:
            subprocess.run(["umount", "-l", str(disk.folder)], check=True)
        else:
            disk.set_read_only(False)


CAUSES = r"No space left on device|File too large|unexpected pos|PytorchStreamWriter"


@pytest.mark.parametrize("left", [0, 1 << 12, 100 << 10, 300 << 10, 500 << 10, 700 << 10])
def test_a_full_disk(small_disk: SmallDisk, left: int) -> None:
    path = small_disk.folder / "net"
    old, new, loaded = model(9000), model(9000), model(9000)
    old.train_batch(X, Y)
    old.save(path)  # 360 KB of weights, 720 KB of moments
    new.train_batch(X, Y)
    small_disk.fill(left)
    with pytest.raises(OSError, match=rf"net(\.opt)?\.pt could not be written \(.*({CAUSES}).*space left") as caught:
        new.save(path)
    assert str(path) in str(caught.value)
    assert small_disk.names() == ["net.opt.pt", "net.pt"]
    small_disk.empty()
    loaded.load(path)
    assert same(loaded.network.state_dict(), old.network.state_dict())
    new.save(path)
    assert small_disk.names() == ["net.opt.pt", "net.pt"]
    loaded.load(path)
    assert same(loaded.network.state_dict(), new.network.state_dict())


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt2", "net.onnx"])
def test_a_full_disk_and_other_formats(small_disk: SmallDisk, name: str) -> None:
    path, subject = small_disk.folder / name, model(9000)
    subject.predict_batch(X)
    path.write_text("older")
    small_disk.fill(40 << 10)
    with pytest.raises(OSError, match=rf"{name} could not be written \(.*space left"):
        subject.save(path, training=not name.endswith(("2", "x")))
    assert small_disk.names() == [name] and path.read_text() == "older"


class Once(Callback):
    """Does something at the end of the first epoch, before it is saved."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.action()


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_fit_whose_disk_fails(small_disk: SmallDisk, what: str) -> None:
    folder, subject, straight = small_disk.folder / "run", model(9000), model(9000)
    fails = (lambda: small_disk.fill(8192)) if what == "full" else (lambda: small_disk.set_read_only(True))
    if what == "read-only" and not small_disk.mounted and os.geteuid() == 0:
        pytest.skip("root may write to every folder, and this root may not mount a read-only one")
    with pytest.raises(OSError, match=r"run/2(\.opt)?\.pt could not be written \(.*untouched"):
        fit(subject, folder, epochs=3, callbacks=Once(fails))
    assert small_disk.names() == ["1.opt.pt", "1.pt"]
    if what == "read-only":
        with pytest.raises(ValueError, match=rf"save_dir received '{folder}'.*is read-only"):
            fit(model(9000), folder)
        small_disk.set_read_only(False)
    small_disk.empty()
    # Resumed from what is left, it ends as if nothing had been.
    again = model(9000)
    fit(again, folder, epochs=3, resume=True)
    straight.fit((X, Y), batch_size=4, verbose=0, seed=3, epochs=3)
    assert same(again.network.state_dict(), straight.network.state_dict())


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    folder, subject, loaded = tmp_path / "run", model(), model()
    fit(subject, folder, epochs=3, callbacks=Once(lambda: shutil.rmtree(folder)))
    assert sorted(path.name for path in folder.glob("*.pt") if ".opt" not in path.name) == ["2.pt", "3.pt", "final.pt"]
    loaded.load(folder / "final")
    assert same(loaded.network.state_dict(), subject.network.state_dict())

    def blocked() -> None:
        shutil.rmtree(folder)
        folder.write_text("a file")

    with pytest.raises(OSError, match=r"run/2(\.opt)?\.pt could not be written \(.*(File exists|Not a directory)"):
        fit(model(), folder, epochs=3, callbacks=Once(blocked))


# Two runs at once.

SAVING = """
import sys
import torch
from torch import nn
import hapi

torch.manual_seed(int(sys.argv[2]))
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
model = hapi.Model(net).prepare("adam", nn.CrossEntropyLoss())
model.train_batch(torch.ones(4, 6), torch.tensor([0, 1, 2, 0]))
print("ready", flush=True)
sys.stdin.readline()
for count in range(int(sys.argv[3])):
    model.save(f"{sys.argv[1]}/{count % 2}")
"""
SAVES = 15


@pytest.mark.slow
def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVING, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    looked, missed, there = 0, 0, False
    with (
        subprocess.Popen([*command, "1", str(SAVES)], **pipes) as one,
        subprocess.Popen([*command, "2", str(SAVES)], **pipes) as other,
    ):
        for run in (one, other):
            assert run.stdout.readline() == "ready\n"
        for run in (one, other):
            run.stdin.write("go\n")
            run.stdin.flush()
        while one.poll() is None or other.poll() is None:
            found, _ = checkpoint.newest(tmp_path, network())
            there = there or found is not None
            looked, missed = looked + 1, missed + (there and found is None)
            time.sleep(0.02)
    assert (one.returncode, other.returncode) == (0, 0)
    assert looked > 3 and missed == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.opt.pt", "0.pt", "1.opt.pt", "1.pt"]
    for name in ("0", "1"):
        weights = checkpoint.read_weights(tmp_path / name)
        assert checkpoint.read_training(tmp_path / name, weights.identity) is not None


# A save is ended in the middle.


def ends_in_flush(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """The so many-th flush of a folder from now on raises."""
    flush, flushed = files._flush_folder, []

    def failing(folder: Path) -> None:
        flushed.append(folder)
        if len(flushed) == number:
            raise error
        flush(folder)

    monkeypatch.setattr(files, "_flush_folder", failing)


@pytest.mark.parametrize("error", [SystemExit(143), OSError(5, "Input/output error")], ids=["second stop", "disk"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_save_that_ends_right_after_a_rename_leaves_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    old, new, loaded = model(), model(), model()
    old.save(tmp_path / "net")
    new.train_batch(X, Y)
    with monkeypatch.context() as patch:
        ends_in_flush(patch, number, error)
        with pytest.raises(type(error), match=r"143|net.* is in its place, but .*Input/output error"):
            new.save(tmp_path / "net")
    in_place = old if number == 1 else new
    loaded.load(tmp_path / "net")
    assert same(loaded.network.state_dict(), in_place.network.state_dict())
    assert len(loaded.optimizer.state) == len(in_place.optimizer.state)
    assert len(list(tmp_path.iterdir())) == 2 + (number == 2), "what waits is needed, or gone"
    assert checkpoint.newest(tmp_path, network())[0] == str(tmp_path / "net")


def interrupted(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Callback:
    """The process is killed between the two renames of a save: its training state keeps the waiting name."""
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == f"{name}.opt.pt":
            raise KeyboardInterrupt
        real(source, target)

    return Once(lambda: monkeypatch.setattr(os, "replace", replace))


def test_a_save_that_was_killed_between_its_renames_is_the_newest_only_while_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        fit(model(), tmp_path, epochs=4, callbacks=interrupted(tmp_path, "2", patch))
    assert (tmp_path / "2.pt").exists() and not (tmp_path / "2.opt.pt").exists()
    straight, again = model(), model()
    straight.fit((X, Y), batch_size=4, verbose=0, seed=3, epochs=4)
    fit(again, tmp_path, epochs=3, resume=True)
    assert again.epochs_trained == 3 and (tmp_path / "2.opt.pt").exists(), "the last rename is done at the resume"
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "2.opt.pt").rename(
        waiting := tmp_path / f".2.opt.pt.{checkpoint.read_weights(tmp_path / '2').identity}"
    )
    assert saved_values(tmp_path)[1] == 9, "its own age counts, under the waiting name too"  # type: ignore[index]
    # Beside the training state of an older save, too.
    shutil.copy(tmp_path / "1.opt.pt", tmp_path / "2.opt.pt")
    for file in [*tmp_path.glob("3.*"), *tmp_path.glob("final.*")]:
        file.unlink()
    found, steps, _ = saved_values(tmp_path) or ("", 0, None)
    assert (found, steps) == (str(tmp_path / "2"), 6) and not waiting.exists()
    last = model()
    fit(last, tmp_path, epochs=4, resume=True)
    assert same(last.network.state_dict(), straight.network.state_dict())


def test_a_folder_that_may_only_be_read_is_resumed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = model()
    subject.save(tmp_path / "net")
    identity = checkpoint.read_weights(tmp_path / "net").identity
    (tmp_path / "net.opt.pt").rename(waiting := tmp_path / f".net.opt.pt.{identity}")

    def refused(*paths: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refused)
    assert checkpoint.newest(tmp_path, network()) == (str(tmp_path / "net"), []) and waiting.exists()


def test_files_of_an_earlier_build_are_passed_over_with_a_reason(tmp_path: Path) -> None:
    for name, remove in (("1", "run"), ("2", "position"), ("3", "callbacks")):
        subject = model()
        subject.steps_trained = int(name)
        subject.save(tmp_path / name)
        content = torch.load(tmp_path / f"{name}.opt.pt")
        del (content["position"] if remove == "run" else content)[remove]
        torch.save(content, tmp_path / f"{name}.opt.pt")
    found, passed_over = checkpoint.newest(tmp_path, network(), run="this one")
    assert found is None and len(passed_over) == 3
    assert sum("is not the training state of a checkpoint of this version" in line for line in passed_over) == 2
    assert "1.pt is of an earlier run" in passed_over[2]
    assert checkpoint.newest(tmp_path, network())[0] == str(tmp_path / "1")
