"""EarlyStopping, ReduceLROnPlateau and what they share: which value is better, and names that no log has."""

import math

import pytest
import torch
from callback_fakes import FakeModel, fit, losses

from hapi.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from hapi.callbacks.monitor import Monitor

# --------------------------------------------------------------------------------------------------- Monitor


@pytest.mark.parametrize(
    ("name", "rising"),
    [
        ("val_loss", False),
        ("error_rate", False),
        ("val_mae", False),
        ("mse", False),
        ("val_acc_top5", True),
        ("MulticlassAUROC_auc", True),
        ("precision", True),
        ("val_recall", True),
        ("f1", True),
        ("accuracy_loss", False),
    ],
)
def test_auto_mode_is_told_from_the_name(name, rising):
    assert Monitor("X", name).rising is rising


def test_a_name_that_does_not_tell_and_a_mode_that_is_unknown():
    with pytest.raises(ValueError, match=r"monitors 'val_bleu'.*Write mode=.min. or mode=.max."):
        Monitor("EarlyStopping", "val_bleu").check({"metrics": ["loss", "val_bleu"]})
    # A name that is not there at all is the first thing to say.
    with pytest.raises(ValueError, match="one of 'loss', 'val_loss'"):
        Monitor("EarlyStopping", "val_los").check({"metrics": ["loss", "val_loss"]})
    with pytest.raises(ValueError, match=r"received mode='maximum'.*Write .min., .max. or .auto."):
        ReduceLROnPlateau(mode="maximum")
    assert Monitor("X", "val_bleu", "max").rising and not Monitor("X", "acc", "min").rising


def test_better_means_by_more_than_min_delta_and_never_nan():
    watch = Monitor("X", "loss", min_delta=0.5)
    assert not watch.improves(math.nan)
    assert watch.improves(2.0)
    assert not watch.improves(1.5)
    assert watch.improves(1.25)
    assert not watch.improves(math.nan) and watch.best == 1.25
    rising = Monitor("X", "acc", min_delta=-0.5)
    assert rising.improves(1.0) and not rising.improves(1.5) and rising.improves(1.75)
    assert Monitor("X", "loss").improves(math.inf)


@pytest.mark.parametrize("cls", [EarlyStopping, ReduceLROnPlateau, lambda name: ModelCheckpoint(monitor=name)])
def test_a_name_that_no_log_has(cls):
    with pytest.raises(ValueError, match=r"monitors 'val_acc'.*Write monitor= one of 'loss', 'val_loss'"):
        fit([cls("val_acc")], losses(1.0), save_dir="d")
    with pytest.raises(ValueError, match="one of 'loss', or pass fit an eval_data"):
        fit([cls("val_loss")], [{"loss": 1.0}], save_dir="d")


# --------------------------------------------------------------------------------------------- EarlyStopping


@pytest.mark.parametrize(
    ("patience", "values", "stopped"),
    [
        (0, [3.0, 2.0, 2.0, 1.0], 3),
        (1, [3.0, 2.0, 2.0, 1.0], 3),
        (2, [3.0, 2.0, 2.0, 1.0, 1.5, 1.25, 0.5], 6),
        (3, [3.0, 2.0, 2.0, 1.0, 1.5, 1.25], None),
        (1, [1.0, None, None, 2.0], 4),
        (1, [math.nan, 1.0], 1),
    ],
)
def test_stops_after_patience_epochs_without_improvement(patience, values, stopped):
    stopping = EarlyStopping(patience=patience)
    done = fit([stopping], losses(*values))
    assert stopping.stopped_epoch == stopped
    assert done.model.stop_training is (stopped is not None)


def test_rising_values_min_delta_and_baseline():
    rising = EarlyStopping("val_acc", patience=1)
    fit([rising], losses(0.5, 0.6, 0.6, name="val_acc"))
    assert rising.stopped_epoch == 3
    demanding = EarlyStopping(min_delta=0.5)
    fit([demanding], losses(3.0, 2.75))
    assert demanding.stopped_epoch == 2
    baseline = EarlyStopping(baseline=1.0, patience=2)
    fit([baseline], losses(2.0, 1.5, 1.25))
    assert baseline.stopped_epoch == 2


def test_a_second_fit_starts_anew():
    stopping = EarlyStopping()
    fit([stopping], losses(1.0, 2.0))
    done = fit([stopping], losses(5.0, 4.0), first_epoch=2)
    assert stopping.stopped_epoch is None and done.model.stop_training is False


def test_goes_on_from_its_state():
    whole, first, second = (EarlyStopping(patience=3) for _ in range(3))
    values = losses(3.0, 2.0, 2.5, 2.25, 2.125)
    fit([whole], values)
    state = fit([first], values[:3]).callbacks.state_dict()
    fit([second], values[3:], first_epoch=3, state=state)
    assert second.stopped_epoch == whole.stopped_epoch == 5


def test_saves_the_best_model_at_each_improvement(tmp_path):
    done = fit([EarlyStopping(patience=9)], losses(3.0, 4.0, 2.0), save_dir=tmp_path)
    assert done.model.saved == [str(tmp_path / "best_model")] * 2
    assert fit([EarlyStopping(save_best_model=False)], losses(3.0), save_dir=tmp_path).model.saved == []


