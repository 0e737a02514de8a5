"""ProgBarLogger: what is written where, how much of it, and that values are read only when they are shown."""

import sys

import pytest
import torch
from callback_fakes import FakeModel

import hapi
from hapi.callbacks import ProgBarLogger, progress
from hapi.callbacks.base import CallbackList
from hapi.callbacks.terminal import number


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Value:
    """A running value that counts how often it is read."""

    reads = 0

    def __float__(self):
        Value.reads += 1
        return 0.5


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    Value.reads = 0
    return clock


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setattr(progress, "_has_screen", lambda: True)


def run_steps(callbacks, kind, steps, clock, seconds):
    for step in range(steps):
        callbacks.call(f"on_{kind}_batch_begin", step)
        clock.now += seconds
        if callbacks.wants_batch_logs(kind, step):
            callbacks.call(f"on_{kind}_batch_end", step, logs={"loss": Value(), "acc": Value()})


def run_fit(bar, clock, *, steps=100, known=True, epochs=1, seconds=0.01, eval_steps=0, **params):
    params = {"steps": steps if known else None, "last_epoch": epochs, **params}
    callbacks = CallbackList([bar], FakeModel(), params)
    callbacks.call("on_train_begin")
    for epoch in range(epochs):
        callbacks.call("on_epoch_begin", epoch)
        run_steps(callbacks, "train", steps, clock, seconds)
        bar.model.steps_trained += steps
        logs = {"loss": 0.25, "acc": 0.5, "lr": 0.001}
        if eval_steps:
            callbacks.call("on_eval_begin", logs={"steps": eval_steps if known else None})
            run_steps(callbacks, "eval", eval_steps, clock, seconds)
            callbacks.call("on_eval_end", logs={"loss": 0.75, "acc": 0.125})
            logs |= {"val_loss": 0.75, "val_acc": 0.125}
        callbacks.call("on_epoch_end", epoch, logs=logs)
    callbacks.call("on_train_end", logs=logs)
    return callbacks


# ---------------------------------------------------------------------------------------------------- lines


def test_each_epoch_ends_with_one_line_of_all_its_values(clock, capsys):
    run_fit(ProgBarLogger(), clock, epochs=2, eval_steps=50)
    out, err = capsys.readouterr()
    values = "1.5s - loss 0.2500 - acc 0.5000 - lr 0.001 - val_loss 0.7500 - val_acc 0.1250 - 10.0 ms/step"
    assert out == f"Epoch 1/2 - {values}\nEpoch 2/2 - {values}\n"
    assert err == ""
    assert Value.reads == 0


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("steps", "eval_steps"), [(1000, 0), (5000, 0), (1000, 1000), (100_000, 10_000)])
def test_a_file_gets_few_lines_however_long_an_epoch_takes(clock, capsys, steps, eval_steps, known):
    run_fit(ProgBarLogger(), clock, steps=steps, eval_steps=eval_steps, known=known, seconds=1.0)
    lines = capsys.readouterr().out.splitlines()
    assert 5 <= len(lines) <= 20
    assert sum("evaluate" in line for line in lines) >= (3 if eval_steps else 0)
    assert lines[-1].startswith("Epoch 1/1 - ")
    assert Value.reads == 2 * (len(lines) - 1)


def test_plain_lines_say_how_far_and_how_fast(clock, capsys):
    run_fit(ProgBarLogger(), clock, steps=1000, seconds=0.1)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "Epoch 1/1 step 100/1000 - loss 0.5000 - acc 0.5000 - 100.0 ms/step - 1:30 left"
    run_fit(ProgBarLogger(), clock, steps=1000, seconds=8.0, global_batch=64, samples=63_970)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Epoch 1/1 step 100/1000 - loss 0.5000 - acc 0.5000 - 8 samples/s - 2:00:00 left"
    assert lines[9] == "Epoch 1/1 step 1000/1000 - loss 0.5000 - acc 0.5000 - 8 samples/s - 0:00 left"
    run_fit(ProgBarLogger(), clock, steps=1000, seconds=0.1, known=False, global_batch=64)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "Epoch 1/1 step 50 - loss 0.5000 - acc 0.5000 - 640 samples/s"


