"""How each figure of a report is computed, from what was sent, what was released, and when each migration ran.

The definitions are fixed (docs/operations/figures.md): a figure means the same in every report.
"""

from __future__ import annotations

import collections
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from whimbrel.core.instance import Instance
from whimbrel.core.keys import Selection
from whimbrel.core.operator import Operator
from whimbrel.core.protocols.machine import ABORTED, DONE, Migration
from whimbrel.core.protocols.restore import RESTORE
from whimbrel.core.record import Kind, Record, Result
from whimbrel.log import codec
from whimbrel.log.contract import Log

BEFORE = AFTER = 10_000_000
"""Microseconds before and after a move that it is compared with."""
TAIL = 1_000_000
"""What still counts as `during` after a move's end."""


class Release(NamedTuple):
    """A result, and when the gate let it out."""

    at_us: int
    result: Result

    @property
    def latency_us(self) -> int:
        return self.at_us - self.result.ingress_us


# ── Right or wrong ───────────────────────────────────────────────────────────────────────────────────────────────────


def sequential(ingress: Log, operator: Operator) -> tuple[dict[str, list[Any]], int]:
    """What each key's results would be had one instance applied all records in the order of arrival; and how many."""
    instance = Instance("sequential", operator)
    records: list[Record] = []
    event: Any = None
    sent = 0
    for entry in ingress.read(0):
        if event is None:
            names = codec.decode(entry.blob).schema.names[len(codec.META_NAMES) :]
            event = make_event(names)
        for record in codec.records(entry):
            if record.kind == Kind.DATA:
                sent += 1
                records.append(record._replace(seq=record.offset, body=event(*record.body)))
            elif record.kind == Kind.TICK:
                records.append(record._replace(seq=record.offset))
    expected: dict[str, list[Any]] = defaultdict(list)
    for result in instance.apply(records).results:
        expected[result.key].append((result.seq, result.n, result.values))
    return expected, sent


def make_event(names: list[str]) -> Any:
    """A type with an attribute for each of a stage's columns."""
    return collections.namedtuple("Event", names)


def compare(expected: dict[str, list[Any]], releases: Iterable[Release]) -> dict[str, int]:
    """Lost, duplicated, out of order, wrong: against the sequential run."""
    got: dict[str, list[Any]] = defaultdict(list)
    for _, result in releases:
        got[result.key].append((result.seq, result.n, result.values))
    counts = {"lost": 0, "duplicated": 0, "out_of_order": 0, "wrong": 0}
    for key in expected.keys() | got.keys():
        wanted = {item[:2]: item[2] for item in expected.get(key, ())}
        seen: set[tuple[int, int]] = set()
        last = (-1, -1)
        for *place, values in got.get(key, ()):
            identity = (place[0], place[1])
            if identity in seen:
                counts["duplicated"] += 1
                continue
            seen.add(identity)
            if identity not in wanted or wanted[identity] != values:
                counts["wrong"] += 1
            if identity < last:
                counts["out_of_order"] += 1
            last = max(last, identity)
        counts["lost"] += len(wanted.keys() - seen)
    return counts


# ── How long ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the maximum, in milliseconds, of microseconds; nothing of nothing."""
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
    """The longest time without a release that touches this span; a release on either side of it counts as its edge."""
    first, last = bisect_left(times, start), bisect_right(times, end)
    around = times[max(0, first - 1) : last + 1]
    return max((b - a for a, b in pairwise(around)), default=0)


def stabilised(releases: Sequence[Release], start: int, limit_us: float) -> float | None:
    """Milliseconds until the first moment behind which all latencies of 10 s stay below a limit.

    None if that was not seen: the releases may end before the 10 s do.
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
    mine = [release for release in releases if release.result.key in selection]
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
