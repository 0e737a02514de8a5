"""The operations of a forward pass, against formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

import hapi


def rows(text: str) -> dict[str, list[str]]:
    """The table's rows: first cell -> the others."""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) >= 3}


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class Applied(nn.Module):
    """A function as a network, of its input and a vector (D,)."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.vector = function, nn.Parameter(torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.vector)


B, T, D, F = 2, 7, 16, 32
ATTENTION = 2 * 2 * B * T * T * D

CASES: dict[str, tuple[nn.Module, Any, int]] = {
    "linear": (nn.Linear(D, F), (B, T, D), 2 * B * T * D * F),
    "conv": (nn.Conv2d(3, 8, 3, stride=2, padding=1), (B, 3, 9, 9), 2 * B * 8 * 25 * 27),
    "groups": (nn.Conv1d(8, 8, 3, groups=8), (B, 8, 9), 2 * B * 8 * 7 * 3),
    "lazy": (
        nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten(), nn.LazyLinear(10)), (B, 3, 8, 8),
        2 * B * (8 * 36 * 27 + 288 * 10),
    ),
    "lstm": (nn.LSTM(6, 8, batch_first=True), (B, 5, 6), 2 * 5 * B * 32 * (6 + 8)),
    "gru": (nn.GRU(6, 8, 2, bidirectional=True), (5, B, 6), 2 * 2 * 5 * B * 24 * ((6 + 8) + (16 + 8))),
    "attention": (Attention(), (B, 4, T, D // 4), ATTENTION),
    "transformer": (
        nn.TransformerEncoderLayer(D, 4, F, batch_first=True), (B, T, D),
        2 * B * T * (4 * D * D + 2 * D * F) + ATTENTION,
    ),
    "matrix and vector": (Applied(lambda x, vector: x @ vector), (B, D), 2 * B * D),
    "batch and vector": (Applied(lambda x, vector: x @ vector), (B, T, D), 2 * B * T * D),
    "vector and matrix": (Applied(lambda x, vector: vector @ x.T), (B, D), 2 * B * D),
    "added": (Applied(lambda x, vector: torch.addmv(x[:, 0], x, vector)), (B, D), 2 * B * D),
    "added in place": (Applied(lambda x, vector: x[:, 0].clone().addmv_(x, vector)), (B, D), 2 * B * D),
    "two vectors": (Applied(lambda x, vector: torch.stack([row @ vector for row in x])), (B, D), 2 * B * D),
    "vdot": (Applied(lambda x, vector: torch.stack([torch.vdot(row, vector) for row in x])), (B, D), 2 * B * D),
    "inner": (Applied(torch.inner), (B, T, D), 2 * B * T * D),
    "sum of products": (
        Applied(lambda x, _: torch.addbmm(x.new_zeros(T, T), x, x.transpose(1, 2))), (B, T, D), 2 * B * T * T * D,
    ),
    "nothing": (nn.ReLU(), (B, 3), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_formulas(name: str) -> None:
    network, size, expected = CASES[name]
    assert hapi.flops(network, size) == expected
    assert hapi.flops(network.eval(), (2 * size[0], *size[1:]) if name != "gru" else (10, B, 6)) == 2 * expected or (
        name in ("attention", "transformer")
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_bilinear_layer_as_einsum_is_counted(device: str) -> None:
    layer = nn.Bilinear(4, 5, 6, device=device)
    expected = 2 * (B * 6 * 4 * 5 + B * 6 * 5)
    assert hapi.flops(layer, [(B, 4), (B, 5)]) == expected
    assert hapi.flops(layer, [(B, T, 4), (B, T, 5)]) == T * expected
    left, right = torch.zeros(B, 4, device=device), torch.zeros(B, 5, device=device)
    written_out = Applied(lambda x, _: torch.einsum("bi,oij,bj->bo", x, layer.weight, right)).to(device)
    assert hapi.flops(written_out, inputs=left) == expected


def test_a_known_network_and_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        network = resnet18()
    # 1.814 G multiply-adds are what torchvision's page of this network says.
    assert hapi.flops(network, (1, 3, 224, 224)) == pytest.approx(2 * 1.814e9, rel=1e-3)
    printed = capsys.readouterr().out
    table = rows(printed.partition("  layer1 ")[0]) | rows(printed[printed.index("  avgpool") :])
    assert table["fc (Linear)"] == ["[1, 1000]", f"{2 * 512 * 1000:,}", "0.0%"]
    assert table["conv1 (Conv2d)"] == ["[1, 64, 112, 112]", f"{2 * 64 * 112 * 112 * 147:,}", "6.5%"]
    assert table["ResNet"][2] == "100.0%"


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.same, self.unused = self.block, nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.same(self.block(self.embed(tokens))) * scale


@pytest.mark.parametrize(
    "arguments",
    [
        {"input_size": [(1, 3), (1, 1)], "dtype": ["int64", "float32"]},
        {"input_size": {"scale": (1, 1), "tokens": (1, 3)}, "dtype": {"tokens": "int64"}},
        {"inputs": (torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 1))},
        {"inputs": {"tokens": torch.zeros(1, 3, dtype=torch.int64), "scale": torch.ones(1, 1)}},
    ],
)
def test_a_layer_that_is_called_twice_and_several_inputs(
    capsys: pytest.CaptureFixture[str], arguments: dict[str, Any]
) -> None:
    assert hapi.flops(Twice(), **arguments) == 2 * (2 * 3 * 64)
    printed = capsys.readouterr().out
    assert rows(printed)["block (Linear)"] == ["[1, 3, 8]", "768", "100.0%"]
    assert rows(printed)["unused (Linear)"] == ["-", "-"] and "FLOPs of one forward: 768" in printed


def test_nothing_is_left() -> None:
    network = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(), nn.LSTM(6, 4))
    network[1].eval()
    state = {name: value.clone() for name, value in network.state_dict().items()}
    stream = torch.get_rng_state()
    assert hapi.flops(network, (3, 6)) > 0
    with pytest.raises(RuntimeError, match=r"^flops gave the network.*layer '0' \(BatchNorm1d\) failed"):
        hapi.flops(network, (3, 5))
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert [module.training for module in network.modules()] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), stream)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    assert torch.backends.mha.get_fastpath_enabled() and torch.backends.mkldnn.enabled and torch.backends.cudnn.enabled
    lazy = nn.LazyLinear(3)
    hapi.flops(lazy, (2, 5))
    assert isinstance(lazy, nn.LazyLinear) and lazy.has_uninitialized_params()


def test_of_a_model() -> None:
    model = hapi.Model(nn.Linear(6, 3)).prepare(loss=nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match=r"neither input_size and inputs.*inputs=batch"):
        hapi.flops(model)
    model.evaluate((torch.rand(8, 6), torch.zeros(8, dtype=torch.int64)), batch_size=4, verbose=0)
    assert hapi.flops(model) == 2 * 4 * 6 * 3 == hapi.flops(model, (4, 6))
    with pytest.raises(TypeError, match="both input_size and inputs"):
        hapi.flops(model.network, (4, 6), inputs=torch.rand(4, 6))
    with pytest.raises(TypeError, match=r"of type int, which is no network.*hapi\.flops\(network"):
        hapi.flops(3, (4, 6))


@pytest.mark.parametrize("size", [(10**6, 3, 10**3, 10**4), (10**30, 3, 8, 8), (10**12, 10**12, 8, 8)])
def test_an_input_beyond_the_memory(size: tuple[int, ...]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1))
    match = r"received the shape \(10+, .*which as torch.float32 takes [\d,]+ bytes: there is no memory.*'cpu'. Write"
    for call in (lambda: hapi.flops(network, size), lambda: hapi.Model(network).summary(size)):
        with pytest.raises(ValueError, match=match) as caught:
            call()
        assert caught.value.__cause__ is not None


@pytest.mark.slow
def test_a_layer_beyond_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    network = nn.Sequential(nn.Flatten(0, 1), nn.Linear(1, 2))
    network[1].weight = nn.Parameter(torch.zeros(1, 1).expand(10**9, 1))
    network[1].bias = None
    match = r"^flops gave the network \[1000000, 1, 1\], and its layer '1' \(Linear\) had no memory for it. Write"
    with pytest.raises(RuntimeError, match=match):
        hapi.flops(network, (10**6, 1, 1))
    # What the message says works with any size.
    assert hapi.flops(copy.deepcopy(network[1:]).to("meta"), (10**7, 1)) == 2 * 10**16
    hapi.Model(nn.Linear(6, 3, device="meta")).summary((10**14, 6))
    assert "[100000000000000, 3]" in capsys.readouterr().out


def test_an_error_of_another_kind_is_torchs_own() -> None:
    with pytest.raises(RuntimeError, match="quint8|[Qq]uanti"):
        hapi.flops(nn.Linear(6, 3), (2, 6), dtype=torch.quint8)
