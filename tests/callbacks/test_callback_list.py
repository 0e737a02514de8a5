"""CallbackList: which hooks are called when and with what; default_callbacks: which callbacks a fit has."""

import inspect

import pytest
import torch
from callback_fakes import FakeModel, fit, losses

import hapi
from hapi.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    GradientNorm,
    History,
    ModelCheckpoint,
    ProgBarLogger,
)
from hapi.callbacks.base import CallbackList, default_callbacks

HOOKS = {
    "on_train_begin": [],
    "on_train_end": [],
    "on_epoch_begin": ["epoch"],
    "on_epoch_end": ["epoch"],
    "on_train_batch_begin": ["step"],
    "on_train_batch_end": ["step"],
    "on_eval_begin": [],
    "on_eval_end": [],
    "on_eval_batch_begin": ["step"],
    "on_eval_batch_end": ["step"],
    "on_predict_begin": [],
    "on_predict_end": [],
    "on_predict_batch_begin": ["step"],
    "on_predict_batch_end": ["step"],
}


class Recorder(Callback):
    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name in HOOKS:
            return lambda *args: self.seen.append((name, *args))
        return super().__getattribute__(name)


for hook in HOOKS:
    setattr(Recorder, hook, lambda self, *args: None)  # so that they count as overridden


def test_the_hooks_are_paddle_s_fourteen_with_its_signatures():
    found = [name for name in vars(Callback) if name.startswith("on_") and name != "on_exception"]
    assert sorted(found) == sorted(HOOKS)
    for name, arguments in HOOKS.items():
        assert list(inspect.signature(getattr(Callback, name)).parameters) == ["self", *arguments, "logs"]
        assert inspect.signature(getattr(Callback, name)).parameters["logs"].default is None


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_gets_its_arguments_and_a_dict(hook):
    recorder = Recorder()
    callbacks = CallbackList([recorder], FakeModel(), {})
    args = [3] * len(HOOKS[hook])
    callbacks.call(hook, *args)
    callbacks.call(hook, *args, logs={"loss": 1.0})
    assert recorder.seen == [(hook, *args, {}), (hook, *args, {"loss": 1.0})]


def test_params_and_model_come_first():
    seen = []

    class Early(Callback):
        def set_params(self, params):
            super().set_params(params)
            seen.append(("params", params["epochs"]))

        def set_model(self, model):
            super().set_model(model)
            seen.append(("model", model))

    model, early = FakeModel(), Early()
    CallbackList([early], model, {"epochs": 3})
    assert seen == [("params", 3), ("model", model)]
    assert early.params["callbacks"] == (early,) and early.model is model


