"""What a run has become on the way, beyond weights and counters, is there again after a resume: to the same bits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import hapi
from hapi.callbacks import Callback, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

sys.path.insert(0, str(Path(__file__).parent / "distributed"))
from resume_within import Ended, EndsAt, SavesAt

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


class CutAt(Callback):
    """Ends a run after an epoch, when its checkpoint is written."""

    _place = 10**6

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch + 1 == self.epoch:
            raise Ended


def model(loss: Any = None, **options: Any) -> hapi.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    return hapi.Model(net).prepare("adam", loss or nn.CrossEntropyLoss(), **options)


def fit(subject: hapi.Model, folder: Path, epochs: int, data: Any = (X, Y), **options: Any) -> Any:
    if not isinstance(data, DataLoader):
        options = {"batch_size": 5, **options}
    return subject.fit(data, epochs=epochs, seed=7, verbose=0, save_dir=folder, **options).history


def same(one: hapi.Model, other: hapi.Model) -> bool:
    pairs = zip(one.network.state_dict().values(), other.network.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def cut_and_resumed(tmp_path: Path, make: Callable[[], Any], callbacks: Callable[[], list[Any]], cut: int) -> Any:
    """Two models: one trained for four epochs, one that was cut off and went on."""
    straight, first, second = make(), make(), make()
    fit(straight, tmp_path / "straight", 4, callbacks=callbacks())
    with pytest.raises(Ended):
        fit(first, tmp_path / "cut", 4, callbacks=[*callbacks(), CutAt(cut)])
    fit(second, tmp_path / "cut", 4, callbacks=callbacks(), resume=True)
    return straight, second


class StopsAt(Callback):
    def __init__(self, epoch: int, step: int | None = None) -> None:
        self.epoch, self.step = epoch, step

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if self.step == step and self.model.epochs_trained + 1 == self.epoch:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.step is None and epoch + 1 == self.epoch:
            self.model.stop_training = True


@pytest.mark.parametrize("stops", [lambda: StopsAt(2), lambda: EarlyStopping("loss", patience=0, min_delta=10.0)])
def test_a_run_that_was_told_to_stop_trains_no_further(tmp_path: Path, stops: Callable[[], Any], capsys: Any) -> None:
    straight, second = cut_and_resumed(tmp_path, model, lambda: [stops()], 2)
    assert straight.epochs_trained == second.epochs_trained == 2
    assert same(straight, second)
    third = model()
    third.fit((X, Y), batch_size=5, epochs=4, save_dir=tmp_path / "cut", resume=True)
    assert third.epochs_trained == 2
    assert "was ended by stop_training" in capsys.readouterr().out


def test_a_stop_within_an_epoch_holds_for_a_run_that_goes_on_from_there(tmp_path: Path) -> None:
    class Saves(ModelCheckpoint):
        def save_within(self, stopping: bool) -> None:
            super().save_within(stopping)
            if self.model.stop_training:
                raise Ended

    straight, second = model(), model()
    history = straight.fit((X, Y), (X, Y), 5, 3, seed=7, verbose=0, callbacks=[StopsAt(2, 1)]).history
    with pytest.raises(Ended):
        model().fit(
            (X, Y), (X, Y), 5, 3, seed=7, verbose=0,
            callbacks=[StopsAt(2, 1), Saves(save_dir=tmp_path, every_n_steps=1)],
        )  # fmt: skip
    resumed = second.fit(
        (X, Y), (X, Y), 5, 3, seed=7, verbose=0, save_dir=tmp_path, resume=True, callbacks=[StopsAt(2, 1)]
    )  # fmt: skip
    assert resumed.history == history
    assert same(straight, second)


class Centered(nn.Module):
    """A loss with a running centre, as of self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("weight", torch.ones(3))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        moved = outputs - self.center - self.hidden
        if torch.is_grad_enabled():
            self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
            self.hidden.add_(0.01)
        return nn.functional.cross_entropy(moved, labels, self.weight)


