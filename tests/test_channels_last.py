"""`prepare(channels_last=True)`: another layout in memory, the same numbers and names."""

import pytest
import torch
from torch import nn

import hapi

X, Y = torch.randn(22, 3, 8, 8).double(), torch.arange(22) % 4


class Seen(nn.Module):
    """Notes the layout of what it is given."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.last = nn.Linear(6, 4)
        self.layouts = set()

    def forward(self, x):
        self.layouts.add(x.is_contiguous(memory_format=torch.channels_last))
        return self.last(self.norm(self.conv(x)).relu().mean((2, 3)))


def trained(**options):
    torch.manual_seed(0)
    network = Seen().double()
    model = hapi.Model(network).prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy(), **options)
    history = model.fit((X, Y), (X, Y), batch_size=4, epochs=2, verbose=0, seed=1).history
    return model, history


def test_the_numbers_are_the_same():
    (plain, history), (last, other) = trained(), trained(channels_last=True)
    assert plain.network.layouts == {False} and last.network.layouts == {True}
    assert last.network.conv.weight.is_contiguous(memory_format=torch.channels_last)
    for name, values in history.items():
        assert other[name] == pytest.approx(values, rel=1e-8), name
    for name, tensor in plain.network.state_dict().items():
        torch.testing.assert_close(last.network.state_dict()[name], tensor, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(last.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-8, atol=1e-8)


def test_single_batches_and_files(tmp_path):
    model, _ = trained(channels_last=True)
    model.network.layouts.clear()
    model.train_batch(X[:4], Y[:4])
    model.eval_batch(X[:4], Y[:4])
    outputs = model.predict_batch(X[:4])
    assert model.network.layouts == {True}
    model.save(tmp_path / "x")
    fresh = Seen().double()
    fresh.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True))
    torch.testing.assert_close(fresh.eval()(X[:4]), outputs, rtol=1e-8, atol=1e-8)


def test_it_can_be_taken_back():
    model, _ = trained(channels_last=True)
    model.prepare("sgd", nn.CrossEntropyLoss())
    model.network.layouts.clear()
    model.fit((X, Y), verbose=0)
    assert model.network.layouts == {False}
    assert model.network.conv.weight.is_contiguous()


def test_what_has_no_channels_is_left_alone():
    network = nn.Linear(6, 3)
    model = hapi.Model(network).prepare("sgd", nn.CrossEntropyLoss(), channels_last=True)
    model.fit((torch.randn(8, 6), torch.arange(8) % 3), verbose=0)


def test_it_is_a_switch():
    with pytest.raises(TypeError, match="channels_last received 'yes', which is neither True nor False"):
        hapi.Model(Seen()).prepare(channels_last="yes")
