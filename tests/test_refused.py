"""A layer that takes another width than it is given says so in words."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

import hapi

X = torch.rand(6, 3, 8, 8)
CASES: dict[str, tuple[nn.Module, torch.Tensor, str]] = {
    "not flattened": (
        nn.Sequential(nn.ReLU(), nn.Linear(192, 2)), X,
        "The layer '1' (Linear) was given an input of shape (2, 3, 8, 8), whose last dimension is 8, but "
        "in_features=192 is what it takes. Write nn.Flatten() before it.",
    ),
    "another width": (nn.Sequential(nn.Flatten(), nn.Linear(100, 2)), X, "Write in_features=192, or give data of the "),
    "alone": (nn.Linear(5, 2), X.flatten(1), "The network, a Linear was given an input of shape (2, 192), whose last"),
    "channels": (
        nn.Sequential(nn.Conv2d(1, 2, 3)), X,
        "The layer '0' (Conv2d) was given an input of shape (2, 3, 8, 8), which has 3 channels (dimension 1), but "
        "in_channels=1 is what it takes. Write in_channels=3, or give data with as many channels as it takes.",
    ),
    "channels last": (nn.Sequential(nn.Conv2d(3, 2, 3)), X.permute(0, 2, 3, 1), "Write x.permute(0, 3, 1, 2) for a b"),
    "a number a sample": (
        nn.Sequential(nn.Linear(1, 2)), X[:, 0, 0, 0],
        "The layer '0' (Linear) was given an input of shape (2,), whose last dimension is 2, but in_features=1 is what "
        "it takes. Write x.unsqueeze(1).",
    ),
    "no features": (nn.Linear(5, 2), X[:, 0, 0, 0], "Give a batch of the shape (N, 5)."),
    "no channels": (
        nn.Sequential(nn.Conv2d(1, 2, 3)), X[:, 0],
        "The layer '0' (Conv2d) was given an input of shape (2, 8, 8), in which a batch has no dimension of channels, "
        "but in_channels=1 is what it takes. Write x.unsqueeze(1).",
    ),
    "no channels of several": (nn.Conv2d(3, 2, 3), X[:, 0], "Give a batch of the shape (N, 3, 8, 8)."),
    "as wide as its channels": (nn.Conv2d(8, 2, 3), X, "Write in_channels=3, or give data with as many channels as"),
    "of time last": (nn.Conv1d(8, 2, 3), X[:, :, 0], "Write x.permute(0, 2, 1) for a batch."),
    "of one dimension": (nn.Conv1d(4, 2, 3), X[:, :, 0], "which has 3 channels (dimension 1), but in_channels=4"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_width_that_a_layer_does_not_take(name: str) -> None:
    network, x, words = CASES[name]
    y = torch.zeros(6, dtype=torch.int64)
    model = hapi.Model(network).prepare("adam", nn.CrossEntropyLoss())
    calls: list[Any] = [
        lambda: model.fit((x, y), batch_size=2, verbose=0),
        lambda: model.evaluate((x, y), batch_size=2, verbose=0),
        lambda: model.predict(x, batch_size=2, verbose=0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)


class Odd(nn.Module):
    """Fails beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x.flatten(1)) @ torch.rand(3, 3)


class Nested(Odd):
    """Gives its layer a tensor that has no shape."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(torch.nested.nested_tensor(list(x.flatten(2))))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "network", [Odd(), nn.Sequential(nn.Conv2d(3, 2, 20)), Nested()], ids=["its own product", "kernel", "nested"]
)
def test_what_is_not_certain_is_left_to_torch(network: nn.Module) -> None:
    with pytest.raises(RuntimeError) as caught:
        hapi.Model(network).prepare(loss=nn.CrossEntropyLoss()).predict(X, verbose=0)
    assert not isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_nothing_is_looked_for_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hapi.refused", None)
    hapi.Model(nn.Flatten()).predict(X, verbose=0)
