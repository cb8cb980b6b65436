"""A restoration by its records: what each one costs that is applied again, in silence or for real.

Both kinds share micro-batches, so neither can be timed alone. Over some restorations with more or less of each, the
time that replaying takes is a plane over the two numbers; its slopes are the prices, and what is left is paid once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whimbrel.core.protocols.restore import REPLAYING
from whimbrel.lab.bench.summary import Run

LEAST = 4
"""Runs: a plane goes through any three points."""


def replay(migrations: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of a run's restorations: how many records were applied again, in silence and for real (intermediate: they came
    while nobody was there), and how long that took. Nothing of other moves."""
    mine = [migration for migration in migrations if "replayed" in migration]
    if not mine:
        return {}
    took = [phase["ms"] for migration in mine for phase in migration["phases"] if phase["phase"] == REPLAYING]
    silent = sum(migration["silent"] for migration in mine)
    return {
        "silent": silent,
        "intermediate": sum(migration["replayed"] for migration in mine) - silent,
        "replay_ms": round(sum(took), 1),
    }


def prices(runs: Sequence[Run]) -> dict[str, float] | None:
    """Milliseconds for a record in silence, for an intermediate one, and once; None if the runs do not tell."""
    rows = [run["figures"] for run in runs if "replay_ms" in run["figures"]]
    if len(rows) < LEAST:
        return None
    given = np.array([[row["silent"], row["intermediate"], 1.0] for row in rows])
    took = np.array([row["replay_ms"] for row in rows])
    found, _, rank, _ = np.linalg.lstsq(given, took, rcond=None)
    if rank < 3:
        return None
    rest, spread = took - given @ found, took - took.mean()
    return {
        "silent_ms": round(float(found[0]), 4),
        "intermediate_ms": round(float(found[1]), 4),
        "once_ms": round(float(found[2]), 1),
        "r2": round(1.0 - float((rest**2).sum() / (spread**2).sum()), 3),
        "record_ms": round(float(took.sum() / given[:, :2].sum()), 4),
    }
