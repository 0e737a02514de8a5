"""The profiler: what its files hold, and that nothing is left of it outside its window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi.callbacks import Callback, Profiler, profiler

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


def model() -> hapi.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Dropout(0.1)), nn.Linear(8, 3))
    return hapi.Model(net).prepare("adam", nn.CrossEntropyLoss())


def fit(subject: hapi.Model, *callbacks: Callback, **options: Any) -> hapi.Model:
    options = {"batch_size": 4, "seed": 3, "verbose": 0, "epochs": 2, **options}
    subject.fit((X, Y), (X, Y), callbacks=callbacks, **options)
    return subject


def events(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


class Watch(Callback):
    """In which steps a profiler is at work, and hooks are on the layers."""

    _place = 10**6

    def __init__(self) -> None:
        self.steps: list[bool] = []
        self.hooked: list[bool] = []

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        self.steps.append(torch.autograd._profiler_enabled())
        self.hooked.append(bool(self.model.network[0]._forward_hooks))


@pytest.mark.parametrize(("wait", "warmup", "active"), [(1, 1, 3), (0, 2, 1), (4, 1, 1), (7, 1, 4)])
def test_its_window(tmp_path: Path, wait: int, warmup: int, active: int) -> None:
    profile, watch = Profiler(tmp_path / "new", wait, warmup, active), Watch()
    subject = fit(model(), profile, watch)
    # (While it warms up torch's profiler is prepared, not enabled.)
    window = range(wait, wait + warmup + active)
    assert watch.hooked == [step in window for step in range(12)]
    assert [step for step, on in enumerate(watch.steps) if on] == list(window)[warmup:]
    assert profile.trace == tmp_path / "new" / "rank0.pt.trace.json"
    names = events(profile.trace)
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == active
    # Training steps alone are in it, each with its optimizer step and its layers.
    assert names.count("Optimizer.step#Adam.step") == active
    assert names.count("layer: 0 (Linear)") == names.count("layer: the network (Sequential)") == active
    assert (tmp_path / "new" / "rank0.txt").read_text() == profile.table
    rows = {line.split("  ")[0]: line.split()[-3] for line in profile.table.split("\n\n")[0].splitlines()[2:]}
    layers = ["the network (Sequential)", "0 (Linear)", "1 (Sequential)", "1.0 (ReLU)", "1.1 (Dropout)", "2 (Linear)"]
    assert rows == dict.fromkeys(layers, str(active)) and "aten::addmm" in profile.table
    plain = fit(model())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), subject.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in subject.network.modules())


def test_a_fit_that_ends_within_the_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = Profiler(tmp_path, wait=8, warmup=1, active=10)
    fit(model(), profile, verbose=2)
    assert profile.trace is not None and events(profile.trace).count("Optimizer.step#Adam.step") == 3
    assert f"Profiler: wrote {profile.trace} and rank0.txt" in capsys.readouterr().out
    for wait in (11, 12, 100):
        profile = Profiler(tmp_path / "never", wait=wait, warmup=1)
        fit(model(), profile, verbose=2)
        assert profile.trace is None and not (tmp_path / "never").exists()
        assert f"ended after 12 steps, before the first to record, step {wait + 2}. Write" in capsys.readouterr().out


def test_an_error_within_the_window_ends_it(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
            if step == 3:
                raise KeyError

    subject = model()
    with pytest.raises(KeyError):
        fit(subject, Profiler(tmp_path, wait=0), Fails())
    assert not torch.autograd._profiler_enabled() and list(tmp_path.iterdir()) == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in subject.network.modules())


def test_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "get_rank", lambda: 1)
    fit(model(), Profiler(tmp_path), watch := Watch())
    assert not any(watch.hooked) and list(tmp_path.iterdir()) == []
    fit(model(), Profiler(tmp_path, all_ranks=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank1.pt.trace.json", "rank1.txt"]


def test_without_layers_and_with_shapes(tmp_path: Path) -> None:
    profile = Profiler(tmp_path, layers=False, record_shapes=True, profile_memory=True)
    fit(model(), profile)
    assert profile.table.startswith("No layers were marked.") and "[4, 6]" not in profile.table
    traced = json.loads(profile.trace.read_text())["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in traced)


@pytest.mark.parametrize("counts", [{"wait": -1}, {"warmup": 0}, {"active": 0}])
def test_counts_that_are_none(counts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Profiler received .*but it counts steps from [01]. Write"):
        Profiler(**counts)
    with pytest.raises(TypeError, match=r"Profiler received active=1.0, of type float, which is not a whole number"):
        Profiler(active=1.0)


def test_a_folder_that_cannot_be_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    subject = model()
    with pytest.raises(
        ValueError, match=r"Profiler received log_dir=.*nothing can be written: .*file is a file. Write"
    ):
        fit(subject, Profiler(tmp_path / "file" / "profile"))
    assert subject.steps_trained == 0
