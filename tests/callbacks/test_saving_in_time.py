"""ModelCheckpoint within epochs: when it saves, what it keeps, in a thread, and when the disk fails."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hapi
from hapi import agreement, checkpoint, files
from hapi.callbacks import Callback, ModelCheckpoint
from hapi.callbacks.base import CallbackList, Saver
from hapi.callbacks.retention import Retention
from hapi.distributed import group
from hapi.signals import StopSignals

X, Y = torch.randn(40, 4), torch.randint(2, (40,))


def fit(folder, *callbacks, model=None, epochs=3, **options):
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    model = model or hapi.Model(net).prepare("adam", nn.CrossEntropyLoss())
    options = {"verbose": 0} | options
    model.fit((X, Y), batch_size=4, epochs=epochs, save_dir=folder, seed=1, callbacks=callbacks, **options)
    return model


def names(folder):
    whole = {path.name.removesuffix(".pt") for path in folder.glob("*.pt") if not path.name.endswith(".opt.pt")}
    assert whole == {path.name.removesuffix(".opt.pt") for path in folder.glob("*.opt.pt")}, "a half pair"
    return whole


class Looks(Callback):
    """What is there after each step."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def on_train_batch_begin(self, step, logs=None):
        self.seen.append(names(self.folder) if self.folder.exists() else set())


def test_every_n_steps_keeps_the_newest_until_an_epochs_follows(tmp_path):
    looks = Looks(tmp_path)
    fit(tmp_path, ModelCheckpoint(every_n_steps=4), looks)
    assert looks.seen[:10] == [set()] * 4 + [{"step_4"}] * 4 + [{"step_8"}] * 2
    assert looks.seen[10:20] == [{"1"}] * 2 + [{"1", "step_12"}] * 4 + [{"1", "step_16"}] * 4
    assert names(tmp_path) == {"1", "2", "3", "final"}


def test_at_edges_of_optimizer_steps_alone(tmp_path):
    looks = Looks(tmp_path)
    fit(tmp_path, ModelCheckpoint(every_n_steps=2), looks, epochs=1, accumulate_grad_batches=4)
    assert looks.seen == [set()] * 4 + [{"step_4"}] * 4 + [{"step_8"}] * 2


def test_keep_last_counts_epochs_and_steps_together(tmp_path):
    looks = Looks(tmp_path)
    fit(tmp_path, ModelCheckpoint(every_n_steps=4, keep_last=2), looks)
    assert looks.seen[-1] == {"step_24", "step_28"}
    assert names(tmp_path) == {"step_28", "3", "final"}


def test_every_seconds(tmp_path):
    class Slow(Callback):
        def on_train_batch_end(self, step, logs=None):
            time.sleep(0.15)

    looks = Looks(tmp_path)
    fit(tmp_path, ModelCheckpoint(every_seconds=0.4), looks, Slow(), epochs=1)
    assert any("step_" in name for seen in looks.seen for name in seen)
    assert not looks.seen[1]


def test_the_best_few_are_kept(tmp_path):
    values = [0.5, 0.2, 0.9, 0.1, 0.8, 0.3]

    class Scores(Callback):
        def on_epoch_end(self, epoch, logs=None):
            checkpoint_callback._save_best(epoch + 1, values[epoch])

    checkpoint_callback = ModelCheckpoint(monitor="loss", save_top_k=3, save_freq=100)
    checkpoint_callback.on_epoch_end = lambda epoch, logs=None: None
    fit(tmp_path, checkpoint_callback, Scores(), epochs=6)
    assert names(tmp_path) == {"best_model", "top_2", "top_4", "top_6", "final"}
    loaded = hapi.Model(nn.Linear(4, 2))
    loaded.load(tmp_path / "best_model")
    fourth = hapi.Model(nn.Linear(4, 2))
    fourth.load(tmp_path / "top_4")
    assert torch.equal(loaded.network.weight, fourth.network.weight)


