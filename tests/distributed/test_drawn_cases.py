"""W processes give the numbers of one: drawn worlds, sizes, kinds of data, losses and ways of training."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable

import drawn_cases as drawn
import pytest
import torch
from drawn_cases import LOADERS, MAP_STYLE, STREAMS, Case, Result
from ranks import Ranks, alone

# Of loaders as scripts have them: what they leave out, repeat or shuffle is what the cases are about.
pytestmark = pytest.mark.filterwarnings("ignore:The loader's", "ignore:predict received a loader with")

SEED = int(os.environ.get("HAPI_TEST_SEED", "1"))
CASES = int(os.environ.get("HAPI_TEST_CASES", "520"))
PER_TEST = 40
ALWAYS = 40
"""So many of them are run by `make test`, all by `make test-slow`."""
MORE_RANKS = range(5, 9)
"""World sizes of which there are a few cases each: as many processes have to be started."""

close = pytest.approx


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(number, marks=[pytest.mark.slow] if number >= ALWAYS else [])
        for number in range(0, CASES, PER_TEST)
    ],
)
def test_drawn_cases(ranks, first):
    check_all(ranks, [drawn.draw(SEED, number) for number in range(first, min(CASES, first + PER_TEST))])


@pytest.mark.parametrize("world", [pytest.param(world, marks=pytest.mark.slow) for world in MORE_RANKS])
def test_drawn_cases_of_more_ranks(world):
    pool = Ranks(world)
    try:
        check_all(lambda _: pool, of_more_ranks(world))
    finally:
        pool.close()


def of_more_ranks(world: int) -> list[Case]:
    """Their numbers go on after the others'; together every kind of data comes in turn."""
    each = max(1, CASES // 60)
    first = CASES + each * MORE_RANKS.index(world)
    return [drawn.draw(SEED, number, world) for number in range(first, first + each)]


def check_all(ranks: Callable[[int], Ranks], cases: list[Case]) -> None:
    failures = []
    for case in cases:
        try:
            check(case, ranks(case.world).run(drawn.run, case))
        except AssertionError as failure:
            failures.append(f"{case}\n{failure}")
    assert not failures, f"{len(failures)} cases (HAPI_TEST_SEED={SEED}):\n" + "\n\n".join(failures[:5])


def test_every_kind_and_loss_is_drawn_at_every_world_size():
    cases = [drawn.draw(SEED, number) for number in range(CASES)]
    kinds = Counter((case.kind, case.world) for case in cases)
    assert all(kinds[kind, world] for kind in drawn.KINDS if kind not in drawn.SLOW_KINDS for world in (2, 3, 4))
    assert all(any(kinds[kind, world] for world in (2, 3, 4)) for kind in drawn.SLOW_KINDS)
    assert {case.loss for case in cases} == set(drawn.LOSSES)
    assert any(case.samples < case.world for case in cases)
    more = [case for world in MORE_RANKS for case in of_more_ranks(world)]
    assert {case.world for case in more} == {5, 6, 7, 8}
    assert {case.kind for case in more} >= {*drawn.KINDS} - {*drawn.SLOW_KINDS}
    assert any(case.samples < case.world for case in more)


def check(case: Case, results: list[Result]) -> None:
    first = results[0]
    for other in results[1:]:
        # As text, since where nothing counts the loss is nan, which is not equal to itself.
        assert repr(other.evaluated) == repr(first.evaluated), "evaluate: other floats on another rank"
        assert repr(other.history) == repr(first.history), "History: other floats on another rank"
        assert all(map(torch.equal, other.weights, first.weights)), "other weights on another rank"
        assert first.predicted is None or torch.equal(other.predicted, first.predicted), "other predictions"
    if first.evaluated is not None:
        check_evaluation(case, results)
    else:
        check_prediction(case, results)
    check_training(case, results)
    if case.kind not in OWN_ORDER and not (case.kind in STREAMS and case.drop_last):
        check_against_one_process(case, results, alone(drawn.run, case, True))


def check_evaluation(case: Case, results: list[Result]) -> None:
    """Each sample once, exact values."""
    first = results[0]
    numbers = drawn.flat(drawn.union(results, "eval", 0))
    assert numbers_may_be(case, numbers), f"evaluate saw {sorted(numbers)}"
    loss, squares, _ = drawn.once(case, first.start, numbers)
    wanted = math.nan if loss is None else loss
    assert first.evaluated["loss"] == close(wanted, rel=1e-5, abs=1e-6, nan_ok=True)
    assert first.evaluated["square"] == close(squares, rel=1e-5)


def check_prediction(case: Case, results: list[Result]) -> None:
    """Each sample once, in the data set's order where there is one."""
    first = results[0]
    got = first.predicted
    seen = drawn.flat(drawn.union(results, "predict", 0))
    assert numbers_may_be(case, seen), f"predict saw {sorted(seen)}"
    _, _, outputs = drawn.once(case, first.start, sorted(seen))
    assert got.shape == outputs.shape
    assert torch.allclose(torch.sort(got, 0).values, torch.sort(outputs, 0).values, atol=1e-5)
    if case.kind in ORDER:
        _, _, in_order = drawn.once(case, first.start, ORDER[case.kind](case))
        assert torch.allclose(got, in_order[: len(got)], atol=1e-5), "predictions in another order"
        if first.in_batches is not None:
            assert torch.allclose(torch.cat(first.in_batches), got, atol=1e-6), "batches in another order"
    if case.kind in MAP_STYLE and first.in_batches is not None:
        sizes = [len(batch) for batch in first.in_batches]
        assert sizes == [min(case.batch, len(got) - done) for done in range(0, len(got), case.batch)]


def numbers_may_be(case: Case, numbers: list[int]) -> bool:
    expected = drawn.expected_numbers(case)
    return expected is None or ("loader" in case.kind and case.drop_last) or sorted(numbers) == expected


OWN_ORDER = ("iterable sharding workers", "iterable sharding ranks", "iterable loader", "loader distributed")
"""Kinds that one process cannot follow: who gets what is the data's own business, or a batch is a loader's."""

ORDER = {
    **{
        kind: (lambda case: list(range(case.samples)))
        for kind in ("columns", "arrays", "dict", "tensor dataset", "dataset", "workers", "loader", "batches",
                     "loader batch sampler", "iterable", "iterable workers")
    },
    "subset": drawn.chosen,
    "subset of dataset": drawn.chosen,
    "loader sampler": lambda case: list(reversed(range(case.samples))),
}  # fmt: skip
"""Kinds whose order is fixed: the numbers of the predictions' rows."""


def check_training(case: Case, results: list[Result]) -> None:
    """Each sample once per epoch; losses and weights are those of a plain loop over the union of the ranks' samples."""
    first = results[0]
    epochs = [drawn.union(results, "train", epoch) for epoch in range(len(first.history["square"]))]
    expected = drawn.expected_numbers(case)
    limit = case.num_iters
    for steps in epochs:
        numbers = sorted(drawn.flat(steps))
        limit = limit - len(steps) if limit is not None else None
        if expected is not None and limit != 0 and not case.drop_last:
            assert numbers == expected, f"an epoch saw {numbers}"
        elif expected is not None:
            assert not Counter(numbers) - Counter(expected), f"an epoch saw {numbers}"
    followed = drawn.follow(case, first.start, epochs)
    assert first.history["square"] == close(followed.squares, rel=2e-5)
    losses = [math.nan if loss is None else loss for loss in followed.losses]
    assert first.history["loss"] == close(losses, rel=2e-5, abs=1e-6, nan_ok=True)
    for got, wanted in zip(first.weights, followed.weights, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5), f"weights are off by {float((got - wanted).abs().max()):.2g}"


def check_against_one_process(case: Case, results: list[Result], one: Result) -> None:
    """The same evaluation, predictions and order; the same run where hapi decides about batches."""
    first = results[0]
    if first.evaluated is not None:
        assert first.evaluated == close(one.evaluated, rel=1e-5, abs=1e-6, nan_ok=True)
    else:
        assert torch.allclose(first.predicted, one.predicted, atol=1e-5), "other predictions than one process"
    for epoch in range(len(first.history["square"])):
        alone_steps = drawn.union([one], "train", epoch)
        if case.kind in LOADERS:
            dealt = {
                step * case.world + rank: numbers
                for rank, result in enumerate(results)
                for (phase, seen_epoch, step), numbers in result.seen.items()
                if (phase, seen_epoch) == ("train", epoch)
            }
            assert dealt == dict(enumerate(alone_steps[: len(dealt)])), f"other batches in epoch {epoch}"
        else:
            assert drawn.union(results, "train", epoch) == alone_steps, f"other samples per step in epoch {epoch}"
    if case.kind not in LOADERS:
        assert first.history.keys() == one.history.keys()
        for name, values in first.history.items():
            assert values == close(one.history[name], rel=2e-5, abs=1e-6, nan_ok=True), (
                f"History: other {name} than one process"
            )
        for got, wanted in zip(first.weights, one.weights, strict=True):
            assert torch.allclose(got, wanted, atol=1e-5), "other weights than one process"
