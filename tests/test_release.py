"""What is uploaded: sdist and wheel as `python -m build` makes them, and what their metadata says."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from test_packaging import OFFLINE, PIP, fresh_environment, python

ROOT = Path(__file__).parents[1]
FOLDERS = ("hapi", "datasets", "tests", "examples", "benchmarks", "docs", "tools")
LEFT_BEHIND = shutil.ignore_patterns(
    "__pycache__", ".git", ".*_cache", ".launchers", ".venv", "build", "dist", "*.egg-info", "checkpoints", "log"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both. Without isolation: nothing is fetched."""
    pytest.importorskip("build")
    source = tmp_path_factory.mktemp("release") / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_BEHIND)
    out = source.parent / "dist"
    python("-m", "build", "--no-isolation", "-o", str(out), str(source), cwd=source.parent)
    return out


@pytest.mark.slow
def test_twine_finds_nothing(built: Path) -> None:
    pytest.importorskip("twine")
    python("-m", "twine", "check", "--strict", *map(str, built.iterdir()), cwd=built)


@pytest.mark.slow
def test_both_say_what_they_are(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        assert "hapi/py.typed" in archive.namelist()
    version = metadata["Version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    classifiers = metadata.get_all("Classifier")
    least = metadata["Requires-Python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in classifiers
    assert any(entry.startswith("Operating System ::") for entry in classifiers)
    assert wheel.name == f"torch_hapi-{version}-py3-none-any.whl"


@pytest.mark.slow
def test_the_sdist_can_be_tested(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    there = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not re.search(r"__pycache__|^hapi/datasets/", path.relative_to(ROOT).as_posix())
    }
    assert wanted <= there, sorted(wanted - there)
    assert {"Makefile", "mkdocs.yml", "CHANGELOG.md", "LICENSE", "README.zh-CN.md", ".ci/run"} <= there
    interpreter = fresh_environment(tmp_path / "venv")
    editable = ("--no-build-isolation", "-e", str(source))
    python(*PIP, "--python", str(interpreter), "install", *OFFLINE, *editable, cwd=tmp_path)
    tests = ("tests/test_summary.py", "tests/datasets/test_dataset_sample.py", "tests/launchers/test_detection.py")
    command = [str(interpreter), "-m", "pytest", "-q", *tests]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
