"""History: aligned lists, plots, and what it prints as."""

import builtins
import math

import pytest
from callback_fakes import fit

from hapi.callbacks import History, drawing
from hapi.tuning import RateSweep


def test_epochs_are_numbered_from_1_and_values_are_floats():
    history = History()
    fit([history], [{"loss": 3, "acc": 0.5}, {"loss": 2, "acc": 0.75}], first_epoch=4)
    assert history.epoch == [5, 6]
    assert history.history == {"loss": [3.0, 2.0], "acc": [0.5, 0.75]}
    assert all(type(value) is float for values in history.history.values() for value in values)


def test_a_value_that_some_epochs_lack_is_nan_there():
    history = History()
    fit([history], [{"loss": 3.0}, {"loss": 2.0, "val_loss": 4.0}, {"loss": 1.0}])
    assert history.history["loss"] == [3.0, 2.0, 1.0]
    first, second, third = history.history["val_loss"]
    assert math.isnan(first) and second == 4.0 and math.isnan(third)


def test_each_fit_starts_anew_and_a_resumed_one_goes_on():
    first, second = History(), History()
    state = fit([first], [{"loss": 3.0}, {"loss": 2.0, "val_loss": 4.0}]).callbacks.state_dict()
    kept = first.history
    fit([second], [{"loss": 1.0}], first_epoch=2, state=state)
    assert second.epoch == [1, 2, 3] and second.history["loss"] == [3.0, 2.0, 1.0]
    assert kept["loss"] == [3.0, 2.0] and state["History.0"]["epoch"] == [1, 2]
    fit([first], [{"loss": 9.0}])
    assert first.history == {"loss": [9.0]} and kept["loss"] == [3.0, 2.0]


def test_repr():
    history = History()
    assert repr(history) == "History(0 epochs)"
    fit([history], [{"loss": 3.0, "lr": 0.001}, {"loss": 0.51239, "lr": 0.001, "val_acc": 0.9}])
    assert repr(history) == "History(2 epochs: loss 3 -> 0.5124, lr 0.001, val_acc 0.9)"
    history.history["x"] = [math.nan, math.nan]
    assert "x nan" in repr(history)


@pytest.fixture
def trained():
    history = History()
    fit([history], [{"loss": 3.0, "val_loss": 4.0, "lr": 0.1}, {"loss": 2.0, "val_loss": 3.0, "lr": 0.1}])
    return history


def test_plot_writes_a_file(trained, tmp_path):
    pytest.importorskip("matplotlib")
    trained.plot(tmp_path / "new folder" / "curves.png")
    trained.plot(str(tmp_path / "curves.svg"))
    assert (tmp_path / "new folder" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "curves.svg").read_bytes()


def test_plot_draws_on_rank_0_alone_and_makes_the_folder(trained, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    trained.plot(tmp_path / "new" / "curves.png")
    assert (tmp_path / "new" / "curves.png").is_file()
    monkeypatch.setattr(drawing, "get_rank", lambda: 1)
    trained.plot(tmp_path / "other.png")
    RateSweep([0.1, 0.2], [2.0, 1.0], [2.0, 1.0]).plot(tmp_path / "other.png")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_plot_draws_training_and_evaluation_together(trained):
    figure_module = pytest.importorskip("matplotlib.figure")
    trained.history["val_only"] = [1.0, 2.0]
    figure = figure_module.Figure()
    trained._draw(figure)
    drawn = [[line.get_label() for line in axes.lines] for axes in figure.axes]
    assert drawn == [["training", "validation"], ["lr"], ["val_only"]]
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes] == [
        ("epoch", name) for name in ("loss", "lr", "val_only")
    ]
    assert [axes.get_legend() is not None for axes in figure.axes] == [True, False, False]
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 2]
    assert list(figure.axes[0].lines[1].get_ydata()) == [4.0, 3.0]


@pytest.mark.parametrize("epochs", [1, 2, 3, 40])
def test_plot_counts_epochs_in_whole_numbers(epochs):
    figure_module = pytest.importorskip("matplotlib.figure")
    history = History()
    fit([history], [{"loss": 1.0 / (epoch + 1)} for epoch in range(epochs)])
    figure = figure_module.Figure()
    history._draw(figure)
    ticks = list(figure.axes[0].get_xticks())
    assert ticks == [int(tick) for tick in ticks] and any(1 <= tick <= epochs for tick in ticks)


def test_plot_joins_what_was_not_evaluated_each_epoch_and_wraps_many_panels(tmp_path):
    figure_module = pytest.importorskip("matplotlib.figure")
    history = History()
    rows = [{f"metric{i}": float(i) for i in range(9)} | ({"val_metric0": 1.0} if e % 2 else {}) for e in range(5)]
    fit([history], rows)
    figure = figure_module.Figure(layout="constrained")
    history._draw(figure)
    assert list(figure.axes[0].lines[1].get_xdata()) == [2, 4]
    assert len(figure.axes) == 9 and figure.get_size_inches().tolist() == [16, 9]


def test_plot_shows_on_a_screen(trained, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    shown = []
    monkeypatch.setattr(matplotlib, "get_backend", lambda: "qtagg")
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(len(pyplot.gcf().axes)))
    trained.plot()
    pyplot.close("all")
    assert shown == [2]


def test_plot_without_a_screen(trained, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setattr(matplotlib, "get_backend", lambda: "agg")
    with pytest.raises(RuntimeError, match=r"Write them to a file: plot\('history.png'\)"):
        trained.plot()


def test_plot_without_matplotlib(trained, monkeypatch):
    real = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ImportError, match=r"pip install torch-hapi\[plot\]"):
        trained.plot("x.png")


def test_plot_of_nothing():
    with pytest.raises(RuntimeError, match="Call fit first"):
        History().plot("x.png")
