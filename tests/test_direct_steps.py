"""Steps that are computed directly, without `Model.train_step` and what surrounds it, against those that are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hapi
from hapi.callbacks import Callback
from hapi.step import Stepper

GENERATOR = torch.Generator().manual_seed(7)
X = torch.randn(53, 6, generator=GENERATOR)
Y = torch.randint(5, (53,), generator=GENERATOR)
REAL = torch.randn(53, 5, generator=GENERATOR)


class Indirectly(Callback):
    """Has all batches take the way of the first one."""

    def forget(self) -> None:
        self.model._engine.prepared.replaced = True

    def on_train_begin(self, logs: Any = None) -> None:
        self.forget()

    def on_eval_begin(self, logs: Any = None) -> None:
        self.forget()


class Parts(nn.Module):
    """One input, and outputs of another kind."""

    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.body, self.kind = nn.Linear(6, 5), kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(self.body(x))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 5))


def with_hook(hook: Callable[[torch.Tensor], Any]) -> nn.Module:
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda module, given, value: hook(value))
    return loss


def prepared(loss: Any, net: nn.Module | None = None, metrics: Any = None, **options: Any) -> hapi.Model:
    net = net if net is not None else network()
    return hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=0.5), loss, metrics, **options)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each batch that is computed directly, whether it was trained on."""
    seen: list[bool] = []
    computed = Stepper._directly

    def counting(stepper: Stepper, kind: str, *batch: Any) -> Any:
        seen.append(kind == "train")
        found = computed(stepper, kind, *batch)
        if found is None:
            seen.pop()
        return found

    monkeypatch.setattr(Stepper, "_directly", counting)
    return seen


LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), Y),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), Y),
    "function": (mse_loss, REAL),
    "of one number": (lambda outputs, labels: mse_loss(outputs, labels).reshape(1), REAL),
    "hook": (with_hook(lambda value: 2 * value), REAL),
    "hook, sum and count": (with_hook(lambda value: (value * 4, 4)), REAL),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("loss, labels", LOSSES.values(), ids=LOSSES)
