"""train_batch, eval_batch and predict_batch: loops of one's own over the same parts as fit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import hapi
from hapi.metrics import Accuracy

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)
WEIGHT = torch.tensor([0.2, 1.0, 5.0])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def model(loss: Any = None, net: nn.Module | None = None, **options: Any) -> hapi.Model:
    net = net if net is not None else network()
    return hapi.Model(net).prepare(SGD(net.parameters(), lr=0.5), loss or nn.CrossEntropyLoss(), Accuracy(), **options)


def close(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


def stepped(*parts: tuple[torch.Tensor, torch.Tensor], loss: Any = cross_entropy) -> nn.Module:
    """A network after one plain step a part."""
    net = network()
    for x, y in parts:
        net.zero_grad()
        loss(net(x), y).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.5 * parameter.grad
    return net


def test_a_step_is_a_plain_step() -> None:
    subject = model()
    for part in (slice(0, 5), slice(5, 12)):
        expected = cross_entropy(subject.network(X[part]), Y[part]).item()
        accuracy = (subject.network(X[part]).argmax(1) == Y[part]).float().mean().item()
        logs = subject.train_batch(X[part], Y[part])
        assert logs == pytest.approx({"loss": expected, "acc": accuracy})
        assert all(type(value) is float for value in logs.values())
    expected = stepped((X[:5], Y[:5]), (X[5:], Y[5:]))
    assert all(map(torch.equal, subject.network.parameters(), expected.parameters()))


@pytest.mark.parametrize("loss", [None, lambda outputs, labels: cross_entropy(outputs, labels)])
def test_a_batch_of_no_samples_is_refused(loss) -> None:
    subject = model(loss)
    for call in (subject.train_batch, subject.eval_batch):
        with pytest.raises(ValueError, match=f"{call.__name__} received a batch of no samples"):
            call(X[:0], Y[:0])
    assert subject.predict_batch(X[:0]).shape == (0, 3)
    assert close(subject.network, network())


def test_a_loop_of_train_batch_is_fit() -> None:
    loop, whole = model(), model()
    for x, y in zip(X.split(4), Y.split(4), strict=True):
        loop.train_batch(x, y)
    whole.fit((X, Y), batch_size=4, shuffle=False, verbose=0)
    assert all(map(torch.equal, loop.network.parameters(), whole.network.parameters()))


def weighted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, labels, WEIGHT)


def halves(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum over the labels below 2 and their number."""
    counted = labels < 2
    return cross_entropy(outputs[counted], labels[counted], reduction="sum"), counted.sum()


LOSSES = [
    (nn.CrossEntropyLoss(), cross_entropy),
    (nn.CrossEntropyLoss(weight=WEIGHT), weighted),
    (cross_entropy, cross_entropy),
    (halves, lambda outputs, labels: halves(outputs, labels)[0] / halves(outputs, labels)[1]),
]


@pytest.mark.parametrize(("loss", "plain"), LOSSES)
@pytest.mark.parametrize("cuts", [(12,), (6, 6), (5, 4, 3), (1, 10, 1)])
def test_batches_without_an_update_add_up_to_one_large_batch(loss: Any, plain: Any, cuts: tuple[int, ...]) -> None:
    subject = model(loss)
    for _ in range(2):
        parts = list(zip(X.split(cuts), Y.split(cuts), strict=True))
        for number, (x, y) in enumerate(parts, 1):
            subject.train_batch(x, y, update=number == len(parts))
    assert close(subject.network, stepped((X, Y), (X, Y), loss=plain))


def test_without_an_update_nothing_moves() -> None:
    subject = model()
    logs = subject.train_batch(X, Y, update=False)
    assert logs["loss"] == pytest.approx(cross_entropy(network()(X), Y).item())
    assert all(map(torch.equal, subject.network.parameters(), network().parameters()))


def test_an_update_leaves_no_gradient_behind() -> None:
    subject = model()
    subject.train_batch(X, Y, update=False)
    subject.train_batch(X, Y)
    assert all(parameter.grad is None for parameter in subject.network.parameters())
    subject.train_batch(X, Y)
    assert close(subject.network, stepped((X, Y), (X, Y)))


