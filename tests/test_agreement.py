"""The ranks' meetings within an epoch, one rank's side of them, the others' answers made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from hapi import agreement
from hapi.agreement import Agreement
from hapi.distributed import group
from hapi.metrics.tally import Tally
from hapi.signals import StopSignals

CPU = torch.device("cpu")


class Others:
    """What the other ranks say, for each question when it is asked; and what was asked of them."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.asked: list[list[float]] = []
        self.waited = 0

    def answer(self, values: Sequence[float]) -> SimpleNamespace:
        self.asked.append(list(values))
        others = self.values + [-math.inf] * (len(values) - len(self.values))
        largest = [max(pair) for pair in zip(values, others, strict=True)]
        return SimpleNamespace(wait=lambda: self._told(largest))

    def _told(self, largest: list[float]) -> list[float]:
        self.waited += 1
        return largest


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    made = Others()
    monkeypatch.setattr(group, "begin_max", made.answer)
    monkeypatch.setattr(group, "get_world_size", lambda: 2)
    # So that the meetings come after the steps 1, 3, 7, 15, ...
    monkeypatch.setattr(agreement, "_SECONDS", 1e9)
    return made


@pytest.fixture
def model() -> SimpleNamespace:
    return SimpleNamespace(stop_training=False)


def stepping(model: SimpleNamespace, tally: Tally) -> Callable[[], bool]:
    """What a step's end says, for one step after the other."""
    meeting = Agreement(model, "stop", StopSignals())
    count = iter(range(1000))
    return lambda: meeting.after_step(tally, 0, next(count))


def test_the_ranks_are_asked_a_step_before_the_answer_is_waited_for(others: Others, model: SimpleNamespace) -> None:
    after_step = stepping(model, Tally([], CPU))
    seen = []
    for _ in range(15):
        assert not after_step()
        seen.append((len(others.asked), others.waited))
    # The first one has to be waited for.
    assert seen == [(1, 1), (2, 1), (2, 2), (2, 2), (2, 2), (3, 2), (3, 3), *[(3, 3)] * 6, (4, 3), (4, 4)]


def test_what_is_asked_for_while_an_answer_is_under_way_is_kept(others: Others, model: SimpleNamespace) -> None:
    after_step = stepping(model, Tally([], CPU))
    assert not after_step() and not after_step()
    model.stop_training = True
    # The others have not heard of it: here too nobody stops before they have.
    stops = [after_step() for _ in range(5)]
    assert stops == [False] * 4 + [True] and model.stop_training


def test_what_others_ask_for_holds_here(others: Others, model: SimpleNamespace) -> None:
    after_step = stepping(model, Tally([], CPU))
    after_step()
    others.values = [1.0]
    assert not after_step() and not model.stop_training
    assert after_step() and model.stop_training


@pytest.mark.parametrize("first", [1, 2, 3, 4, 6, 7])
def test_a_loss_without_a_value_is_told_with_its_own_step(others: Others, model: SimpleNamespace, first: int) -> None:
    tally = Tally([], CPU)
    after_step = stepping(model, tally)
    with pytest.raises(RuntimeError, match=f"infinite or NaN in epoch 1, step {first}:"):
        for step in range(1, 16):
            tally.update(torch.tensor(math.nan if step == first else 1.0), 1, None, None)
            after_step()


def test_an_answer_under_way_at_the_end_of_an_epoch_is_waited_for_there(others: Others, model: SimpleNamespace) -> None:
    tally = Tally([], CPU)
    meeting = Agreement(model, "stop", StopSignals())
    meeting.after_step(tally, 0, 0)
    tally.update(torch.tensor(math.inf), 1, None, None)
    meeting.after_step(tally, 0, 1)
    assert (len(others.asked), others.waited) == (2, 1)
    with pytest.raises(RuntimeError, match="epoch 1, step 2:"):
        meeting.end_epoch(tally, 0, 1)
    meeting = Agreement(model, "ignore", StopSignals())
    for step in range(2):
        meeting.after_step(tally, 0, step)
    others.values = [1.0]
    meeting.end_epoch(tally, 0, 1)
    assert model.stop_training
    assert others.waited == len(others.asked)
    # The next meeting is as far away as after any other.
    before = others.waited
    meeting.after_step(tally, 1, 0)
    assert others.waited == before


def test_where_all_meet_after_each_step_nobody_asks_before(
    others: Others, model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The answer of the step before would come a whole, long step late.
    monkeypatch.setattr(agreement, "_SECONDS", 0.0)
    after_step = stepping(model, Tally([], CPU))
    for step in range(1, 4):
        assert not after_step()
        assert len(others.asked) == others.waited == step
    model.stop_training = True
    assert after_step()


def test_what_is_heard_before_a_save_holds_at_once(others: Others, model: SimpleNamespace) -> None:
    tally = Tally([], CPU)
    meeting = Agreement(model, "stop", StopSignals())
    for step in range(3):
        assert not meeting.after_step(tally, 0, step)
    assert not meeting.before_save(tally, 0, 2)
    others.values = [1.0]
    assert not meeting.after_step(tally, 0, 3)
    assert meeting.before_save(tally, 0, 3) and model.stop_training
