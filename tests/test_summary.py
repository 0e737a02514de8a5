"""The table of layers: the numbers against torch's own, and the network as it was before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hapi.layer_table import summary


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 10))


def rows(text: str) -> dict[str, list[str]]:
    """The table's rows: first cell -> the other two."""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) == 3}


def column_sum(text: str) -> int:
    numbers = [row[1].split(" ")[0].replace(",", "") for row in rows(text).values()]
    return sum(int(number) for number in numbers if number.isdigit())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.dense = nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> dict[str, Any]:
        joint = self.embed(tokens).mean(1) + self.dense(features)
        return {"joint": joint, "pair": (joint, None)}


class Shared(nn.Module):
    """An output layer that shares the embedding's weight, and a block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.block = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 3)
        self.head = nn.Linear(8, 50)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.block(self.embed(tokens))))


def test_mlp(capsys: pytest.CaptureFixture[str]) -> None:
    assert summary(mlp(), (1, 1, 28, 28)) == {"total_params": 407_050, "trainable_params": 407_050}
    printed = capsys.readouterr().out
    table = rows(printed)
    assert table["Sequential"] == ["[1, 10]", "-"]
    assert table["0 (Flatten)"] == ["[1, 784]", "-"]
    assert table["1 (Linear)"] == ["[1, 512]", "401,920"]
    assert table["4 (Linear)"] == ["[1, 10]", "5,130"]
    assert column_sum(printed) == 407_050


def test_conv_net_with_nested_names(capsys: pytest.CaptureFixture[str]) -> None:
    block = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.MaxPool2d(2))
    network = nn.Sequential(block, nn.Flatten(), nn.Linear(32 * 15 * 15, 10))
    counts = summary(network, (None, 3, 32, 32))
    printed = capsys.readouterr().out
    table = rows(printed)
    assert table["0 (Sequential)"] == ["[1, 32, 15, 15]", "-"]
    assert table["1 (BatchNorm2d)"] == ["[1, 32, 30, 30]", "64"]
    assert "\n    0 (Conv2d)" in printed  # two levels down
    assert counts["total_params"] == sum(p.numel() for p in network.parameters()) == column_sum(printed)


def test_lstm_returns_a_nested_tuple(capsys: pytest.CaptureFixture[str]) -> None:
    summary(nn.LSTM(6, 8, batch_first=True), (-1, 5, 6))
    assert rows(capsys.readouterr().out)["LSTM"][0] == "([1, 5, 8], ([1, 1, 8], [1, 1, 8]))"


@pytest.mark.parametrize(
    "arguments",
    [
        {"input_size": [(2, 7), (2, 4)], "dtype": ["int64", torch.float32]},
        {"input_size": {"tokens": (2, 7), "features": (2, 4)}, "dtype": {"tokens": "int64"}},
        {"inputs": (torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 4))},
        {"inputs": {"features": torch.zeros(2, 4), "tokens": torch.zeros(2, 7, dtype=torch.int64)}},
    ],
)
def test_several_inputs(capsys: pytest.CaptureFixture[str], arguments: dict[str, Any]) -> None:
    summary(TwoInputs(), **arguments)
    table = rows(capsys.readouterr().out)
    assert table["TwoInputs"][0] == "{joint: [2, 8], pair: ([2, 8], None)}"
    assert table["embed (Embedding)"] == ["[2, 7, 8]", "800"]


def test_shared_parameters_and_modules_count_once(capsys: pytest.CaptureFixture[str]) -> None:
    network = Shared()
    network.block.requires_grad_(False)
    counts = summary(network, (1, 3), dtype="int64")
    printed = capsys.readouterr().out
    table = rows(printed)
    assert counts == {"total_params": 400 + 72 + 27 + 50, "trainable_params": 400 + 27 + 50}
    assert column_sum(printed) == counts["total_params"]
    assert table["head (Linear)"] == ["[1, 3, 50]", "50 + shared"]
    assert table["unused (Linear)"] == ["-", "27"]
    assert printed.count("block (Linear)") == 1


def test_without_an_input_only_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert summary(mlp())["total_params"] == 407_050
    printed = capsys.readouterr().out
    assert rows(printed)["1 (Linear)"] == ["-", "401,920"]
    assert "summary(input_size=" in printed


def test_dtype_of_the_network_is_the_default() -> None:
    summary(nn.Linear(4, 2).to(torch.bfloat16), (1, 4))
    with pytest.raises(RuntimeError, match="input_size="):
        summary(nn.Linear(4, 2).to(torch.bfloat16), (1, 4), dtype="float32")


def test_network_on_the_meta_device(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        network = nn.Linear(10_000, 100_000)
    assert summary(network, (1, 10_000))["total_params"] == 1_000_100_000
    assert rows(capsys.readouterr().out)["Linear"] == ["[1, 100000]", "1,000,100,000"]


class Restless(nn.Module):
    """Counts its calls in a buffer, draws, and keeps its BatchNorm in train mode whatever it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: torch.Tensor

    def train(self, mode: bool = True) -> Restless:
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.norm(x + torch.rand_like(x))


def fails(network: nn.Module) -> None:
    with pytest.raises(RuntimeError):
        summary(network, (3, 5))