def test_the_epoch_s_line_tells_the_speed_of_its_training_alone(clock, capsys):
    bar = ProgBarLogger()
    # 313 steps of 32, the last of 16: 10,000 samples in 3.13 s. The evaluation takes ten times as long a step.
    callbacks = CallbackList([bar], FakeModel(), {"steps": 313, "samples": 10_000, "global_batch": 32})
    callbacks.call("on_train_begin")
    callbacks.call("on_epoch_begin", 0)
    run_steps(callbacks, "train", 313, clock, 0.01)
    bar.model.steps_trained += 313
    callbacks.call("on_eval_begin", logs={"steps": 7})
    run_steps(callbacks, "eval", 7, clock, 0.1)
    callbacks.call("on_eval_end", logs={"loss": 0.75})
    callbacks.call("on_epoch_end", 0, logs={"loss": 0.25})
    assert capsys.readouterr().out == "Epoch 1 - 3.8s - loss 0.2500 - 3195 samples/s\n"


def test_an_epoch_without_a_step_has_no_speed(clock, capsys):
    run_fit(ProgBarLogger(), clock, steps=0, global_batch=32)
    assert capsys.readouterr().out == "Epoch 1/1 - 0.0s - loss 0.2500 - acc 0.5000 - lr 0.001\n"


def test_a_resumed_epoch_counts_what_was_done_before_and_not_for_its_speed(clock, capsys):
    ended = ProgBarLogger()
    CallbackList([ended], FakeModel(), {"steps": 1000})
    ended.on_train_begin()
    ended.model.steps_trained = 2000
    ended.on_epoch_begin(2)
    state = ended.state_dict()
    bar = ProgBarLogger(log_freq=50, verbose=2)
    model = FakeModel()
    model.steps_trained = 2900
    params = {"steps": 1000, "samples": 10_000, "global_batch": 10, "num_iters": 2950}
    callbacks = CallbackList([bar], model, params)
    callbacks.call("on_train_begin")
    bar.load_state_dict(state)
    callbacks.call("on_epoch_begin", 2)
    bar.load_state_dict(state)
    for step in range(900, 950):
        clock.now += 1.0
        if callbacks.wants_batch_logs("train", step):
            callbacks.call("on_train_batch_end", step, logs={"loss": Value()})
    model.steps_trained += 50
    callbacks.call("on_epoch_end", 2, logs={"loss": 0.25})
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 3 step 950/950 - loss 0.5000 - 10 samples/s - 0:00 left",
        "Epoch 3 - 50.0s - loss 0.2500 - 10 samples/s",
    ]


