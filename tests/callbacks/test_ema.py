"""The average of the weights: against a plain loop, in evaluations, in checkpoints, and after what cuts a run off."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi.callbacks import EMA, Callback, ModelCheckpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from resume_within import Ended

X = torch.randn(22, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def model(net: nn.Module | None = None, optimizer: Any = None, **options: Any) -> hapi.Model:
    net = net or network()
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=0.05)
    return hapi.Model(net).prepare(optimizer, nn.CrossEntropyLoss(), **options)


def fit(subject: hapi.Model, callbacks: Any = None, epochs: int = 2, **options: Any) -> dict[str, list[float]]:
    options = {"eval_data": (X, Y), "batch_size": 4, "seed": 7, "verbose": 0, **options}
    return subject.fit((X, Y), epochs=epochs, callbacks=callbacks, **options).history


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def averages(ema: EMA) -> dict[str, torch.Tensor]:
    with ema.applied():
        return state(ema.model.network)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class AtEachUpdate(Callback):
    """What the weights are after each optimizer step."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.states.append(state(self.model.network))

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.states.append(state(self.model.network))


@pytest.mark.parametrize(("warmup", "accumulate"), [(True, 1), (False, 1), (True, 4)])
def test_it_is_the_average_of_the_weights(warmup: bool, accumulate: int) -> None:
    subject, ema, seen = model(), EMA(0.7, warmup=warmup), AtEachUpdate()
    fit(subject, [ema, seen], accumulate_grad_batches=accumulate)
    steps = [6 * epoch + step for epoch in range(2) for step in (range(1, 7) if accumulate == 1 else (4, 6))]
    assert ema.updates == len(steps)
    expected = seen.states[0]
    for number, step in enumerate(steps, 1):
        decay = min(0.7, (1 + number) / (10 + number)) if warmup else 0.7
        for name, value in seen.states[step].items():
            averaged = value.is_floating_point()
            expected[name] = decay * expected[name].double() + (1 - decay) * value.double() if averaged else value
    found = averages(ema)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].to(value.dtype), msg=name)


def test_training_does_not_notice_and_evaluation_does() -> None:
    plain, subject, ema = model(), model(), EMA(0.7)
    alone, history = fit(plain), fit(subject, ema)
    assert equal(state(plain.network), state(subject.network))
    assert history["loss"] == alone["loss"] and history["val_loss"] != alone["val_loss"]
    averaged = subject.evaluate((X, Y), batch_size=4, verbose=0, callbacks=ema)
    assert averaged["loss"] == history["val_loss"][-1]
    assert subject.evaluate((X, Y), batch_size=4, verbose=0)["loss"] == alone["val_loss"][-1]
    assert not subject.network._state_dict_hooks and not subject.optimizer._optimizer_step_post_hooks


def test_evaluations_of_a_fit_may_use_the_weights() -> None:
    plain, ema = model(), EMA(0.7, in_evaluation=False)
    alone, history = fit(plain), fit(subject := model(), ema)
    assert history == alone and equal(state(plain.network), state(subject.network))
    assert subject.evaluate((X, Y), 4, verbose=0, callbacks=ema)["loss"] != alone["val_loss"][-1]


def test_prediction_and_saving_with_the_averages(tmp_path: Path) -> None:
    subject, ema = model(), EMA(0.7)
    fit(subject, ema)
    before = state(subject.network)
    predicted = subject.predict(X, verbose=0, callbacks=ema)
    with ema.applied():
        subject.save(tmp_path / "averaged")
        assert torch.equal(predicted, subject.predict(X, verbose=0))
    assert equal(state(subject.network), before) and not torch.equal(predicted, subject.predict(X, verbose=0))
    other = network()
    other.load_state_dict(torch.load(tmp_path / "averaged.pt", weights_only=True))
    assert torch.equal(other.eval()(X), predicted)


