"""Parameters that the loss reaches in some steps, on some ranks, in some batches of a window, or never."""

from __future__ import annotations

import pytest
import routed_cases as routed
import torch
from ranks import alone

CASES = 120
PER_TEST = 30


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(PER_TEST, CASES, PER_TEST))]
)
def test_a_part_of_the_network_trains_as_in_one_process_whoever_reaches_it(ranks, first):
    failures = []
    for number in range(first, first + PER_TEST):
        case = routed.draw(1, number)
        wanted = routed.follow(case)
        results = ranks(case.world).run(routed.train, case)
        for rank, weights in enumerate([*results, alone(routed.train, case)]):
            off = max(float((got - want).abs().max()) for got, want in zip(weights, wanted, strict=True))
            if off > 2e-5:
                failures.append(f"rank {rank} is off by {off:.2g}: {case}")
        if any(not torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True)):
            failures.append(f"ranks differ: {case}")
    assert not failures, "\n".join(failures)
