"""What save writes and load takes back: plain weights, a training state that goes on to the bit, whole files."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import warnings
from collections import Counter, namedtuple
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

import hapi
from hapi import checkpoint, files, pairs
from hapi.callbacks import Callback, EarlyStopping, ModelCheckpoint

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


ADAM = partial(Adam, lr=0.01)


def model(seed: int = 0, optimizer: Any = ADAM, **options: Any) -> hapi.Model:
    return hapi.Model(network(seed)).prepare(optimizer, nn.CrossEntropyLoss(), **options)


def fit(subject: hapi.Model, epochs: int = 1, **options: Any) -> Any:
    return subject.fit((X, Y), (X, Y), batch_size=5, epochs=epochs, seed=7, verbose=0, **options).history


def equal(one: Any, other: Any) -> bool:
    """Equal to the bit, through any nest."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return equal(dict(one.state_dict()), dict(other.state_dict()))


# Weights.


def test_the_weights_are_a_plain_state_dict(tmp_path: Path) -> None:
    subject = model()
    fit(subject)
    subject.save(tmp_path / "net")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.opt.pt", "net.pt"]
    state = torch.load(tmp_path / "net.pt", weights_only=True)
    assert list(state) == list(subject.network.state_dict())
    plain = network(seed=1)
    plain.load_state_dict(state, strict=True)
    assert same_weights(plain, subject.network)


@pytest.mark.parametrize(("written", "loaded"), [("net.pt", "net"), ("net.pt", "net.pt"), ("net.pth", "net.pth")])
def test_a_state_dict_of_plain_torch(tmp_path: Path, written: str, loaded: str) -> None:
    plain = network(seed=1)
    torch.save(plain.state_dict(), tmp_path / written)
    subject = model()
    subject.load(str(tmp_path / loaded))
    assert same_weights(plain, subject.network)


@pytest.mark.parametrize("name", ["net", "v1.2", "a.b/c.d", "deep/er/net.pt"])
def test_names(tmp_path: Path, name: str) -> None:
    subject, other = model(), model(seed=1)
    fit(subject)
    subject.save(tmp_path / name)
    other.load(tmp_path / name)
    assert same_weights(subject.network, other.network)
    assert other.epochs_trained == 1
    stem = name.removesuffix(".pt")
    assert (tmp_path / f"{stem}.pt").is_file() and (tmp_path / f"{stem}.opt.pt").is_file()


def test_load_before_prepare_and_without_an_optimizer(tmp_path: Path) -> None:
    subject = model()
    fit(subject)
    subject.save(tmp_path / "net")
    for other in (hapi.Model(network(1)), hapi.Model(network(1)).prepare(loss=nn.CrossEntropyLoss())):
        other.load(tmp_path / "net")
        assert same_weights(subject.network, other.network)
        other.save(tmp_path / "weights")
        other.load(tmp_path / "weights")
    assert equal(hapi.Model(subject.network).predict(X, verbose=0), other.predict(X, verbose=0))


def test_reset_optimizer_loads_the_weights_alone(tmp_path: Path) -> None:
    subject, other = model(), model(seed=1)
    fit(subject)
    subject.save(tmp_path / "net")
    other.load(tmp_path / "net", reset_optimizer=True)
    assert same_weights(subject.network, other.network)
    assert not other.optimizer.state and other.epochs_trained == 0


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_of_wrappers_are_taken_off(tmp_path: Path, prefix: str) -> None:
    state = network(seed=1).state_dict()
    torch.save({prefix + key: value for key, value in state.items()}, tmp_path / "net.pt")
    subject = model()
    subject.load(tmp_path / "net")
    assert same_weights(network(seed=1), subject.network)


