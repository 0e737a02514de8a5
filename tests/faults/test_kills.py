"""A training of two processes, killed at any instant and started again, ends as if nothing had been.

HAPI_TEST_KILLS sets how often (30, and 4 without the slow tests), HAPI_TEST_SEED when.
"""

from __future__ import annotations

import os
import random
import time

import pytest
from killed import LAST, Life, newest_step

KILLS = int(os.environ.get("HAPI_TEST_KILLS", "30"))
SEED = int(os.environ.get("HAPI_TEST_SEED", "1"))
VICTIMS = ((0,), (1,), (0, 1))
# How often a save does each, about: the kills are to be spread over several saves.
OPERATIONS = {"replace": 1, "fsync": 1, "unlink": 1, "open": 1, "write": 60}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    digests = Life(tmp_path_factory.mktemp("undisturbed")).result()
    assert digests[0] == digests[1], "the ranks themselves differ"
    return digests


def ended_by_a_kill(life: Life, rng: random.Random) -> bool:
    """Kill the life somewhere after its next checkpoints; False if it came to its end before."""
    target = newest_step(life.folder) + rng.randint(1, 9)
    limit = time.monotonic() + 60
    while newest_step(life.folder) < target and not life.is_over():
        assert time.monotonic() < limit, f"no checkpoint in 60 s:\n{life.log()}"
        time.sleep(0.001)
    time.sleep(rng.random() * 0.03)
    if life.is_over():
        return False
    life.kill(rng.choice(VICTIMS))
    return True


def ended_in_a_write(life: Life) -> bool:
    """Wait for the life to end by its own hand; False if it came to its end."""
    limit = time.monotonic() + 60
    while not life.is_over():
        assert time.monotonic() < limit, f"neither killed nor done in 60 s:\n{life.log()}"
        time.sleep(0.002)
    if life.ranks[0].exitcode is None:
        life.ranks[0].join(60)
    killed_itself = life.ranks[0].exitcode == -9
    if killed_itself:
        life.end()
    return killed_itself


@pytest.mark.parametrize("wanted", [4, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_killed_runs_end_with_the_bits_of_one_that_was_not(tmp_path, undisturbed, wanted):
    rng = random.Random(SEED)
    log: list[str] = []
    kills, counted, runs = 0, 0, 0
    while counted < wanted:
        runs += 1
        folder = tmp_path / f"run{runs}"
        while True:
            in_a_write = rng.random() < 0.5
            before = newest_step(folder)
            operation, count = rng.choice(list(OPERATIONS)), rng.randint(2, 25)
            dies_at = (operation, count * OPERATIONS[operation]) if in_a_write else None
            life = Life(folder, dies_at)
            hit = ended_in_a_write(life) if in_a_write else ended_by_a_kill(life, rng)
            if not hit:
                break
            kills += 1
            # A kill before the first checkpoint proves nothing.
            counted += newest_step(folder) > 0
            log.append(f"run {runs}: from step {before}, killed at {newest_step(folder)} of {LAST} by {dies_at}")
            if counted >= wanted and newest_step(folder) > 0:
                life = Life(folder)
                break
        assert life.result() == undisturbed, f"other bits after {kills} kills:\n" + "\n".join(log)
    print("\n".join(log))
    print(f"{kills} kills in {runs} runs, {counted} of them after a first checkpoint: 0 losses, 0 hangs")
    assert counted >= wanted