def test_nothing_that_is_not_its_own_is_deleted(tmp_path):
    fit(tmp_path, ModelCheckpoint(every_n_steps=5), epochs=1)
    hapi.Model(nn.Linear(4, 2)).save(tmp_path / "step_3")
    (tmp_path / "notes.txt").write_text("mine")
    fit(tmp_path, ModelCheckpoint(every_n_steps=5, keep_last=1), epochs=2)
    assert names(tmp_path) == {"1", "step_3", "2", "final"} - {"1"} and (tmp_path / "notes.txt").exists()


def test_retention_goes_on_after_a_resume(tmp_path):
    class Ends(Callback):
        def on_train_batch_begin(self, step, logs=None):
            if self.model.steps_trained == 17:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, ModelCheckpoint(every_n_steps=4, keep_last=2), Ends())
    assert names(tmp_path) == {"step_12", "step_16"}
    fit(tmp_path, ModelCheckpoint(every_n_steps=4, keep_last=2), resume=True)
    assert names(tmp_path) == {"step_28", "3", "final"}


def test_a_name_that_is_written_again_is_not_deleted():
    retention = Retention(keep_last=1, top_k=1)
    for name in ("step_1", "step_2", "step_1"):
        retention.add(name)
    assert "step_1" not in retention.dropped()


def test_in_a_thread_the_files_are_those_of_the_step_and_training_goes_on(tmp_path, monkeypatch):
    gate, threads, real = threading.Event(), [], checkpoint.write

    def slow(path, snapshot):
        threads.append(threading.current_thread().name)
        gate.wait(20)
        real(path, snapshot)

    class Opens(Callback):
        def on_train_batch_begin(self, step, logs=None):
            if self.model.steps_trained == 8:
                gate.set()

    monkeypatch.setattr(checkpoint, "write", slow)
    both = [fit(tmp_path / "thread", ModelCheckpoint(every_n_steps=5, keep_last=9, asynchronous=True), Opens())]
    monkeypatch.undo()
    both.append(fit(tmp_path / "plain", ModelCheckpoint(every_n_steps=5, keep_last=9)))
    assert set(threads) == {"hapi-writer_0"}
    assert names(tmp_path / "thread") == names(tmp_path / "plain")
    for name in names(tmp_path / "plain"):
        one, other = (torch.load(tmp_path / kind / f"{name}.pt") for kind in ("thread", "plain"))
        assert all(torch.equal(one[key], other[key]) for key in other), name
        moments = [
            torch.load(tmp_path / kind / f"{name}.opt.pt")["optimizer"]["state"][0]["exp_avg"]
            for kind in ("thread", "plain")
        ]
        assert torch.equal(*moments), name


def test_one_that_writes_in_a_thread_is_copied_and_pickled(tmp_path):
    keep = ModelCheckpoint(asynchronous=True)
    for name, other in (("deep", copy.deepcopy(keep)), ("pickled", pickle.loads(pickle.dumps(keep)))):
        fit(tmp_path / name, other, epochs=1)
        assert names(tmp_path / name) == {"1", "final"}