class Holder(nn.Module):
    """A network whose own part is called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 3)


@pytest.mark.parametrize(
    "prefix", ["module.", "module.module.", "_orig_mod.module.", "module._orig_mod.", "module._orig_mod.module."]
)
def test_a_part_that_is_called_module_keeps_its_name(tmp_path: Path, prefix: str) -> None:
    part = nn.Linear(6, 3)
    torch.save({prefix + key: value for key, value in part.state_dict().items()}, tmp_path / "net.pt")
    holder = Holder()
    hapi.Model(holder).load(tmp_path / "net")
    assert same_weights(part, holder.module)


def test_skip_mismatch_names_everything(tmp_path: Path) -> None:
    model().save(tmp_path / "net")
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    other = nn.Sequential(nn.Linear(6, 8), norm, nn.Dropout(), nn.Linear(8, 5), nn.Linear(5, 2))
    subject = hapi.Model(other).prepare("adam", nn.CrossEntropyLoss())
    untouched = other[3].weight.clone()
    with pytest.warns(UserWarning) as caught:
        subject.load(tmp_path / "net", skip_mismatch=True)
    (message,) = (str(warning.message) for warning in caught)
    assert "loaded 4 of 8 entries" in message
    assert "missing: 4.weight, 4.bias" in message
    assert "unexpected: 1.running_mean, 1.running_var, 1.num_batches_tracked" in message
    assert "3.weight ((3, 8) in the file, (5, 8) in the network)" in message
    assert "3.bias ((3,) in the file, (5,) in the network)" in message
    assert torch.equal(other[0].weight, network().state_dict()["0.weight"])
    assert torch.equal(other[3].weight, untouched)
    assert not subject.optimizer.state


def test_a_lazy_network_takes_its_shapes_from_the_file(tmp_path: Path) -> None:
    torch.save(nn.Linear(6, 3).state_dict(), tmp_path / "net.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lazy modules were once announced as new.
        lazy = nn.LazyLinear(3)
    hapi.Model(lazy).load(tmp_path / "net")
    assert lazy.weight.shape == (3, 6)


class Extra(nn.Linear):
    def __init__(self, extra: Any) -> None:
        super().__init__(6, 3)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [None, 3, {"seen": [1, 2]}, torch.ones(2)])
def test_extra_state(tmp_path: Path, extra: Any) -> None:
    hapi.Model(Extra(extra)).save(tmp_path / "net")
    subject = Extra(torch.zeros(2) if isinstance(extra, torch.Tensor) else None)
    hapi.Model(subject).load(tmp_path / "net")
    assert equal(subject.extra, extra)


# The two files belong together.


def test_a_pair_of_two_saves_is_refused(tmp_path: Path) -> None:
    subject = model()
    subject.save(tmp_path / "one")
    fit(subject)
    subject.save(tmp_path / "two")
    (tmp_path / "one.opt.pt").replace(tmp_path / "two.opt.pt")
    other = model(seed=1)
    with pytest.raises(ValueError, match=r"two different saves.*reset_optimizer=True"):
        other.load(tmp_path / "two")
    assert same_weights(other.network, network(seed=1))
    other.load(tmp_path / "two", reset_optimizer=True)
    assert same_weights(other.network, subject.network)


def test_weights_without_their_training_state(tmp_path: Path) -> None:
    subject, other = model(), model(seed=1)
    fit(subject)
    subject.save(tmp_path / "net")
    (tmp_path / "net.opt.pt").unlink()
    with pytest.warns(UserWarning, match=r"net\.pt was saved together with net\.opt\.pt.*reset_optimizer=True") as said:
        other.load(tmp_path / "net")
    assert said[0].filename == __file__
    assert same_weights(other.network, subject.network)
    assert not other.optimizer.state


def test_training_state_of_another_kind(tmp_path: Path) -> None:
    subject = model()
    subject.save(tmp_path / "net")
    torch.save({"format": 0}, tmp_path / "net.opt.pt")
    with pytest.raises(ValueError, match=r"net\.opt\.pt is not the training state.*reset_optimizer=True"):
        subject.load(tmp_path / "net")


@pytest.mark.parametrize("other", [partial(SGD, lr=0.1, momentum=0.9), lambda p: Adam([p[0]]), lambda p: Adam(p[:1])])
def test_state_of_another_optimizer(tmp_path: Path, other: Callable[..., Any]) -> None:
    subject = model()
    fit(subject)
    subject.save(tmp_path / "net")
    strange = model(seed=1, optimizer=other)
    before = strange.optimizer.state_dict()
    with pytest.raises(ValueError, match=r"does not fit this (SGD|Adam).*reset_optimizer=True"):
        strange.load(tmp_path / "net")
    assert equal(strange.optimizer.state_dict(), before)


# Going on.

STEPS = 5  # of an epoch

PREPARED = {
    "sgd": {"optimizer": partial(SGD, lr=0.1, momentum=0.9)},
    "adam": {},
    "fused adamw": {"optimizer": "adamw"},
    "clipped": {"clip_grad_norm": 0.1},
    "steps": {"scheduler": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)},
    "milestones": {"scheduler": partial(lr_scheduler.MultiStepLR, milestones=[1, 2])},
    "one cycle": {"scheduler": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=2 * STEPS)},
    "cosine": {"scheduler": partial(lr_scheduler.CosineAnnealingLR, T_max=2)},
    "lambda": {"scheduler": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch)},
    "plateau": {"scheduler": partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=10.0)},
    "sequence": {
        "scheduler": lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [1])], [1]
        )
    },
    "bf16": {"amp_configs": "bf16"},
    "fp16": {"amp_configs": {"dtype": "fp16", "init_loss_scaling": 2.0**20, "incr_every_n_steps": 3}},
}


@pytest.mark.parametrize("options", PREPARED.values(), ids=PREPARED)
def test_a_loaded_model_goes_on_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    straight, first, second = model(**options), model(**options), model(seed=1, **options)
    history = fit(straight, epochs=2)
    before = fit(first)
    first.save(tmp_path / "net")
    second.load(tmp_path / "net")
    assert (second.epochs_trained, second.steps_trained) == (1, STEPS)
    after = fit(second)
    assert same_weights(straight.network, second.network)
    assert equal(straight.optimizer.state_dict(), second.optimizer.state_dict())
    assert history == {name: before[name] + after[name] for name in history}
    straight.save(tmp_path / "straight")
    second.save(tmp_path / "second")
    one, other = (torch.load(tmp_path / f"{name}.opt.pt") for name in ("straight", "second"))
    for content in (one, other):
        # Of the last fit, and one of them has called it twice.
        del content["position"]["cursor"], content["position"]["begun"]
    for part in ("scheduler", "scaler", "counters", "position"):
        assert equal(one[part], other[part])


@pytest.mark.parametrize("part", ["fp16", "steps", "sgd"])
def test_loading_into_a_model_that_has_trained_goes_back(tmp_path: Path, part: str) -> None:
    subject = model(**PREPARED[part])
    fit(subject)
    subject.save(tmp_path / "net")
    once = fit(subject, epochs=2)
    weights = {key: value.clone() for key, value in subject.network.state_dict().items()}
    subject.load(tmp_path / "net")
    subject.save(tmp_path / "again")
    one, other = (torch.load(tmp_path / f"{name}.opt.pt") for name in ("net", "again"))
    assert all(equal(one[part], other[part]) for part in ("optimizer", "scheduler", "scaler", "counters"))
    assert fit(subject, epochs=2) == once
    assert equal(weights, dict(subject.network.state_dict()))


def test_float32_moments_of_bfloat16_parameters(tmp_path: Path) -> None:
    def halved(seed: int) -> hapi.Model:
        torch.manual_seed(seed)
        subject = hapi.Model(nn.Linear(6, 3).bfloat16()).prepare(partial(Adam, lr=0.01), nn.CrossEntropyLoss())
        for parameter in subject.network.parameters():
            moments = {name: torch.rand(parameter.shape) for name in ("exp_avg", "exp_avg_sq")}
            subject.optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
        return subject

    subject, other = halved(0), halved(1)
    subject.save(tmp_path / "net")
    other.load(tmp_path / "net")
    assert equal(subject.optimizer.state_dict(), other.optimizer.state_dict())
    assert {state["exp_avg"].dtype for state in other.optimizer.state.values()} == {torch.float32}


def test_saving_draws_nothing(tmp_path: Path) -> None:
    subject = model()
    before = torch.get_rng_state()
    subject.save(tmp_path / "net")
    subject.load(tmp_path / "net")
    assert torch.equal(torch.get_rng_state(), before)


# What may be saved.


class Remembers(Callback):
    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory}


class Strange:
    pass


@pytest.mark.parametrize(
    ("memory", "key"),
    [
        (Strange(), r"callbacks\['Remembers\.0'\]\['memory'\]"),
        ([1, {"deep": Strange}], r"callbacks\['Remembers\.0'\]\['memory'\]\[1\]\['deep'\]"),
        ({Strange(): 1}, r"callbacks\['Remembers\.0'\]\['memory'\]: its key"),
        (frozenset([1]), r"callbacks\['Remembers\.0'\]\['memory'\]"),
        (1 << 2000, r"callbacks\['Remembers\.0'\]\['memory'\]"),
    ],
)
def test_what_a_safe_load_would_refuse(tmp_path: Path, memory: Any, key: str) -> None:
    with pytest.raises(TypeError, match=rf"^{key}.* Keep only numbers"):
        fit(model(), save_dir=tmp_path, callbacks=Remembers(memory))
    assert list(tmp_path.iterdir()) == []


def test_strange_parts_of_network_and_optimizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^network\['_extra_state'\] is of type Strange"):
        hapi.Model(Extra(Strange())).save(tmp_path / "net")
    subject = model()
    subject.optimizer.param_groups[0]["note"] = Strange()
    with pytest.raises(TypeError, match=r"^optimizer\['param_groups'\]\[0\]\['note'\] is of type Strange"):
        subject.save(tmp_path / "net")
    assert list(tmp_path.iterdir()) == []


class Level(IntEnum):
    HIGH = 3


Point = namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.int32(3), 3),
        (np.bool_(True), True),
        (np.arange(3), torch.arange(3)),
        ({np.int64(1): np.float32(2.0)}, {1: 2.0}),
        (Level.HIGH, 3),
        (Point(1, [2]), (1, [2])),
        ({1, 2}, {1, 2}),
        (Counter([2, 2, 5]), Counter([2, 2, 5])),
        (nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))),
        ((torch.float16, torch.Size([2]), torch.device("cpu"), 2j, b"x", None), None),
    ],
)
def test_values_become_plain_and_come_back(tmp_path: Path, value: Any, expected: Any) -> None:
    expected = value if expected is None else expected
    files.write(tmp_path / "value.pt", files.as_plain(value, "value"))
    loaded = files.read(tmp_path / "value.pt")
    assert type(loaded) is type(expected)
    assert equal(loaded, expected)


def test_numpy_learning_rate(tmp_path: Path) -> None:
    subject, other = model(optimizer=partial(SGD, lr=0.1)), model(seed=1, optimizer=partial(SGD, lr=0.5))
    subject.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    subject.save(tmp_path / "net")
    other.load(tmp_path / "net")
    assert type(other.optimizer.param_groups[0]["lr"]) is float
    assert other.optimizer.param_groups[0]["lr"] == 0.25


# Whole or absent.


class Stopping(list):
    limit = -1

    def clear(self) -> None:
        super().clear()
        self.limit = -1


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Stopping:
    """The names of files renamed into place; a rename fails after so many as `limit` says."""
    names = Stopping()
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        if len(names) == names.limit:
            raise OSError(errno.EIO, "the disk has gone")
        names.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    return names


def test_a_stop_before_any_rename_leaves_a_whole_pair(tmp_path: Path, replaced: Stopping) -> None:
    for renames in range(4):
        folder = tmp_path / str(renames)
        old, new, loaded = model(), model(seed=1), model(seed=2)
        replaced.clear()
        old.save(folder / "net")
        assert [name.rpartition(".pt")[0] for name in replaced] == [".net.opt", "net", "net.opt"]
        replaced.clear()
        replaced.limit = renames
        if renames < 3:
            with pytest.raises(OSError, match="the disk has gone"):
                new.save(folder / "net")
        else:
            new.save(folder / "net")
        # The weights' own rename decides; the training state that belongs to them is found in both cases.
        expected = old if renames < 2 else new
        loaded.load(folder / "net")
        assert same_weights(expected.network, loaded.network)
        replaced.clear()
        old.save(folder / "net")
        assert sorted(path.name for path in folder.iterdir()) == ["net.opt.pt", "net.pt"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OSError),
        (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file"), OSError),
        (RuntimeError("something else"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_write_that_fails_leaves_the_older_pair_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    subject, other = model(), model(seed=1)
    subject.save(tmp_path / "net")

    def half(content: Any, file: Any) -> None:
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(raised):
        other.save(tmp_path / "net")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.opt.pt", "net.pt"]
    other.load(tmp_path / "net")
    assert same_weights(subject.network, other.network)


def test_files_of_two_saves_are_noticed(tmp_path: Path) -> None:
    subject = model()
    for name in ("net", "other"):
        subject.save(tmp_path / name)
    os.replace(tmp_path / "other.opt.pt", tmp_path / "net.opt.pt")
    with pytest.raises(ValueError, match="two different saves"):
        subject.load(tmp_path / "net")
    subject.load(tmp_path / "net", reset_optimizer=True)


KILLED = """
import os, sys
import torch
from torch import nn
import hapi