def test_plain_lines_of_one_pass_are_seconds_apart(clock, capsys):
    run_fit(ProgBarLogger(), clock, steps=1000, seconds=0.02)  # a tenth takes 2 s, a line is due after 5
    assert [line.split(" - ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "Epoch 1/1 step 300/1000",
        "Epoch 1/1 step 600/1000",
        "Epoch 1/1 step 900/1000",
        "Epoch 1/1",
    ]


def test_verbose_2_writes_every_log_freq_steps(clock, capsys, screen):
    run_fit(ProgBarLogger(log_freq=20, verbose=2), clock, steps=50, eval_steps=20)
    out, err = capsys.readouterr()
    assert [line.split(" - ")[0] for line in out.splitlines()] == [
        "Epoch 1/1 step 20/50",
        "Epoch 1/1 step 40/50",
        "Epoch 1/1 evaluate step 20/20",
        "Epoch 1/1",
    ]
    assert err == "" and Value.reads == 6


def test_verbose_2_of_unknown_length(clock, capsys):
    run_fit(ProgBarLogger(log_freq=10, verbose=2), clock, steps=45, known=False)
    starts = [line.split(" - ")[0] for line in capsys.readouterr().out.splitlines()]
    assert starts == [*(f"Epoch 1/1 step {step}" for step in (10, 20, 30, 40)), "Epoch 1/1"]


def test_verbose_0_writes_nothing_and_wants_nothing(clock, capsys):
    callbacks = run_fit(ProgBarLogger(verbose=0), clock, eval_steps=50)
    assert capsys.readouterr() == ("", "")
    assert not any(callbacks.wants_batch_logs("train", step) for step in range(1000))
    assert Value.reads == 0


def test_rank_1_writes_nothing_and_wants_nothing(clock, capsys, monkeypatch, screen):
    monkeypatch.setattr(progress, "get_rank", lambda: 1)
    callbacks = run_fit(ProgBarLogger(verbose=2), clock, eval_steps=50)
    assert capsys.readouterr() == ("", "")
    assert not any(callbacks.wants_batch_logs("train", step) for step in range(1000))


def test_evaluate_and_predict_alone_end_with_their_own_line(clock, capsys):
    callbacks = CallbackList([ProgBarLogger()], FakeModel(), {"steps": 30})
    callbacks.call("on_eval_begin")
    run_steps(callbacks, "eval", 30, clock, 0.5)
    callbacks.call("on_eval_end", logs={"loss": 0.75, "acc": 0.125})
    callbacks.call("on_predict_begin")
    run_steps(callbacks, "predict", 30, clock, 0.1)
    callbacks.call("on_predict_end")
    assert capsys.readouterr().out.splitlines() == [
        "Evaluate step 10/30 - loss 0.5000 - acc 0.5000 - 500.0 ms/step - 0:10 left",
        "Evaluate step 20/30 - loss 0.5000 - acc 0.5000 - 500.0 ms/step - 0:05 left",
        "Evaluate step 30/30 - loss 0.5000 - acc 0.5000 - 500.0 ms/step - 0:00 left",
        "Evaluate - 15.0s - loss 0.7500 - acc 0.1250 - 500.0 ms/step",
        "Predict - 3.0s - 100.0 ms/step",
    ]


@pytest.mark.parametrize("steps", [1, 7, 10, 19, 20])
@pytest.mark.parametrize("extent", [{}, {"steps": 19}, {"steps": 50}], ids=["unknown", "known", "at most"])
def test_the_speed_of_evaluate_and_predict_is_that_of_all_steps(clock, capsys, steps, extent):
    callbacks = CallbackList([ProgBarLogger(log_freq=10)], FakeModel(), extent)
    callbacks.call("on_eval_begin")
    run_steps(callbacks, "eval", steps, clock, 0.2)
    clock.now += 0.2 * steps  # what comes at the end is of all steps, too
    callbacks.call("on_eval_end", logs={"loss": 0.75})
    callbacks.call("on_predict_begin")
    run_steps(callbacks, "predict", steps, clock, 0.1)
    callbacks.call("on_predict_end")
    assert capsys.readouterr().out.splitlines() == [
        f"Evaluate - {0.4 * steps:.1f}s - loss 0.7500 - 400.0 ms/step",
        f"Predict - {0.1 * steps:.1f}s - 100.0 ms/step",
    ]


@pytest.mark.parametrize(("steps", "speed"), [(1, ""), (2, " - 80 samples/s"), (20, " - 80 samples/s")])
def test_a_last_step_of_which_the_samples_are_unknown_counts_for_no_speed(clock, capsys, steps, speed):
    callbacks = CallbackList([ProgBarLogger(log_freq=10)], FakeModel(), {"global_batch": 8})
    callbacks.call("on_predict_begin")
    run_steps(callbacks, "predict", steps, clock, 0.1)
    clock.now += 10.0
    callbacks.call("on_predict_end")
    assert capsys.readouterr().out == f"Predict - {0.1 * steps + 10.0:.1f}s{speed}\n"


def test_a_line_is_one_string(clock, monkeypatch):
    written = []
    monkeypatch.setattr(sys.stdout, "write", written.append)
    run_fit(ProgBarLogger(verbose=2), clock, steps=20)
    assert len(written) == 3 and all(text.endswith("\n") and text.count("\n") == 1 for text in written)


# ------------------------------------------------------------------------------------------------------ bar


def test_a_bar_on_stderr_and_the_epoch_s_line_on_stdout(clock, capsys, screen):
    run_fit(ProgBarLogger(), clock, steps=95, epochs=2, eval_steps=40)
    out, err = capsys.readouterr()
    assert out.count("\n") == 2 and out.startswith("Epoch 1/2 - ")
    for text in ("Epoch 1/2:", "Epoch 2/2:", "Epoch 2/2 evaluate:", "/95", "/40", "loss 0.5000, acc 0.5000"):
        assert text in err
    assert "\n" not in err.strip("\n")  # nothing of the bar stays


def test_the_bar_reads_values_four_times_a_second(clock, screen, capsys):
    run_fit(ProgBarLogger(log_freq=1), clock, steps=1000, seconds=0.001)
    assert 4 <= Value.reads / 2 <= 5
    Value.reads = 0
    run_fit(ProgBarLogger(log_freq=10), clock, steps=1000, seconds=1.0)
    assert Value.reads / 2 == 100


def test_a_bar_of_unknown_length(clock, capsys, screen):
    run_fit(ProgBarLogger(), clock, steps=40, known=False, seconds=1.0)
    assert "40 steps" in capsys.readouterr().err


@pytest.mark.parametrize("size", [None, (0, 0), (24, 100)], ids=["no size", "zero", "100 columns"])
def test_the_bar_is_seen_on_a_terminal_of_any_size(clock, monkeypatch, size):
    import fcntl
    import os
    import pty
    import select
    import struct
    import termios

    master, slave = pty.openpty()
    if size is not None:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    shown = ""
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        run_fit(ProgBarLogger(), clock, steps=40, seconds=1.0)
        terminal.flush()
        # What a terminal was sent comes in pieces.
        while "40/40" not in shown and select.select([master], [], [], 5.0)[0]:
            shown += os.read(master, 4096).decode(errors="replace")
    os.close(master)
    assert "Epoch 1/1: 100%" in shown and "40/40" in shown and "loss 0.5000, acc" in shown


@pytest.mark.parametrize("columns", [60, 80, 100, 140, None])
@pytest.mark.parametrize("title", ["Epoch 1/5", "Epoch 12/20 evaluate"])
def test_what_the_bar_tells_fits_beside_it(columns, title, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_bar_size", lambda: {"ncols": columns})
    bar = progress._Bar(title, progress._Extent(313, 32))
    bar.done = 200
    for times, name in ((bar, "shown"), (bar._bar, "start_t"), (bar._bar, "last_print_t")):
        setattr(times, name, getattr(times, name) - 2.0)
    bar.show({"loss": 0.5198, "acc": 0.8095})
    capsys.readouterr()
    shown = str(bar._bar)
    bar.close()
    assert columns is None or len(shown) <= columns
    if columns == 60:
        return  # less than the values take
    assert shown.startswith(f"{title}: ") and " 200/313 [00:" in shown and shown.endswith(", loss 0.5198, acc 0.8095]")
    assert ("samples/s" in shown) == (columns != 80 or "evaluate" not in title)
    assert ("64%" in shown) == ("samples/s" not in shown or columns != 80)
    assert "\u2588" in shown


def test_bars_start_no_thread(clock, capsys, screen, monkeypatch):
    import tqdm

    monkeypatch.setattr(tqdm.std, "TMonitor", lambda *args: pytest.fail("a thread was started"))
    monkeypatch.setattr(tqdm.std.tqdm, "monitor", None)
    run_fit(ProgBarLogger(), clock, steps=20)
    assert tqdm.tqdm.monitor_interval > 0  # the user's own bars keep theirs


def test_an_exception_takes_the_bar_away(clock, capsys, screen):
    bar = ProgBarLogger()
    callbacks = CallbackList([bar], FakeModel(), {"steps": 20, "last_epoch": 1})
    callbacks.call("on_train_begin")
    callbacks.call("on_epoch_begin", 0)
    run_steps(callbacks, "train", 10, clock, 1.0)
    callbacks.call("on_exception", KeyboardInterrupt())
    assert bar._pass is None
    capsys.readouterr()
    callbacks = CallbackList([bar], FakeModel(), {"steps": 5})
    callbacks.call("on_eval_begin")
    callbacks.call("on_eval_end", logs={"loss": 1.0})
    assert capsys.readouterr().out == "Evaluate - 0.0s - loss 1.0000\n"


def test_a_notebook_counts_as_a_screen(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert not progress._has_screen()
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    assert progress._has_screen()


def test_a_notebook_with_widgets_gets_a_widget(monkeypatch):
    import tqdm
    import tqdm.notebook

    extent = progress._Extent(10, 32)
    assert issubclass(progress._bar_class(extent), tqdm.std.tqdm)
    assert not issubclass(progress._bar_class(extent), tqdm.notebook.tqdm)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: object())
    assert issubclass(progress._bar_class(extent), tqdm.notebook.tqdm)


def test_tqdm_is_imported_when_a_bar_is_shown():
    assert "tqdm" not in vars(progress)


# -------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("log_freq", [0, -1, 2.5, True])
def test_a_wrong_log_freq(log_freq):
    with pytest.raises(ValueError if type(log_freq) is int else TypeError, match="Write log_freq=10"):
        ProgBarLogger(log_freq=log_freq)


@pytest.mark.parametrize("verbose", [3, -1, "bar"])
def test_a_wrong_verbose(verbose):
    with pytest.raises(ValueError, match=r"Write 0 \(silent\), 1 \(a bar\) or 2 \(lines\)"):
        ProgBarLogger(verbose=verbose)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (0.25, "0.2500"), (-1234.5, "-1234.5000"), (1e-4, "1.000e-04"), (1e5, "1.000e+05")],
)
def test_numbers(value, text):
    assert number(value) == text
    assert number(torch.tensor(0.5).item()) == "0.5000"


