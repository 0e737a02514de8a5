"""A run that was ended between two epochs and resumed ends with the bits of one that was not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hapi

sys.path.insert(0, str(Path(__file__).parent))
import resume_runs


def test_resumed_runs_end_with_the_same_bits(tmp_path):
    resume_runs.check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [3])
def test_so_they_do_on_several_processes(tmp_path, processes):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    run = subprocess.run(
        [*command, resume_runs.__file__, str(tmp_path)],
        capture_output=True, text=True, timeout=180, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert sorted(run.stdout.split("\n")[:-1]) == [f"rank {rank} equal" for rank in range(processes)]


def test_the_newest_whole_checkpoint_is_taken_and_what_is_broken_is_named(tmp_path, capsys):
    resume_runs.trained(tmp_path, 3)
    for name in ("final.pt", "best_model.opt.pt", "best_model.pt"):
        os.truncate(tmp_path / name, 500)
    (tmp_path / "3.opt.pt").unlink()
    (tmp_path / "3.pt").touch()
    capsys.readouterr()
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    torch.manual_seed(1)
    model, _ = resume_runs.trained(tmp_path / "other", 1)
    model.fit((x, y), epochs=5, save_dir=tmp_path, resume=True, verbose=2)
    printed = capsys.readouterr().out
    assert "3.pt has no 3.opt.pt beside it" in printed and "final.pt is not a whole checkpoint" in printed
    assert f"resuming from {tmp_path / '2'}\n" in printed
    assert model.epochs_trained == 5 and (tmp_path / "5.pt").exists()


def test_a_fresh_start_where_there_is_nothing_and_none_without_being_asked(tmp_path, capsys):
    _, history = resume_runs.trained(tmp_path, 2, resume=True)
    assert history.epoch == [1, 2]
    _, again = resume_runs.trained(tmp_path, 1)
    assert again.epoch == [1], "resume=None goes on only after a launcher's restart"
    _, none_left = resume_runs.trained(tmp_path, 2, resume=str(tmp_path / "2"))
    assert none_left.epoch == [1, 2], "nothing is left to train, and its history is there"


def test_a_restart_by_the_launcher_goes_on_by_itself(tmp_path, monkeypatch):
    resume_runs.trained(tmp_path, 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    _, history = resume_runs.trained(tmp_path, 3)
    assert history.epoch == [1, 2, 3]


def test_resume_that_cannot_work(tmp_path):
    model = hapi.Model(torch.nn.Linear(2, 2)).prepare("sgd", torch.nn.CrossEntropyLoss())
    data = (torch.randn(4, 2), torch.randint(2, (4,)))
    with pytest.raises(ValueError, match="save_dir="):
        model.fit(data, resume=True, verbose=0)
    with pytest.raises(TypeError, match="resume=True"):
        model.fit(data, resume=3, verbose=0)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        model.fit(data, resume=tmp_path / "none", verbose=0)
    torch.save(model.network.state_dict(), tmp_path / "plain.pt")
    with pytest.raises(ValueError, match=r"by model\.load"):
        model.fit(data, resume=tmp_path / "plain", verbose=0)


def test_the_furthest_checkpoint_that_fits_is_taken_whatever_the_files_times_say(tmp_path, capsys):
    resume_runs.trained(tmp_path, 3)
    for name in ("final", "3", "best_model"):
        (tmp_path / f"{name}.pt").unlink()
    (tmp_path / "1.pt").touch()
    hapi.Model(torch.nn.Linear(2, 2)).save(tmp_path / "teacher")
    for file in tmp_path.glob("teacher*"):
        os.utime(file, (4e9, 4e9))
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    model, _ = resume_runs.trained(tmp_path / "other", 1)
    model.steps_trained = 10**6
    capsys.readouterr()
    model.fit((x, y), epochs=4, save_dir=tmp_path, resume=True, verbose=2)
    assert f"resuming from {tmp_path / '2'}\n" in capsys.readouterr().out
    assert model.epochs_trained == 4


def test_a_later_run_in_the_same_folder_is_the_newest_whatever_its_length(tmp_path, capsys):
    resume_runs.trained(tmp_path, 3)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    model, _ = resume_runs.trained(tmp_path / "other", 1)
    model.epochs_trained = model.steps_trained = 0
    capsys.readouterr()
    model.fit((x, y), epochs=1, save_dir=tmp_path, verbose=2)
    assert f"{tmp_path} holds checkpoints of an earlier run, 1 to 3; resume=True would" in capsys.readouterr().out
    weights = [value.clone() for value in model.network.state_dict().values()]
    for name in ("3.pt", "3.opt.pt"):
        os.utime(tmp_path / name, (4e9, 4e9))
    again, _ = resume_runs.trained(tmp_path / "other", 1)
    again.fit((x, y), epochs=1, save_dir=tmp_path, resume=True, verbose=2)
    printed = capsys.readouterr().out
    assert "resuming from" in printed and f"{tmp_path / '3'}\n" not in printed
    assert "has 1 epochs, and epochs=1 counts the whole run: nothing is left to train" in printed
    assert "holds checkpoints" not in printed
    assert all(map(torch.equal, weights, again.network.state_dict().values()))
    # A resumed run is still the one that was begun.
    again.fit((x, y), epochs=2, save_dir=tmp_path, resume=True, verbose=0)
    assert again.epochs_trained == 2
    last, _ = resume_runs.trained(tmp_path / "other", 1)
    last.fit((x, y), epochs=2, save_dir=tmp_path, resume=True, verbose=0)
    assert all(map(torch.equal, again.network.state_dict().values(), last.network.state_dict().values()))


def test_a_run_that_was_rolled_back_goes_on_in_its_new_branch(tmp_path):
    """Begun anew from an earlier checkpoint, and interrupted: what the first branch has left is further, but older."""
    resume_runs.trained(tmp_path, 4)
    branch, _ = resume_runs.trained(tmp_path, 3, resume=str(tmp_path / "1"), accumulate_grad_batches=2)
    resumed, _ = resume_runs.trained(tmp_path, 3, resume=True, accumulate_grad_batches=2)
    assert (tmp_path / "4.pt").exists() and resumed.epochs_trained == 3
    assert all(map(torch.equal, resume_runs.bits(branch), resume_runs.bits(resumed)))
    # A folder names no checkpoint: the run that is found there goes on.
    same, _ = resume_runs.trained(tmp_path / "other", 3, resume=str(tmp_path), accumulate_grad_batches=2)
    assert same._engine.begun == branch._engine.begun > 0


def test_a_stopped_run_says_where_it_goes_on(tmp_path, capsys):
    class Told(hapi.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            if step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    model, _ = resume_runs.trained(tmp_path / "other", 1)
    before = model.steps_trained
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    with pytest.raises(SystemExit):
        model.fit((x, y), batch_size=2, epochs=2, save_dir=tmp_path / "cut", verbose=2, callbacks=Told())
    step = f"step_{before + 2}"
    assert f"stopped after step {before + 2}; fit(..., resume=True) goes on from {tmp_path / 'cut' / step}\n" in (
        capsys.readouterr().out
    )
    model.fit((x, y), batch_size=2, save_dir=tmp_path / "cut", verbose=2)
    assert f"holds checkpoints of an earlier run, {step}; resume=True" in capsys.readouterr().out


def test_a_restart_goes_on_from_its_own_run_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    resume_runs.trained(tmp_path, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    _, history = resume_runs.trained(tmp_path, 1)
    assert history.epoch == [1], "the first run's result is none of the second's"
    _, history = resume_runs.trained(tmp_path, 2)
    assert history.epoch == [1, 2]


def test_a_best_model_of_early_stopping_holds_the_state_of_all_callbacks(tmp_path):
    from hapi.callbacks import Callback, EarlyStopping

    class Count(Callback):
        seen = 0

        def on_epoch_end(self, epoch, logs=None):
            self.seen += 1

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    net = torch.nn.Linear(6, 3)
    data = (torch.randn(8, 6), torch.randint(3, (8,)))
    model = hapi.Model(net).prepare("sgd", torch.nn.CrossEntropyLoss())
    model.fit(data, data, epochs=2, save_dir=tmp_path, save_freq=5, verbose=0, callbacks=[EarlyStopping(), Count()])
    count = Count()
    model.fit(data, data, epochs=2, resume=tmp_path / "best_model", verbose=0, callbacks=count)
    assert count.seen == 2


def test_a_folder_of_another_network_is_not_overwritten(tmp_path):
    resume_runs.trained(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = hapi.Model(torch.nn.Linear(6, 4)).prepare("sgd", torch.nn.CrossEntropyLoss())
    data = torch.randn(8, 6), torch.randint(3, (8,))
    with pytest.raises(ValueError, match=r"no checkpoint to go on from: .*of another network.*another save_dir"):
        other.fit(data, epochs=3, save_dir=tmp_path, resume=True, verbose=0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_script_of_several_fits_is_restarted_in_the_one_that_was_cut(tmp_path, monkeypatch):
    """In one folder, as under a launcher that restarts: each fit goes on from its own checkpoints."""

    class Ended(RuntimeError):
        pass

    class EndsAt(hapi.callbacks.Callback):
        def __init__(self, epoch):
            self.epoch = epoch

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == self.epoch:
                raise Ended

    x, y = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3

    def script(folder, *callbacks):
        torch.manual_seed(0)
        model = hapi.Model(torch.nn.Linear(6, 3)).prepare("adam", torch.nn.CrossEntropyLoss())
        histories = [
            model.fit((x, y), epochs=epochs, save_dir=folder, seed=epochs, verbose=0, callbacks=list(callbacks)).epoch
            for epochs in (2, 3)
        ]
        return histories, model.network.weight

    expected, weight = script(tmp_path / "straight")
    assert expected == [[1, 2], [3, 4, 5]]
    for ends in (0, 1, 2, 3, 4):
        folder = tmp_path / str(ends)
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        with pytest.raises(Ended):
            script(folder, EndsAt(ends))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        histories, resumed = script(folder)
        assert histories == expected, ends
        assert torch.equal(resumed, weight), ends