def test_a_checkpoint_holds_both(tmp_path: Path) -> None:
    subject, ema = model(), EMA(0.7)
    history = fit(subject, [ema, ModelCheckpoint(monitor="val_loss")], save_dir=tmp_path)
    weights = torch.load(tmp_path / "final.pt", weights_only=True)
    assert equal(dict(weights), state(subject.network))
    fresh, loaded = model(), EMA(0.7)
    loaded.load(tmp_path / "final")
    with loaded.applied(fresh):
        assert equal(state(fresh.network) | {"1.num_batches_tracked": torch.tensor(12)}, averages(ema))
    loaded.load(tmp_path / "best_model")
    value = fresh.evaluate((X, Y), batch_size=4, verbose=0, callbacks=loaded)["loss"]
    assert value == min(history["val_loss"])
    fit(fresh, save_dir=tmp_path / "without")
    with pytest.raises(ValueError, match=r"no averages of number 1: that fit had 1 EMA callback\. "):
        loaded.load(tmp_path / "final", 1)
    with pytest.raises(ValueError, match=r"number=-1, but it counts callbacks from 0"):
        loaded.load(tmp_path / "final", -1)
    with pytest.raises(ValueError, match=r"holds no averages.*had no EMA callback\..*callbacks=EMA\(\)"):
        loaded.load(tmp_path / "without" / "final")


class CutAt(Callback):
    """Ends a run at a step, or after an epoch when its checkpoint is written."""

    _place = 10**6

    def __init__(self, epoch: int, step: int | None = None) -> None:
        self.at = epoch, step

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        if (self.model.epochs_trained, step) == self.at:
            raise Ended

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (epoch, None) == self.at:
            raise Ended


class SignalInEvaluation(Callback):
    """Tells the run to stop while the averages are in the network."""

    def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
        if self.model.epochs_trained == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("cut", "error"), [(CutAt(1), Ended), (CutAt(1, 5), Ended), (SignalInEvaluation(), SystemExit)]
)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, cut: Callback, error: type[BaseException]) -> None:
    straight, kept = model(), EMA(0.7)
    alone = fit(straight, kept, epochs=3)
    first = model()
    with pytest.raises(error):
        fit(first, [EMA(0.7), ModelCheckpoint(every_n_steps=5), cut], epochs=3, save_dir=tmp_path)
    assert not first.network._state_dict_hooks and not first.optimizer._optimizer_step_post_hooks
    second, ema = model(), EMA(0.7)
    history = fit(second, [ema, ModelCheckpoint(every_n_steps=5)], epochs=3, save_dir=tmp_path, resume=True)
    assert history == alone and ema.updates == kept.updates == 18
    assert equal(state(second.network), state(straight.network)) and equal(averages(ema), averages(kept))


def test_a_save_within_an_evaluation_is_one_of_the_weights(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x).relu())[:, :3]

    class Saves(Callback):
        def on_eval_begin(self, logs: Any = None) -> None:
            self.model.save(tmp_path / "within")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert equal(dict(torch.load(tmp_path / "within.pt", weights_only=True)), state(self.model.network))

    torch.manual_seed(0)
    fit(model(Tied()), [EMA(0.7), Saves()])


def test_an_error_in_an_evaluation_leaves_the_weights() -> None:
    class Fails(Callback):
        def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
            raise Ended

    plain, subject = model(), model()
    fit(plain, epochs=1)
    with pytest.raises(Ended):
        fit(subject, [EMA(0.7), Fails()], epochs=1)
    assert equal(state(plain.network), state(subject.network))


class Overflows(Callback):
    """Lets all steps from the third on overflow."""

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        if step == 2:
            self.model._engine.prepared.scaler.update(2.0**60)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_fp16_skips_moves_nothing(fused: bool) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, fused=fused)
    subject = model(net, optimizer, amp_configs={"dtype": "fp16", "init_loss_scaling": 4.0})
    ema, seen = EMA(0.7, warmup=False), AtEachUpdate()
    fit(subject, [ema, seen, Overflows()], epochs=1, num_iters=5)
    first, second, third, *rest = (values["0.weight"] for values in seen.states)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    assert len(rest) == 3 and all(torch.equal(third, other) for other in rest)
    torch.testing.assert_close(averages(ema)["0.weight"], first.lerp(second, 0.3).lerp(third, 0.3))


