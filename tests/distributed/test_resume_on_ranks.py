"""Runs on several ranks that are ended within an epoch and resumed: the same bits, the same samples."""

from __future__ import annotations

import pytest
import resume_within
from resume_within import ROWS

FEW = ("dataset", "accumulating", "loader", "loader that leaves batches out", "stream")
OTHERS = tuple(kind for kind in resume_within.KINDS if kind not in FEW)


@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        (3, FEW),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in [(3, OTHERS), (2, FEW), (2, (*OTHERS, "compiled")), (4, FEW)]
        ),
    ],
)
def test_the_same_bits(ranks, tmp_path, world, kinds):
    for kind in kinds:
        ranks(world).run(resume_within.check, kind, tmp_path / kind)


def test_data_with_a_state_that_is_watched_loses_nothing(ranks):
    """It is begun twice in each pass, until it is known to share itself out."""
    seen = ranks(2).run(resume_within.rows_of_who_asks, 2)
    assert sorted(row for rows in seen for row in rows) == sorted(2 * [*range(ROWS)])


def test_evaluation_data_that_shards_itself_has_a_place_on_each_rank(ranks, tmp_path):
    assert ranks(2).run(resume_within.evaluated_part, tmp_path) == [True, True]


@pytest.mark.slow
def test_what_other_ranks_had_seen_is_needed(ranks, tmp_path):
    assert ranks(2).run(resume_within.without_a_rank, tmp_path) == [True, True]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("kind", ["tensors", "loader"])
def test_another_number_of_ranks_reads_the_rest_of_the_epoch(ranks, tmp_path, before, after, kind):
    read = on(ranks, before, kind, tmp_path, False) + on(ranks, after, kind, tmp_path, True)
    assert sorted(row for part in read for row in part) == list(range(ROWS))


def on(ranks, world, *arguments):
    if world == 1:
        return [resume_within.read_part(*arguments)]
    return ranks(world).run(resume_within.read_part, *arguments)