def test_learning_rates_are_written_short():
    assert [number(value, "lr") for value in (0.001, 1e-5, 0.123456)] == ["0.001", "1e-05", "0.1235"]
    assert number(float("nan")) == "nan"


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_it_is_called_before_a_step_only_where_the_number_of_steps_shows_at_the_end(call, monkeypatch, capsys):
    counted = []
    count = ProgBarLogger.on_eval_batch_begin

    def counting(self, step, logs=None):
        counted.append(step)
        count(self, step)

    for hook in ("on_eval_batch_begin", "on_predict_batch_begin"):
        monkeypatch.setattr(ProgBarLogger, hook, counting)
    model = hapi.Model(torch.nn.Linear(4, 3)).prepare(loss=torch.nn.CrossEntropyLoss())
    logger = ProgBarLogger()
    x, y = torch.rand(40, 4), torch.zeros(40, dtype=torch.int64)
    for data, expected in (((x, y), []), (Unsized(x, y), [0, 1]), ((x, y), [])):
        counted.clear()
        options = {} if isinstance(data, Unsized) else {"batch_size": 16}
        getattr(model, call)(data, callbacks=[logger], **options)
        assert counted == expected
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("samples/s" in line or "ms/step" in line for line in lines)


@pytest.mark.parametrize("own", ["class", "object"])
def test_hooks_of_the_users_own_in_it_are_called(own, capsys):
    called = []

    class Bar(ProgBarLogger):
        def on_eval_batch_begin(self, step, logs=None):
            called.append(step)

    bar = Bar() if own == "class" else ProgBarLogger()
    if own == "object":
        bar.on_eval_batch_begin = lambda step, logs=None: called.append(step)
    x, y = torch.rand(40, 4), torch.zeros(40, dtype=torch.int64)
    model = hapi.Model(torch.nn.Linear(4, 3)).prepare(loss=torch.nn.CrossEntropyLoss())
    for data in (Unsized(x, y), (x, y)):
        called.clear()
        model.evaluate(data, callbacks=[bar])
        assert called == [0, 1]


class Unsized(torch.utils.data.IterableDataset):
    """Samples of which nobody knows how many there are."""

    def __init__(self, x, y):
        self.samples = list(zip(x, y, strict=True))

    def __iter__(self):
        yield from self.samples
