"""Every public call with arguments of wrong types and values: each is refused by hapi itself, in three parts."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from wrong_arguments import CALLS, CASES, make

import hapi

ROOT = Path(hapi.__file__).resolve().parents[1]
SOURCES = tuple(f"{ROOT / name}/" for name in ("hapi", "datasets"))
# A sentence that says what to write, to do, or what there is.
CURE = re.compile(
    r"(?:^|[.,:;] )(?:or )?"
    r"(?:Write|Pass|Give|Use|Leave|Make|Call|Run|Keep|Set|Choose|Say|Put|Derive|It takes|Known ones)\b"
)


def test_all_public_calls_are_there() -> None:
    assert {"hapi.Model.fit", "hapi.callbacks.EarlyStopping", "hapi.datasets.MNIST", "hapi.metrics.F1.update"} < set(
        CALLS
    )
    assert len(CASES) > 400


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-{re.sub('[^a-zA-Z0-9.]+', '_', repr(case[2])):.20}")
        for case in CASES
    ],
)
def test_a_wrong_argument_is_refused_in_words(
    name: str, argument: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            make(name, argument, value)
    except ImportError as error:
        pytest.skip(f"{name} needs an extra: {error}")
    place = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert place.startswith(SOURCES), f"raised by {place}: {caught.value}"
    text = str(caught.value)
    others = {other.rpartition(".")[2] for other in CALLS} - {name.rpartition(".")[2], argument}
    assert text.partition(" received ")[0] not in others, f"names another call than {name}: {text}"
    assert CURE.search(text), f"says not what to write: {text}"
    assert names(value, text), f"says not what was received: {text}"
    assert not list(tmp_path.iterdir())


def names(value: Any, text: str) -> bool:
    """Whether a message tells which value it is about."""
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape)) in text
    if isinstance(value, list) and any(isinstance(item, type) for item in value):
        return all(item.__name__ in text for item in value)
    if isinstance(value, type):
        return value.__name__ in text
    kind = re.escape(type(value).__name__)
    return repr(value)[:20] in text or re.search(rf"(?:\btype |\ban? |\(){kind}\b", text) is not None
