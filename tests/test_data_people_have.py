"""Data of other libraries, in the examples and by itself: each sample once, alone and on two processes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hapi

ROOT = Path(__file__).parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NEEDS = {"hf_datasets": "datasets", "web_dataset": "webdataset", "data_frame": "pandas"}
EXAMPLES = ["hf_datasets", "web_dataset", "image_folder", "data_frame", "iterables", "text"]


def needs(distribution: str) -> None:
    # Not by importing it: from the root of this repository `import datasets` finds the folder of that name.
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {distribution}: pip install 'torch-hapi[examples]'")


def run(*arguments: str, cwd: Path, ignored: str = "ignore:This DataLoader will create") -> str:
    """Run Python with this checkout's hapi, and nothing else of the checkout, on its path."""
    (cwd / "path").mkdir(exist_ok=True)
    if not (cwd / "path" / "hapi").exists():
        (cwd / "path" / "hapi").symlink_to(ROOT / "hapi")
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    # torch remarks where workers are more than cores.
    environ |= {"PYTHONWARNINGS": ignored, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environ |= {"PYTHONPATH": str(cwd / "path"), "HAPI_TIMEOUT": "60"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"test accuracy (\d\.\d+)", output)]


def example(name: str) -> str:
    return str(ROOT / "examples" / "data" / f"{name}.py")


@pytest.mark.slow
def test_text_of_any_length(tmp_path: Path) -> None:
    (accuracy,) = accuracies(run(example("text"), cwd=tmp_path))
    assert accuracy >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_alone_and_on_two_processes(tmp_path: Path, name: str) -> None:
    if name in NEEDS:
        needs(NEEDS[name])
    (alone,) = accuracies(run(example(name), cwd=tmp_path))
    first, second = accuracies(run(*TORCHRUN, example(name), cwd=tmp_path))
    # Twice the batch, and half the steps.
    assert first == second and min(alone, first) >= 0.5


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_header_says_how_to_run_it(name: str) -> None:
    header = Path(example(name)).read_text(encoding="utf-8").split('"""')[1]
    assert f"python examples/data/{name}.py\n" in header and f"--nproc-per-node 2 examples/data/{name}.py\n" in header
    assert ("the extra `examples`" in header) == (name in NEEDS)


WEBDATASET = """
import os, sys
import torch, webdataset
from torch import nn
from torch.utils.data import DataLoader
import hapi

n, folder = 101, sys.argv[1]
rank = int(os.environ.get("RANK", 0))
shards = f"{folder}/{rank}-{{00..03}}.tar"
with webdataset.ShardWriter(f"{folder}/{rank}-%02d.tar", maxcount=26, verbose=0) as written:
    for number in range(n):
        written.write({"__key__": f"{number:05d}", "x.cls": number})

def made(splitter):
    pipeline = webdataset.WebDataset(shards, nodesplitter=splitter, shardshuffle=False)
    return pipeline.decode().to_tuple("x.cls").map(lambda sample: (torch.tensor([float(sample[0])]),) * 2)

class Same(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, x):
        return self.scale * x

def error(outputs, labels):
    return (outputs ** 2).mean()

def check(data, **options):
    model = hapi.Model(Same()).prepare(lambda p: torch.optim.SGD(p, lr=0.0), error)
    history = model.fit(data, data, verbose=0, **options)
    rows = model.predict(data, verbose=0, **{k: v for k, v in options.items() if k != "epochs"}).flatten().tolist()
    assert sorted(rows) == [float(number) for number in range(n)], (len(rows), len(set(rows)))
    return history.history["loss"] + history.history["val_loss"]

by_node = webdataset.split_by_node
values = [
    check(made(by_node)),
    check(made(by_node), num_workers=2),
    check(made(None)),
    check(DataLoader(made(by_node), batch_size=8, num_workers=1)),
    check(webdataset.WebLoader(made(by_node).batched(8), batch_size=None, num_workers=2)),
    check(webdataset.WebLoader(made(by_node), batch_size=None, num_workers=1).batched(8)),
]
try:
    check(made(webdataset.shardlists.single_node_only))
except ValueError as error:
    assert "nodesplitter=webdataset.split_by_node" in str(error) and "RANK" in os.environ, error
else:
    assert "RANK" not in os.environ
expected = sum(number ** 2 for number in range(n)) / n
assert all(abs(value / expected - 1) < 1e-6 for pair in values for value in pair), values
print("each sample once")
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["alone", "two processes"])
def test_webdataset_gives_each_sample_once(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    needs("webdataset")
    (tmp_path / "script.py").write_text(WEBDATASET, encoding="utf-8")
    (tmp_path / "shards").mkdir()
    command = (*launcher, str(tmp_path / "script.py"), str(tmp_path / "shards"))
    # Rows of what shards itself come rank by rank, which predict says.
    assert run(*command, cwd=tmp_path, ignored="ignore").count("each sample once") == (2 if launcher else 1)


HUGGING_FACE = """
import datasets, numpy, torch
from torch import nn
from torch.utils.data import DataLoader
import hapi