def test_half_precision_weights_have_float32_averages() -> None:
    net = nn.Linear(6, 3).to(torch.bfloat16)
    subject, ema, seen = model(net), EMA(0.9, warmup=False), AtEachUpdate()
    subject.prepare(torch.optim.SGD(net.parameters(), lr=1e-2), nn.CrossEntropyLoss())
    subject.fit((X.bfloat16(), Y), batch_size=4, epochs=2, verbose=0, callbacks=[ema, seen])
    expected = seen.states[0]["weight"].float()
    for values in seen.states[1:]:
        expected = expected.lerp(values["weight"].float(), 0.1)
    assert ema.state_dict()["averages"]["weight"].dtype == torch.float32
    assert torch.equal(ema.state_dict()["averages"]["weight"], expected)
    assert torch.equal(averages(ema)["weight"], expected.to(torch.bfloat16))


def test_frozen_weights_are_not_averaged_until_the_optimizer_has_them(tmp_path: Path) -> None:
    class Thaw(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and len(self.model.optimizer.param_groups) == 1:
                self.model.optimizer.add_param_group({"params": self.model.network[0].parameters()})

    net = network()
    ema = EMA(0.7, warmup=False)
    fit(model(net, torch.optim.SGD(net[4:].parameters(), lr=0.1)), [ema, Thaw()], epochs=1)
    assert "4.weight" in ema.state_dict()["averages"] and "0.weight" not in ema.state_dict()["averages"]
    fit(subject := model(net, torch.optim.SGD(net[4:].parameters(), lr=0.1)), [ema, seen := AtEachUpdate(), Thaw()])
    assert ema.updates == 12 and subject.epochs_trained == 2
    found = averages(ema)["0.weight"]
    # It starts from the weight after the first step in which it took part.
    expected = seen.states[7]["0.weight"]
    for values in seen.states[8:]:
        expected = expected.lerp(values["0.weight"], 0.3)
    torch.testing.assert_close(found, expected)


def test_several_of_them(tmp_path: Path) -> None:
    fast, slow, plain = EMA(0.5), EMA(0.9, in_evaluation=False), model()
    history, alone = fit(subject := model(), [fast, slow], save_dir=tmp_path), fit(plain, EMA(0.5))
    assert history == alone and equal(state(plain.network), state(subject.network))
    assert not equal(averages(fast), averages(slow))
    loaded = EMA()
    for number, ema in enumerate([fast, slow]):
        loaded.load(tmp_path / "final", number)
        with loaded.applied(subject):
            assert equal(state(subject.network), averages_of(ema, subject))
    for call in (lambda both: fit(model(), both), lambda both: subject.evaluate((X, Y), verbose=0, callbacks=both)):
        with pytest.raises(ValueError, match=r"holds 2 of EMA.*EMA\(decay, in_evaluation=False\)"):
            call([EMA(0.5), EMA(0.9)])
    assert equal(state(plain.network), state(subject.network))


def averages_of(ema: EMA, subject: hapi.Model) -> dict[str, torch.Tensor]:
    return {**state(subject.network), **ema.state_dict()["averages"]}


def test_errors_name_the_cure() -> None:
    for decay in (0, 1, 1.5, True, "0.9"):
        with pytest.raises(ValueError, match=r"decay=.*Write decay=0\.999"):
            EMA(decay)  # type: ignore[arg-type]
    ema = EMA()
    with pytest.raises(RuntimeError, match=r"has none yet.*fit\(..., callbacks=ema\)"):
        model().evaluate((X, Y), verbose=0, callbacks=ema)
    with pytest.raises(RuntimeError, match="has none yet"), EMA().applied():
        pass
    fit(model(), ema, epochs=1)
    with (
        pytest.raises(ValueError, match=r"averages of 0\.weight.*another network"),
        ema.applied(model(nn.Linear(6, 3))),
    ):
        pass


def test_averages_are_put_into_a_model() -> None:
    ema = EMA()
    with (
        pytest.raises(TypeError, match=r"(?s)EMA.applied received .*no hapi.Model. Write ema.applied\(hapi.Model"),
        ema.applied(network()),
    ):
        pass


def saved(path: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(f"{path}.pt", weights_only=True))


def wider() -> hapi.Model:
    return model(nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 3)))


