"""Ending alike: requests to stop, monitored values, unequal data and errors that only one rank meets."""

from __future__ import annotations

import math
import os
import signal
import tempfile
from typing import Any

import pytest
import torch
from closed_form import Line, prepared, ramp
from ranks import alone, same
from torch.utils.data import IterableDataset

import hapi
from hapi import agreement, files, signals
from hapi.distributed import group
from hapi.metrics.tally import Tally


class StopAt(hapi.callbacks.Callback):
    """Asks for an end, on one rank alone."""

    def __init__(self, rank: int, hook: str, epoch: int, step: int = 0) -> None:
        self.rank, self.hook, self.epoch, self.step = rank, hook, epoch, step
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._ask("on_epoch_begin", 0)

    def on_train_batch_end(self, step, logs=None):
        self._ask("on_train_batch_end", step)

    def on_eval_end(self, logs=None):
        self._ask("on_eval_end", 0)

    def on_epoch_end(self, epoch, logs=None):
        self._ask("on_epoch_end", 0)

    def _ask(self, hook: str, step: int) -> None:
        if (group.get_rank(), hook, self._epoch) == (self.rank, self.hook, self.epoch) and step >= self.step:
            self.model.stop_training = True


def stop(rank: int, hook: str, step: int, eval_freq: int, evaluates: bool) -> tuple[int, int, int, bool]:
    """Train for many epochs of 6 steps, until one rank asks for an end in the second."""
    model = prepared()
    data = ramp(12)
    history = model.fit(
        data, data if evaluates else None, batch_size=1, epochs=50, eval_freq=eval_freq, verbose=0,
        callbacks=StopAt(rank, hook, 1, step),
    )  # fmt: skip
    evaluations = sum(not math.isnan(value) for value in history.history.get("val_loss", []))
    return model.epochs_trained, model.steps_trained, evaluations, model.stop_training


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("eval_freq", [1, 5])
@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("on_epoch_begin", 0),
        ("on_train_batch_end", 0),
        ("on_train_batch_end", 5),
        ("on_eval_end", 0),
        ("on_epoch_end", 0),
    ],
)
def test_any_rank_s_request_ends_all_ranks_at_the_same_edge(ranks, hook, step, eval_freq, evaluates):
    if hook == "on_eval_end" and not (evaluates and eval_freq == 1):
        hook = "on_epoch_end"
    epochs, steps, evaluations, asked = same(ranks(2).run(stop, 1, hook, step, eval_freq, evaluates))
    assert epochs == 2
    assert 6 < steps <= 12
    assert asked
    # The last epoch is always evaluated, where it is known in time to be the last.
    in_time = hook in ("on_epoch_begin", "on_train_batch_end")
    assert evaluations == (0 if not evaluates else 2 if eval_freq == 1 else int(in_time))


def stop_too_late_for_an_evaluation(rank: int) -> tuple[int, bool]:
    """One rank asks when the second epoch's steps are over and its values are put together, as another thread may."""
    model = prepared()
    reduced = Tally.reduced

    def late(tally: Tally) -> dict[str, float]:
        model.stop_training |= group.get_rank() == rank and model.epochs_trained == 1
        return reduced(tally)

    Tally.reduced = late
    try:
        history = model.fit(ramp(4), ramp(4), batch_size=1, epochs=50, eval_freq=5, verbose=0)
    finally:
        Tally.reduced = reduced
    return model.epochs_trained, "val_loss" in history.history


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_between_two_questions_makes_no_rank_evaluate_alone(ranks, rank):
    assert same(ranks(2).run(stop_too_late_for_an_evaluation, rank)) == (2, False)


def stop_within_an_epoch() -> int:
    """One rank asks in its 10th step; meetings come after steps 1, 3, 7, 15, ... here, whatever time steps take."""
    seconds, agreement._SECONDS = agreement._SECONDS, 1e9
    try:
        model = prepared()
        model.fit(ramp(200), batch_size=1, callbacks=StopAt(1, "on_train_batch_end", 0, 9), verbose=0)
    finally:
        agreement._SECONDS = seconds
    return model.steps_trained


def test_within_an_epoch_all_ranks_stop_at_the_next_meeting(ranks):
    assert same(ranks(2).run(stop_within_an_epoch)) == 15


