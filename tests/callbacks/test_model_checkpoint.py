"""ModelCheckpoint: which paths are saved when."""

from pathlib import Path

import pytest
from callback_fakes import FakeModel, fit, losses

from hapi.callbacks import Callback, EarlyStopping, ModelCheckpoint
from hapi.callbacks.base import CallbackList


def saved(callbacks, epoch_logs, model=None, **params):
    done = fit(callbacks, epoch_logs, model, save_dir="runs", **params)
    return [Path(path).relative_to("runs").as_posix() for path in done.model.saved]


@pytest.mark.parametrize(
    ("freq", "expected"),
    [(1, ["1", "2", "3", "4", "5", "final"]), (2, ["2", "4", "5", "final"]), (9, ["5", "final"])],
)
def test_every_kth_epoch_from_1_and_the_last(freq, expected):
    assert saved([ModelCheckpoint(save_freq=freq)], losses(*[1.0] * 5)) == expected


def test_numbering_goes_on_in_a_later_fit():
    assert saved([ModelCheckpoint(save_freq=2)], losses(1.0, 1.0, 1.0), first_epoch=3) == ["4", "6", "final"]


def test_the_last_epoch_is_saved_if_the_fit_was_stopped_before():
    assert saved([ModelCheckpoint(save_freq=5), EarlyStopping(save_best_model=False)], losses(1.0, 2.0, 3.0)) == [
        "2",
        "final",
    ]
    assert saved([ModelCheckpoint(save_freq=3)], losses(1.0, 1.0), last_epoch=9) == ["2", "final"]
    assert saved([ModelCheckpoint(save_freq=2)], losses(1.0, 1.0), last_epoch=9) == ["2", "final"]


def test_a_fit_without_an_epoch_left_saves_final_alone():
    checkpoint = ModelCheckpoint(save_freq=5)
    saved([checkpoint], losses(1.0), last_epoch=9)
    assert saved([checkpoint], []) == ["final"]


def test_an_epoch_of_a_fit_that_failed_is_not_saved_by_the_next():
    checkpoint = ModelCheckpoint(save_freq=5)
    callbacks = CallbackList([checkpoint], FakeModel(), {"save_dir": "runs", "last_epoch": 9})
    callbacks.call("on_train_begin")
    callbacks.call("on_epoch_end", 0)
    callbacks.call("on_exception", KeyboardInterrupt())
    assert saved([checkpoint], []) == ["final"]


def test_best_model_on_improvement_before_the_epoch_s_own():
    values = losses(3.0, 2.0, 2.5, None, 1.0)
    expected = ["best_model", "1", "best_model", "2", "3", "4", "best_model", "5", "final"]
    assert saved([ModelCheckpoint(monitor="val_loss")], values) == expected
    rising = losses(0.1, 0.1, 0.2, name="val_acc")
    assert saved([ModelCheckpoint(monitor="val_acc", save_freq=9)], rising) == [
        "best_model",
        "best_model",
        "3",
        "final",
    ]
    assert saved([ModelCheckpoint(monitor="val_acc", save_freq=9, mode="min")], rising) == ["best_model", "3", "final"]


def test_the_best_value_survives_a_restart_and_a_second_fit_starts_anew():
    first = ModelCheckpoint(monitor="val_loss")
    state = fit([first], losses(1.0), save_dir="runs").callbacks.state_dict()
    assert state["ModelCheckpoint.0"]["best"] == 1.0
    again = ModelCheckpoint(monitor="val_loss")
    assert "best_model" not in saved([again], losses(2.0), state=state)
    assert "best_model" in saved([again], losses(2.0))
    assert "best" not in ModelCheckpoint().state_dict()


def test_the_state_in_a_checkpoint_is_the_one_after_this_epoch():
    class Model(FakeModel):
        def save(self, path):
            super().save(path)
            self.states = [*getattr(self, "states", []), checkpoint.state_dict()["best"]]

    checkpoint, model = ModelCheckpoint(monitor="val_loss"), Model()
    saved([checkpoint], losses(2.0, 1.0), model)
    assert model.states == [2.0, 2.0, 1.0, 1.0, 1.0]


def test_comes_after_all_others():
    order = []

    class Other(Callback):
        def on_epoch_end(self, epoch, logs=None):
            order.append("other")

    class Model(FakeModel):
        def save(self, path):
            order.append(Path(path).name)

    saved([ModelCheckpoint(), Other()], losses(1.0), Model())
    assert order == ["other", "1", "final"]


def test_its_own_folder_wins(tmp_path):
    done = fit([ModelCheckpoint(save_dir=tmp_path)], losses(1.0), save_dir="runs")
    assert done.model.saved == [str(tmp_path / "1"), str(tmp_path / "final")]


def test_no_folder_at_all():
    with pytest.raises(ValueError, match=r'Write fit\(..., save_dir="checkpoints"\)'):
        fit([ModelCheckpoint()], losses(1.0))


def test_what_it_says(capsys):
    saved([ModelCheckpoint()], losses(1.0))
    saved([ModelCheckpoint(verbose=1)], losses(1.0), verbose=0)
    assert capsys.readouterr().out == ""
    saved([ModelCheckpoint(verbose=1)], losses(1.0))
    lines = [f"ModelCheckpoint: saved {Path('runs') / name}\n" for name in ("1", "final")]
    assert capsys.readouterr().out == "".join(lines)


@pytest.mark.parametrize("freq", [0, -1, 1.0, True])
def test_a_wrong_save_freq(freq):
    with pytest.raises(ValueError if type(freq) is int else TypeError, match="Write save_freq=1"):
        ModelCheckpoint(save_freq=freq)