def test_leaves_best_model_to_a_checkpoint_that_monitors(tmp_path):
    made = [EarlyStopping(patience=9), ModelCheckpoint(monitor="loss", save_freq=9, save_dir=tmp_path)]
    done = fit(made, losses(3.0, 2.0), save_dir=tmp_path)
    assert done.model.saved.count(str(tmp_path / "best_model")) == 1  # the loss is 1.0 both times
    # One that monitors for another folder leaves fit's alone.
    made[1] = ModelCheckpoint(monitor="loss", save_freq=9, save_dir=tmp_path / "other")
    done = fit(made, losses(3.0, 2.0), save_dir=tmp_path)
    assert done.model.saved.count(str(tmp_path / "best_model")) == 2
    done = fit([EarlyStopping(patience=9), ModelCheckpoint(save_freq=9)], losses(3.0, 2.0), save_dir=tmp_path)
    assert done.model.saved.count(str(tmp_path / "best_model")) == 2


def test_what_early_stopping_says(capsys):
    fit([EarlyStopping()], losses(1.0, 2.0))
    assert capsys.readouterr().out == (
        "EarlyStopping: fit has no save_dir, so no best model is saved.\n"
        "EarlyStopping: stopped after epoch 2, best val_loss 1.0000.\n"
    )
    fit([EarlyStopping(verbose=0)], losses(1.0, 2.0))
    fit([EarlyStopping()], losses(1.0, 2.0), verbose=0)
    fit([EarlyStopping()], losses(1.0), save_dir="d")
    assert capsys.readouterr().out == ""


def test_a_negative_patience():
    with pytest.raises(ValueError, match="Write patience=0"):
        EarlyStopping(patience=-1)


# ----------------------------------------------------------------------------------------- ReduceLROnPlateau


def rates(callback, values, **options):
    """The learning rate after each epoch."""
    model, seen = options.pop("model", None) or FakeModel(lr=1.0), []

    class Reader(type(callback).__mro__[1]):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(round(float(model.optimizer.param_groups[0]["lr"]), 9))

    done = fit([callback, Reader()], losses(*values), model, **options)
    return seen, done.callbacks.state_dict()


def test_lowers_the_rate_after_patience_epochs():
    assert rates(ReduceLROnPlateau(patience=2), [3.0, 3.0, 3.0, 3.0, 3.0, 1.0])[0] == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    assert rates(ReduceLROnPlateau(patience=0, factor=0.5), [3.0, 3.0, 2.0, 2.0])[0] == [1.0, 0.5, 0.5, 0.25]
    assert rates(ReduceLROnPlateau(patience=1, factor=0.5), [3.0, None, 3.0, None])[0] == [1.0, 1.0, 0.5, 0.5]


def test_cooldown_min_lr_and_min_delta():
    flat = [3.0] * 6
    assert rates(ReduceLROnPlateau(patience=1, factor=0.5, cooldown=2), flat)[0] == [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert rates(ReduceLROnPlateau(patience=1, factor=0.5, min_lr=0.3), flat[:4])[0] == [1.0, 0.5, 0.3, 0.3]
    assert rates(ReduceLROnPlateau(patience=1, factor=0.5), [3.0, 3.0 - 5e-5])[0] == [1.0, 0.5]
    assert rates(ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0), [3.0, 3.0 - 5e-5])[0] == [1.0, 1.0]


def test_a_rate_below_min_lr_is_not_raised(capsys):
    low = rates(ReduceLROnPlateau(patience=1, min_lr=0.3), [3.0] * 3, model=FakeModel(lr=0.2))[0]
    assert low == [0.2, 0.2, 0.2]
    assert capsys.readouterr().out == ""


def test_every_group_and_a_rate_that_is_a_tensor():
    model = FakeModel()
    rate = torch.tensor(0.5)
    weight, bias = model.network.parameters()
    model.optimizer = torch.optim.SGD([{"params": [weight], "lr": 1.0}, {"params": [bias], "lr": rate}])
    rates(ReduceLROnPlateau(patience=1, factor=0.5), [3.0, 3.0], model=model)
    assert [float(group["lr"]) for group in model.optimizer.param_groups] == [0.5, 0.25]
    assert model.optimizer.param_groups[1]["lr"] is rate


def test_plateau_goes_on_from_its_state():
    values = [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0, 3.0, 3.0]
    whole, _ = rates(ReduceLROnPlateau(patience=2, factor=0.5, cooldown=1), values)
    for cut in range(1, len(values)):
        model = FakeModel(lr=1.0)
        first, state = rates(ReduceLROnPlateau(patience=2, factor=0.5, cooldown=1), values[:cut], model=model)
        callback = ReduceLROnPlateau(patience=2, factor=0.5, cooldown=1)
        second, _ = rates(callback, values[cut:], model=model, first_epoch=cut, state=state)
        assert first + second == whole


def test_plateau_beside_a_scheduler():
    model = FakeModel()
    model.scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1)
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau and the model's StepLR.*Keep one of them"):
        fit([ReduceLROnPlateau("loss")], losses(1.0), model)


def test_what_plateau_says(capsys):
    fit([ReduceLROnPlateau(patience=1)], losses(1.0, 1.0))
    assert capsys.readouterr().out == "ReduceLROnPlateau: learning rate 0.1 -> 0.01 after epoch 2.\n"
    fit([ReduceLROnPlateau(patience=1, verbose=0)], losses(1.0, 1.0))
    fit([ReduceLROnPlateau(patience=1)], losses(1.0, 1.0), verbose=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("factor", [0, 1, 1.5, -0.1])
def test_a_factor_that_does_not_lower(factor):
    with pytest.raises(ValueError, match=r"Write factor=0.1"):
        ReduceLROnPlateau(factor=factor)


@pytest.mark.parametrize("options", [{"patience": -1}, {"cooldown": -1}])
def test_negative_numbers_of_epochs(options):
    with pytest.raises(ValueError, match="counts epochs from 0. Write (patience=10|cooldown=0)"):
        ReduceLROnPlateau(**options)