def test_workers_start_beside_a_save_in_a_thread(tmp_path, monkeypatch):
    real = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *what: (time.sleep(0.3), real(*what)))
    model = hapi.Model(nn.Linear(4, 2)).prepare("adam", nn.CrossEntropyLoss())
    data = torch.utils.data.TensorDataset(X, Y)
    keep = ModelCheckpoint(every_n_steps=9, asynchronous=True)
    model.fit(data, data, batch_size=4, epochs=2, num_workers=1, save_dir=tmp_path, verbose=0, callbacks=keep)
    assert names(tmp_path) == {"1", "2", "final"}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails(tmp_path, monkeypatch, asynchronous):
    real = files.draft

    def draft(path, *rest):
        if path.name.split(".")[0] in ("step_12", "step_16", "2"):
            raise OSError(28, "No space left on device", str(path))
        return real(path, *rest)

    monkeypatch.setattr(files, "draft", draft)
    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path / "stop", ModelCheckpoint(every_n_steps=4, asynchronous=asynchronous))
    assert names(tmp_path / "stop") == {"1"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keep = ModelCheckpoint(every_n_steps=4, asynchronous=asynchronous, on_save_error="continue")
        model = fit(tmp_path / "on", keep)
    assert model.steps_trained == 30 and names(tmp_path / "on") == {"1", "3", "final"}
    assert sum("goes on without this checkpoint" in str(warning.message) for warning in caught) == 3


def test_no_temporary_file_stays(tmp_path):
    fit(tmp_path, ModelCheckpoint(every_n_steps=3, asynchronous=True))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".") and name.endswith(".part")]


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"every_n_steps": 0}, "every_n_steps=1"),
        ({"keep_last": -1}, "keep_last=1"),
        ({"every_seconds": 0}, "every_seconds=600"),
        ({"on_save_error": "ignore"}, '"stop" or "continue"'),
        ({"save_top_k": 3}, 'monitor="val_loss"'),
    ],
)
def test_options_that_cannot_be(options, cure):
    with pytest.raises(ValueError, match=cure):
        ModelCheckpoint(**options)


# What is another run's stays.