save = torch.save

def half(content, file):
    save(content, file)
    file.truncate(file.tell() // 2)
    os._exit(9)

torch.save = half
hapi.Model(nn.Linear(6, 3)).prepare("adam", nn.CrossEntropyLoss()).save(sys.argv[1])
"""


def test_a_kill_within_a_write_leaves_the_older_pair(tmp_path: Path) -> None:
    subject, other = model(), model(seed=1)
    subject.save(tmp_path / "net")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "net")], timeout=120, check=False)
    assert done.returncode == 9
    # Half a file lies there, under no name that is taken for a checkpoint.
    assert len(list(tmp_path.iterdir())) == 3
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["net.opt.pt", "net.pt"]
    other.load(tmp_path / "net")
    assert same_weights(subject.network, other.network)


# What fit writes.


def names(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".pt") for path in folder.iterdir() if ".opt" not in path.name)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"epochs": 3}, ["1", "2", "3", "final"]),
        ({"epochs": 5, "save_freq": 2}, ["2", "4", "5", "final"]),
        ({"epochs": 2, "save_freq": 9}, ["2", "final"]),
        ({"epochs": 3, "num_iters": STEPS + 1, "save_freq": 9}, ["2", "final"]),
        ({"epochs": 1, "callbacks": ModelCheckpoint(monitor="val_loss")}, ["1", "best_model", "final"]),
    ],
)
def test_files_of_fit(tmp_path: Path, options: dict[str, Any], expected: list[str]) -> None:
    subject = model()
    fit(subject, save_dir=tmp_path, **options)
    assert names(tmp_path) == expected
    assert len(list(tmp_path.iterdir())) == 2 * len(expected)
    other = model(seed=1)
    other.load(tmp_path / "final")
    assert same_weights(subject.network, other.network)
    assert (other.epochs_trained, other.steps_trained) == (subject.epochs_trained, subject.steps_trained)


def test_epochs_are_numbered_on_over_calls(tmp_path: Path) -> None:
    subject = model()
    fit(subject, save_dir=tmp_path / "one")
    fit(subject, save_dir=tmp_path / "two")
    assert names(tmp_path / "one") == ["1", "final"]
    assert names(tmp_path / "two") == ["2", "final"]


def test_the_best_model_is_that_of_the_best_epoch(tmp_path: Path) -> None:
    subject = model(optimizer=partial(SGD, lr=3.0))
    checkpoint = ModelCheckpoint(monitor="val_loss")
    values = fit(subject, epochs=6, save_dir=tmp_path, callbacks=[checkpoint, EarlyStopping(patience=9, verbose=0)])
    best = values["val_loss"].index(min(values["val_loss"]))
    assert best < 5
    one, other = (model(seed, optimizer=partial(SGD, lr=0.1)) for seed in (1, 2))
    one.load(tmp_path / "best_model")
    other.load(tmp_path / str(best + 1))
    assert same_weights(one.network, other.network)
    assert one.evaluate((X, Y), verbose=0)["loss"] == pytest.approx(min(values["val_loss"]))
    callbacks = torch.load(tmp_path / "final.opt.pt")["callbacks"]
    assert callbacks["ModelCheckpoint.0"]["best"] == min(values["val_loss"])


class Simple(torch.optim.Optimizer):
    """As one is written by hand: its settings are its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                moved = self.state[parameter].setdefault("moved", torch.zeros_like(parameter))
                moved.mul_(0.5).add_(parameter.grad)
                parameter.sub_(group["lr"] * moved)


MATRICES = [getattr(torch.optim, name) for name in ("Muon", "Adafactor") if hasattr(torch.optim, name)]


@pytest.mark.parametrize("kind", [Simple, *MATRICES, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adadelta])
def test_any_optimizer_goes_on_with_the_same_bits(tmp_path: Path, kind: Any) -> None:
    def made() -> hapi.Model:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False))
        return hapi.Model(net).prepare(kind, nn.CrossEntropyLoss())

    straight, first, second = made(), made(), made()
    fit(straight, 2)
    fit(first, 1, save_dir=tmp_path)
    fit(second, 2, save_dir=tmp_path, resume=True)
    assert same_weights(second.network, straight.network)


