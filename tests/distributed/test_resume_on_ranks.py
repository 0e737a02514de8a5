"""Runs on several ranks that are ended within an epoch and resumed: the same bits, the same samples."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import resume_within
import torch
from ranks import alone, same
from resume_within import ROWS, Ended, EndsAt
from torch import nn

import hapi
from hapi.callbacks import ModelCheckpoint

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


def cycled(folder: Path, cut: int | None, total: int = 24, **batch: int) -> tuple[list[float], int]:
    """A run with a cycle, whole or ended at one of its steps; it goes on from what is in the folder."""
    torch.manual_seed(1)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
    model = hapi.Model(net).prepare(optimizer, nn.CrossEntropyLoss(), scheduler=cycle)
    stop = [] if cut is None else [EndsAt(cut)]
    with contextlib.suppress(Ended):
        model.fit(
            (resume_within.X, resume_within.Y), epochs=3, seed=3, verbose=0, save_dir=folder, resume=True,
            callbacks=[ModelCheckpoint(every_n_steps=1), *stop], **(batch or {"global_batch_size": 6}),
        )  # fmt: skip
    return net.weight.flatten().tolist(), model.scheduler.last_epoch


def in_threes(folder: Path, cut: int | None) -> int:
    """With batches of three a rank, so that an epoch has 8 steps on two ranks and 16 on one."""
    return cycled(folder, cut, total=8 + 8 + 5 + 6, batch_size=3)[1]


def test_a_cycle_of_just_the_run_s_steps_goes_on_at_another_number_of_ranks(ranks, tmp_path):
    straight = alone(cycled, tmp_path / "straight", None)
    for cut, world in ((5, 3), (11, 2), (21, 3)):
        assert same(ranks(world).run(cycled, tmp_path / "cut", cut))[1] == cut
    weights, steps = alone(cycled, tmp_path / "cut", None)
    assert steps == straight[1] == 24 and weights == pytest.approx(straight[0], rel=1e-5)
    # Five steps on two ranks have taken as much as ten on one, which leaves six.
    assert same(ranks(2).run(in_threes, tmp_path / "threes", 21)) == 21
    assert alone(in_threes, tmp_path / "threes", None) == 27


def copied(path: Path, to: Path) -> None:
    """Load and save again, as a script does that renames a checkpoint."""
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=24)
    model = hapi.Model(net).prepare(optimizer, nn.CrossEntropyLoss(), scheduler=cycle)
    model.load(path)
    model.save(to)


def test_a_copy_that_another_number_of_ranks_has_made_is_gone_on_from_as_the_checkpoint_itself(ranks, tmp_path):
    straight = same(ranks(2).run(cycled, tmp_path / "straight", None))
    assert same(ranks(2).run(cycled, tmp_path / "cut", 11))[1] == 11
    copied(tmp_path / "cut" / "step_11", tmp_path / "again" / "copy")
    assert same(ranks(2).run(cycled, tmp_path / "again", None)) == straight
