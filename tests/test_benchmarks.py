"""The benchmarks' programs run; what they measure is no test's business."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("turns")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("peers")


def test_other_work_than_the_loops_is_told(turns: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def way(steps: float, loss: float) -> Any:
        return turns.Way("it", [], laps=[{"steps": 1.0, "loss": 9.0}, {"steps": steps, "loss": loss}])

    hand = way(3750, 0.100)
    assert turns.unequal(hand, hand) == turns.unequal(way(3750, 0.110), hand) == ""
    assert turns.unequal(way(1875, 0.100), hand) == "1875 steps instead of 3750"
    assert turns.unequal(way(3750, 0.130), hand) == "loss 0.1300 instead of 0.1000"
    one, other = (turns.Way("it", [], laps=[{"sum": value}]) for value in (100.0, 101.0))
    assert turns.unequal(one, one) == "" and turns.unequal(one, other) == "sum 100.0000 instead of 101.0000"
    assert turns.unequal(turns.Way("silent", [], laps=[{}]), one) == "sum nan instead of 100.0000"
    assert not turns.tell_unequal([hand, hand], hand)
    assert turns.tell_unequal([hand, way(1, 0.1)], hand)
    assert capsys.readouterr().out == "\nNot the same work: it, 1 steps instead of 3750.\n"


def test_libraries_that_are_not_there_are_asked_for(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit, match="--install"):
        peers.versions()
    # A Python with another torch, or without the libraries.
    monkeypatch.setattr(peers, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(peers, "VERSIONS", "import no_such_library")
    with pytest.raises(SystemExit, match="--install"):
        peers.versions()
    monkeypatch.setattr(peers, "VERSIONS", f"print({__file__!r}); print('lightning 1')")
    with pytest.raises(SystemExit, match="times would not compare"):
        peers.versions()


def test_the_picture_shows_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    picture = importlib.import_module("picture")
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    tables = {heading: picture.table(results, heading) for heading in ("1 process", "2 processes")}
    picture.draw(tables, tmp_path / "images" / "speed.svg")
    for shown in (picture.PICTURE, tmp_path / "images" / "speed.svg"):
        text = shown.read_text(encoding="utf-8")
        for ratios in tables.values():
            assert ratios["hand"] == 1
            assert all(f">{ratio:.2f}<" in text for ratio in ratios.values())
    with pytest.raises(SystemExit, match="no table under '3 processes'"):
        picture.table(results, "3 processes")


@pytest.mark.slow
def test_the_cards_script_runs_its_part_for_a_cpu(tmp_path: Path) -> None:
    done = run(str(ROOT / "benchmarks" / "gpu.py"), "mlp", "--laps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| fit / hand |" in done.stdout
    for check in ("amp-bf16", "amp-fp16", "resume"):
        assert f"| {check} | passed |" in done.stdout, done.stdout
    told, table = done.stdout.split("Milliseconds a step", 1)
    assert "Left out: the ways compiled, graph; the checks pinned, beside, kept." in told
    assert "| nccl | passed on gloo |" in table


@pytest.mark.slow
def test_a_check_that_fails_says_so(tmp_path: Path) -> None:
    # The plain loop in another precision than fit.
    other = "import gpu_checks, torch; print(gpu_checks.amp(torch.float16, 'bf16', None))"
    done = run("-c", f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); {other}", cwd=tmp_path)
    assert done.returncode == 1
    assert "losses " in done.stderr and "Traceback" not in done.stderr


def test_a_step_that_comes_once_in_several_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    steps = importlib.import_module("bench_steps")
    times = [1e-6] * 9 + [11e-6]
    assert steps.means(times * (2 * steps.BLOCK // 10)) == pytest.approx([2.0, 2.0])


TAKES_TURNS = """
import sys
sys.path.insert(0, {folder!r})
from turns import Laps
laps = Laps()
while True:
    for step in range(1, 101):
        if step % 50 == 1:
            with open({log!r}, "a") as log:
                log.write(sys.argv[1])
        laps.pause_after(step)
    laps.mark()
"""


def test_ways_take_turns_within_a_lap(turns: ModuleType, tmp_path: Path) -> None:
    script = TAKES_TURNS.format(folder=str(ROOT / "benchmarks"), log=str(tmp_path / "order"))
    ways = [turns.Way(name, [sys.executable, "-c", script, name]) for name in "ab"]
    turns.compare(ways, 2, tmp_path / "log")
    # Each warms up alone; then they alternate, and another begins each time.
    assert (tmp_path / "order").read_text() == "aabb" + "abab" + "baba"
    assert [len(way.laps) for way in ways] == [2, 2]


def test_a_pause_takes_no_time(turns: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, float] | None] = []
    clock = iter([(1.0, 1.0), (4.0, 2.0), (11.0, 3.0), (15.0, 6.0), (15.0, 6.0), (17.0, 7.0), (17.0, 7.0)])
    monkeypatch.setattr(turns, "_now", lambda: next(clock))
    monkeypatch.delenv(turns.ADDRESS, raising=False)
    laps = turns.Laps()
    laps._driver = SimpleNamespace(send=sent.append, recv=lambda: True)
    # Not before the first lap.
    laps.pause()
    laps.mark()
    laps.pause()
    laps.mark(loss=0.5)
    laps.mark()
    assert sent[:2] == [None, None]
    assert [(lap["elapsed"], lap["cpu"]) for lap in sent[2:] if lap is not None] == [(7.0, 4.0), (2.0, 1.0)]
    assert sent[2] is not None and sent[2]["loss"] == 0.5
    # A clock of fit's has not seen the 7 seconds in which another had its turn.
    assert laps._standing_still(lambda: 100.0)() == 93.0


ON_SCREEN = """
import sys
sys.path.insert(0, {folder!r})
from turns import Laps
laps = Laps()
while True:
    print("seen" if sys.stderr.isatty() else "unseen", file=sys.stderr)
    laps.mark()
"""


def test_a_way_may_write_to_a_terminal(turns: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ON_SCREEN.format(folder=str(ROOT / "benchmarks"))]
    turns.compare([turns.Way("it", command, on_screen=True)], 1, tmp_path / "log")
    until = time.monotonic() + 20
    while (tmp_path / "log").read_text().split() != ["seen"] * 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert (tmp_path / "log").read_text().split() == ["seen"] * 2


@pytest.mark.parametrize("case", ["mnist-256", "evaluate-256", "predict-256"])
def test_steps_take_turns(case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    steps = importlib.import_module("bench_steps")
    from hapi.callbacks.base import CallbackList
    from hapi.datasets import FashionMNIST

    before, sample = CallbackList.wants_batch_logs, FashionMNIST(mode="test", sample=True)
    monkeypatch.setattr(steps, "MNIST", lambda mode: sample)
    monkeypatch.setattr(steps, "mnist_in_memory", lambda: (sample.data, sample.targets))
    turns = []
    means = steps.means
    monkeypatch.setattr(steps, "means", lambda times: turns.append(len(times)) or means(times))
    theirs, ours, _, ratio = map(float, steps.run(case, 3))
    assert min(theirs, ours, ratio) > 0
    # As many of each.
    assert turns[0] == turns[1] >= 2
    # What takes the turns is taken away again.
    assert CallbackList.wants_batch_logs is before
