"""An epoch of `Model.fit` beside the same epoch in other libraries, each against the tuned hand-written loop.

    python benchmarks/peers.py --install                  the libraries, into .peers/, on the torch of this Python
    python benchmarks/peers.py                            one process: a Markdown table, half an hour
    python benchmarks/peers.py --ranks 1 2 --laps 9       and on two processes
    python benchmarks/peers.py --ways fit lightning       only these, and the loop

What they do is in peer_ways.py. They take turns, an epoch each (see turns.py); a ratio is taken between epochs that
follow one another. All are alive meanwhile: about 10 GB on one process. Output goes to a file, where each library shows
what it shows there by default.

Equal work is checked: as many optimizer steps as the loop, and after the last epoch a loss that lies within 15 % of the
loop's (or 0.002); the order of the samples and the dropout masks differ. Where that does not hold the row says so, and
the command fails.

On two processes run those that train one network on several: hapi, Lightning (ddp), Accelerate and Ignite (idist), each
over gloo with one thread a process. Keras on torch, Poutyne and skorch document no simple way to do that on CPUs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from bench_ddp import places
from bench_fit import provide_data
from peer_ways import ALONE, ON_RANKS
from turns import Way, compare, machine, ratios, row, spread, tell_unequal

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".peers"
PYTHON = PEERS / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
PACKAGES = ("lightning", "accelerate", "keras", "pytorch-ignite", "poutyne", "skorch")
OURS = ("hand", "fit")
VERSIONS = f"""
import importlib.metadata, torch
print(torch.__file__, ", ".join(f"{{name}} {{importlib.metadata.version(name)}}" for name in {PACKAGES}), sep="\\n")
"""


def install() -> None:
    """Make the environment of the other libraries: they find the torch of this Python, and none is downloaded."""
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
    ask = [str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    folder = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    Path(folder, "torch_of_benchmark.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    with tempfile.TemporaryDirectory() as temporary:
        # So that pip rather fails than brings another torch.
        kept = Path(temporary, "constraints")
        kept.write_text("".join(f"{name}=={importlib.metadata.version(name)}\n" for name in ("torch", "torchvision")))
        pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-c", str(kept)]
        subprocess.run([*pip, *PACKAGES], check=True)
    print(versions())


def versions() -> str:
    """Those of the libraries.

    Raises:
        SystemExit: They are not installed, or have another torch than this Python.
    """
    asked = PYTHON.exists() and subprocess.run([str(PYTHON), "-c", VERSIONS], capture_output=True, text=True)
    if not asked or asked.returncode:
        raise SystemExit(
            f"The other libraries are not in {PEERS.name}/, so nothing can be compared. Run: "
            "python benchmarks/peers.py --install"
        )
    where, found = asked.stdout.splitlines()
    if not Path(where).samefile(torch.__file__):
        raise SystemExit(
            f"{PEERS.name}/ was made for the torch at {where}, but this Python has {torch.__file__}: times would not "
            "compare. Run: python benchmarks/peers.py --install"
        )
    return found


def made(name: str, ranks: int) -> Way:
    """A way on so many processes."""
    python = sys.executable if name in OURS else str(PYTHON)
    # hapi from this checkout. Not for the others: its folder datasets/ would hide a package of that name.
    variables = {"PYTHONPATH": str(ROOT) if name in OURS else ""}
    environments = [{}] if ranks == 1 else places(ranks)
    script = Path(__file__).with_name("peer_ways.py")
    return Way(name, [python, str(script), name], [variables | environment for environment in environments])


def table(ways: Sequence[Way]) -> Iterator[str]:
    """A row for each way, the loop's first."""
    hand = ways[0]
    yield row(
        "way", ["seconds an epoch", "of the loop's", "CPU seconds", "of the loop's", "MB", "steps", "loss", "acc"]
    )
    yield row("---", ["---"] * 8)
    for way in ways:
        last = way.laps[-1]
        times = []
        for key in ("elapsed", "cpu"):
            times += [spread([lap[key] for lap in way.laps], 2), spread(ratios(way, hand, key), 2)]
        found = [f"{last['peak']:.0f}", f"{last['steps']:.0f}", f"{last['loss']:.4f}", f"{last['acc']:.4f}"]
        yield row(way.name, [*times, *found])


def run(ranks: int, only: Sequence[str], laps: int) -> bool:
    """Let all ways take turns and print their table.

    Returns:
        Whether all did the same work.
    """
    names = ALONE if ranks == 1 else ON_RANKS
    ways = [made(name, ranks) for name in names if name == "hand" or not only or name in only]
    with tempfile.TemporaryDirectory() as folder:
        compare(ways, laps, Path(folder, "log"))
    print(f"\n### {ranks} process{'es' if ranks > 1 else ''}\n", *table(ways), sep="\n", flush=True)
    return not tell_unequal(ways, ways[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Model.fit beside other libraries, against a hand-written loop.")
    parser.add_argument("--install", action="store_true", help="install the other libraries and end")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="processes: a table for each")
    parser.add_argument("--laps", type=int, default=9, help="how many epochs of each way are timed")
    parser.add_argument("--ways", nargs="+", default=[], help=f"only these, of {', '.join(ALONE)}")
    options = parser.parse_args()
    if unknown := set(options.ways) - set(ALONE):
        parser.error(f"unknown ways {sorted(unknown)}; there are {', '.join(ALONE)}")
    if options.install:
        install()
        return
    found = versions()
    provide_data()
    print(f"{machine()}; {found}")
    print(f"Medians of {options.laps} epochs, quartiles in brackets; steps, loss and accuracy after the last one.")
    same = [run(ranks, options.ways, options.laps) for ranks in options.ranks]
    sys.exit(not all(same))


if __name__ == "__main__":
    main()
