"""Saves that a script makes itself, on several ranks: nothing of the loader's order is lost."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
from closed_form import prepared, ramp
from ranks import same
from resume_within import Ended, SavesAt
from torch.utils.data import DataLoader, TensorDataset


def loader() -> DataLoader[Any]:
    data = TensorDataset(*ramp(24))
    return DataLoader(data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))


def seen(model: Any) -> list[int]:
    return [int(value) for value in model.network.seen]


def saved_within(folder: Path, step: int) -> tuple[list[int], list[int]]:
    """This rank's rows of an uninterrupted run, and of one that goes on from a save of the script's own."""
    straight, first, second = prepared(), prepared(), prepared()
    straight.fit(loader(), epochs=2, verbose=0, seed=5)
    with contextlib.suppress(Ended):
        first.fit(loader(), epochs=2, verbose=0, seed=5, callbacks=SavesAt(folder / "x", 1, step))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.fit(loader(), epochs=2, verbose=0, seed=5, resume=folder / "x")
    return seen(straight)[12 + 3 * (step + 1) :], seen(second)


def test_a_save_of_ones_own_within_an_epoch_loses_no_sample(ranks, tmp_path):
    for step in (0, 2):
        for expected, got in ranks(2).run(saved_within, tmp_path, step):
            assert got == expected and len(got) == 12 - 3 * (step + 1)


def saved_between(folder: Path) -> tuple[list[int], list[int]]:
    straight, first, second = prepared(), prepared(), prepared()
    straight.fit(loader(), epochs=3, verbose=0, seed=5)
    first.fit(loader(), epochs=1, verbose=0, seed=5)
    first.save(folder / "x")
    second.fit(loader(), epochs=2, verbose=0, seed=5, save_dir=folder / "d", resume=folder / "x")
    # Nothing is left to train: what it writes is as good to go on from as what it found.
    again, last = prepared(), prepared()
    again.fit(loader(), epochs=2, verbose=0, seed=5, save_dir=folder / "d", resume=True)
    last.fit(loader(), epochs=3, verbose=0, seed=5, save_dir=folder / "d", resume=True)
    return seen(straight)[12:], seen(second) + seen(last)


def test_a_save_between_two_fits_keeps_the_order_that_is_to_come(ranks, tmp_path):
    results = ranks(2).run(saved_between, tmp_path)
    for expected, got in results:
        assert got == expected
    assert same([len(got) for _, got in results]) == 24