def stop_with_a_best_model(rank: int, folder: str) -> tuple[int, bool]:
    """One rank asks after the second epoch, which is the best so far; what the best model says of it."""
    model = prepared()
    stops = [StopAt(rank, "on_epoch_end", 1), hapi.callbacks.EarlyStopping("loss", patience=9, verbose=0)]
    model.fit(ramp(4), batch_size=1, epochs=9, callbacks=stops, save_dir=folder, verbose=0)
    content = torch.load(f"{folder}/best_model.opt.pt", weights_only=True)
    return content["counters"]["epochs_trained"], content["position"]["cursor"]["stopped"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_best_model_knows_of_a_request_of_any_rank(ranks, tmp_path, rank):
    assert same(ranks(2).run(stop_with_a_best_model, rank, str(tmp_path))) == (2, True)


def stop_and_go_on() -> list[int]:
    """The request is for one fit only."""
    model = prepared()
    model.fit(ramp(4), batch_size=1, epochs=9, callbacks=StopAt(0, "on_epoch_end", 0), verbose=0)
    between = model.epochs_trained
    model.fit(ramp(4), batch_size=1, epochs=2, verbose=0)
    return [between, model.epochs_trained]


def test_a_request_is_forgotten_at_the_next_fit(ranks):
    assert same(ranks(2).run(stop_and_go_on)) == [1, 3]


def early_stopping(folder: str) -> tuple[int, int | None, list[float]]:
    """A loss that rises on one rank and falls on the other; together it falls for three epochs, then rises."""
    net = Line()
    epoch = [0]

    def loss(outputs, labels):
        mine = [9.0, 7.0, 5.0, 6.0, 7.0, 8.0, 9.0][epoch[0]] if group.get_rank() == 0 else float(epoch[0])
        return outputs.mean() * 0 + mine

    class Count(hapi.callbacks.Callback):
        def on_epoch_begin(self, number, logs=None):
            epoch[0] = number

    early = hapi.callbacks.EarlyStopping("val_loss", patience=2, verbose=0)
    keeper = hapi.callbacks.ModelCheckpoint(monitor="val_loss", mode="min", save_freq=100)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=1.0), loss)
    data = ramp(4)
    history = model.fit(
        data, data, batch_size=2, epochs=7, save_dir=folder, callbacks=[Count(), early, keeper], verbose=0
    )
    return model.epochs_trained, early.stopped_epoch, history.history["val_loss"]


def test_early_stopping_decides_on_the_mean_over_ranks(ranks, tmp_path):
    epochs, stopped, values = same(ranks(2).run(early_stopping, str(tmp_path)))
    assert values == [4.5, 4.0, 3.5, 4.5, 5.5]
    assert (epochs, stopped) == (5, 5)
    assert (tmp_path / "best_model.pt").exists()


class Uneven(IterableDataset):
    """Shards itself: so many samples on each rank."""

    sharded = True

    def __init__(self, lengths: list[int]) -> None:
        self.length = lengths[group.get_rank()]

    def __iter__(self) -> Any:
        for number in range(self.length):
            yield torch.tensor([float(number)]), torch.zeros(1)


def best_model_on_a_full_disk(folder: str, saver: str) -> str:
    real = files.draft

    def draft(path, *rest):
        if path.name.startswith("best_model"):
            raise OSError(28, "No space left on device", str(path))
        return real(path, *rest)

    files.draft = draft
    try:
        callback = getattr(hapi.callbacks, saver)(monitor="loss")
        prepared().fit(ramp(12), batch_size=2, epochs=3, save_dir=folder, verbose=0, callbacks=callback)
    except OSError as error:
        return str(error)
    finally:
        files.draft = real
    return "went on"


@pytest.mark.parametrize("saver", ["EarlyStopping", "ModelCheckpoint"])
def test_a_best_model_that_cannot_be_saved_stops_all_ranks(ranks, tmp_path, saver):
    for said in ranks(2).run(best_model_on_a_full_disk, str(tmp_path), saver):
        assert "No space left on device" in said and "best_model" in said


def uneven(lengths: list[int], batch: int, accumulate: int, num_iters: int | None) -> tuple[int, int, int, float]:
    model = prepared(weight=0.0)
    taken: list[int] = []
    model.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    model.fit(
        Uneven(lengths), batch_size=batch, epochs=2, accumulate_grad_batches=accumulate, num_iters=num_iters, verbose=0
    )
    return model.steps_trained, len(taken), len(model.network.seen), model.network.value


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("lengths", [[8, 12], [12, 8], [0, 5], [5, 0], [1, 9]])
def test_ranks_of_unequal_length_end_together_and_lose_nothing(ranks, lengths, accumulate):
    results = ranks(2).run(uneven, lengths, 2, accumulate, None)
    steps = -(-max(lengths) // 2)
    assert same([result[:2] + result[3:] for result in results])[:2] == (2 * steps, 2 * -(-steps // accumulate))
    assert [result[2] for result in results] == [2 * length for length in lengths]
    # The windows' means, taken twice.
    batches = [[list(range(n, min(n + 2, length))) for n in range(0, length, 2)] for length in lengths]
    windows = [
        [x for rank in batches for batch in rank[first : first + accumulate] for x in batch]
        for first in range(0, steps, accumulate)
    ]
    assert results[0][3] == pytest.approx(-2 * sum(sum(window) / len(window) for window in windows))


@pytest.mark.parametrize("num_iters", [1, 3, 5, 6, 7])
def test_num_iters_cuts_unequal_ranks_at_the_same_step(ranks, num_iters):
    results = ranks(2).run(uneven, [3, 11], 2, 2, num_iters)
    assert same([result[:2] for result in results])[0] == num_iters


def spoilt(rank: int, at: int, policy: str) -> str:
    """A loss that is no number, on one rank, in one step."""
    net = Line()
    calls = [0]

    def loss(outputs, labels):
        calls[0] += 1
        return outputs.mean() * (float("nan") if (group.get_rank(), calls[0]) == (rank, at) else 1.0)

    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=1.0), loss)
    try:
        model.fit(ramp(16), batch_size=1, verbose=0, nan_policy=policy)
    except RuntimeError as error:
        return str(error)
    return f"trained {model.steps_trained} steps"


@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_loss_that_is_no_number_on_one_rank_stops_all_with_its_step(ranks, at):
    assert f"epoch 1, step {at}" in same(ranks(2).run(spoilt, 1, at, "stop"))


def spoilt_before_its_end(at: int, accumulate: int) -> str:
    """The same on rank 1, whose data ends after two of six steps."""
    net = Line()
    calls = [0]

    def loss(outputs, labels):
        calls[0] += 1
        return outputs.mean() * (float("nan") if (group.get_rank(), calls[0]) == (1, at) else 1.0)

    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), lr=1.0), loss)
    with pytest.raises(RuntimeError) as error:
        model.fit(Uneven([6, 2]), batch_size=1, verbose=0, accumulate_grad_batches=accumulate)
    return str(error.value)


