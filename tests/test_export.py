"""Inference programs: what they compute is what predict computes."""

from __future__ import annotations

import ast
import importlib.util
import logging
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

import hapi
from hapi import export
from hapi.datasets import FashionMNIST

EIGHT = torch.rand(8, 4)


def run(path: Path, *args: Any, **kwargs: Any) -> Any:
    return torch.export.load(path).module()(*args, **kwargs)


def images() -> torch.Tensor:
    data = FashionMNIST(sample=True)
    return torch.stack([torch.as_tensor(data[index][0]) for index in range(7)])


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5),
        nn.Linear(4 * 13 * 13, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> hapi.Model:
    network = convolutional()
    model = hapi.Model(network).prepare(torch.optim.SGD(network.parameters(), lr=0.1), nn.CrossEntropyLoss())
    model.fit(FashionMNIST(sample=True), num_iters=2, verbose=0)
    return model


def test_it_is_written_without_a_word(trained: hapi.Model, tmp_path: Path, capfd: Any, caplog: Any) -> None:
    trained.export(tmp_path / "quiet.pt2", example_inputs=images()[:2])
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_program_gives_the_predictions_of_real_images(trained: hapi.Model, tmp_path: Path) -> None:
    trained.export(tmp_path / "net.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]
    program = torch.export.load(tmp_path / "net.pt2").module()
    samples = images()
    for batch in (samples[:1], samples, torch.cat([samples] * 9)):
        expected = trained.predict(batch, verbose=0)
        assert expected.shape == (len(batch), 10)
        assert torch.allclose(program(batch), expected, rtol=1e-4, atol=1e-5)


def test_save_without_training_state(trained: hapi.Model, tmp_path: Path) -> None:
    trained.save(tmp_path / "deep" / "net", training=False)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["net.pt2"]
    samples = images()
    assert torch.allclose(run(tmp_path / "deep" / "net.pt2", samples), trained.predict(samples, verbose=0), atol=1e-5)


def test_the_network_is_left_as_it_was(trained: hapi.Model, tmp_path: Path) -> None:
    network = trained.network
    network[5].eval()  # frozen by the user
    modes = [module.training for module in network.modules()]
    state = {key: value.clone() for key, value in network.state_dict().items()}
    draws = torch.get_rng_state()
    trained.export(tmp_path / "net.pt2")
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), draws)
    network[5].train()


class Several(nn.Module):
    """Two inputs of different batch shapes, a nest of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 3)
        self.linear = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> Any:
        joint = self.embed(tokens).mean(1) + self.linear(features)
        return {"joint": joint, "pair": (joint.sum(1), tokens)}


@pytest.mark.parametrize("by_name", [False, True])
def test_several_inputs_and_outputs(tmp_path: Path, by_name: bool) -> None:
    tokens, features = torch.randint(0, 10, (7, 5)), torch.rand(7, 4)
    model = hapi.Model(Several(), inputs=None if by_name else 2)
    data: Any = {"features": features, "tokens": tokens} if by_name else (tokens, features)
    expected = model.predict(data, verbose=0)
    model.export(tmp_path / "net.pt2")
    found = run(tmp_path / "net.pt2", **data) if by_name else run(tmp_path / "net.pt2", *data)
    assert torch.allclose(found["joint"], expected["joint"])
    assert torch.allclose(found["pair"][0], expected["pair"][0])
    assert torch.equal(found["pair"][1], tokens)


@pytest.mark.parametrize("example", [EIGHT, EIGHT[:1], [EIGHT], {"input": EIGHT}, EIGHT.numpy()])
def test_examples(tmp_path: Path, example: Any) -> None:
    network = nn.Linear(4, 3)
    hapi.Model(network).export(str(tmp_path / "net.pt2"), example)
    inputs = {"input": EIGHT} if isinstance(example, dict) else {}
    found = run(tmp_path / "net.pt2", **inputs) if inputs else run(tmp_path / "net.pt2", EIGHT)
    assert torch.allclose(found, network(EIGHT))


def test_the_last_batch_seen_is_the_example(tmp_path: Path) -> None:
    network = nn.Linear(4, 3)
    model = hapi.Model(network).prepare(loss=nn.CrossEntropyLoss())
    for see in (model.predict_batch, lambda x: model.evaluate((x, torch.zeros(len(x), dtype=torch.int64)), verbose=0)):
        see(EIGHT)
        model.export(tmp_path / "net.pt2")
        assert torch.allclose(run(tmp_path / "net.pt2", EIGHT[:3]), network(EIGHT[:3]))


@pytest.mark.parametrize("path", ["net", "net.pt", "net.onnx.txt"])
def test_an_ending_that_names_no_format(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match=r'"x\.pt2" for torch\.export or "x\.onnx"'):
        hapi.Model(nn.Linear(4, 3)).export(tmp_path / path, EIGHT)
    assert list(tmp_path.iterdir()) == []


def test_without_an_example(tmp_path: Path) -> None:
    for call in (
        lambda model: model.export(tmp_path / "net.pt2"),
        lambda model: model.save(tmp_path / "net", training=False),
    ):
        with pytest.raises(ValueError, match=r"example_inputs=batch\), or call it after fit"):
            call(hapi.Model(nn.Linear(4, 3)))
    with pytest.raises(ValueError, match="Pass a batch as the network's forward takes it"):
        hapi.Model(nn.Linear(4, 3)).export(tmp_path / "net.pt2", "text")
    assert list(tmp_path.iterdir()) == []


def test_onnx_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        export.importlib.util, "find_spec", lambda name: None if name in ("onnx", "onnxscript") else find(name)
    )
    with pytest.raises(ImportError, match=r'needs onnx and onnxscript.*pip install "torch-hapi\[onnx\]".*\.pt2'):
        hapi.Model(nn.Linear(4, 3)).export(tmp_path / "net.onnx", EIGHT)
    assert list(tmp_path.iterdir()) == []


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_a_network_that_cannot_be_traced_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    path.write_text("older")
    with pytest.raises(RuntimeError, match=r"^Branches could not .*net\.pt2 .*data-dependent.*Write what depends on"):
        hapi.Model(Branches()).export(path, EIGHT)
    assert path.read_text() == "older"
    assert [file.name for file in tmp_path.iterdir()] == ["net.pt2"]


# ONNX, and both formats.


def example_network(name: str) -> nn.Module:
    """The network that an example trains, read off its source."""
    tree = ast.parse((Path(__file__).parents[1] / "examples" / name).read_text(encoding="utf-8"))
    (made,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "net"
    )
    torch.manual_seed(0)
    network: nn.Module = eval(ast.unparse(made), {"nn": nn})
    return network


def in_colour(samples: torch.Tensor) -> torch.Tensor:
    """Real images in the shape of CIFAR-10's."""
    return nn.functional.pad(samples, (2, 2, 2, 2)).expand(-1, 3, -1, -1).contiguous()


