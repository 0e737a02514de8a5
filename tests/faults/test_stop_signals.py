"""SIGTERM, SIGUSR1 and Ctrl-C: all ranks stop at one edge, save, and the resumed run ends as if nothing had been."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import hapi
from hapi import signals
from hapi.callbacks import Callback
from hapi.data import Feed

SCRIPT = Path(__file__).with_name("signalled.py")


def start(folder, phase, *more, launcher=()):
    folder.mkdir(exist_ok=True)
    for mark in folder.glob("at.*"):
        mark.unlink()
    return subprocess.Popen(
        [sys.executable, *launcher, SCRIPT, folder, phase, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
    )  # fmt: skip


def arrived(folder, processes=1, seconds=90.0):
    end = time.monotonic() + seconds
    while len(list(folder.glob("at.*"))) < processes:
        assert time.monotonic() < end, "the run did not come so far"
        time.sleep(0.01)


def result(process, seconds=120.0):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


class Signals(Callback):
    """Sends this process a signal in the middle of the second epoch, once."""

    def __init__(self, phase, number):
        self.phase, self.number = phase, number

    def on_train_batch_end(self, step, logs=None):
        self.send("train", step == 3)

    def on_eval_batch_end(self, step, logs=None):
        self.send("eval", step == 0)

    def send(self, phase, here):
        if here and phase == self.phase and self.model.epochs_trained == 1:
            os.kill(os.getpid(), self.number)


def fit(folder, *callbacks, **options):
    model = hapi.Model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.normal_()
    model.prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    data = Rows()
    history = model.fit(
        data, data, epochs=3, batch_size=4, save_dir=folder, seed=1, verbose=0, callbacks=callbacks, **options
    )
    return model, history


class Rows(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), index / 40) + torch.randn(4), index % 2


PHASES = [("train", signal.SIGTERM, 143), ("eval", signal.SIGUSR1, 143), ("train", signal.SIGINT, 130)]


@pytest.mark.parametrize(("phase", "number", "code"), PHASES)
@pytest.mark.parametrize("workers", [0, 1])
def test_alone(tmp_path, phase, number, code, workers):
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    straight, history = fit(tmp_path / "straight")
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path / "cut", Signals(phase, number), num_workers=workers)
    assert caught.value.code == code and isinstance(caught.value, KeyboardInterrupt) == (number == signal.SIGINT)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == handlers
    steps = 14 if phase == "train" else 20
    assert sorted(path.name for path in (tmp_path / "cut").glob("*.pt") if "opt" not in path.name) == [
        "1.pt", f"step_{steps}.pt"
    ]  # fmt: skip
    resumed, again = fit(tmp_path / "cut", resume=True, num_workers=workers)
    assert all(map(torch.equal, straight.network.parameters(), resumed.network.parameters()))
    assert again.history == history.history
    assert not list((tmp_path / "cut").glob("step_*")), "an epoch's checkpoint has taken its place"


def test_a_notebook_gets_its_history(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(signals, "is_interactive", lambda: True)
    model, history = fit(tmp_path, Signals("train", signal.SIGINT))
    assert (model.steps_trained, history.epoch) == (14, [1]) and (tmp_path / "step_14.pt").exists()
    assert "press Ctrl-C again to stop at once" in capfd.readouterr().err


def test_without_a_folder_nothing_is_saved_and_it_stops_alike():
    with pytest.raises(SystemExit) as caught:
        fit(None, Signals("train", signal.SIGTERM))
    assert caught.value.code == 143


def test_a_signal_while_a_fit_tidies_up_is_not_lost(tmp_path, monkeypatch, capfd):
    close = Feed.close

    def closing(feed):
        os.kill(os.getpid(), signal.SIGINT)
        close(feed)

    monkeypatch.setattr(Feed, "close", closing)
    with pytest.raises(KeyboardInterrupt):
        hapi.Model(nn.Linear(4, 2)).prepare("sgd", nn.CrossEntropyLoss()).fit(
            (torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)), save_dir=tmp_path, verbose=0
        )
    assert (tmp_path / "final.pt").exists() and "stopping" in capfd.readouterr().err


def test_handlers_of_the_script_are_left_alone(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        model, _ = fit(tmp_path, Signals("train", signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM] and model.steps_trained == 30


@pytest.mark.slow
def test_workers_and_all_when_the_whole_group_is_signalled(tmp_path):
    """As a scheduler does: the data workers get it as well."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, tmp_path, "workers"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    arrived(tmp_path)
    os.killpg(process.pid, signal.SIGTERM)
    code, out, err = result(process)
    assert code == 143 and "exception Stopped 143" in out, (out, err)
    assert "DataLoader worker" not in err and "Traceback" not in err, err
    assert len(list((tmp_path / "saved").glob("step_*.pt"))) == 2, "one pair"


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tmp_path):
    process = start(tmp_path, "slow")
    arrived(tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    returned, _, err = result(process, 30.0)
    assert returned == -signal.SIGINT and not list((tmp_path / "saved").glob("step_*")), err


HAPIRUN = ("-m", "hapi.distributed.launch", "--nproc_per_node", "2", "--log_dir", "log")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [
        (HAPIRUN, signal.SIGTERM, 143),
        pytest.param(HAPIRUN, signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(TORCHRUN, signal.SIGTERM, 1, marks=pytest.mark.slow),
    ],
)
def test_two_processes(tmp_path, launcher, number, code):
    process = start(tmp_path, "train" if number == signal.SIGTERM else "eval", launcher=launcher)
    arrived(tmp_path, 2)
    process.send_signal(number)
    returned, out, err = result(process)
    assert returned == code, (returned, out, err)
    # A short evaluation may have come to its end before all have agreed; then the epoch's own checkpoint is there.
    names = {path.name.split(".")[0] for path in (tmp_path / "saved").glob("[!.]*.pt")}
    assert len(names) == 2 and any(name == "2" or name.startswith("step_") for name in names), names


@pytest.mark.slow
def test_an_evaluation_whose_ranks_do_not_meet_is_given_up(tmp_path):
    process = start(tmp_path, "parts", launcher=HAPIRUN)
    arrived(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    code, out, err = result(process)
    seen = [int(text.split()[-3]) for text in out.splitlines() if "batches evaluated" in text]
    assert code == 143 and len(seen) == 1 and seen[0] < 150, (code, out, err)
    assert len(list((tmp_path / "saved").glob("step_*.pt"))) == 2
    # What goes on from there evaluates anew, all of it.
    code, out, err = result(start(tmp_path, "parts", "resume", launcher=HAPIRUN))
    assert code == 0 and out.count("done ") == 1, (code, out, err)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(tmp_path):
    process = start(tmp_path, "train", launcher=HAPIRUN)
    arrived(tmp_path, 2)
    ranks = [
        int(pid) for pid in os.listdir("/proc")
        if pid.isdigit() and int(pid) != process.pid and _has_argument(pid, str(tmp_path)) and _rank(pid) == "1"
    ]  # fmt: skip
    assert ranks
    os.kill(ranks[0], signal.SIGTERM)
    code, out, err = result(process)
    assert code == 143 and len(list((tmp_path / "saved").glob("step_*.pt"))) == 2, (code, out, err)


def ends(folder, *more):
    """What a run under hapirun prints at its end."""
    code, out, err = result(start(folder, "train", *more, launcher=HAPIRUN))
    assert code == 0, err
    return sorted(line.partition("done ")[2] for line in out.splitlines() if "done " in line)


@pytest.mark.slow
def test_a_killed_launcher_costs_nothing(tmp_path):
    straight = ends(tmp_path / "straight")
    folder = tmp_path / "killed"
    process = start(folder, "train", launcher=HAPIRUN)
    arrived(folder, 2)
    process.kill()
    process.communicate(timeout=30.0)  # its ranks have closed their outputs: they are gone too
    assert "1.pt" in [path.name for path in (folder / "saved").glob("*.pt")], "a kill before it proves nothing"
    assert straight == ends(folder, "resume") and straight


def _read(pid, name):
    try:
        return Path("/proc", pid, name).read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _has_argument(pid, argument):
    return argument in _read(pid, "cmdline")


def _rank(pid):
    return dict(entry.partition("=")[::2] for entry in _read(pid, "environ")).get("RANK")


class PlainWay(DataLoader):
    """An __iter__ of its own, so that it is read as it is; counts its passes."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        read = super().__iter__()
        yield from read


class Wrapper:
    """Passes a loader's batches on."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


class SignalsGroup(Signals):
    """To the data workers as well, as a scheduler does."""

    def __init__(self, phase, number):
        super().__init__(phase, number)
        # Ranks that other tests have started.
        self.others = multiprocessing.active_children()

    def send(self, phase, here):
        if here and phase == self.phase and self.model.epochs_trained == 1:
            children = [child for child in multiprocessing.active_children() if child not in self.others]
            assert children, "no worker is there"
            for child in children:
                os.kill(child.pid, self.number)
                # Whoever dies of it would be missed at an uncertain time, or not at all.
                status = Path(f"/proc/{child.pid}/status").read_text()
                ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
                assert all(ignored >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
        super().send(phase, here)


def told_in_the_middle(data, folder):
    model = hapi.Model(nn.Linear(4, 2)).prepare("adam", nn.CrossEntropyLoss())
    with pytest.raises(SystemExit) as caught:
        model.fit(data, epochs=3, save_dir=folder, verbose=0, callbacks=SignalsGroup("train", signal.SIGTERM))
    return caught.value.code


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("kind", [PlainWay, StatefulDataLoader, "persistent", "within"])
def test_workers_of_loaders_that_are_read_as_they_are_are_spared(tmp_path, kind):
    others = multiprocessing.active_children()
    options = {"batch_size": 4, "num_workers": 1, "persistent_workers": kind == "persistent"}
    loader = (PlainWay if isinstance(kind, str) else kind)(Rows(), **options)
    data = Wrapper(loader) if kind == "within" else loader
    assert told_in_the_middle(data, tmp_path) == 143
    assert (tmp_path / "step_14.pt").exists()
    # They leave such signals to the main process, and so would live on beside one that is about to end.
    assert not set(multiprocessing.active_children()) - set(others)
    assert "_get_iterator" not in vars(loader) and loader.worker_init_fn is None
    assert getattr(loader, "passes", 2) == 2
    assert len(list(data)) == 10, "it can be read again"
    # With it go the workers that this has started.
    loader._iterator = None


FAILING = """
import sys, torch, hapi
from torch import nn
sys.path.insert(0, sys.argv[1])
from test_stop_signals import PlainWay, Rows

class Fails(hapi.callbacks.Callback):
    def on_train_batch_end(self, step, logs=None):
        raise RuntimeError("as it goes")

data = PlainWay(Rows(), batch_size=4, num_workers=1, persistent_workers=True)
hapi.Model(nn.Linear(4, 2)).prepare("adam", nn.CrossEntropyLoss()).fit(data, verbose=0, callbacks=Fails())
"""


def test_a_script_that_fails_does_not_wait_for_such_workers(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FAILING, SCRIPT.parent], capture_output=True, text=True, timeout=90, cwd=tmp_path
    )
    assert done.returncode == 1 and "RuntimeError: as it goes" in done.stderr, done.stderr