def test_the_numbers_are_the_same(loss: Any, labels: torch.Tensor, accumulate: int, direct: list[bool]) -> None:
    results = []
    for callbacks in ([], [Indirectly()]):
        metrics = hapi.metrics.Accuracy() if labels is Y else None
        model = prepared(loss, metrics=metrics)
        history = model.fit(
            (X, labels), (X, labels), epochs=2, batch_size=8, seed=3, verbose=0, callbacks=callbacks,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        values = model.evaluate((X, labels), batch_size=8, verbose=0, callbacks=callbacks)
        results.append((history.history, values, [p.tolist() for p in model.network.state_dict().values()]))
        if not callbacks:
            # Seven batches a pass; the first of each call is looked at, for training and for evaluation.
            assert sum(direct) == 2 * 7 - 1
            assert direct.count(False) == 2 * 7 - 1 + 7 - 1
            direct.clear()
    assert not direct
    assert results[0] == results[1]


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dict": lambda outputs: {"scores": outputs},
    "two": lambda outputs: (outputs, outputs.sum()),
    "its own loss": lambda outputs: {"loss": outputs.square().mean(), "scores": outputs},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_outputs_of_any_kind(kind: Callable[[torch.Tensor], Any]) -> None:
    def loss(*values: Any) -> torch.Tensor:
        scores = values[0]["scores"] if isinstance(values[0], dict) else values[0]
        return mse_loss(scores, values[-1])

    results = []
    for callbacks in ([], [Indirectly()]):
        torch.manual_seed(0)
        net = Parts(kind)
        model = prepared(loss, net)
        history = model.fit((X, REAL), (X, REAL), batch_size=8, seed=3, verbose=0, callbacks=callbacks)
        results.append((history.history, net.body.weight.tolist()))
    assert results[0] == results[1]


def test_other_steps_are_not(direct: list[bool]) -> None:
    class Own(hapi.Model):
        def train_step(self, inputs: Any, labels: Any) -> Any:
            return super().train_step(inputs, labels)

    net = network()
    own = Own(net).prepare(torch.optim.SGD(net.parameters(), lr=0.5), nn.CrossEntropyLoss())
    ignored = torch.where(Y == 0, -100, Y)
    own.fit((X, Y), batch_size=8, verbose=0)
    # Several losses, half precision, labels that are left out, several labels.
    prepared([nn.CrossEntropyLoss()]).fit((X, Y), batch_size=8, verbose=0)
    prepared(nn.CrossEntropyLoss(), amp_configs="bf16").fit((X, Y), batch_size=8, verbose=0)
    prepared(nn.CrossEntropyLoss()).fit((X, ignored), batch_size=8, verbose=0)
    by_batch = prepared(nn.CrossEntropyLoss())
    for _ in range(3):
        by_batch.train_batch(X[:8], Y[:8])
        by_batch.eval_batch(X[:8], Y[:8])
    assert not direct


def fails_at(batch: int, how: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
    """A loss that is another one in its call of a number, from 0."""
    calls = []

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        calls.append(batch)
        return how(outputs, labels) if len(calls) == batch + 1 else mse_loss(outputs, labels)

    return loss


WRONG = {
    "a number": (lambda outputs, labels: 1.0, "holds no gradient to train with"),
    "nothing": (lambda outputs, labels: None, "holds no gradient to train with"),
    "no graph": (lambda outputs, labels: mse_loss(outputs, labels).detach(), "does not depend on any parameter"),
    "a value a sample": (lambda outputs, labels: (outputs - labels).square().mean(1), "not one number to minimize"),
    "another form": (lambda outputs, labels: (mse_loss(outputs, labels) * 8, 8), "a mean for some batches"),
    "shapes": (lambda outputs, labels: outputs @ labels, "mat1 and mat2"),
}


@pytest.mark.parametrize("how, words", WRONG.values(), ids=WRONG)
def test_errors_in_a_later_batch_are_worded_alike(how: Any, words: str, direct: list[bool]) -> None:
    found = []
    for callbacks in ([], [Indirectly()]):
        model = prepared(fails_at(3, how))
        with pytest.raises((ValueError, RuntimeError), match=words) as raised:
            model.fit((X, REAL), batch_size=8, seed=3, verbose=0, callbacks=callbacks)
        found.append((type(raised.value), str(raised.value)))
        assert model.steps_trained == 3
    assert direct == [True] * 3
    assert found[0] == found[1]


def odd_batches(*last: torch.Tensor) -> DataLoader[Any]:
    """Two good batches, and one of other tensors."""
    batches = [(X[:8], REAL[:8]), (X[8:16], REAL[8:16]), last]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


ODD = {
    "dtype": (X[:8].double(), REAL[:8]),
    "width": (X[:8, :5], REAL[:8]),
    "one sample": (X[:1], REAL[:1]),
    "labels": (X[:8], REAL[:8, :3]),
}


@pytest.mark.parametrize("last", ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_data_that_fails_later_is_worded_alike(last: tuple[torch.Tensor, ...], direct: list[bool]) -> None:
    found = []
    for callbacks in ([], [Indirectly()]):
        model = prepared(nn.MSELoss())
        with pytest.raises((ValueError, RuntimeError)) as raised:
            model.fit(odd_batches(*last), verbose=0, callbacks=callbacks)
        found.append((type(raised.value), str(raised.value)))
    assert direct == [True] * 2
    assert found[0] == found[1]


class ShrinksAt(nn.Module):
    """Gives one number in a call of a number, from 0."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.body, self.call, self.calls = nn.Linear(6, 5), call, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs: torch.Tensor = self.body(x)
        return outputs.square().mean() if self.calls == self.call + 1 else outputs


@pytest.mark.parametrize("method", ["fit", "evaluate"])
@pytest.mark.parametrize("gives, words", [(True, "a pair whose second part is one number"), (False, "gave None")])
def test_an_output_that_is_one_number_later(method: str, gives: bool, words: str) -> None:
    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        return mse_loss(outputs, labels) if outputs.dim() else outputs if gives else None

    for callbacks in ([], [Indirectly()]):
        model = prepared(loss, ShrinksAt(2))
        with pytest.raises(ValueError, match=words):
            getattr(model, method)((X, REAL), batch_size=8, verbose=0, callbacks=callbacks)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_loss_prepared_within_a_call_is_as_new_after_it(method: str) -> None:
    class Switches(Callback):
        def at(self, step: int) -> None:
            # The call's last.
            if step == 6:
                optimizer = torch.optim.SGD(self.model.network.parameters(), lr=0.5)
                self.model.prepare(optimizer, nn.CrossEntropyLoss())

        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            self.at(step)

        def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
            self.at(step)

    model = prepared(nn.MSELoss(), nn.Linear(6, 5))
    getattr(model, method)((X, REAL), batch_size=8, verbose=0, callbacks=[Switches()])
    fresh = prepared(nn.CrossEntropyLoss(), copy.deepcopy(model.network))
    # Of labels that are left out it knows.
    ignored = torch.where(torch.arange(8) < 6, -100, Y[:8])
    for each in (model, fresh):
        each.train_batch(X[:8], ignored, update=False)
        each.train_batch(X[8:16], Y[8:16])
    assert torch.equal(model.network.weight, fresh.network.weight)
    # A first batch is looked at closely.
    model.prepare(loss=nn.L1Loss())
    with pytest.raises(ValueError, match="L1Loss received outputs of shape"):
        model.evaluate((X, REAL[:, :1]), batch_size=8, verbose=0)


def test_a_loss_that_a_callback_prepares_is_taken_from_the_next_batch_on() -> None:
    class Switches(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 2:
                self.model.prepare(self.model.optimizer, tenfold)

    def tenfold(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        called.append(10)
        return 10 * mse_loss(outputs, labels)

    def once(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        called.append(1)
        return mse_loss(outputs, labels)

    called: list[int] = []
    prepared(once).fit((X, REAL), batch_size=8, verbose=0, callbacks=[Switches()])
    assert called == [1] * 3 + [10] * 4


def test_what_is_hung_on_network_and_loss_within_a_fit_is_called() -> None:
    class Hangs(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 2:
                self.model.network.register_forward_hook(lambda *_: called.append("network"))
                self.model.loss.register_forward_hook(lambda *_: called.append("loss"))

    called: list[str] = []
    data = TensorDataset(X, REAL)
    prepared(nn.MSELoss()).fit(data, batch_size=8, verbose=0, callbacks=[Hangs()])
    assert called == ["network", "loss"] * 4