def test_each_callback_gets_a_dict_of_its_own():
    class Meddler(Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["loss"] = -1.0
            self.params["metrics"] = "gone"

    meddler, recorder = Meddler(), Recorder()
    callbacks = CallbackList([meddler, recorder], FakeModel(), {"metrics": ["loss"]})
    logs = {"loss": 1.0}
    callbacks.call("on_epoch_end", 0, logs=logs)
    assert recorder.seen == [("on_epoch_end", 0, {"loss": 1.0})]
    assert logs == {"loss": 1.0} and recorder.params["metrics"] == ["loss"]


def test_batch_end_is_called_on_every_batch_freq_th_step():
    class Sparse(Recorder):
        batch_freq = 3

    sparse, dense = Sparse(), Recorder()
    callbacks = CallbackList([sparse, dense], FakeModel(), {})
    for step in range(7):
        callbacks.call("on_train_batch_begin", step)
        callbacks.call("on_train_batch_end", step)
    assert [args[1] for args in sparse.seen if args[0] == "on_train_batch_end"] == [2, 5]
    assert [args[1] for args in sparse.seen if args[0] == "on_train_batch_begin"] == list(range(7))
    assert len(dense.seen) == 14


@pytest.mark.parametrize("kind", ["train", "eval", "predict"])
def test_wants_batch_logs_only_if_a_callback_is_due(kind):
    class Sparse(Callback):
        batch_freq = 4

    setattr(Sparse, f"on_{kind}_batch_end", lambda self, step, logs=None: None)
    callbacks = CallbackList([Sparse(), Callback()], FakeModel(), {})
    assert [step for step in range(9) if callbacks.wants_batch_logs(kind, step)] == [3, 7]
    others = {"train", "eval", "predict"} - {kind}
    assert not any(callbacks.wants_batch_logs(other, 3) for other in others)


def test_a_hook_set_on_the_object_counts_as_overridden():
    callback, seen = Callback(), []
    callback.on_train_batch_end = lambda step, logs: seen.append(step)
    callbacks = CallbackList([callback], FakeModel(), {})
    callbacks.call("on_train_batch_end", 0)
    assert seen == [0] and callbacks.wants_batch_logs("train", 0)


def test_on_exception_gets_the_exception_alone():
    class Watcher(Callback):
        def on_exception(self, exc):
            self.exc = exc

    watcher, error = Watcher(), KeyboardInterrupt()
    CallbackList([watcher], FakeModel(), {}).call("on_exception", error)
    assert watcher.exc is error


def test_an_on_exception_that_fails_keeps_nobody_from_putting_things_back():
    class Fails(Callback):
        def on_exception(self, exc):
            raise OSError("the server is gone")

    class Interrupts(Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    net = torch.nn.Linear(3, 1)
    model = hapi.Model(net).prepare("sgd", torch.nn.MSELoss(), clip_grad_norm=0.5)
    data = torch.ones(4, 3), torch.ones(4, 1)
    with (
        pytest.warns(UserWarning, match="Fails.on_exception failed: OSError: the server is gone"),
        pytest.raises(KeyboardInterrupt),
    ):
        model.fit(data, verbose=0, callbacks=[Fails(), GradientNorm(), Interrupts()])
    assert model._engine.prepared.clip_grad_norm == 0.5


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("on_test_begin", "on_eval_begin"),
        ("on_test_batch_begin", "on_eval_batch_begin"),
        ("on_test_batch_end", "on_eval_batch_end"),
        ("on_batch_end", "on_train_batch_end"),
        ("on_validation_start", "on_eval_begin"),
        ("on_validation_batch_start", "on_eval_batch_begin"),
        ("on_validation_epoch_end", "on_eval_end"),
        ("on_test_epoch_start", "on_eval_begin"),
        ("on_predict_epoch_end", "on_predict_end"),
        ("on_predict_start", "on_predict_begin"),
        ("on_train_epoch_start", "on_epoch_begin"),
        ("on_train_batch_start", "on_train_batch_begin"),
        ("on_fit_start", "on_train_begin"),
        ("on_step_end", "on_train_batch_end"),
        ("on_save_checkpoint", "state_dict"),
        ("on_load_checkpoint", "load_state_dict"),
        ("on_epoch_edn", "on_epoch_end"),
    ],
)
def test_hooks_of_other_libraries_are_told_as_they_are_called_here(theirs, ours):
    callback = type("Mine", (Callback,), {theirs: lambda self, *given: None})()
    with pytest.raises(TypeError, match=f"a method {theirs}, which is no hook.*; {ours} is meant"):
        CallbackList([callback], FakeModel(), {})


def test_the_order():
    mine, last, mine_too = Callback(), ModelCheckpoint(save_dir="d"), CSVLogger("x")
    bar, history = ProgBarLogger(), History()
    callbacks = CallbackList([mine, last, bar, mine_too, history], FakeModel(), {})
    assert callbacks.callbacks == [history, bar, mine, mine_too, last]
    assert mine.params["callbacks"] == (history, bar, mine, mine_too, last)


