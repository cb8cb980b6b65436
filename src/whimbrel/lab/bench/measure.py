"""The computation of each figure of a report, from the releases and the times of each migration.

The definitions are fixed (docs/operations/figures.md): a figure means the same in every report. Correctness is checked
in oracle.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from whimbrel.core.keys import Selection
from whimbrel.core.protocols.machine import ABORTED, DONE, Migration
from whimbrel.core.protocols.restore import RESTORE
from whimbrel.core.record import Result

BEFORE = AFTER = 10_000_000
"""Microseconds before and after a move that it is compared with."""
TAIL = 1_000_000
"""Microseconds after a move's end that still count as `during`."""


class Release(NamedTuple):
    """A result, and when the gate released it."""

    at_us: int
    result: Result

    @property
    def latency_us(self) -> int:
        return self.at_us - self.result.ingress_us


# ── Times ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the maximum, in milliseconds, of microseconds; empty if there are no values."""
    if not len(values):
        return {}
    array = np.asarray(values) / 1000
    p50, p99 = np.percentile(array, [50, 99])
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1), "max": round(float(array.max()), 1)}


def span(migration: Migration) -> tuple[int, int]:
    """When a migration was ordered and when it was over, in microseconds."""
    over = (line.at_us for line, following in pairwise(migration.story) if following.phase in (DONE, ABORTED))
    return migration.story[0].at_us, next(over, migration.story[-1].at_us)


def phases(migration: Migration) -> list[dict[str, Any]]:
    """How long each phase took."""
    found: dict[str, float] = {}
    for line, following in pairwise(migration.story):
        found[following.phase] = found.get(following.phase, 0.0) + (following.at_us - line.at_us) / 1000
    return [{"phase": phase, "ms": round(ms, 1)} for phase, ms in found.items()]


def longest_gap(times: Sequence[int], start: int, end: int) -> int:
    """The longest time without a release that overlaps this span; the nearest release on either side is its edge."""
    first, last = bisect_left(times, start), bisect_right(times, end)
    around = times[max(0, first - 1) : last + 1]
    return max((b - a for a, b in pairwise(around)), default=0)


def stabilised(releases: Sequence[Release], start: int, limit_us: float) -> float | None:
    """Milliseconds until the first time after which all latencies stay below a limit for 10 s.

    None if that was not observed: the releases may end before the 10 s do.
    """
    if not releases:
        return None
    moment = start
    for release in releases:
        if release.at_us < start or release.latency_us < limit_us:
            continue
        if release.at_us > moment + AFTER:
            break
        moment = release.at_us
    return (moment - start) / 1000 if releases[-1].at_us >= moment + AFTER else None


def measure(migration: Migration, selection: Selection, releases: Sequence[Release], batch_ms: float) -> dict[str, Any]:
    """All figures of one migration, of the moved keys only. `releases` in the order of their release."""
    moved = {key for key in {release.result.key for release in releases} if key in selection}
    mine = [release for release in releases if release.result.key in moved]
    times = [release.at_us for release in mine]
    start, end = span(migration)

    def latencies(since: int, until: int) -> list[int]:
        part = mine[bisect_left(times, since) : bisect_right(times, until)]
        return [release.latency_us for release in part]

    before = latencies(start - BEFORE, start)
    usual_gap = longest_gap([t for t in times if start - BEFORE <= t <= start], start - BEFORE, start)
    stoppage = max(0, longest_gap(times, start, end + TAIL) - usual_gap) / 1000
    move = migration.move
    return {
        "id": move.id,
        "stage": move.stage,
        "protocol": move.protocol,
        "from": migration.from_site,
        "to": migration.to_site,
        "keys": migration.keys or len({release.result.key for release in mine}),
        "state_bytes": migration.state_bytes,
        "bytes_sent": migration.sent_bytes,
        "outcome": migration.phase,
        "reason": migration.reason if migration.phase != DONE else None,
        "duration_ms": round((end - start) / 1000, 1),
        "stoppage_ms": round(stoppage, 1),
        "stoppage_batches": round(stoppage / batch_ms, 2) if batch_ms else None,
        "stabilised_ms": stabilised(mine, start, 1.1 * max(before)) if before else None,
        "latency_ms": {
            "before": percentiles(before),
            "during": percentiles(latencies(start, end + TAIL)),
            "after": percentiles(latencies(end + TAIL, end + TAIL + AFTER)),
        },
        "phases": phases(migration),
        **({"replayed": migration.replayed, "silent": migration.silent} if move.protocol == RESTORE.name else {}),
    }
