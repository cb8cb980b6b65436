"""Pictures of a comparison, drawn from its report: latency over time, bars, growth.

Lines differ by style and marker, bars by hatching: never by colour alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from whimbrel.lab.bench.run import described
from whimbrel.lab.bench.summary import grouped

COLOURS = ("#2a9d8f", "#e9a23b", "#d1495b", "#1d3557", "#7b6d8d", "#457b9d")
STYLES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "x")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
ROW = 3
"""The number of cells in a row."""


def draw(report: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw all pictures that the report has data for; return their paths."""
    drawn = []
    if any(run["series"] for run in report["runs"]):
        drawn.append(_latency(report, folder / f"{stem}-latency.png"))
    if any(figures["duration_ms"] for figures in report["summary"].values()):
        drawn.append(_bars(report, folder / f"{stem}-bars.png"))
    if any(report.get("growth", {}).get("fit", {}).values()):
        drawn.append(_growth(report, folder / f"{stem}-growth.png"))
    return drawn


def _latency(report: dict[str, Any], path: Path) -> Path:
    """A panel for each cell, a line for each candidate's first run there; second 0 is the order to move."""
    names = list(report["cells"][0]["parameters"])
    labels = list(report["summary"])
    panels = grouped(report["runs"], lambda run: str([run["parameters"][name] for name in names]))
    columns = min(ROW, len(panels))
    rows = -(-len(panels) // columns)
    size = (10, 4.5) if len(panels) == 1 else (5.2 * columns, 3.2 * rows)
    figure = Figure(figsize=size, dpi=120)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for axes, runs in zip(grid.flat, panels, strict=False):
        for group in grouped([run for run in runs if run["series"]], lambda run: run["label"]):
            place, series = labels.index(group[0]["label"]), group[0]["series"]
            axes.plot(
                series["seconds"],
                series["max_ms"],
                color=COLOURS[place % len(COLOURS)],
                ls=STYLES[place % len(STYLES)],
                marker=MARKERS[place % len(MARKERS)],
                markevery=3,
                ms=4,
                label=group[0]["label"],
            )
        text = ", ".join(f"{name} {runs[0]['parameters'][name]}" for name in names)
        _tidy(axes, text or described(runs[0]["parameters"]), "seconds since the order to move", "worst latency, ms")
        axes.axvline(0, color="black", lw=0.8)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    return _save(figure, path)


def _bars(report: dict[str, Any], path: Path) -> Path:
    labels = list(report["summary"])
    figure = Figure(figsize=(11, 3.8), dpi=120)
    grid = figure.subplots(1, 3)
    panels = (
        ("stoppage_ms", 1.0, "stoppage, ms"),
        ("duration_ms", 1.0, "duration, ms"),
        ("bytes_sent", 2**20, "MiB sent"),
    )
    for axes, (name, unit, text) in zip(grid, panels, strict=True):
        values = [(report["summary"][label][name] or 0) / unit for label in labels]
        for place, value in enumerate(values):
            hatch, colour = HATCHES[place % len(HATCHES)], COLOURS[place % len(COLOURS)]
            axes.bar(place, value, color=colour, hatch=hatch, edgecolor="white")
            axes.text(
                place, value, f"{value:,.3g}" if value < 1000 else f"{value:,.0f}", ha="center", va="bottom", fontsize=8
            )
        axes.set_xticks(range(len(labels)), labels, rotation=20 if len(labels) > 3 else 0)
        _tidy(axes, "", "candidate", f"{text} (median)")
    return _save(figure, path)


def _growth(report: dict[str, Any], path: Path) -> Path:
    figure = Figure(figsize=(7, 4.8), dpi=120)
    axes = figure.subplots()
    for place, (label, line) in enumerate(report["growth"]["fit"].items()):
        runs = [run for run in report["runs"] if run["label"] == label]
        mib = np.array([run["figures"]["state_bytes"] for run in runs]) / 2**20
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        axes.scatter(mib, [run["figures"]["duration_ms"] for run in runs], color=colour, marker=marker, label=label)
        if line:
            x = np.linspace(mib.min(), mib.max(), 200)
            text = f"{line['slope']:.1f} ms/MiB + {line['intercept']:,.0f} ms, r² {line['r2']:.3f}"
            axes.plot(
                x, line["slope"] * x + line["intercept"], color=colour, ls=STYLES[place % len(STYLES)], label=text
            )
    copies = sorted((int(size) / 2**20, ms) for size, ms in report["growth"]["copy_ms"].items())
    axes.plot(
        *zip(*copies, strict=True), color="black", lw=1, ls=(0, (1, 3)), marker="+", label="bare copy through a log"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=8, frameon=False)
    _tidy(axes, "", "state moved, MiB", "duration of the move, ms")
    return _save(figure, path)


def _tidy(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> Path:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
