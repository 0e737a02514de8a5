"""Outputs in another form than the loss takes: told once, before the first step, at the user's own line."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hapi

X = torch.rand(32, 4)
Y = torch.randint(3, (32,))
DATA = X, Y


def trained(loss: Any, *last: nn.Module, kind: type[hapi.Model] = hapi.Model) -> hapi.Model:
    network = nn.Sequential(nn.Linear(4, 3), *last)
    return kind(network).prepare(torch.optim.SGD(network.parameters(), lr=0.1), loss)


@pytest.mark.parametrize(
    ("loss", "last", "said"),
    [
        (nn.CrossEntropyLoss(), nn.Softmax(1), "CrossEntropyLoss received probabilities.*Leave the Softmax"),
        (nn.functional.cross_entropy, nn.Softmax(1), "CrossEntropyLoss received probabilities"),
        (partial(nn.functional.cross_entropy, label_smoothing=0.1), nn.Softmax(1), "CrossEntropyLoss received prob"),
        (nn.NLLLoss(), nn.Softmax(1), r"NLLLoss received probabilities.*Replace its Softmax by nn\.LogSoftmax"),
        (nn.NLLLoss(), nn.Identity(), "NLLLoss received scores.*Replace NLLLoss by CrossEntropyLoss"),
        (nn.functional.nll_loss, nn.Identity(), "NLLLoss received scores"),
    ],
)
def test_another_form_is_told_once(loss: Any, last: nn.Module, said: str) -> None:
    model = trained(loss, last)
    with pytest.warns(UserWarning, match=said) as caught:
        model.fit(DATA, DATA, epochs=2, batch_size=8, verbose=0)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert model.steps_trained == 8
    with pytest.warns(UserWarning, match=said) as caught:
        model.evaluate(DATA, verbose=0)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_it_is_told_before_the_first_step() -> None:
    model = trained(nn.CrossEntropyLoss(), nn.Softmax(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="probabilities"):
            model.fit(DATA, verbose=0)
    assert model.steps_trained == 0


def test_one_of_a_list_of_losses() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x), self.layer(x).softmax(1)

    model = hapi.Model(Two(), labels=2).prepare("sgd", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss()])
    with pytest.warns(UserWarning, match="CrossEntropyLoss received probabilities") as caught:
        model.fit((X, Y, Y), verbose=0)
    assert len(caught) == 1


def test_an_overridden_step_is_told_at_its_own_line() -> None:
    class Own(hapi.Model):
        def train_step(self, inputs: Any, labels: Any) -> Any:
            return super().train_step(inputs, labels)

    with pytest.warns(UserWarning, match="probabilities") as caught:
        trained(nn.CrossEntropyLoss(), nn.Softmax(1), kind=Own).fit(DATA, verbose=0)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("loss", "last"),
    [
        (nn.CrossEntropyLoss(), [nn.Identity()]),
        (nn.CrossEntropyLoss(), [nn.LogSoftmax(1)]),  # the same numbers
        (nn.CrossEntropyLoss(), [nn.ReLU()]),
        (nn.NLLLoss(), [nn.LogSoftmax(1)]),
        (nn.MultiMarginLoss(), [nn.Softmax(1)]),
        (lambda outputs, labels: nn.functional.cross_entropy(outputs, labels), [nn.Softmax(1)]),  # knows what it does
    ],
)
@pytest.mark.parametrize("amp", [None, "bf16"])
def test_the_right_form_is_left_alone(recwarn: pytest.WarningsRecorder, loss: Any, last: Any, amp: str | None) -> None:
    model = trained(loss, *last)
    model.prepare(model.optimizer, loss, amp_configs=amp).fit(DATA, DATA, epochs=1, verbose=0)
    assert not recwarn.list


def test_pixels_are_classified_along_dimension_1(recwarn: pytest.WarningsRecorder) -> None:
    labels = torch.randint(3, (8, 5, 5))
    network = nn.Sequential(nn.Conv2d(2, 3, 1), nn.LogSoftmax(1))
    images = torch.rand(8, 2, 5, 5)
    hapi.Model(network).prepare("sgd", nn.NLLLoss()).fit((images, labels), verbose=0)
    assert not recwarn.list
    network[1] = nn.Softmax(1)
    with pytest.warns(UserWarning, match="NLLLoss received probabilities"):
        hapi.Model(network).prepare("sgd", nn.NLLLoss()).fit((images, labels), verbose=0)
