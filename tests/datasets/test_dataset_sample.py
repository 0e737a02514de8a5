"""The Fashion-MNIST sample that the package ships, and how light the package is."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch

from hapi.datasets import FashionMNIST

ROOT = Path(__file__).parents[2]

IMPORTS = """
import json, sys
from hapi.datasets import FashionMNIST
seen = [sorted({"torchvision", "PIL"} & set(sys.modules))]
data = FashionMNIST(sample=True)
data[0], data.finish_batch(data.fetch_batch(__import__("torch").arange(4)))
seen.append(sorted({"torchvision", "PIL"} & set(sys.modules)))
print(json.dumps(seen))
"""


@pytest.mark.parametrize(("mode", "size"), [("train", 10_000), ("test", 2_000)])
def test_the_sample_is_balanced(mode: str, size: int) -> None:
    data = FashionMNIST(mode=mode, sample=True)
    assert data.data.shape == (size, 1, 28, 28)
    assert data.data.dtype == torch.uint8
    assert data.targets.bincount().tolist() == [size // 10] * 10
    assert data.root is None
    assert len({bytes(image.flatten().tolist()) for image in data.data[:500]}) > 490


def test_the_sample_is_small_and_its_licence_lies_beside_it() -> None:
    folder = resources.files("hapi.datasets") / "samples"
    files = {entry.name: len(entry.read_bytes()) for entry in folder.iterdir()}
    assert sum(files.values()) <= 5_000_000
    assert set(files) == {"fashion-mnist-train.xz", "fashion-mnist-test.xz", "LICENSE-fashion-mnist"}
    notice = (folder / "LICENSE-fashion-mnist").read_text(encoding="utf-8")
    assert "The MIT License" in notice
    assert "2017 Zalando SE" in notice


def test_a_root_and_the_sample_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sample=True, but the sample lies in the package.*Leave out one"):
        FashionMNIST(tmp_path, sample=True)


def test_the_sample_holds_the_first_images_of_each_class(data_home: Path) -> None:
    for mode, each in (("train", 1000), ("test", 200)):
        full, sample = FashionMNIST(data_home, mode=mode), FashionMNIST(mode=mode, sample=True)
        ranks = torch.stack([(full.targets == label).cumsum(0) for label in range(10)])
        first = ranks.gather(0, full.targets[None])[0] <= each
        assert torch.equal(sample.data, full.data[first])
        assert torch.equal(sample.targets, full.targets[first])


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_the_script_makes_the_shipped_bytes(data_home: Path, tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "tools" / "make_fashion_sample.py"))["main"]([str(data_home), "--out", str(tmp_path)])
    shipped = resources.files("hapi.datasets") / "samples"
    for name in ("fashion-mnist-train.xz", "fashion-mnist-test.xz"):
        assert (tmp_path / name).read_bytes() == (shipped / name).read_bytes()


def test_importing_and_the_sample_do_not_import_torchvision(tmp_path: Path) -> None:
    done = run("-c", IMPORTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], []]


def test_the_source_folder_refuses_to_be_taken_for_another_package() -> None:
    done = run("-c", "import datasets")
    assert done.returncode != 0
    assert "source folder of hapi.datasets was imported as 'datasets'" in done.stderr
    assert "run `python -P`" in done.stderr
