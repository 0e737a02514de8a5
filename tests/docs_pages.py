"""Runs pages of docs/, as a reader would: python tests/docs_pages.py FOLDER PAGE.md ...

A page's blocks run in order, in a folder of the page's own. ``python`` blocks run in this process, as one script; with
a title they are written to a file of that name instead, which a ``sh`` block then starts. ``py`` is another library's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)

# Commands that install, or that need a cluster; their words are tested elsewhere: test_docs.py, tests/real_launchers.
ELSEWHERE = ("pip", "sbatch", "srun", "kubectl")
# Addresses that are nobody's: the command of several hosts. tests/launch runs it.
HOSTS = "192.0.2."


@dataclass
class Block:
    """A fenced block: its language, its title, its code, and the line of the page where the code starts."""

    language: str
    title: str | None
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        title = re.search(r'title="([^"]+)"', match["options"])
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(match["language"], title and title[1], textwrap.dedent(match["code"]), line))
    return found


def left_out(command: str) -> str | None:
    """Why a line of a shell block is not run here; None: it is."""
    word = command.split()[0] if command.strip() else "#"
    if word in ELSEWHERE or HOSTS in command:
        return "tested elsewhere"
    if command.startswith("python -m paddle"):
        return "tested elsewhere"
    if word in ("mpirun", "mpiexec.mpich", "accelerate") and shutil.which(word) is None:
        return f"{word} is not installed"
    return None


def runnable(code: str) -> str:
    return "\n".join(line for line in code.splitlines() if left_out(line) is None)


def run(page: Path, folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    module = ModuleType("__main__")
    module.__file__ = str(page)
    sys.modules["__main__"] = module
    for block in blocks(page):
        if block.language == "python" and block.title:
            (folder / block.title).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            # Lines of errors are those of the page.
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), vars(module))
        elif block.language == "sh" and runnable(block.code).strip():
            command = ["bash", "-euo", "pipefail", "-c", runnable(block.code)]
            done = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL)
            if done.returncode:
                raise RuntimeError(f"{page}:{block.line}: exit code {done.returncode}\n{block.code}")


def shims(folder: Path) -> None:
    """The commands that an installation puts beside Python, of this checkout."""
    modules = {"python": "", "torchrun": "-m torch.distributed.run", "hapirun": "-m hapi.distributed.launch"}
    folder.mkdir(parents=True)
    for name, module in modules.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (folder / name).chmod(0o755)


def main(folder: Path, pages: list[str]) -> int:
    shims(folder / "bin")
    environment = {**os.environ, "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])}
    # A test runs as root in a container, which Open MPI wants to be told of.
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    failed = 0
    for name in pages:
        began = time.monotonic()
        own = folder / Path(name).stem
        own.mkdir()
        try:
            run(DOCS / name, own, environment)
        except BaseException:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {name}", flush=True)
        else:
            print(f"passed {name} in {time.monotonic() - began:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
