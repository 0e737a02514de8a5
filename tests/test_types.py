"""Type hints as users meet them: mypy --strict on a script that uses Model, callbacks, metrics and data sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a type checker must not let pass.
MISTAKES = """
import hapi
from hapi.metrics import Accuracy

value: str = Accuracy(topk="five").compute()
hapi.Model(3).fit(None, epochs="2")
hapi.callbacks.EarlyStopping(patience="long")
hapi.callbacks.EarlyStopping(restore_best_weights=True)
hapi.callbacks.ModelCheckpoint(filepath="best")
hapi.datasets.MNIST(train=True)
"""


def strictly(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Check a script as one of another project, which finds hapi on its path."""
    options = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={folder / 'cache'}"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", "mypy", *options, str(script)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    done = strictly(ROOT / "tests" / "typed_script.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    said = strictly(tmp_path / "mistakes.py", tmp_path).stdout
    assert said.count("error:") == 8, said
