"""What is installed: the wheel's contents, and the package used from a wheel and from an editable install.

Nothing is downloaded: the fresh environments find torch by a `.pth` file that names the folder where it lies.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
import torchvision
import tqdm

ROOT = Path(__file__).parents[1]
PIP = ("-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-index", "--quiet")
SAMPLE_LIMIT = 5_000_000
MODULE_LIMIT = 60

IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
import hapi
names = []
for info in [None, *pkgutil.walk_packages(hapi.__path__, "hapi.")]:
    module = hapi if info is None else importlib.import_module(info.name)
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
        names.append(f"{module.__name__}.{name}")
print(json.dumps([hapi.__file__, names]))
"""

WEIGH_IMPORT = """
import json, sys
import torch
before = set(sys.modules)
import hapi
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def python(*arguments: str, interpreter: Path | str = sys.executable, cwd: Path) -> str:
    """Run an interpreter away from the checkout, so that only what is installed is found."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(interpreter), *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_copy(folder: Path) -> Path:
    """A copy of what the build reads: a build leaves its traces in the folder that it reads."""
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("hapi", "datasets"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def fresh_environment(folder: Path) -> Path:
    """A virtual environment without pip and without hapi that finds torch all the same; its interpreter."""
    python("-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
    interpreter = folder / "bin" / "python"
    site = python("-c", "import site; print(site.getsitepackages()[0])", interpreter=interpreter, cwd=folder)
    homes = {str(Path(module.__file__).parents[1]) for module in (torch, torchvision, tqdm)}
    (Path(site.strip()) / "borrowed.pth").write_text("\n".join(sorted(homes)) + "\n")
    return interpreter


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = source_copy(tmp_path_factory.mktemp("source"))
    out = tmp_path_factory.mktemp("wheel")
    python(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", str(out), str(source), cwd=out)
    (built,) = out.iterdir()
    return built


def packages_of_the_source() -> set[str]:
    return {path.rpartition("/")[0] for path in modules_of_the_source() if path.endswith("/__init__.py")}


def modules_of_the_source() -> set[str]:
    """The paths that they have in the wheel, whether or not the link hapi/datasets is there."""
    within_hapi = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hapi").rglob("*.py")}
    return within_hapi | {f"hapi/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "datasets").rglob("*.py")}


def test_the_wheel_holds_hapi_and_nothing_beside_it(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
        samples = [entry for entry in archive.infolist() if entry.filename.startswith("hapi/datasets/samples/")]
    dist_info = metadata_name.partition("/")[0]
    assert wheel.name.startswith("torch_hapi-")
    assert {name.partition("/")[0] for name in names} == {"hapi", dist_info}
    assert "hapi/py.typed" in names
    assert f"{dist_info}/licenses/LICENSE" in names
    assert metadata["Name"] == "torch-hapi"
    assert metadata["License-Expression"] == "MIT"
    core = {line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert core == {"torch>=2.9", "torchvision", "tqdm"}
    assert 1_000_000 < sum(entry.file_size for entry in samples) <= SAMPLE_LIMIT
    assert any("LICENSE" in entry.filename or "NOTICE" in entry.filename for entry in samples)


def test_every_package_and_module_is_in_the_wheel(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = {package for package in packages_of_the_source() if f"{package}/__init__.py" not in names}
    assert not missing, f"add {sorted(missing)} to tool.setuptools.packages in pyproject.toml"
    assert modules_of_the_source() <= names, "a module has no __init__.py beside it"


def test_an_installed_wheel_gives_every_public_name(wheel: Path, tmp_path: Path) -> None:
    interpreter = fresh_environment(tmp_path / "venv")
    python(*PIP, "--python", str(interpreter), "install", *OFFLINE, str(wheel), cwd=tmp_path)
    output = python("-c", IMPORT_EVERYTHING, interpreter=interpreter, cwd=tmp_path)
    location, names = json.loads(output.splitlines()[-1])
    assert Path(location).is_relative_to(tmp_path)
    expected = {"Model", "datasets.MNIST", "metrics.Accuracy", "callbacks.EarlyStopping"}
    assert {f"hapi.{name}" for name in expected} <= set(names)


def test_an_editable_install_finds_the_datasets_too(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = source_copy(tmp_path / "source")
    interpreter = fresh_environment(tmp_path / "venv")
    editable = ("--no-build-isolation", "-e", str(source))
    python(*PIP, "--python", str(interpreter), "install", *OFFLINE, *editable, cwd=tmp_path)
    code = "import hapi.datasets; print(hapi.datasets.__file__); print(hapi.datasets.MNIST.__module__)"
    location, module = python("-c", code, interpreter=interpreter, cwd=tmp_path).split()
    assert Path(location).resolve() == source / "datasets" / "__init__.py"
    assert module.startswith("hapi.datasets")


def test_import_hapi_is_as_light_as_import_torch(tmp_path: Path) -> None:
    code = f"import sys; sys.path.append({str(ROOT)!r})\n{WEIGH_IMPORT}"
    added = json.loads(python("-c", code, cwd=tmp_path))
    heavy = {"torchvision", "torchmetrics", "matplotlib", "tensorboard", "PIL"}
    assert not heavy & {name.partition(".")[0] for name in added}
    assert "hapi.datasets" not in added
    assert len(added) <= MODULE_LIMIT, added
