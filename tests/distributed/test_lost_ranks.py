"""A rank that fails, is late, or calls something else: the others say which, within HAPI_TIMEOUT."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from closed_form import Ramp, prepared, ramp
from ranks import RankFailure, Ranks

from hapi.callbacks import Callback
from hapi.distributed import group

LIMIT = 3


class Fails(Ramp):
    """On the last rank a sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if group.get_rank() == group.get_world_size() - 1:
            raise KeyError(f"no sample {index}")
        return super().__getitem__(index)


class Late(Callback):
    """The last rank takes longer than the others wait."""

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        if group.get_rank() == group.get_world_size() - 1:
            time.sleep(LIMIT + 3)


def call(kind: str) -> None:
    model = prepared()
    if kind == "a rank fails":
        model.fit(Fails(12), batch_size=2, verbose=0)
    elif kind == "a rank fails in train_batch":
        x, y = ramp(4)
        model.train_batch(x if group.get_rank() < 2 else x.reshape(2, 2), y)
    elif kind == "a rank is late":
        model.fit(ramp(12), batch_size=2, verbose=0, callbacks=Late())
    elif group.get_rank() == 0:
        model.evaluate(ramp(12), verbose=0)


def note_down(kind: str, folder: str) -> None:
    """Write what this rank's call raises, and after how many seconds."""
    begun = time.monotonic()
    error = None
    try:
        call(kind)
    except Exception as raised:
        error = raised
    Path(folder, str(group.get_rank())).write_text(f"{time.monotonic() - begun} {type(error).__name__} {error}")
    # The pool's own collective would meet one that another rank still waits in.
    while len(list(Path(folder).iterdir())) < 3:
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("kind", "wanted", "of_last"),
    [
        ("a rank fails", "rank 2 failed first, of KeyError: 'no sample", "KeyError"),
        pytest.param(
            "a rank fails in train_batch",
            "rank 2 failed first, of ValueError: The ",
            "ValueError",
            marks=pytest.mark.slow,
        ),
        pytest.param("a rank is late", "rank 2 left no word", "RankLostError", marks=pytest.mark.slow),
        ("rank 0 alone", "ranks 1, 2 left no word", "NoneType"),
    ],
)
def test_the_others_say_which_rank_it_is(kind: str, wanted: str, of_last: str, tmp_path: Path) -> None:
    pool = Ranks(3, HAPI_TIMEOUT=str(LIMIT))
    try:
        # Their collectives do not match any more, which the pool may see.
        with suppress(RankFailure):
            pool.run(note_down, kind, str(tmp_path))
    finally:
        pool.close()
    texts = [(tmp_path / str(rank)).read_text().split(" ", 2) for rank in range(3)]
    assert texts[2][1] == of_last
    for seconds, error, text in texts[: 1 if kind == "rank 0 alone" else 2]:
        assert error == "RankLostError"
        assert wanted in text and "HAPI_TIMEOUT=3 s" in text and "on every rank" in text
        assert float(seconds) < LIMIT + 4
