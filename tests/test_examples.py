"""The examples as a user runs them: the file alone, and the same file under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(*arguments: str, cwd: Path) -> str:
    """Run Python in a folder of its own, on this checkout; one thread, as torchrun sets it too."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def example(name: str) -> str:
    return str(ROOT / "examples" / f"{name}.py")


def accuracies(output: str) -> list[float]:
    found = re.findall(r"test accuracy (\d\.\d+)|'acc': (\d\.\d+)", output)
    return [float(first or second) for first, second in found]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_quickstart_alone(tmp_path: Path) -> None:
    output = run(example("quickstart"), cwd=tmp_path)
    (accuracy,) = accuracies(output)
    assert accuracy >= 0.80
    assert "1 process" in output.splitlines()[0]
    assert "checkpoints/quickstart/final.pt" in output
    kept = tmp_path / "checkpoints" / "quickstart"
    names = {f"{name}{ending}" for name in (1, 2, 3, 4, 5, "final") for ending in (".pt", ".opt.pt")}
    assert files(kept) == names
    assert list(torch.load(kept / "final.pt", weights_only=True)) == ["1.weight", "1.bias", "4.weight", "4.bias"]


@pytest.mark.slow
def test_quickstart_on_two_processes(tmp_path: Path) -> None:
    output = run(*TORCHRUN, example("quickstart"), "2", cwd=tmp_path)
    first, second = accuracies(output)
    assert first == second >= 0.75
    assert output.count("hapi: 2 processes (torchrun, gloo)") == 1
    assert output.count("checkpoints/quickstart/final.pt") == 1
    for epoch in (1, 2):
        assert len(re.findall(rf"Epoch {epoch}/2 - .*val_acc", output)) == 1
    kept = tmp_path / "checkpoints" / "quickstart"
    assert files(kept) == {f"{name}{ending}" for name in (1, 2, "final") for ending in (".pt", ".opt.pt")}


@pytest.mark.slow
def test_custom_step_on_two_processes(tmp_path: Path) -> None:
    first, second = accuracies(run(*TORCHRUN, example("custom_step"), "1", cwd=tmp_path))
    assert first == second >= 0.7


@pytest.mark.slow
def test_one_epoch_of_mnist(tmp_path: Path, data_home: Path) -> None:
    (accuracy,) = accuracies(run(example("mnist"), "1", cwd=tmp_path))
    assert accuracy >= 0.95


@pytest.mark.slow
def test_cifar10_fast_takes_its_steps_on_a_cpu(tmp_path: Path, data_home: Path) -> None:
    # Copies of the data set that are not the published bytes are told of by a warning. Few images: a CPU without
    # arithmetic in bfloat16 takes a third of a second for each.
    output = run("-W", "ignore:CIFAR10:UserWarning", example("cifar10_fast"), "2", "32", cwd=tmp_path)
    assert "32 samples; 1 step per epoch" in output
    assert len(re.findall(r"Epoch [12]/2 - .* - loss \d", output)) == 2
    assert len(accuracies(output)) == 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize("name", ["quickstart", "mnist", "cifar10", "custom_step"])
def test_the_header_says_what_to_expect(name: str) -> None:
    header = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    for word in (f"python examples/{name}.py", "torchrun", "test accuracy", "seconds", "cores", "torch 2."):
        assert word in header, f"{word!r} is missing"


def readme(folder: Path) -> str:
    """The README's code, one block after the other, in a file."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 5
    (folder / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    return "readme.py"


def test_the_readmes_code_runs_as_it_stands(tmp_path: Path) -> None:
    output = run(readme(tmp_path), cwd=tmp_path)
    assert "after epoch 3: " in output and "'top3': " in output and "hapi: resuming from checkpoints/" in output
    assert "overfit_batches: loss " in output and "FLOPs of one forward: 501,760" in output
    assert {"history.png", "mnist.pt2", "checkpoints", "averaged.pt", "profile"} <= files(tmp_path)


@pytest.mark.slow
def test_the_readmes_code_runs_on_two_processes(tmp_path: Path) -> None:
    assert run(*TORCHRUN, readme(tmp_path), cwd=tmp_path).count("'top3': ") == 2
