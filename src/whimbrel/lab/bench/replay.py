"""The cost of a restoration by its records: of each that is replayed, silently or with results.

Both kinds share micro-batches, so neither can be timed alone. Over several restorations with different numbers of each,
the replay time is a plane over the two numbers; its slopes are the costs per record, and its intercept occurs once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whimbrel.core.protocols.restore import REPLAYING
from whimbrel.lab.bench.summary import Run

LEAST = 4
"""The minimum number of runs: a plane fits any three points."""


def replay(migrations: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of a run's restorations: how many records were replayed, silently and with results (intermediate: they came
    during the outage), and how long that took. Empty for other moves."""
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
    """Milliseconds per silent record, per intermediate record, and once; None if the runs do not determine them."""
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
