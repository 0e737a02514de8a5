"""Where the time of a step of `Model.fit` goes that a loop by hand does not spend: both under cProfile.

    python benchmarks/profile_steps.py                 2000 steps of each, half a minute
    python benchmarks/profile_steps.py --steps 1000 --rows 40

The network and data are those of `mnist-32-tensors` in bench_fit.py; the ways take turns of 500 steps. A row is a
function: how often a step calls it, and microseconds of a step within it and not in what it calls, in fit and by
hand. Those come first that differ most. cProfile takes longer itself than a short function does, so that the rows say
where to look, and `bench_steps.py` how much it is.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from itertools import islice
from pathlib import Path

from bench_fit import adam, mlp, mnist_in_memory, provide_data
from bench_steps import training
from torch import nn
from turns import machine, row

import hapi

BATCH_SIZE = 32
TURN = 500
Rows = dict[str, tuple[float, float]]


def per_step(profile: cProfile.Profile, steps: int) -> Rows:
    """Of each function its calls and its own microseconds, both of a step."""
    rows: Rows = {}
    for (file, _, name), (_, calls, own, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        # Of one name in one file there may be several.
        where = name if file == "~" else f"{Path(file).parent.name}/{Path(file).name} {name}"
        before = rows.get(where, (0.0, 0.0))
        rows[where] = before[0] + calls / steps, before[1] + own / steps * 1e6
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Model.fit and a loop by hand under cProfile.")
    parser.add_argument("--steps", type=int, default=2000, help="of each")
    parser.add_argument("--rows", type=int, default=20, help="how many functions are shown")
    options = parser.parse_args()
    provide_data()
    images, classes = mnist_in_memory()
    converted = images.div(255)
    network = mlp()
    model = hapi.Model(network).prepare(adam(network), nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
    by_hand = training(mlp(), lambda rows: converted[rows], classes, BATCH_SIZE)

    def fit(steps: int) -> None:
        model.fit((converted, classes), epochs=10**6, batch_size=BATCH_SIZE, num_iters=steps, verbose=0)

    def hand(steps: int) -> None:
        for _ in islice(by_hand, steps):
            pass

    # What the first steps set up is left out.
    fit(50)
    hand(50)
    profiles = cProfile.Profile(), cProfile.Profile()
    turns = max(1, options.steps // TURN)
    for _ in range(turns):
        for profile, run in zip(profiles, (fit, hand), strict=True):
            profile.runcall(run, TURN)
    ours, theirs = (per_step(profile, turns * TURN) for profile in profiles)
    none = 0.0, 0.0
    differing = sorted(ours | theirs, key=lambda name: -abs(ours.get(name, none)[1] - theirs.get(name, none)[1]))
    print(machine(), "", row("function", ["calls", "by hand", "us", "by hand"]), row("---", ["---"] * 4), sep="\n")
    for name in differing[: options.rows]:
        (calls, own), (their_calls, their_own) = ours.get(name, none), theirs.get(name, none)
        print(row(name, [f"{calls:.2f}", f"{their_calls:.2f}", f"{own:.1f}", f"{their_own:.1f}"]))
    totals = [sum(own for _, own in rows.values()) for rows in (ours, theirs)]
    print(row("all", ["", "", *(f"{total:.0f}" for total in totals)]))


if __name__ == "__main__":
    main()
