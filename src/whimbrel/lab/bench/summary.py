"""Summaries of many runs: medians for each candidate, for each cell of a sweep, and a line fitted to a sweep."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import inf, isinf
from statistics import median
from typing import Any

import msgspec
import numpy as np

MOVED = ("stoppage_ms", "peak_ms", "duration_ms", "p99_ratio", "stabilised_ms", "bytes_sent")
RESTORED = ("silent", "intermediate", "replay_ms")
STILL = ("commit_ms", "batch_ms")
FIGURES = (*MOVED, *RESTORED, *STILL)
BASELINES = ("live", "pause")

Run = dict[str, Any]


def figures(run: Run) -> dict[str, float | None]:
    """One run's figures, by the names of the summary."""
    own = {**run["figures"], "commit_ms": run["commit_ms"], "batch_ms": run["batch_ms"].get("p50")}
    return {name: own.get(name) for name in FIGURES}


def medians(runs: Sequence[Run]) -> dict[str, float | None]:
    """The median of each figure. One that a run does not have, such as the time until it was stable, is infinite."""
    every = [figures(run) for run in runs]
    middle = {name: median(inf if (value := one[name]) is None else value for one in every) for name in FIGURES}
    return {name: None if isinf(value) else round(value, 3) for name, value in middle.items()}


def grouped(runs: Sequence[Run], by: Callable[[Run], Hashable]) -> list[list[Run]]:
    """The runs in groups, in the order in which each group first appears."""
    groups: dict[Hashable, list[Run]] = {}
    for run in runs:
        groups.setdefault(by(run), []).append(run)
    return list(groups.values())


def summarise(runs: Sequence[Run]) -> dict[str, dict[str, float | None]]:
    """By candidate: the medians over all its runs, whatever their parameters."""
    return {group[0]["label"]: medians(group) for group in grouped(runs, lambda run: run["label"])}


def cells(runs: Sequence[Run], varied: Sequence[str]) -> list[dict[str, Any]]:
    """The medians of each candidate at each point of a sweep; `varied` are the parameters that span it."""

    def place(run: Run) -> bytes:
        return msgspec.json.encode([run["label"], *(run["parameters"][name] for name in varied)])

    return [
        {
            "label": group[0]["label"],
            "parameters": {name: group[0]["parameters"][name] for name in varied},
            "runs": len(group),
            **medians(group),
        }
        for group in grouped(runs, place)
    ]


def ratios(summary: dict[str, dict[str, float | None]]) -> dict[str, dict[str, dict[str, float]]]:
    """Each candidate's figures divided by those of `live` and of `pause`, where both are above zero."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for baseline in BASELINES:
        for label, mine in summary.items():
            if baseline in summary and label != baseline:
                pairs = {name: (mine[name], summary[baseline][name]) for name in FIGURES}
                found.setdefault(label, {})[f"vs_{baseline}"] = {
                    name: round(one / other, 3) for name, (one, other) in pairs.items() if one and other
                }
    return found


def fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float] | None:
    """The straight line through some points and how well it fits: r² is the part of the variation that it explains.

    None for fewer than three different points: a line fits any two.
    """
    if len(set(x)) < 3:
        return None
    slope, intercept = np.polyfit(x, y, 1)
    rest = np.asarray(y) - (slope * np.asarray(x) + intercept)
    spread = float(((np.asarray(y) - np.mean(y)) ** 2).sum())
    r2 = 1.0 - float((rest**2).sum()) / spread if spread else 1.0
    return {"slope": float(slope), "intercept": float(intercept), "r2": r2}
