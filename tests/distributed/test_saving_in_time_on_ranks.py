"""Saves within an epoch, on several ranks: all save together, and each callback when its own time has come."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from closed_form import prepared, ramp

from hapi import agreement
from hapi.callbacks import EarlyStopping, ModelCheckpoint


def saves(folder: str) -> int:
    # A meeting after each step, so that a wish is agreed on at once.
    seconds, agreement._SECONDS = agreement._SECONDS, 0.0
    try:
        model = prepared()
        callbacks = [
            ModelCheckpoint(save_dir=f"{folder}/{name}", every_seconds=limit, keep_last=99)
            for name, limit in (("hourly", 3600.0), ("often", 1e-9))
        ]
        model.fit(ramp(8), batch_size=1, callbacks=callbacks, verbose=0)
    finally:
        agreement._SECONDS = seconds
    return model.steps_trained


def saved_at_a_resume(folder: str) -> list[int]:
    """The ranks of whom a checkpoint knows that was made up for at a resume."""

    class Cut(ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt
            super().on_epoch_end(epoch, logs)

    Cut.__name__ = ModelCheckpoint.__name__  # by which its state is found
    with contextlib.suppress(KeyboardInterrupt):
        fitted(folder, Cut())
    fitted(folder, ModelCheckpoint(), resume=True)
    cursors = [torch.load(f"{folder}/{name}.opt.pt")["position"]["cursor"] for name in (1, 2)]
    return [len(cursor["ranks"] or ()) for cursor in cursors]


def fitted(folder: str, *callbacks: Any, **options: Any) -> None:
    best = EarlyStopping("loss", patience=9, verbose=0)
    prepared().fit(
        ramp(8), batch_size=1, epochs=3, callbacks=[best, *callbacks], save_dir=folder, verbose=0, seed=1, **options
    )


def test_what_a_kill_came_before_is_saved_with_the_places_of_all(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(saved_at_a_resume, str(tmp_path)) == [[2, 2], [2, 2]]


def test_each_saves_when_rank_0_s_clock_says_so_to_it(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(saves, str(tmp_path)) == [4, 4]
    found = {
        name: {path.name.removesuffix(".opt.pt") for path in (tmp_path / name).glob("*.opt.pt")}
        for name in ("hourly", "often")
    }
    assert found == {"hourly": {"1", "final"}, "often": {"step_1", "step_2", "step_3", "step_4", "1", "final"}}