# Reading beside a run that saves.


def test_a_pair_is_read_whole_while_another_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = model(), model(seed=1)
    old.save(tmp_path / "net")
    read_training, locked = checkpoint.read_training, []

    def between(path: Any, identity: Any) -> Any:
        # A writer would have to wait here: it gets no lock for itself.
        descriptor = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked.append(path)
        finally:
            os.close(descriptor)
        return read_training(path, identity)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_training", between)
        weights, training = checkpoint.read_pair(tmp_path / "net")
    assert locked and equal(dict(weights.state), dict(old.network.state_dict()))
    assert training is not None and training["id"] == weights.identity
    new.save(tmp_path / "net")
    assert checkpoint.read_pair(tmp_path / "net")[0].identity != weights.identity
    assert checkpoint.read_pair(tmp_path / "net", with_training=False)[1] is None


def test_weights_of_plain_torch_are_no_pair(tmp_path: Path) -> None:
    model().save(tmp_path / "net")
    torch.save(network(seed=1).state_dict(), tmp_path / "net.pt")
    weights, training = checkpoint.read_pair(tmp_path / "net")
    assert training is None and weights.identity is None
    found, passed_over = checkpoint.newest(tmp_path, network())
    assert found is None and "net.pt was not written by save" in passed_over[0]


