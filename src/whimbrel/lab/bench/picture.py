"""Pictures: latency over time, with the moves marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whimbrel.lab.bench.measure import Release

BIN_US = 500_000
_COLOURS = {"live": "#2a9d8f", "pause": "#e9a23b", "restart": "#d1495b"}
_LINES = ["#1d3557", "#7b6d8d", "#457b9d"]


def latency_over_time(
    path: Path,
    groups: Mapping[str, Sequence[Release]],
    moves: Sequence[Mapping[str, Any]],
    title: str,
    zero: int,
    marks: Sequence[tuple[int, str]] = (),
) -> None:
    """Median and worst latency of each group of keys, half a second at a time; each move is a band.

    A move needs `start_us`, `end_us`, `protocol`, `label`. Releases before `zero` are omitted.
    `marks`: times with their names, each a line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 4.6), dpi=130)
    for (name, all_releases), colour in zip(groups.items(), _LINES, strict=False):
        releases = [release for release in all_releases if release.at_us >= zero]
        at = np.array([release.at_us for release in releases])
        latency = np.array([release.latency_us for release in releases]) / 1e6
        bins = (at - zero) // BIN_US
        edges = np.unique(bins)
        seconds = (edges + 0.5) * BIN_US / 1e6
        median = [np.median(latency[bins == edge]) for edge in edges]
        worst = [latency[bins == edge].max() for edge in edges]
        axes.plot(seconds, median, color=colour, lw=2, label=f"{name}, median")
        axes.plot(seconds, worst, color=colour, lw=0.9, ls=":", label=f"{name}, worst")
    top = axes.get_ylim()[1] * 1.3
    axes.set_ylim(0, top)
    for move in moves:
        start, end = ((move[side] - zero) / 1e6 for side in ("start_us", "end_us"))
        axes.axvspan(start, end, color=_COLOURS.get(move["protocol"], "#888888"), alpha=0.28, lw=0)
        axes.text(start, top * 0.985, move["label"], ha="left", va="top", fontsize=8)
    for at_us, name in marks:
        second = (at_us - zero) / 1e6
        axes.axvline(second, color="#d1495b", lw=0.8)
        axes.text(second, top * 0.985, name, ha="right", va="top", fontsize=6, rotation=90)
    axes.set_xlabel("seconds")
    axes.set_ylabel("latency, s (gateway to gate)")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, -0.27), ncols=4)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
