"""The README's picture: an epoch in each library, by the hand-written loop's, as RESULTS.md has them.

    python benchmarks/picture.py            writes docs/images/speed.svg; matplotlib is needed

It draws the last table under "1 process" and under "2 processes".
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "speed.svg"
NAMES = {
    "hand": "by hand",
    "fit": "hapi",
    "skorch": "skorch",
    "keras": "Keras on torch",
    "keras-compiled": "Keras on torch, compiled",
}


def table(text: str, heading: str) -> dict[str, float]:
    """Each way's seconds by the hand-written loop's: the medians of a table's column "of the loop's".

    Raises:
        SystemExit: There is no such table.
    """
    found = re.search(rf"^### {re.escape(heading)}$(.*?)(?=^#|\Z)", text, re.M | re.S)
    rows = [line.strip("|").split("|") for line in found.group(1).splitlines() if line.startswith("|")] if found else []
    ratios = {cells[0].strip(): float(cells[2].split("(")[0]) for cells in rows[2:]}
    if not ratios:
        raise SystemExit(f"RESULTS.md has no table under {heading!r}: run benchmarks/peers.py and put it there.")
    return ratios


def draw(tables: dict[str, dict[str, float]], path: Path) -> None:
    """Bars, the fastest first; hapi's in another colour."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    heights = [len(ratios) for ratios in tables.values()]
    # The same file for the same figures, with its texts as texts.
    with rc_context({"svg.hashsalt": "hapi", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7, 0.3 * sum(heights) + 1.2), layout="constrained")
        panels = figure.subplots(len(tables), 1, height_ratios=heights, sharex=True)
        for panel, (title, ratios) in zip(panels, tables.items(), strict=True):
            ways = sorted(ratios, key=lambda way: ratios[way], reverse=True)
            colours = ["#d9480f" if way == "fit" else "#868e96" for way in ways]
            names = [NAMES.get(way, way.replace("-", ", ").capitalize()) for way in ways]
            panel.bar_label(panel.barh(names, [ratios[way] for way in ways], color=colours), fmt="%.2f", padding=3)
            panel.set_title(title, loc="left")
            panel.spines[["top", "right"]].set_visible(False)
        panels[-1].set_xlabel("time of an epoch; a tuned loop by hand: 1")
        path.parent.mkdir(exist_ok=True)
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


if __name__ == "__main__":
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    draw({heading: table(results, heading) for heading in ("1 process", "2 processes")}, PICTURE)
    print(f"drawn: {PICTURE.relative_to(ROOT)}")
