"""Brings every launcher that a package index has: Debian packages, and one virtual environment a Python package.

    python tests/real_launchers/install.py

Quick where all is there already. What cannot be had is named, with the reason; the tests then fail for it. The
environments lie in .launchers (HAPI_LAUNCHERS_HOME names another folder), and see the packages of the environment that
runs this: torch is not installed a second time.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("HAPI_LAUNCHERS_HOME") or ROOT / ".launchers").absolute()

DEBIAN = {
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.mpich": "mpich",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
}
"""Command -> package."""

PYTHON = {
    "accelerate": "accelerate>=1.15,<2",
    "paddle": "paddlepaddle>=3.3,<4",
    "ray": "ray[train]>=2.60,<3",
}
"""Environment -> what is installed into it."""


def find(command: str) -> str | None:
    """The path of a command, also where an administrator's commands lie."""
    return shutil.which(command, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def python_of(name: str) -> Path:
    """The Python of one of the environments, there or not."""
    return HOME / name / "bin" / "python"


def missing(*names: str) -> str | None:
    """Why one of these commands or environments is not there, or None."""
    for name in names:
        if name in PYTHON:
            if not _is_ready(name):
                return f"{PYTHON[name]} is not installed{_reason(name)}"
        elif find(name) is None:
            return f"{name} (Debian package {DEBIAN[name]}) is not installed{_reason('debian')}"
    return None


def _reason(name: str) -> str:
    path = HOME / f"{name}.failed"
    return f": {path.read_text()}" if path.exists() else "; run python tests/real_launchers/install.py"


def install() -> None:
    """Bring what is missing; why something could not be had is kept for `missing`."""
    HOME.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in PYTHON if not _is_ready(name)]
    # Downloading takes most of the time.
    with ThreadPoolExecutor() as pool:
        reasons = {name: pool.submit(_install_python, name) for name in wanted}
        _keep("debian", _install_debian())
    for name in PYTHON:
        _keep(name, reasons[name].result() if name in reasons else None)


def _keep(name: str, reason: str | None) -> None:
    path = HOME / f"{name}.failed"
    path.unlink(missing_ok=True)
    if reason:
        path.write_text(reason)


def _install_debian() -> str | None:
    packages = sorted({package for command, package in DEBIAN.items() if find(command) is None})
    if not packages:
        return None
    if find("apt-get") is None or os.geteuid() != 0:
        return f"apt-get install {' '.join(packages)} needs Debian (or a relative) and root"
    settings = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return _run(["apt-get", "update", "-qq"], settings) or _run(
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], settings
    )


def _stamp(name: str) -> tuple[Path, str]:
    return HOME / name / ".ready", f"{PYTHON[name]} beside {_outer_packages()}"


def _is_ready(name: str) -> bool:
    path, text = _stamp(name)
    return path.exists() and path.read_text() == text


def _outer_packages() -> str:
    return sysconfig.get_path("purelib")


def _install_python(name: str) -> str | None:
    python = python_of(name)
    if reason := _run([sys.executable, "-m", "venv", "--clear", str(HOME / name)]):
        return reason
    _see_outer_packages(python)
    if reason := _run([str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install", PYTHON[name]]):
        return reason
    path, text = _stamp(name)
    path.write_text(text)
    return None


def _see_outer_packages(python: Path) -> None:
    """After the environment's own packages come those of the environment that runs this, its links included."""
    command = "import sysconfig; print(sysconfig.get_path('purelib'))"
    inner = subprocess.run([str(python), "-c", command], check=True, capture_output=True, text=True).stdout.strip()
    folders = [_outer_packages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    (Path(inner) / "outer.pth").write_text("".join(lines))


def _run(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """The last line of what a command said, if it failed."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else f"{' '.join(command[:6])}: {said[-1] if said else done.returncode}"


def main() -> None:
    install()
    for name in [*DEBIAN, *PYTHON]:
        reason = missing(name)
        print(f"{name}: {reason}" if reason else f"{name}: {python_of(name) if name in PYTHON else find(name)}")


if __name__ == "__main__":
    main()