def test_clipping() -> None:
    def steep(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 100 * cross_entropy(outputs, labels)

    subject = model(steep, clip_grad_norm=0.5)
    before = nn.utils.parameters_to_vector(subject.network.parameters()).detach().clone()
    subject.train_batch(X, Y, update=False)
    subject.train_batch(X, Y)
    moved = nn.utils.parameters_to_vector(subject.network.parameters()) - before
    assert float(moved.norm().detach()) == pytest.approx(0.5 * 0.5, rel=1e-4)


def test_eval_batch_and_predict_batch_leave_everything_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    net[2].eval()  # frozen by the user
    subject = model(net=net)
    modes = [module.training for module in net.modules()]
    state = {key: value.clone() for key, value in net.state_dict().items()}
    draws = torch.get_rng_state()
    logs = subject.eval_batch(X, Y)
    outputs = subject.predict_batch(X)
    assert torch.equal(torch.get_rng_state(), draws)
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert not outputs.requires_grad
    net.eval()
    assert torch.equal(outputs, net(X))
    assert logs["loss"] == pytest.approx(cross_entropy(net(X), Y).item())
    assert logs["acc"] == pytest.approx((net(X).argmax(1) == Y).float().mean().item())


def test_train_batch_trains_in_train_mode_and_gives_modes_back() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    subject = model(net=net)
    subject.train_batch(X, Y)
    assert torch.allclose(net[0].running_mean, 0.1 * X.mean(0))
    assert not net.training and not net[0].training
    net.train()
    net[0].eval()  # frozen by the user
    subject.train_batch(X, Y)
    assert torch.allclose(net[0].running_mean, 0.1 * X.mean(0))
    assert net.training and not net[0].training


def test_between_fits() -> None:
    mixed, plain = model(), model()
    mixed.fit((X, Y), batch_size=12, shuffle=False, verbose=0)
    mixed.train_batch(X, Y)
    mixed.eval_batch(X, Y)
    mixed.train_batch(X[:6], Y[:6], update=False)
    mixed.train_batch(X[6:], Y[6:])
    mixed.fit((X, Y), batch_size=12, shuffle=False, verbose=0)
    plain.fit((X, Y), batch_size=12, epochs=4, shuffle=False, verbose=0)
    assert close(mixed.network, plain.network)


def test_gradients_left_open_do_not_reach_a_fit() -> None:
    subject, other = model(), model()
    subject.train_batch(X, Y, update=False)
    for one in (subject, other):
        one.fit((X, Y), batch_size=12, shuffle=False, verbose=0)
    assert all(map(torch.equal, subject.network.parameters(), other.network.parameters()))


def test_without_metrics_or_labels() -> None:
    net = network()
    subject = hapi.Model(net).prepare(SGD(net.parameters(), lr=0.5), lambda outputs: outputs.square().mean())
    expected = net(X).square().mean().item()
    assert subject.train_batch(X) == pytest.approx({"loss": expected})
    assert hapi.Model(net).eval_batch(X) == {}
    assert torch.equal(hapi.Model(net).predict_batch(X), net(X))


def test_a_loss_that_is_no_number_is_shown() -> None:
    spoilt = X.clone()
    spoilt[0] = torch.nan
    loss = model().train_batch(spoilt, Y)["loss"]
    assert loss != loss


def test_running_values_do_not_pass_from_call_to_call() -> None:
    subject = model()
    first = subject.eval_batch(X[:4], Y[:4])
    subject.eval_batch(X[4:], Y[4:])
    assert subject.eval_batch(X[:4], Y[:4]) == first


@pytest.mark.parametrize(
    ("given", "make"),
    [
        ("sgd", SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        (torch.optim.RMSprop, torch.optim.RMSprop),
        (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), partial(SGD, lr=0.1, momentum=0.9)),
    ],
)
def test_optimizers_by_name_or_callable(given: Any, make: Any) -> None:
    net, twin = network(), network()
    for one in (net, twin):
        one[0].bias.requires_grad_(False)
    subject = hapi.Model(net).prepare(given, nn.CrossEntropyLoss())
    options = {} if isinstance(make, partial) else {"lr": subject.optimizer.defaults["lr"]}
    optimizer = make([parameter for parameter in twin.parameters() if parameter.requires_grad], **options)
    for _ in range(3):
        subject.train_batch(X, Y)
        optimizer.zero_grad()
        cross_entropy(twin(X), Y).backward()
        optimizer.step()
    assert close(net, twin)
    if isinstance(given, str):
        assert subject.optimizer.defaults["fused"] and subject.optimizer.defaults["lr"] == 1e-3