def refuses_to_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who may pass through a folder, and neither list nor lock it; root would be let in."""
    real = os.open

    def refusing(path: Any, *rest: Any, **more: Any) -> int:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)


def test_a_folder_that_cannot_be_locked_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model().save(tmp_path / "net")
    refuses_to_open(tmp_path, monkeypatch)
    weights, training = checkpoint.read_pair(tmp_path / "net")
    assert training is not None and training["id"] == weights.identity
    with pytest.raises(FileNotFoundError, match="does not exist, so nothing can be loaded"):
        checkpoint.read_pair(tmp_path / "none" / "net")


def test_a_folder_that_vanishes_before_the_renames_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = tmp_path / "run", pairs._opened
    folder.mkdir()

    def vanished(place: Path, reading: bool) -> Any:
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
        return opened(place, reading)

    monkeypatch.setattr(pairs, "_opened", vanished)
    with pytest.raises(OSError, match=rf"^{folder} cannot be locked for a save \(No such file.*\), so .* Check that"):
        model().save(folder / "net")


# What killed processes leave.


def aged(path: Path, content: bytes = b"half") -> Path:
    path.write_bytes(content)
    os.utime(path, (1e9, 1e9))
    return path


def test_what_is_swept_is_ours_alone(tmp_path: Path) -> None:
    theirs = [
        ".notes.partial.md",
        ".data.partition.json",
        ".thesis.pdf.part",
        ".a.12-abc.part",
        ".b.1-0123abcd.part.txt",
    ]
    ours = [".net.pt.417-0123abcd.part", ".net.opt.pt.1-ffffffff.part", ".net.onnx.23-00000000.part.onnx"]
    for name in theirs + ours:
        aged(tmp_path / name)
    (tmp_path / ".net.pt.418-0123abcd.part").write_bytes(b"of a run that writes now")
    files.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*theirs, ".net.pt.418-0123abcd.part"])


@pytest.mark.parametrize("suffix", ["", ".onnx"])
def test_what_is_drafted_would_be_swept(tmp_path: Path, suffix: str) -> None:
    with files.draft(tmp_path / "net.pt", lambda path: path.touch(), suffix) as draft:
        os.utime(draft, (1e9, 1e9))
        files.sweep(tmp_path)
        assert not draft.exists()


def test_a_training_state_that_waits_for_nothing_goes_as_a_fit_begins(tmp_path: Path) -> None:
    model().save(tmp_path / "step_9")
    identity = checkpoint.read_weights(tmp_path / "step_9").identity
    content = (tmp_path / "step_9.opt.pt").read_bytes()
    (tmp_path / "step_9.opt.pt").unlink()
    needed = aged(tmp_path / f".step_9.opt.pt.{identity}", content)
    theirs = aged(tmp_path / ".notes.opt.pt.txt")
    damaged = aged(tmp_path / f".damaged.opt.pt.{'1' * 32}")
    (tmp_path / "damaged.pt").write_bytes(b"half")
    young = tmp_path / f".young.opt.pt.{'2' * 32}"
    young.touch()
    gone = [aged(tmp_path / f".{name}.opt.pt.{'3' * 32}") for name in ("step_7", "step_9")]
    fit(model(), save_dir=tmp_path)
    assert needed.exists() and theirs.exists() and damaged.exists() and young.exists()
    assert not any(path.exists() for path in gone)
    model(seed=1).load(tmp_path / "step_9")


# Tensors of every kind, saved at once and by a thread.


class OwnKind(torch.Tensor):
    pass


def odd_tensors() -> dict[str, Any]:
    base = torch.arange(12.0)
    parameter = nn.Parameter(base[:4])
    weight = nn.Parameter(torch.ones(3))
    (weight * 2).sum().backward()
    labelled = nn.Parameter(torch.ones(2))
    labelled.note = {"of": "someone"}  # type: ignore[attr-defined]
    return {
        "computed": weight * 3,
        "parameter": parameter,
        "frozen": nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False),
        "leaf": torch.zeros(2, requires_grad=True),
        "weight": weight,
        "labelled": labelled,
        "own kind": torch.ones(2, requires_grad=True).as_subclass(OwnKind),
        "shared": [base, base[2:6], base.view(3, 4).T],
        "same": (weight, weight),
        "set": {torch.tensor(5.0)},
        "sparse": torch.eye(3).to_sparse(),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "counter": Counter({3: 2}),
    }


def saved_by_fit(folder: Path, state: dict[str, Any], asynchronous: bool) -> dict[str, Any]:
    fit(model(), save_dir=folder, callbacks=[Remembers(state), ModelCheckpoint(asynchronous=asynchronous)])
    content = torch.load(folder / "final.opt.pt", weights_only=True)
    memory: dict[str, Any] = content["callbacks"]["Remembers.0"]["memory"]
    return memory


def described(value: Any) -> Any:
    """Kind and values of all tensors, and what memory they have in common."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense().resolve_conj()
        return type(value), value.requires_grad, value.is_leaf, value.layout, tuple(value.stride()), dense.tolist()
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value), [described(item) for item in value]
    return value


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_of_every_kind_come_out_right(tmp_path: Path, asynchronous: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sparse tensors, whose invariants are checked
        given = odd_tensors()
        del given["sparse"]
        loaded = saved_by_fit(tmp_path, given, asynchronous)
    plain = {**given, **{name: given[name].detach() for name in ("computed", "labelled")}}
    plain["own kind"] = given["own kind"].detach().as_subclass(torch.Tensor)
    assert described(loaded) == described(plain)
    memory = {tensor.untyped_storage().data_ptr() for tensor in (*loaded["shared"], loaded["parameter"])}
    assert len(memory) == 1, "what shared memory still does"
    assert loaded["same"][0] is loaded["same"][1] is loaded["weight"]
    assert all(tensor.grad is None for tensor in loaded["same"])
    assert torch.equal(loaded["shared"][0], torch.arange(12.0))


def test_a_copy_for_a_thread_changes_no_more(tmp_path: Path) -> None:
    given = odd_tensors()
    plain = files.as_plain(given, "given")
    before = described(plain)
    copied = files.with_own_tensors(plain, {})
    assert described(copied) == before
    with torch.no_grad():
        for value in (*given["shared"], *given["set"], given["weight"], given["leaf"], given["labelled"]):
            value.mul_(0).sub_(1)
        given["sparse"].mul_(0)
    assert described(copied) == before


def test_two_threads_that_save_leave_the_script_s_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second, first_done = threading.Event(), threading.Event()
    seen, real = [], torch.save
    other = threading.Thread(target=lambda: files.save_object([2], tmp_path / "2.pt"))

    def save(content: Any, file: Any) -> None:
        if content == [1]:
            # The other save comes into this one, if it can, and would read the option that this one has set.
            other.start()
            second.wait(0.1)
        else:
            second.set()
            first_done.wait(5)
        seen.append(torch.serialization.get_crc32_options())
        real(content, file)

    # The whole process's, as in older versions of torch; in newer ones each thread has its own.
    option = [False]
    monkeypatch.setattr(torch.serialization, "get_crc32_options", lambda: option[-1])
    monkeypatch.setattr(torch.serialization, "set_crc32_options", option.append)
    monkeypatch.setattr(torch, "save", save)
    files.save_object([1], tmp_path / "1.pt")
    first_done.set()
    other.join()
    assert option[-1] is False and seen == [True, True]
    assert (files.read(tmp_path / "1.pt"), files.read(tmp_path / "2.pt")) == ([1], [2])