def works(network: nn.Module) -> None:
    summary(network, (3, 4))


@pytest.mark.parametrize("run", [works, fails])
def test_the_network_is_left_as_it_was(run: Callable[[nn.Module], None]) -> None:
    network = nn.Sequential(Restless(), nn.Dropout(), nn.Linear(4, 2))
    network[1].eval()  # frozen by the user
    modes = [module.training for module in network.modules()]
    state = {name: value.clone() for name, value in network.state_dict().items()}
    calls = network[0].calls
    random_state = torch.get_rng_state()
    run(network)
    assert [module.training for module in network.modules()] == modes
    assert network[0].calls is calls
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in network.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@pytest.mark.parametrize(
    ("arguments", "error", "cure"),
    [
        ({"input_size": (1, 3, 5, 5)}, RuntimeError, r"layer '1' \(Linear\) failed.*input_size=tuple"),
        ({"input_size": (1, -1, 28, 28)}, ValueError, r"tuple\(batch.shape\)"),
        ({"input_size": 784}, TypeError, r"Write input_size=\(1, 3, 32, 32\)"),
        ({"input_size": "784"}, TypeError, r"Write input_size=\(1, 3, 32, 32\)"),
        ({"input_size": [(1, 784), 3]}, TypeError, "batch dimension first"),
        ({"input_size": (1, 784), "dtype": "float33"}, TypeError, 'torch.int64 or "int64"'),
        ({"input_size": (1, 784), "dtype": ["int64", "int64"]}, ValueError, "one an input"),
        ({"input_size": (1, 784), "inputs": torch.zeros(1, 784)}, TypeError, "not both"),
    ],
)
def test_errors_name_the_cure(arguments: dict[str, Any], error: type[Exception], cure: str) -> None:
    with pytest.raises(error, match=cure):
        summary(mlp(), **arguments)


def test_lazy_layers_need_an_input_and_stay_lazy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="input_size="):
        summary(nn.LazyLinear(3))
    network = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2), nn.Linear(2, 2))
    network[4].requires_grad_(False)
    random_state = torch.get_rng_state()
    counts = summary(network, (1, 3, 5, 5))
    expected = {"0 (Conv2d)": 4 * 27 + 4, "1 (BatchNorm2d)": 8, "3 (Linear)": 2 * 36 + 2, "4 (Linear)": 6}
    table = rows(capsys.readouterr().out)
    assert {name: table[name][1] for name in expected} == {name: str(size) for name, size in expected.items()}
    assert counts == {"total_params": sum(expected.values()), "trainable_params": sum(expected.values()) - 6}
    assert all(module.has_uninitialized_params() for module in (network[0], network[1], network[3]))
    assert torch.equal(torch.get_rng_state(), random_state)


class Nested(nn.Module):
    """Layers in containers, one under two names, parameters without a layer, and a batch in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))])
        self.own = nn.Parameter(torch.zeros(2))
        self.again = self.parts["a"]

    def forward(self, batch: dict[str, Any], flag: Any = None) -> dict[str, Any]:
        x = self.again(self.parts["a"](batch["x"]["y"])) * self.scales[0]
        for layer in self.parts["b"]:
            x = layer(x)
        return {"out": [x + self.own], "flag": flag}


def test_any_nesting(capsys: pytest.CaptureFixture[str]) -> None:
    network = Nested()
    network.parts["b"].requires_grad_(False)
    batch = {"x": {"y": torch.ones(2, 4)}}
    frozen = 20 + 10
    for given in ((batch, 3), {"batch": batch, "flag": 3}):
        counts = summary(network, inputs=given)
        assert counts == {"total_params": 20 + frozen + 6 + 2, "trainable_params": 20 + 6 + 2}
        printed = capsys.readouterr().out
        table = rows(printed)
        assert table["Nested"] == ["{out: ([2, 2]), flag: int}", "2"]
        assert table["scales (ParameterList)"] == ["-", "6"] and table["b (ModuleList)"] == ["-", "-"]
        assert "\n      1 (Linear)" in printed and "again" not in printed
        assert column_sum(printed) == counts["total_params"]


def test_compiled_networks_show_their_layers(capsys: pytest.CaptureFixture[str]) -> None:
    in_place, wrapped = mlp(), torch.compile(mlp())
    in_place.compile()
    for network in (in_place, wrapped):
        assert summary(network, (3, 784))["total_params"] == 407_050
        assert rows(capsys.readouterr().out)["1 (Linear)"] == ["[3, 512]", "401,920"]
    assert in_place._compiled_call_impl is not None


def test_scripted_networks_show_what_they_return(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of whether torch goes on with them
        network = torch.jit.trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.zeros(1, 3))
    assert summary(network, (2, 3)) == {"total_params": 16, "trainable_params": 16}
    assert rows(capsys.readouterr().out)["TopLevelTracedModule"] == ["[2, 4]", "-"]


@pytest.mark.parametrize("frozen", [False, True])
def test_parametrized_layers(frozen: bool) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)).requires_grad_(not frozen)
    assert summary(layer, (1, 3)) == {"total_params": 20, "trainable_params": 0 if frozen else 20}