x = numpy.arange(202, dtype="float32").reshape(101, 2)
data = datasets.Dataset.from_dict({"x": x.tolist(), "label": list(range(101)), "text": ["a"] * 101})
torched = data.with_format("torch")

class Sum(nn.Module):
    def forward(self, x):
        return x.sum(1)

model = hapi.Model(Sum(), labels=["label"])
for given in (torched, data.with_format("numpy"), torched.to_iterable_dataset().with_format("torch"),
              DataLoader(torched, batch_size=8), torched.select(range(101))):
    assert torch.equal(model.predict(given, verbose=0), torch.from_numpy(x.sum(1))), type(given)
for given in (data, data.to_iterable_dataset(), DataLoader(data, batch_size=8)):
    try:
        model.predict(given, verbose=0)
    except ValueError as error:
        assert "columns ['x'] arrive as lists" in str(error) and 'with_format("torch")' in str(error), error
    else:
        raise AssertionError(type(given))
try:
    model.predict(datasets.DatasetDict(train=torched), verbose=0)
except TypeError as error:
    assert "splits ['train']" in str(error) and "Write data['train']." in str(error), error
else:
    raise AssertionError
print("as it should be")
"""


@pytest.mark.slow
def test_hugging_faces_data_sets(tmp_path: Path) -> None:
    needs("datasets")
    (tmp_path / "script.py").write_text(HUGGING_FACE, encoding="utf-8")
    assert "as it should be" in run(str(tmp_path / "script.py"), cwd=tmp_path)


@pytest.mark.slow
def test_frames_are_refused_with_a_recipe() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [0.5, 1.5], "kind": pandas.Categorical(["u", "v"]), "label": [0, 1]})
    model = hapi.Model(nn.Linear(1, 2)).prepare("sgd", nn.CrossEntropyLoss())
    for data in (frame, (frame[["a"]], frame["label"]), {"x": frame["a"]}):
        with pytest.raises(TypeError, match=r"train_data holds a (DataFrame|Series) of pandas.*\.to_numpy"):
            model.fit(data, verbose=0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.cat([x, kind[:, None].float()], 1))

    columns = {
        "x": frame[["a"]].to_numpy("float32"),
        "kind": frame["kind"].cat.codes.to_numpy("int64"),
        "label": frame["label"].to_numpy("int64"),
    }
    assert hapi.Model(Net()).prepare("sgd", nn.CrossEntropyLoss()).fit(columns, verbose=0).history["loss"]


def made() -> object:
    yield torch.rand(2, 1), torch.zeros(2).long()


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        ("data.csv", r"ImageFolder\(path\).*pandas\.read_csv\(path\)"),
        (Path("images"), r"ImageFolder\(path\)"),
        (made, r"def __iter__\(self\): return made\(\)"),
        ({"x": [[1.0]], "label": [0]}, r'\{"x": torch\.tensor\(x\)'),
        ({"train": torch.utils.data.TensorDataset(torch.rand(2, 1))}, r"fit\(data\['train'\], eval_data="),
    ],
)
def test_what_is_no_data_yet(data: object, cure: str) -> None:
    with pytest.raises(TypeError, match=cure):
        hapi.Model(nn.Linear(1, 2)).prepare("sgd", nn.CrossEntropyLoss()).fit(data, verbose=0)
