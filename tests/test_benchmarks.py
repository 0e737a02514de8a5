"""The benchmarks' programs run; what they measure is no test's business."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_the_cards_script_runs_its_part_for_a_cpu(tmp_path: Path) -> None:
    done = run(str(ROOT / "benchmarks" / "gpu.py"), "mlp", "--laps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| fit / hand |" in done.stdout
    for check in ("amp-bf16", "amp-fp16", "nccl", "resume"):
        assert f"| {check} | passed |" in done.stdout, done.stdout
    assert "Left out: the ways compiled, graph; the checks pinned." in done.stdout


@pytest.mark.slow
def test_a_check_that_fails_says_so(tmp_path: Path) -> None:
    # The plain loop in another precision than fit.
    other = "import gpu_checks, torch; print(gpu_checks.amp(torch.float16, 'bf16', None))"
    done = run("-c", f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); {other}", cwd=tmp_path)
    assert done.returncode == 1
    assert "losses " in done.stderr and "Traceback" not in done.stderr