def test_buffers_of_a_loss_that_training_changes_are_there_again(tmp_path: Path) -> None:
    straight, second = cut_and_resumed(tmp_path, lambda: model(Centered()), list, 2)
    assert same(straight, second)
    # What training leaves alone is the script's, which may give another value when it goes on.
    third = model(Centered())
    third.loss.weight.fill_(2.0)
    third.load(tmp_path / "cut" / "2")
    assert third.loss.weight.tolist() == [2.0] * 3
    assert third.loss.center.abs().sum() > 0


class Freezes(Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.network[0].requires_grad_(False)


def test_layers_that_were_frozen_on_the_way_stay_so(tmp_path: Path) -> None:
    straight, second = cut_and_resumed(tmp_path, model, lambda: [Freezes()], 3)
    assert same(straight, second)
    assert not second.network[0].weight.requires_grad


def test_layers_that_the_script_frees_or_freezes_before_a_resume_are_told(tmp_path: Path, capsys: Any) -> None:
    def made(frozen: int | None) -> hapi.Model:
        subject = model()
        if frozen is not None:
            subject.network[frozen].requires_grad_(False)
        return subject

    fit(made(0), tmp_path, 1)
    # (which the script freezes, what is told)
    for frozen, told in (
        (0, None),
        (None, "hapi: 0.weight, 0.bias stay frozen, as in the run of "),
        (2, "hapi: 0.weight, 0.bias stay frozen and 2.weight, 2.bias are trained, as in the run of "),
    ):
        subject = made(frozen)
        capsys.readouterr()
        subject.fit((X, Y), batch_size=5, epochs=1, resume=tmp_path / "1")
        written = capsys.readouterr().out
        assert (told in written) if told else ("frozen" not in written), frozen
        assert [p.requires_grad for p in subject.network.parameters()] == [False, False, True, True]
    # As the line says, a change that is meant.
    subject = made(None)
    subject.load(tmp_path / "1")
    before = subject.network[0].weight.clone()
    fit(subject, tmp_path / "more", 1)
    assert not torch.equal(subject.network[0].weight, before)


class NoiseAt(Callback):
    """Draws from all three generators in a hook between steps."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.draw)

    def draw(self, *_: Any, logs: Any = None) -> None:
        with torch.no_grad():
            self.model.network[0].bias.add_(0.01 * torch.randn(8))


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_eval_begin", "on_eval_end"])
def test_what_hooks_between_steps_draw(tmp_path: Path, hook: str) -> None:
    """Going on from the last step of an epoch, and from its end."""
    straight, second, third = model(), model(), model()
    # An evaluation in between sets the streams too.
    options: dict[str, Any] = {} if hook == "on_epoch_end" else {"eval_data": (X, Y)}
    fit(straight, tmp_path, 3, callbacks=NoiseAt(hook), **options)
    saver = ModelCheckpoint(save_dir=tmp_path / "cut", every_n_steps=5, keep_last=9)
    fit(model(), tmp_path / "cut", 1, callbacks=[NoiseAt(hook), saver], **options)
    fit(second, tmp_path / "b", 3, callbacks=NoiseAt(hook), resume=tmp_path / "cut" / "step_5", **options)
    fit(third, tmp_path / "c", 3, callbacks=NoiseAt(hook), resume=tmp_path / "cut" / "1", **options)
    assert same(straight, second) and same(straight, third)


class Rows(torch.utils.data.Dataset[Any]):
    """Notes which rows are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return X[index], Y[index]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_save_of_ones_own_within_a_window_loses_no_sample(tmp_path: Path, step: int) -> None:
    """A loader's own generator: its order is drawn from where it stood when the epoch began."""

    def loader(data: Rows) -> Any:
        return DataLoader(data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))

    straight, first, second = Rows(), Rows(), Rows()
    saves = SavesAt(tmp_path / "x", 1, step)
    fit(model(), tmp_path / "a", 2, loader(straight), accumulate_grad_batches=2)
    with pytest.raises(Ended):
        fit(model(), tmp_path / "b", 2, loader(first), accumulate_grad_batches=2, callbacks=saves)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(model(), tmp_path / "b", 2, loader(second), accumulate_grad_batches=2, resume=tmp_path / "x")
    taken = 6 * (step // 2) + (6 if step % 2 else 0)
    assert second.read == straight.read[24 + taken :]


def test_data_of_another_size_starts_the_epoch_anew(tmp_path: Path) -> None:
    with pytest.raises(Ended):
        fit(model(), tmp_path, 2, callbacks=[ModelCheckpoint(every_n_steps=1), SavesAt(tmp_path / "x", 1, 2)])
    for data, said in (
        ((X[:20], Y[:20]), "the data has 20 samples, and had 24"),
        (DataLoader(TensorDataset(X, Y), batch_size=3), "the data is of another kind than it was"),
    ):
        with pytest.warns(UserWarning, match=f"the epoch starts anew, since {said}"):
            fit(model(), tmp_path / "other", 2, data, resume=tmp_path / "x")


def test_batches_of_another_size_start_the_epoch_anew(tmp_path: Path) -> None:
    def loader(size: int) -> Any:
        return DataLoader(TensorDataset(X, Y), batch_size=size)

    with pytest.raises(Ended):
        fit(model(), tmp_path, 2, loader(5), callbacks=SavesAt(tmp_path / "x", 1, 2))
    with pytest.warns(UserWarning, match="its batches have 4 samples, and had 5"):
        fit(model(), tmp_path / "other", 2, loader(4), resume=tmp_path / "x")


class Signals(Callback):
    """Gets SIGTERM in a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.send)

    def send(self, *_: Any, logs: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("hook", ["on_train_end", "on_epoch_end", "on_eval_begin"])
def test_a_signal_at_the_end_of_a_run_is_heard(tmp_path: Path, hook: str) -> None:
    with pytest.raises(SystemExit) as ended:
        fit(model(), tmp_path, 1, eval_data=(X, Y), callbacks=Signals(hook))
    assert ended.value.code == 143
    again = model()
    fit(again, tmp_path, 1, eval_data=(X, Y), resume=True)
    assert again.epochs_trained == 1


def test_a_signal_ends_an_evaluation_whose_batches_tell_no_size_beforehand(tmp_path: Path) -> None:
    steps: list[int] = []

    class Once(Callback):
        def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
            steps.append(step)
            if step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def collate(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    evaluation = DataLoader(TensorDataset(X, Y), batch_size=2, collate_fn=collate)
    with pytest.raises(SystemExit):
        fit(model(), tmp_path, 1, eval_data=evaluation, callbacks=Once())
    assert steps == [0, 1]


def test_a_checkpoint_of_no_fit_is_gone_on_from(tmp_path: Path) -> None:
    subject = model()
    fit(subject, tmp_path / "a", 1)
    again = model()
    again.load(tmp_path / "a" / "1")
    again.save(tmp_path / "b" / "loaded")
    by_hand = model()
    by_hand.train_batch(X, Y)
    by_hand.save(tmp_path / "c" / "init")
    for resume, epochs in ((tmp_path / "b" / "loaded", 2), (f"{tmp_path / 'b'}/", 2), (f"{tmp_path / 'c'}/", 1)):
        fresh = model()
        fit(fresh, tmp_path / "d", epochs, resume=resume)
        assert fresh.epochs_trained == epochs


@pytest.mark.parametrize("name", ["1", "step_8", "step_10"])
@pytest.mark.parametrize("after", ["nothing", "a fit", "a fit that was ended"])
def test_a_copy_by_load_and_save_is_gone_on_from_as_the_checkpoint_itself(
    tmp_path: Path, name: str, after: str
) -> None:
    straight, copying, resumed = model(), model(), model()
    keep = ModelCheckpoint(every_n_steps=2, keep_last=9)
    fit(straight, tmp_path / "a", 3, callbacks=keep)
    if after != "nothing":
        # Another run, whose place and seed are none of the copy's.
        cut = [EndsAt(13)] if after == "a fit that was ended" else []
        with contextlib.suppress(Ended):
            copying.fit((X, Y), batch_size=4, epochs=3, seed=1, verbose=0, callbacks=cut)
    copying.load(tmp_path / "a" / name)
    copying.save(tmp_path / "b" / "copy")
    resumed.fit((X, Y), batch_size=5, epochs=3, seed=5, verbose=0, resume=tmp_path / "b" / "copy")
    assert same(straight, resumed)
    assert (resumed.epochs_trained, resumed.steps_trained) == (3, straight.steps_trained)


def test_weights_alone_have_no_place_in_a_run(tmp_path: Path) -> None:
    subject = model()
    fit(model(), tmp_path / "a", 1)
    with pytest.raises(Ended):
        fit(subject, tmp_path / "b", 3, callbacks=EndsAt(8))
    subject.load(tmp_path / "a" / "1", reset_optimizer=True)
    subject.save(tmp_path / "c" / "mixed")
    position = torch.load(tmp_path / "c" / "mixed.opt.pt", weights_only=True)["position"]
    assert position["cursor"] is None and position["seed"] == 7


def test_a_load_within_a_fit_moves_nothing_but_what_it_loads(tmp_path: Path) -> None:
    class Loads(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.load(tmp_path / "a" / "1", reset_optimizer=True)
                self.model.load(tmp_path / "a" / "1")
                self.model.epochs_trained, self.model.steps_trained = 2, 10

    straight, resumed = model(), model()
    fit(model(), tmp_path / "a", 1)
    straight.fit((X, Y), batch_size=5, epochs=4, seed=9, verbose=0, save_dir=tmp_path / "b", callbacks=Loads())
    resumed.fit((X, Y), batch_size=5, epochs=4, verbose=0, resume=tmp_path / "b" / "2")
    assert same(straight, resumed)


def test_a_fit_after_another_counts_its_own_epochs_when_it_goes_on(tmp_path: Path) -> None:
    def script(subject: hapi.Model, *cut: Any) -> hapi.Model:
        fit(subject, tmp_path / "a", 2, resume=True)
        fit(subject, tmp_path / "b", 3, resume=True, callbacks=list(cut))
        return subject

    with pytest.raises(Ended):
        script(model(), CutAt(4))
    resumed = script(model())
    straight = model()
    fit(straight, tmp_path / "c", 2)
    fit(straight, tmp_path / "d", 3)
    assert resumed.epochs_trained == straight.epochs_trained == 5
    assert same(resumed, straight)


class Grows(nn.Module):
    """Buffers that no state dict holds: one that grows, one that is filled on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("bank", torch.zeros(0, 6), persistent=False)
        self.register_buffer("last", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.bank = torch.cat([self.bank, x.detach()])[-20:]
            self.last = x.detach().mean(0)
        mean = x if self.last is None else x + self.last
        return self.layer(mean + (self.bank.mean(0) if len(self.bank) else 0.0))


def test_buffers_that_no_state_dict_holds_may_grow(tmp_path: Path) -> None:
    def made() -> hapi.Model:
        torch.manual_seed(0)
        return hapi.Model(Grows()).prepare("sgd", nn.CrossEntropyLoss())

    straight, second = cut_and_resumed(tmp_path, made, list, 2)
    assert same(straight, second)
    assert torch.equal(straight.network.bank, second.network.bank)


def test_the_generator_of_the_evaluation_goes_on_too(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3))

    class Noisy(hapi.Model):
        """Draws by the batch, so that the order shows in the values."""

        def eval_step(self, inputs: Any, labels: Any) -> Any:
            loss, outputs = super().eval_step(inputs, labels)
            return loss * torch.rand(()), outputs

    def made() -> hapi.Model:
        torch.manual_seed(0)
        return Noisy(nn.Linear(6, 3)).prepare("sgd", nn.CrossEntropyLoss())

    straight, second = made(), made()
    expected = fit(straight, tmp_path / "a", 3, eval_data=loader())
    with pytest.raises(Ended):
        fit(made(), tmp_path / "b", 3, eval_data=loader(), callbacks=CutAt(2))
    assert fit(second, tmp_path / "b", 3, eval_data=loader(), resume=True) == expected


class Odd(torch.optim.Optimizer):
    """Keeps a state beside those of the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.state["all"] = {"steps": 0}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.state["all"]["steps"] += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1 / self.state["all"]["steps"])


def test_an_optimizer_with_a_state_beside_its_parameters(tmp_path: Path) -> None:
    def made() -> hapi.Model:
        torch.manual_seed(0)
        return hapi.Model(nn.Linear(6, 3)).prepare(Odd, nn.CrossEntropyLoss())

    straight, second = cut_and_resumed(tmp_path, made, list, 2)
    assert same(straight, second) and second.optimizer.state["all"]["steps"] == 20


def test_an_epoch_whose_own_file_a_kill_came_before_gets_it(tmp_path: Path) -> None:
    class Cuts(ModelCheckpoint):
        def _save_if_due(self, number: int) -> None:
            if number == 2:
                raise Ended
            super()._save_if_due(number)

    Cuts.__name__ = ModelCheckpoint.__name__  # by which its state is found
    with pytest.raises(Ended):
        fit(model(), tmp_path, 4, callbacks=Cuts(save_dir=tmp_path, monitor="loss"))
    assert (tmp_path / "best_model.pt").exists() and not (tmp_path / "2.pt").exists()
    fit(model(), tmp_path, 4, callbacks=ModelCheckpoint(save_dir=tmp_path, monitor="loss"), resume=True)
    straight, second = model(), model()
    fit(straight, tmp_path / "straight", 2)
    second.load(tmp_path / "2")
    assert same(straight, second) and second.epochs_trained == 2


def decaying(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, one_cycle, "had no scheduler, and prepare was given a OneCycleLR, which starts anew"),
        (decaying, None, "had a scheduler, and prepare was given none"),
    ],
)
def test_a_scheduler_that_comes_or_goes_with_a_resume_is_told(
    tmp_path: Path, before: Any, after: Any, said: str
) -> None:
    fit(model(scheduler=before), tmp_path, 1)
    second = model(scheduler=after)
    with pytest.warns(UserWarning, match=said) as told:
        fit(second, tmp_path, 2, resume=True)
    assert [warning.filename for warning in told] == [__file__]
    if after is not None:
        assert second.optimizer.param_groups[0]["lr"] == second.scheduler.get_last_lr()[0]
        assert second.scheduler.last_epoch == 5, "its own beginning, moved by the second epoch's steps"


class Wrapped(torch.utils.data.Sampler[int]):
    def __init__(self, *inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return (index for sampler in self.inner for index in sampler)

    def __len__(self) -> int:
        return sum(map(len, self.inner))


def deep(data: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(data, batch_size=6, sampler=Wrapped(RandomSampler(data, generator=generator)))


def deep_batches(data: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(data, batch_sampler=BatchSampler(Wrapped(RandomSampler(data, generator=generator)), 6, True))


@pytest.mark.parametrize("loader", [deep, deep_batches])
@pytest.mark.parametrize("step", [1, 2])
def test_generators_of_samplers_within_samplers(tmp_path: Path, loader: Any, step: int) -> None:
    straight, second = Rows(), Rows()
    fit(model(), tmp_path / "a", 3, loader(straight))
    with pytest.raises(Ended):
        fit(model(), tmp_path / "b", 3, loader(Rows()), callbacks=SavesAt(tmp_path / "x", 1, step))
    fit(model(), tmp_path / "b", 3, loader(second), resume=tmp_path / "x")
    assert second.read == straight.read[24 + 6 * (step + 1) :]


# Each state is needed: without it the run that goes on is another one.


def taken_out(path: Path, *keys: Any, value: Any) -> None:
    file = hapi.checkpoint.training_path(path)
    content = torch.load(file, weights_only=True)
    place = content
    for key in keys[:-1]:
        place = place[key]
    assert place[keys[-1]] != value, "it was not there"
    place[keys[-1]] = value
    torch.save(content, file)


def evaluated(values: list[float]) -> type[hapi.Model]:
    """A model whose validation loss is given, epoch by epoch."""

    class Given(hapi.Model):
        def eval_step(self, inputs: Any, labels: Any) -> Any:
            return torch.tensor(values[self.epochs_trained]), self.network(*inputs)

    return Given


CASES: dict[str, tuple[Any, Callable[[], list[Any]], tuple[Any, ...], Any]] = {
    "early stopping": (
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        lambda: [EarlyStopping(patience=3, verbose=0)],
        ("callbacks",),
        {},
    ),
    "plateau": (
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        lambda: [ReduceLROnPlateau(patience=3, factor=0.1, verbose=0)],
        ("callbacks",),
        {},
    ),
    "stopped": ([1.0] * 6, lambda: [StopsAt(3)], ("position", "cursor", "stopped"), False),
    "frozen": ([1.0] * 6, lambda: [Freezes()], ("position", "frozen"), []),
}


@pytest.mark.parametrize("kind", CASES)
def test_each_of_these_states_is_needed(tmp_path: Path, kind: str) -> None:
    values, callbacks, keys, without = CASES[kind]

    def made() -> hapi.Model:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        return evaluated(values)(net).prepare("adam", nn.CrossEntropyLoss())

    def run(subject: hapi.Model, name: str, **options: Any) -> hapi.Model:
        fit(subject, tmp_path / name, 6, eval_data=(X, Y), **options)
        return subject

    straight = run(made(), "straight", callbacks=callbacks())
    with pytest.raises(Ended):
        run(made(), "cut", callbacks=[*callbacks(), CutAt(3)])
    resumed = run(made(), "a", callbacks=callbacks(), resume=tmp_path / "cut" / "3")
    assert same(straight, resumed)
    taken_out(tmp_path / "cut" / "3", *keys, value=without)
    assert not same(straight, run(made(), "b", callbacks=callbacks(), resume=tmp_path / "cut" / "3"))


def test_what_a_loss_has_become_is_needed(tmp_path: Path) -> None:
    straight, _ = cut_and_resumed(tmp_path, lambda: model(Centered()), list, 2)
    with pytest.raises(Ended):
        fit(model(Centered()), tmp_path / "again", 4, callbacks=CutAt(2))
    file = hapi.checkpoint.training_path(tmp_path / "again" / "2")
    content = torch.load(file, weights_only=True)
    assert set(content["loss"]) == {"center", "hidden"}
    content["loss"] = {}
    torch.save(content, file)
    third = model(Centered())
    fit(third, tmp_path / "again", 4, resume=tmp_path / "again" / "2")
    assert not same(straight, third)


def test_the_best_value_is_needed(tmp_path: Path) -> None:
    values = [1.0, 2.0, 3.0]
    made = evaluated(values)

    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(save_dir=tmp_path, monitor="val_loss")

    def fresh() -> hapi.Model:
        return made(nn.Linear(6, 3)).prepare("sgd", nn.CrossEntropyLoss())

    with pytest.raises(Ended):
        fit(fresh(), tmp_path, 3, eval_data=(X, Y), callbacks=[saver(), CutAt(2)])
    best = (tmp_path / "best_model.pt").read_bytes()
    fit(fresh(), tmp_path, 3, eval_data=(X, Y), callbacks=saver(), resume=tmp_path / "2")
    assert (tmp_path / "best_model.pt").read_bytes() == best
    taken_out(tmp_path / "2", "callbacks", "ModelCheckpoint.0", value={})
    fit(fresh(), tmp_path, 3, eval_data=(X, Y), callbacks=saver(), resume=tmp_path / "2")
    assert (tmp_path / "best_model.pt").read_bytes() != best


def test_the_number_of_threads_is_set_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        fit(model(), tmp_path, 1)
        torch.set_num_threads(2)
        fit(model(), tmp_path, 2, resume=True)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
