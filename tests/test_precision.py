"""Mixed precision against torch's own recipe written out by hand, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, lr_scheduler

import hapi
from hapi.callbacks import Callback
from hapi.precision import Precision

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)
CPU = torch.device("cpu")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def fit(amp_configs: Any, *, loss: Any = None, lr: float = 0.5, callbacks: Any = None, **options: Any) -> hapi.Model:
    net = network()
    prepare = {name: options.pop(name) for name in ("clip_grad_norm", "scheduler", "metrics") if name in options}
    model = hapi.Model(net)
    model.prepare(SGD(net.parameters(), lr=lr), loss or nn.CrossEntropyLoss(), amp_configs=amp_configs, **prepare)
    options = {"batch_size": 8, "shuffle": False, "epochs": 2, **options}
    model.fit((X, Y), verbose=0, callbacks=callbacks, **options)
    return model


def autocast(dtype: torch.dtype) -> Any:
    return nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype)


def by_hand(
    dtype: torch.dtype,
    *,
    loss: Any = cross_entropy,
    scale: float | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    epochs: int = 2,
) -> nn.Module:
    net = network()
    optimizer = SGD(net.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 2.0**16, enabled=scale is not None)
    batches = list(zip(X.split(8), Y.split(8), strict=True))
    for _ in range(epochs):
        for first in range(0, len(batches), accumulate):
            window = batches[first : first + accumulate]
            for x, y in window:
                with autocast(dtype):
                    value = loss(net(x), y)
                scaler.scale(value / len(window) if len(window) > 1 else value).backward()
            scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return net


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize(
    "amp_configs", ["bf16", "bfloat16", {"dtype": torch.bfloat16}, {"level": "O1", "dtype": "bf16"}]
)
def test_bf16_is_a_plain_autocast_loop(amp_configs: Any) -> None:
    found = fit(amp_configs).network
    assert equal(found, by_hand(torch.bfloat16))
    assert not equal(found, fit(None).network)
    assert all(parameter.dtype == torch.float32 for parameter in found.parameters())


@pytest.mark.parametrize("amp_configs", ["fp16", "O1", "O2", {"level": "O2", "dtype": "float16"}])
def test_fp16_is_a_plain_scaled_loop(amp_configs: Any) -> None:
    assert equal(fit(amp_configs).network, by_hand(torch.float16, scale=2.0**16))


@pytest.mark.parametrize("amp_configs", [None, "O0", {"level": "O0"}, {"level": "O0", "dtype": "fp16"}])
def test_off_is_float32(amp_configs: Any) -> None:
    assert equal(fit(amp_configs).network, by_hand(torch.float32))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(("name", "scale"), [("bf16", None), ("fp16", 1024.0)])
def test_accumulation_and_clipping(name: str, scale: float | None, clip: float | None, accumulate: int) -> None:
    amp_configs = {"dtype": name} if scale is None else {"dtype": name, "init_loss_scaling": scale}
    found = fit(amp_configs, clip_grad_norm=clip, accumulate_grad_batches=accumulate).network
    expected = by_hand(HALF[name], scale=scale, clip=clip, accumulate=accumulate)
    if accumulate == 3:  # Thirds are rounded in another order.
        assert all(map(torch.allclose, found.parameters(), expected.parameters()))
    else:
        assert equal(found, expected)


class Watch(Callback):
    """The weights, the rate and the scale after each training step."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.rates: list[float] = []
        self.scales: list[float] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self._look()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self._look()

    def _look(self) -> None:
        self.weights.append(nn.utils.parameters_to_vector(self.model.network.parameters()).detach().clone())
        self.rates.append(self.model.optimizer.param_groups[0]["lr"])
        scaler = self.model._engine.prepared.scaler
        self.scales.append(scaler.get_scale() if scaler is not None else 1.0)

    def moves(self) -> list[float]:
        return [float((new - old).norm()) for old, new in zip(self.weights, self.weights[1:], strict=False)]


def steep(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 40 * cross_entropy(outputs, labels)


@pytest.mark.parametrize("amp_configs", [None, "bf16", {"dtype": "fp16", "init_loss_scaling": 1024}])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_sees_the_true_norm(amp_configs: Any, accumulate: int) -> None:
    watch = Watch()
    fit(
        amp_configs, loss=steep, lr=1.0, clip_grad_norm=1.0, accumulate_grad_batches=accumulate, epochs=1,
        callbacks=watch,
    )  # fmt: skip
    # Plain SGD with rate 1 moves by the clipped gradient itself.
    expected = [1.0] * 3 if accumulate == 1 else [0.0, 0.0, 1.0]
    assert watch.moves() == pytest.approx(expected, abs=1e-4)


def overflowing(**options: Any) -> dict[str, Any]:
    """A scale at which fp16 gradients overflow, falling fast enough to fit after one skipped step."""
    return {"dtype": "fp16", "init_loss_scaling": 2.0**24, "decr_ratio": 2.0**-14, **options}


def test_a_skipped_step_moves_neither_weights_nor_scheduler() -> None:
    watch = Watch()
    scheduler = lr_scheduler.OneCycleLR

    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        return scheduler(optimizer, max_lr=0.1, total_steps=6, cycle_momentum=False)

    fit(overflowing(), scheduler=one_cycle, callbacks=watch)
    assert watch.scales == [2.0**24] + [2.0**10] * 6
    moves = watch.moves()
    assert moves[0] == 0 and min(moves[1:]) > 0
    twin = SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    curve = one_cycle(twin)
    expected = [twin.param_groups[0]["lr"]] * 2
    for _ in range(5):
        twin.step()
        curve.step()
        expected.append(twin.param_groups[0]["lr"])
    assert watch.rates == expected


def test_a_skipped_window_is_one_step() -> None:
    watch = Watch()
    fit(
        overflowing(), accumulate_grad_batches=3, epochs=3, callbacks=watch,
        scheduler=lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, step_size_up=10, cycle_momentum=False),
    )  # fmt: skip
    assert [move > 0 for move in watch.moves()] == [False] * 5 + [True] + [False] * 2 + [True]
    assert watch.rates == pytest.approx([0.1] * 6 + [0.14] * 3 + [0.18])