@pytest.mark.parametrize(("at", "accumulate"), [(1, 4), (2, 1), (2, 6)])
def test_steps_without_samples_count_where_a_loss_was_no_number(ranks, at, accumulate):
    assert f"epoch 1, step {at}:" in same(ranks(2).run(spoilt_before_its_end, at, accumulate))


def test_a_loss_that_is_no_number_may_be_let_through(ranks):
    assert same(ranks(2).run(spoilt, 1, 3, "ignore")) == "trained 8 steps"


def bad_input(kind: str) -> str:
    """What cannot work is refused on every rank, with no rank left waiting."""
    model = prepared()
    x, y = ramp(4)
    try:
        if kind == "empty":
            model.fit((x[:0], y[:0]), verbose=0)
        elif kind == "empty iterable":
            model.fit(Uneven([0, 0]), verbose=0)
        elif kind == "nothing left":
            model.fit((x, y), batch_size=5, drop_last=True, verbose=0)
        elif kind == "once":
            model.fit(iter([(x, y)]), verbose=0)
        elif kind == "both sizes":
            model.fit((x, y), batch_size=2, global_batch_size=4, verbose=0)
        elif kind == "monitor":
            model.fit((x, y), callbacks=hapi.callbacks.EarlyStopping("val_loss"), verbose=0)
        elif kind == "sync":
            prepared(sync_batchnorm=True).fit((x, y), verbose=0)
        elif kind == "predict nothing":
            model.predict(Uneven([0, 0]), verbose=0)
        elif kind == "evaluate nothing":
            model.evaluate(Uneven([0, 0]), verbose=0)
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", "is empty"),
        ("empty iterable", "gave no batch"),
        ("nothing left", "leaves none of them"),
        ("once", "only once"),
        ("both sizes", "were both given"),
        ("monitor", "'val_loss'"),
        ("sync", "sync_batchnorm=True"),
        ("predict nothing", "gave no batch"),
        ("evaluate nothing", "gave no batch"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(ranks, kind, said):
    for text in [*ranks(2).run(bad_input, kind), alone(bad_input, kind)]:
        assert said in text


def one_epoch_of_many(num_iters: int) -> tuple[int, int]:
    model = prepared()
    model.fit(ramp(12), ramp(2), batch_size=2, epochs=9, num_iters=num_iters, verbose=0)
    return model.steps_trained, model.epochs_trained


@pytest.mark.parametrize(("num_iters", "epochs"), [(1, 1), (3, 1), (4, 2), (7, 3)])
def test_num_iters_ends_a_fit_of_many_epochs(ranks, num_iters, epochs):
    # An epoch has 3 steps on two ranks.
    assert same(ranks(2).run(one_epoch_of_many, num_iters)) == (num_iters, epochs)


class CtrlC(hapi.callbacks.Callback):
    """A terminal's Ctrl-C, which every process of a run gets."""

    def on_train_batch_begin(self, step, logs=None):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def interrupted() -> tuple[str, int]:
    """What a rank writes to its standard error when it is interrupted, and the code that it ends with."""
    before, kept = signal.signal(signal.SIGINT, signal.default_int_handler), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            with pytest.raises(signals.StoppedByUser) as caught:
                prepared().fit(ramp(12), batch_size=1, epochs=3, verbose=0, callbacks=CtrlC())
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            signal.signal(signal.SIGINT, before)
        file.seek(0)
        return file.read().decode(), caught.value.code


def test_ctrl_c_is_answered_once(ranks):
    (first, first_code), (second, second_code) = ranks(2).run(interrupted)
    assert first.count("press Ctrl-C again to stop at once") == 1
    assert (second, first_code, second_code) == ("", 130, 130)