def test_states_are_kept_by_class_and_number():
    made = [EarlyStopping(patience=5), Callback(), EarlyStopping("loss", patience=5)]
    states = fit(made, losses(3.0, 4.0), save_dir="d").callbacks.state_dict()
    assert list(states) == ["EarlyStopping.0", "EarlyStopping.1"]
    assert states["EarlyStopping.0"] == {"best": 3.0, "wait": 1, "stopped_epoch": None}
    assert states["EarlyStopping.1"]["best"] == 1.0
    again = [EarlyStopping(patience=5), History(), EarlyStopping("loss", patience=5)]
    CallbackList(again, FakeModel(), {}).load_state_dict(states)
    assert again[0].state_dict() == states["EarlyStopping.0"]
    assert again[2].state_dict() == states["EarlyStopping.1"]


def test_all_states_are_plain_and_survive_a_safe_load(tmp_path):
    from hapi.callbacks import LRScheduler, ReduceLROnPlateau

    made = [EarlyStopping(), ReduceLROnPlateau("loss"), CSVLogger(tmp_path / "log.csv"), Recorder()]
    made += [History(), ModelCheckpoint(monitor="loss"), ProgBarLogger(verbose=0)]
    states = fit(made, losses(3.0, 4.0), save_dir=str(tmp_path)).callbacks.state_dict()
    torch.save(states, tmp_path / "states.pt")
    assert torch.load(tmp_path / "states.pt", weights_only=True) == states
    assert LRScheduler().state_dict() == {}


def test_what_is_no_callback():
    with pytest.raises(TypeError, match=r"Write EarlyStopping\(\)"):
        CallbackList([EarlyStopping], FakeModel(), {})
    with pytest.raises(TypeError, match=r"type function.*Derive its class from hapi.callbacks.Callback"):
        CallbackList([fit], FakeModel(), {})


@pytest.mark.parametrize("freq", [0, -1, 1.5, True])
def test_a_wrong_batch_freq(freq):
    callback = Callback()
    callback.batch_freq = freq
    with pytest.raises(ValueError if type(freq) is int else TypeError, match="batch_freq=.*Write batch_freq=1"):
        CallbackList([callback], FakeModel(), {})


# ----------------------------------------------------------------------------------------- default_callbacks


def defaults(callbacks=None, *, verbose=1, log_freq=10, save_dir=None, save_freq=1):
    return default_callbacks(callbacks, verbose=verbose, log_freq=log_freq, save_dir=save_dir, save_freq=save_freq)


def kinds(callbacks):
    return [type(callback).__name__ for callback in callbacks]


def test_a_fit_has_a_history_a_bar_and_with_a_folder_checkpoints():
    assert kinds(defaults()) == ["History", "ProgBarLogger"]
    assert kinds(defaults(verbose=0)) == ["History"]
    made = defaults(EarlyStopping(), verbose=2, log_freq=7, save_dir="d", save_freq=3)
    assert sorted(kinds(made)) == ["EarlyStopping", "History", "ModelCheckpoint", "ProgBarLogger"]
    bar = next(callback for callback in made if isinstance(callback, ProgBarLogger))
    checkpoint = next(callback for callback in made if isinstance(callback, ModelCheckpoint))
    assert (bar.log_freq, bar.verbose, checkpoint.save_freq, checkpoint.save_dir) == (7, 2, 3, None)


def test_the_user_s_own_take_their_places():
    mine = [History(), ProgBarLogger(), ModelCheckpoint()]
    assert defaults(mine, save_dir="d") == mine
    assert defaults(tuple(mine), verbose=0, save_dir="d") == mine
    # One folder under two names would have each file written, and each old one deleted, twice.
    assert kinds(defaults([ModelCheckpoint(save_dir="./d/")], verbose=0, save_dir="d")) == [
        "History",
        "ModelCheckpoint",
    ]
    assert len(defaults([ModelCheckpoint(save_dir="e")], verbose=0, save_dir="d")) == 3


def test_a_checkpoint_without_a_folder():
    with pytest.raises(ValueError, match=r'Write fit\(..., save_dir="checkpoints"\) or ModelCheckpoint\(save_dir='):
        defaults([ModelCheckpoint()])
    assert kinds(defaults([ModelCheckpoint(save_dir="d")], verbose=0)) == ["History", "ModelCheckpoint"]