@pytest.mark.parametrize("use", ["applied", "evaluate", "predict"])
def test_a_use_that_was_refused_leaves_it_as_it_was(use: str) -> None:
    subject, plain, ema = model(), model(), EMA(0.7)
    fit(subject, ema)
    fit(plain, EMA(0.7))
    averaged, weights = averages(ema), state(subject.network)
    other = wider()
    with pytest.raises(ValueError, match="another network"):
        if use == "applied":
            with ema.applied(other):
                pass
        elif use == "evaluate":
            other.evaluate((X, Y), verbose=0, callbacks=ema)
        else:
            other.predict(X, verbose=0, callbacks=ema)
    with ema.applied(subject):
        assert equal(state(subject.network), averaged)
    assert equal(state(subject.network), weights)
    assert fit(subject, ema) == fit(plain, EMA(0.7))


def test_an_error_within_applied_leaves_the_averages_until_its_end(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
            raise Ended

    subject, ema = model(), EMA(0.7)
    fit(subject, ema)
    averaged, weights = averages(ema), state(subject.network)
    with ema.applied():
        with pytest.raises(Ended):
            subject.evaluate((X, Y), verbose=0, callbacks=[ema, Fails()])
        # Another network's error is none of this one's.
        with pytest.raises(RuntimeError, match=r"a second network, but .*another\.load\(path\)"):
            wider().evaluate((X, Y), verbose=0, callbacks=ema)
        subject.save(tmp_path / "averaged")
    assert equal(saved(tmp_path / "averaged"), averaged) and equal(state(subject.network), weights)
    assert not subject.network._state_dict_hooks


def test_an_error_within_applied_ends_with_it() -> None:
    subject, ema = model(), EMA(0.7)
    fit(subject, ema)
    weights = state(subject.network)
    with pytest.raises(Ended), ema.applied(), ema.applied():
        raise Ended
    assert equal(state(subject.network), weights)


def test_saves_within_applied_are_of_the_averages_and_within_an_evaluation_of_the_weights(tmp_path: Path) -> None:
    class Saves(Callback):
        """Predicts and applies the averages within an evaluation, and saves before, meanwhile and afterwards."""

        def on_eval_begin(self, logs: Any = None) -> None:
            self.model.predict(X, verbose=0, callbacks=ema)
            self.model.save(tmp_path / "weights 1")
            with ema.applied():
                self.model.save(tmp_path / "averages 1")
            self.model.save(tmp_path / "weights 2")

    subject, ema = model(), EMA(0.7)
    fit(subject, ema)
    averaged, weights = averages(ema), state(subject.network)
    options: dict[str, Any] = {"batch_size": 4, "verbose": 0}
    value = subject.evaluate((X, Y), callbacks=ema, **options)
    with ema.applied():
        assert subject.evaluate((X, Y), callbacks=ema, **options) == value
        subject.save(tmp_path / "averages 2")
        with ema.applied():
            subject.predict(X, callbacks=ema, **options)
        subject.save(tmp_path / "averages 3")
    subject.save(tmp_path / "weights 3")
    assert subject.evaluate((X, Y), callbacks=[ema, Saves()], **options) == value
    subject.save(tmp_path / "weights 4")
    assert not subject.network._state_dict_hooks
    for number in (1, 2, 3):
        assert equal(saved(tmp_path / f"averages {number}"), averaged), number
    for number in (1, 2, 3, 4):
        assert equal(saved(tmp_path / f"weights {number}"), weights), number


def test_a_fit_within_applied_trains_the_weights() -> None:
    plain, subject, ema = model(), model(), EMA(0.7)
    fit(plain, EMA(0.7))
    fit(subject, ema)
    with ema.applied():
        again = fit(subject, ema)
    assert again == fit(plain, EMA(0.7)) and equal(state(subject.network), state(plain.network))
