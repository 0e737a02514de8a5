"""The processes that the other tests run on: what hangs, raises or dies is seen, and the next test has new ones."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, Ranks

from hapi.distributed import group


def place(word: str) -> tuple[int, int, str, float]:
    return group.get_rank(), group.get_world_size(), word, float(torch.rand(()))


def raise_on(rank: int) -> None:
    if group.get_rank() == rank:
        raise ValueError("boom")
    dist.barrier()


def hang_on(rank: int) -> None:
    while group.get_rank() == rank:
        time.sleep(0.01)


def die_on(rank: int) -> None:
    if group.get_rank() == rank:
        os._exit(7)


def skip_a_collective_on(rank: int) -> None:
    if group.get_rank() != rank:
        dist.all_reduce(torch.tensor([5, 5]), async_op=True)


def test_results_come_in_rank_order(ranks):
    results = ranks(3).run(place, "here")
    assert [result[:3] for result in results] == [(0, 3, "here"), (1, 3, "here"), (2, 3, "here")]
    assert len({result[3] for result in results}) == 3, "unseeded ranks have random states of their own"


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        pytest.param(raise_on, "ValueError: boom", marks=pytest.mark.slow),
        (hang_on, "in hang_on"),
        pytest.param(die_on, "exit code 7", marks=pytest.mark.slow),
        pytest.param(skip_a_collective_on, "collectives do not match", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_is_a_failure_and_the_next_run_has_new_processes(function, shown):
    pool = Ranks(2)
    try:
        began = time.monotonic()
        with pytest.raises(RankFailure, match=shown):
            pool.run(function, 1, timeout=3)
        assert time.monotonic() - began < 30
        assert [result[0] for result in pool.run(place, "again")] == [0, 1]
    finally:
        pool.close()
