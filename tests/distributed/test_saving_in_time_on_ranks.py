"""Saves within an epoch, on several ranks: all save together, and each callback when its own time has come."""

from __future__ import annotations

from pathlib import Path

from closed_form import prepared, ramp

from hapi import agreement
from hapi.callbacks import ModelCheckpoint


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


def test_each_saves_when_rank_0_s_clock_says_so_to_it(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(saves, str(tmp_path)) == [4, 4]
    found = {
        name: {path.name.removesuffix(".opt.pt") for path in (tmp_path / name).glob("*.opt.pt")}
        for name in ("hourly", "often")
    }
    assert found == {"hourly": {"1", "final"}, "often": {"step_1", "step_2", "step_3", "step_4", "1", "final"}}
