"""Damaged and hostile files: refused with a reason, or passed over for the older checkpoint; never a wrong value.

HAPI_FUZZ_CASES sets how many files are tried (1,100 by default).
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import HOSTILE, MUTATIONS, OF_ANY_FORMAT, unsealed_size_in_the_pickle
from torch import nn

import hapi
from hapi import checkpoint, tensorfile

KINDS = (*MUTATIONS, *HOSTILE, "old_format", "another_save", "files_exchanged")
CASES = int(os.environ.get("HAPI_FUZZ_CASES", "1100")) // len(KINDS) + 1
MOST_MEMORY = 64 << 20

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))


def model() -> hapi.Model:
    return hapi.Model(network()).prepare("adam", nn.CrossEntropyLoss())


class Saved:
    """An older and a newer checkpoint, as they were written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subject = model()
        for name in ("older", "newer"):
            subject.fit((X, Y), batch_size=4, verbose=0, seed=3)
            subject.save(folder / name)
        self.bytes = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.values = {name: self.read(folder / name) for name in ("older", "newer")}
        self.network = network()

    @staticmethod
    def read(path: Path) -> tuple[Any, Any]:
        weights = checkpoint.read_weights(path)
        return dict(weights.state), checkpoint.read_training(path, weights.identity)

    def restore(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in self.bytes:
                path.unlink()
        for name, content in self.bytes.items():
            (self.folder / name).write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("checkpoints"))


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, NaNs included."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.contiguous().flatten().view(torch.uint8).equal(other.contiguous().flatten().view(torch.uint8))
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def mutated(kind: str, draw: random.Random, name: str, saved: Saved) -> bytes:
    content = saved.bytes[name]
    if kind in MUTATIONS:
        return MUTATIONS[kind](draw, content)
    if kind in HOSTILE:
        return HOSTILE[kind](draw, content, str(saved.folder / "ran"))
    if kind == "another_save":
        return saved.bytes[name.replace("newer", "older")]
    if kind == "files_exchanged":
        return saved.bytes["newer.pt" if ".opt" in name else "newer.opt.pt"]
    target = saved.folder / "old_format"
    whole = torch.load(saved.folder / name)
    torch.save(whole, target, _use_new_zipfile_serialization=False)
    return target.read_bytes()


def peak_memory() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_refused_or_read_as_it_was(saved: Saved, kind: str) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak_memory()
    refused = 0
    for case in range(CASES):
        draw = random.Random(f"{kind} {case}")
        saved.restore()
        name = draw.choice(["newer.pt", "newer.opt.pt"])
        (saved.folder / name).write_bytes(mutated(kind, draw, name, saved))
        try:
            found = saved.read(saved.folder / "newer")
        except ValueError as error:
            refused += 1
            assert "newer" in str(error) and str(error).endswith("."), error
            expected = "older"
        else:
            assert same(found, saved.values["newer"]), f"case {case} of {name} was read, with other values"
            expected = "newer"
        if case % 4 == 0:
            chosen, passed_over = checkpoint.newest(saved.folder, saved.network)
            assert chosen == str(saved.folder / expected), f"case {case}: {passed_over}"
        assert not (saved.folder / "ran").exists(), f"case {case} of {name} ran code"
    assert peak_memory() - before < MOST_MEMORY
    assert refused >= CASES // 3, "hardly any of these files was damaged where it matters"


@pytest.mark.parametrize("kind", ["cut_short", "contents_exchanged", "code_in_a_member"])
@pytest.mark.parametrize("name", ["newer.pt", "newer.opt.pt"])
def test_fit_resumes_from_the_older_one(
    saved: Saved, kind: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved.restore()
    (saved.folder / name).write_bytes(mutated(kind, random.Random(5), name, saved))
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved.folder, folder)
    subject, straight = model(), model()
    subject.fit((X, Y), batch_size=4, epochs=2, seed=3, resume=True, save_dir=folder)
    printed = capsys.readouterr().out
    assert f"passed over: {folder / 'newer'}" in printed and f"resuming from {folder / 'older'}" in printed
    straight.load(saved.folder / "older")
    straight.fit((X, Y), batch_size=4, verbose=0, seed=3)
    assert same(dict(subject.network.state_dict()), dict(straight.network.state_dict()))


@pytest.mark.parametrize("name", ["newer.pt", "newer.opt.pt"])
def test_large_numbers_that_nothing_gives_away_take_no_memory(saved: Saved, name: str) -> None:
    # Whoever writes the whole file anew can write other values: no format tells. What must not happen is a crash.
    saved.restore()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    refused = 0
    for case in range(100):
        changed = unsealed_size_in_the_pickle(random.Random(case), saved.bytes[name])
        (saved.folder / name).write_bytes(changed)
        try:
            saved.read(saved.folder / "newer")
        except ValueError:
            refused += 1
    assert refused > 60
    assert peak_memory() - before < MOST_MEMORY


@pytest.mark.parametrize("place", ["newer.pt", "newer.opt.pt"])
def test_a_folder_in_the_place_of_a_file(saved: Saved, place: str) -> None:
    saved.restore()
    (saved.folder / place).unlink()
    (saved.folder / place).mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match="newer"):
        saved.read(saved.folder / "newer")
    chosen, passed_over = checkpoint.newest(saved.folder, saved.network)
    assert chosen == str(saved.folder / "older") and len(passed_over) == 1


@pytest.mark.parametrize("kind", OF_ANY_FORMAT)
def test_safetensors_files(saved: Saved, kind: str, tmp_path: Path) -> None:
    # The format has no checksum: a flipped bit of a tensor is read. What was cut short is refused, and nothing crashes.
    path = tmp_path / "net.safetensors"
    tensorfile.write(path, saved.network.state_dict())
    content = path.read_bytes()
    for case in range(20):
        changed = MUTATIONS[kind](random.Random(f"{kind} {case}"), content)
        path.write_bytes(changed)
        try:
            found = tensorfile.read(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert len(changed) >= len(content)
            assert sum(tensor.nbytes for tensor in found.values()) <= len(changed)