def identities(folder):
    return {name: checkpoint.read_weights(folder / name).identity for name in names(folder)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_goes_on_in_another_folder_deletes_nothing_there(tmp_path, asynchronous):
    keep = {"keep_last": 2, "asynchronous": asynchronous}
    fit(tmp_path / "a", ModelCheckpoint(**keep), epochs=2)
    fit(tmp_path / "b", ModelCheckpoint(**keep), epochs=2)
    before = identities(tmp_path / "b")
    fit(tmp_path / "b", ModelCheckpoint(**keep), epochs=5, resume=tmp_path / "a" / "2")
    after = identities(tmp_path / "b")
    assert set(after) == {"1", "2", "4", "5", "final"}, "its own third is deleted"
    assert (after["1"], after["2"]) == (before["1"], before["2"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_name_that_another_run_has_written_meanwhile_stays(tmp_path, asynchronous):
    class Other(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                hapi.Model(nn.Linear(4, 2)).save(tmp_path / "1")

    fit(tmp_path, ModelCheckpoint(keep_last=2, asynchronous=asynchronous), Other(), epochs=4)
    assert names(tmp_path) == {"1", "3", "4", "final"}


def test_the_best_few_know_their_own_after_a_resume(tmp_path):
    def keeps():
        return ModelCheckpoint(monitor="loss", save_top_k=2, keep_last=1)

    fit(tmp_path, keeps(), epochs=2)
    fit(tmp_path, keeps(), epochs=4, resume=True)
    assert names(tmp_path) == {"best_model", "top_3", "top_4", "4", "final"}


def test_names_of_an_earlier_build_are_loaded_and_their_files_left(tmp_path):
    retention = Retention(keep_last=2, top_k=2, folder="here")
    retention.load_state_dict({"periodic": ["1", "2"], "top": [[0.5, "top_1"]], "outdated": ["step_9"]})
    retention.add("3")
    state = retention.state_dict()
    assert (state["periodic"], state["top"]) == (["2", "3"], [[0.5, "top_1"]])
    assert state["outdated"] == ["step_9", "1"] and retention.dropped() == {}
    retention.add("4")
    retention.add("5")
    assert list(retention.dropped()) == ["3"] and retention.identity("3") is not None
    elsewhere = Retention(keep_last=2, top_k=2, folder="there")
    elsewhere.load_state_dict(retention.state_dict())
    assert elsewhere.state_dict()["periodic"] == [] and elsewhere.dropped() == {}


# Each saves when its own time has come.


def test_another_one_s_wish_is_not_its_own(tmp_path, monkeypatch):
    # A meeting after each step, so that a wish is agreed on at once.
    monkeypatch.setattr(agreement, "_SECONDS", 0.0)
    hourly, stepwise = (tmp_path / name for name in ("hourly", "stepwise"))
    often = ModelCheckpoint(save_dir=tmp_path / "often", every_seconds=1e-9, keep_last=99)
    fit(
        None,
        ModelCheckpoint(save_dir=hourly, every_seconds=3600, keep_last=99),
        ModelCheckpoint(save_dir=stepwise, every_n_steps=4, keep_last=99),
        often,
        epochs=1,
    )
    assert names(hourly) == {"1", "final"}
    assert names(stepwise) == {"step_4", "step_8", "1", "final"}
    assert names(tmp_path / "often") == {*(f"step_{n}" for n in range(1, 11)), "1", "final"}
    assert not often.is_due


def test_a_wish_is_asked_for_by_rank_0_and_agreed_for_each(monkeypatch):
    savers = [Saver(), Saver()]
    savers[1].wants_save = lambda: True
    callbacks = CallbackList(savers, None, {})
    assert callbacks.wants_save() == [False, True] and not savers[1].is_due
    # As rank 1 sees it: its own clock says nothing, and rank 0 has asked for the first.
    model = SimpleNamespace(stop_training=False)
    tally = SimpleNamespace(take_nonfinite=lambda: None)
    meeting = agreement.Agreement(model, "stop", StopSignals(), callbacks.wants_save)
    monkeypatch.setattr(group, "begin_max", lambda values: SimpleNamespace(wait=lambda: [*values[:5], 1.0, 0.0]))
    meeting.after_step(tally, 0, 0)
    assert meeting.saves and [saver.is_due for saver in savers] == [True, False]
    callbacks.save(stopping=False)
    assert [saver.is_due for saver in savers] == [False, False]
    # Nothing is saved in the middle of an evaluation.
    meeting._countdown = 1
    meeting.in_evaluation()
    assert not meeting.saves and not savers[0].is_due


# What a run that is told to stop says.


class Stops(Callback):
    """Told to stop at the end of the first epoch, once it is saved, or after the tenth step."""

    def __init__(self, hook):
        self.hook = hook

    def on_epoch_end(self, epoch, logs=None):
        if self.hook == "epoch":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, step, logs=None):
        if self.hook == "step" and step == 6:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("hook", "name"), [("epoch", "1"), ("step", "step_7")])
def test_a_stop_names_what_is_there(tmp_path, capsys, hook, name, asynchronous):
    with pytest.raises(SystemExit):
        fit(tmp_path, ModelCheckpoint(asynchronous=asynchronous, verbose=1), Stops(hook), verbose=1)
    assert name in names(tmp_path)
    assert f"resume=True) goes on from {tmp_path}/{name}\n" in capsys.readouterr().out


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_whose_save_fails_names_no_file(tmp_path, capsys, monkeypatch, asynchronous):
    def draft(path, *rest):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "draft", draft)
    keep = ModelCheckpoint(asynchronous=asynchronous, on_save_error="continue")
    with pytest.raises(SystemExit), pytest.warns(UserWarning, match="goes on without this checkpoint"):
        fit(tmp_path, keep, Stops("step"), verbose=1)
    assert f"resume=True) goes on from the newest checkpoint in {tmp_path}\n" in capsys.readouterr().out


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_knows_its_own_id(tmp_path, asynchronous):
    fit(tmp_path, ModelCheckpoint(monitor="loss", save_top_k=2, asynchronous=asynchronous), epochs=3)
    saved = identities(tmp_path)
    for name in names(tmp_path):
        state = torch.load(tmp_path / f"{name}.opt.pt")["callbacks"]["ModelCheckpoint.0"]
        assert name in ("best_model", "final") or state["ids"][name] == saved[name]
        # Those that were still to come, or were exchanged since, aside.
        assert set(state["ids"]) <= {"1", "2", "3", "top_1", "top_2", "top_3"}