def test_options_of_the_scaler() -> None:
    options = {"init_loss_scaling": 512, "incr_ratio": 3.0, "decr_ratio": 0.25, "incr_every_n_steps": 2}
    scaler = Precision({"dtype": "fp16", **options}).make_scaler(CPU)
    assert scaler is not None
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 2
    watch = Watch()
    fit({"dtype": "fp16", **options}, callbacks=watch)
    assert watch.scales == [512, 512, 1536, 1536, 4608, 4608, 13824]


def test_a_fixed_scale_stays_where_it_is() -> None:
    watch = Watch()
    fit(
        {"dtype": "fp16", "use_dynamic_loss_scaling": False, "init_loss_scaling": 2.0**24, "incr_every_n_steps": 1},
        callbacks=watch, scheduler=lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, cycle_momentum=False),
    )  # fmt: skip
    assert set(watch.scales) == {2.0**24}
    assert set(watch.moves()) == {0.0}
    assert set(watch.rates) == {0.1}


def test_only_fp16_needs_a_scaler() -> None:
    assert Precision("bf16").make_scaler(CPU) is None
    assert Precision(None).make_scaler(CPU) is None
    assert Precision("O2").make_scaler(CPU) is not None


class Dtypes:
    """A metric function that notes the dtype of the outputs."""

    def __init__(self) -> None:
        self.seen: list[torch.dtype] = []

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.seen.append(outputs.dtype)
        return (outputs.argmax(1) == labels).float()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_call_runs_under_it(name: str) -> None:
    dtypes = Dtypes()
    model = fit(name, metrics=dtypes, epochs=1)
    model.evaluate((X, Y), batch_size=12, verbose=0)
    model.train_batch(X, Y)
    model.eval_batch(X, Y)
    assert dtypes.seen == [HALF[name]] * (3 + 2 + 1 + 1)
    predicted = model.predict(X, verbose=0)
    assert predicted.dtype == model.predict_batch(X).dtype == HALF[name]
    with torch.autocast("cpu", HALF[name]):
        expected = model.network(X)
        loss = cross_entropy(expected, Y).item()
    assert torch.equal(predicted, expected)
    assert model.evaluate((X, Y), verbose=0)["loss"] == pytest.approx(loss)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_train_batch_is_a_step_of_the_same_recipe(name: str) -> None:
    net = network()
    model = hapi.Model(net).prepare(SGD(net.parameters(), lr=0.5), nn.CrossEntropyLoss(), amp_configs=name)
    for _ in range(2):
        for x, y in zip(X.split(8), Y.split(8), strict=True):
            model.train_batch(x, y)
    assert equal(net, by_hand(HALF[name], scale=2.0**16 if name == "fp16" else None))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_class_weights_under_fp16(accumulate: int) -> None:
    weight = torch.tensor([0.2, 1.0, 5.0])
    amp_configs = {"dtype": "fp16", "init_loss_scaling": 1024}
    loss = nn.CrossEntropyLoss(weight=weight)
    found = fit(amp_configs, loss=loss, accumulate_grad_batches=accumulate, epochs=1).network
    if accumulate == 1:
        expected = by_hand(torch.float16, loss=loss, scale=1024.0, epochs=1)
    else:
        expected = network()
        optimizer = SGD(expected.parameters(), lr=0.5)
        loss(expected(X), Y).backward()
        optimizer.step()
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-3)


def test_changing_the_precision_between_fits() -> None:
    net = network()
    optimizer = SGD(net.parameters(), lr=0.5)
    model = hapi.Model(net)
    for amp_configs in ("bf16", None, "fp16"):
        model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs=amp_configs)
        model.fit((X, Y), batch_size=8, shuffle=False, verbose=0)
    twin = network()
    optimizer = SGD(twin.parameters(), lr=0.5)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
        for x, y in zip(X.split(8), Y.split(8), strict=True):
            with autocast(dtype):
                loss = cross_entropy(twin(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert equal(net, twin)