class Runner:
    """An exported file, called with tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix == ".pt2":
            self.run = torch.export.load(path).module()
        else:
            self.session = onnxruntime.InferenceSession(path)
            self.inputs = [argument.name for argument in self.session.get_inputs()]
            self.outputs = [argument.name for argument in self.session.get_outputs()]

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """What the program gives; ONNX always a dict."""
        if self.path.suffix == ".pt2":
            return self.run(*args, **kwargs)
        named = dict(zip(self.inputs, args, strict=True)) if args else kwargs
        values = self.session.run(None, {name: value.numpy() for name, value in named.items()})
        return {name: torch.from_numpy(value) for name, value in zip(self.outputs, values, strict=True)}


@pytest.mark.parametrize("name", ["cifar10.py", "mnist.py"])
@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_networks_of_the_examples(tmp_path: Path, name: str, suffix: str) -> None:
    samples, network = images(), example_network(name)
    samples = in_colour(samples) if name == "cifar10.py" else samples
    model = hapi.Model(network).prepare("adam", nn.CrossEntropyLoss())
    model.fit((samples, torch.arange(len(samples)) % 10), epochs=2, verbose=0)
    network.train()
    model.export(tmp_path / f"net{suffix}")
    assert network.training and [path.name for path in tmp_path.iterdir()] == [f"net{suffix}"]
    program = Runner(tmp_path / f"net{suffix}")
    for batch in (samples[:1], samples[:2], samples, torch.cat([samples] * 9)):
        expected = model.predict(batch, verbose=0)
        found = program(batch) if suffix == ".pt2" else program(batch)["output"]
        assert found.shape == expected.shape == (len(batch), 10)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_name", [False, True])
def test_onnx_of_several_inputs_and_outputs(tmp_path: Path, by_name: bool) -> None:
    tokens, features = torch.randint(0, 10, (7, 5)), torch.rand(7, 4)
    model = hapi.Model(Several(), inputs=None if by_name else 2)
    data: Any = {"features": features, "tokens": tokens} if by_name else (tokens, features)
    expected = model.predict(data, verbose=0)
    model.export(tmp_path / "net.onnx")
    program = Runner(tmp_path / "net.onnx")
    assert set(program.inputs) == {"tokens", "features"}
    assert program.outputs == ["joint", "pair_0", "pair_1"]
    for rows in (1, 7):
        found = program(tokens=tokens[:rows], features=features[:rows])
        torch.testing.assert_close(found["joint"], expected["joint"][:rows])
        torch.testing.assert_close(found["pair_0"], expected["pair"][0][:rows])
        assert torch.equal(found["pair_1"], tokens[:rows])


class Same(nn.Module):
    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"tokens": nn.functional.dropout(tokens, 0.5, self.training) + 1}


def test_onnx_of_an_output_that_is_called_as_an_input(tmp_path: Path) -> None:
    hapi.Model(Same()).export(tmp_path / "net.onnx", EIGHT)
    program = Runner(tmp_path / "net.onnx")
    assert (program.inputs, program.outputs) == (["tokens"], ["tokens_output"])
    assert torch.equal(program(EIGHT)["tokens_output"], EIGHT + 1)  # and without dropout


def test_a_dict_without_what_forward_needs(tmp_path: Path) -> None:
    for suffix in (".pt2", ".onnx"):
        with pytest.raises((TypeError, ValueError, RuntimeError), match="tokens"):
            hapi.Model(Several()).export(tmp_path / f"net{suffix}", {"features": EIGHT})
    assert list(tmp_path.iterdir()) == []
