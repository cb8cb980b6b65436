"""The verdict on a run: every result and dead letter against the oracle, every migration, every fault and its recovery.

All of it is computed from the files of the deployment: how many rows its source has emitted, the results, the dead
letters, the journal. The expected results do not come from the product (oracle.py). Clocks may have been wrong by whole
hours; a run takes less than an hour, so their times can be corrected.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from whimbrel.core.names import router_of
from whimbrel.core.protocols.machine import ABORTED, Migration
from whimbrel.core.record import Result
from whimbrel.gateway.dead_letters import DeadLetter, DeadLetters
from whimbrel.lab.bench.measure import Release, measure, percentiles
from whimbrel.lab.bench.oracle import FAULTS
from whimbrel.lab.chaos import load, oracle
from whimbrel.lab.chaos.engine import Struck
from whimbrel.lab.chaos.faults import HOUR_US
from whimbrel.lab.chaos.oracle import ENTRY, INTAKE, LEDGER, SHOPS, Letter
from whimbrel.lab.chaos.plan import ORCHESTRATOR
from whimbrel.lab.chaos.rows import Load
from whimbrel.log import EmbeddedLog
from whimbrel.orchestrator.journal import JOURNAL, JournalReader

Line = Mapping[str, Any]
"""A result as it is in the file."""
KEYS = {LEDGER: "account", SHOPS: "shop"}
"""By stage: the column of its keys."""


class Run:
    """The files of a run. Its processes must have ended."""

    def __init__(self, folder: Path, begun_us: int) -> None:
        """`begun_us`: a time before anything was sent."""
        self.folder, self.begun_us = folder, begun_us
        self.moments = load.moments(folder)
        self._rows = [row for row, _ in self.moments]
        self._times = [us for _, us in self.moments]
        self.lines = self._read()
        self._latest = list(accumulate((line["row"] for line in self.lines), max))
        """By line: the highest row number up to it."""

    def _read(self) -> list[Line]:
        """The results, in the order of their release."""
        file = self.folder / "out.jsonl"
        decode = msgspec.json.Decoder().decode
        return [decode(line) for line in file.read_bytes().splitlines()] if file.exists() else []

    def emitted(self) -> int:
        """How many rows the source has emitted; if it has not ended, up to the last known one."""
        seen = max((line["row"] for line in self.lines), default=-1) + 1
        known = load.emitted(self.folder)
        return max([seen, *(row + 1 for row in self._rows)]) if known is None else known

    def came_us(self, row: int) -> int:
        """When the source emitted a row, to within a few rows."""
        place = bisect_right(self._rows, row) - 1
        return self._times[max(place, 0)] if self._times else self.begun_us

    def row_at(self, at_us: int) -> int:
        """The last row that was emitted before a time, to within a few rows."""
        return max((row for row, us in self.moments if us <= at_us), default=-1)

    def lines_behind(self, row: int) -> Iterator[Line]:
        """The results of later rows, in the order of their release."""
        start = bisect_right(self._latest, row)
        return (line for line in islice(self.lines, start, None) if line["row"] > row)

    def releases(self, stage: str) -> list[Release]:
        """The results of records, by the keys of a stage. Without those of timers: event time triggers them."""
        found = []
        for line in self.lines:
            if line["kind"] == ENTRY:
                came, left = self.came_us(line["row"]), righted(line["_released_us"], self.begun_us)
                result = Result(line[KEYS[stage]], 0, line["row"], line["part"], came, came, {})
                found.append(Release(max(left, came), result))
        return sorted(found, key=lambda release: release.at_us)

    def letters(self) -> Counter[Letter]:
        """The dead letters, by their cause."""
        log = EmbeddedLog(self.folder / "data" / "logs" / "dead-letters.db")
        try:
            return Counter(map(_caused, DeadLetters(log).read()))
        finally:
            log.close()


def _caused(letter: DeadLetter) -> Letter:
    if letter.reason != "operator failed":
        return Letter(INTAKE if letter.source == INTAKE else letter.source, letter.position)
    event = msgspec.json.decode(letter.record)
    stage = next((stage for stage in KEYS if letter.source == router_of(stage)), letter.source)
    return Letter(stage, event.get("row", -1), event.get("part", 0))


def judge(
    folder: Path, job: Load, struck: Sequence[Struck], begun_us: int, zero_us: int, acknowledged: int | None = None
) -> dict[str, Any]:
    """Judge a run: the results, the migrations, the faults, and the recovery times.

    `begun_us`: a time before anything was sent. `zero_us`: when the faults began. `acknowledged`: records ingested,
    as the gateway reports them.
    """
    run = Run(folder, begun_us)
    sent = run.emitted()
    expected = oracle.expect(job, sent)
    letters = run.letters()
    releases = {stage: run.releases(stage) for stage in KEYS}
    migrations = journalled(folder, begun_us)
    return {
        "records": {
            "sent": sent,
            "acceptable": expected.accepted,
            "acknowledged": acknowledged,
            "expected": sum(map(len, expected.results.values())),
            "delivered": len(run.lines),
            **oracle.judge(expected, run.lines),
            "dead_lettered": letters.total(),
            "dead_letters": {"expected": len(expected.letters), **oracle.judge_letters(expected, letters)},
        },
        "latency_ms": percentiles([release.latency_us for release in releases[LEDGER]]),
        "migrations": [measure(one, one.move.selection, releases[one.move.stage], 0) for one in migrations],
        "faults": [_described(one, migrations, zero_us) for one in struck],
        "recoveries": [{"fault": number, **recovery(one, run)} for number, one in enumerate(struck)],
    }


def broken(judged: dict[str, Any]) -> list[str]:
    """The violations, a line each."""
    records = judged["records"]
    found = [f"{records[name]} results {name.replace('_', ' ')}" for name in FAULTS if records[name]]
    letters = records["dead_letters"]
    found += [f"{letters[name]} dead letters {name}" for name in ("lost", "duplicated", "wrong") if letters[name]]
    if records["acknowledged"] not in (None, records["acceptable"]):
        found.append(
            f"the gateway says it has taken in {records['acknowledged']} records; the source has emitted "
            f"{records['acceptable']} that it must take"
        )
    for migration in judged["migrations"]:
        if migration["outcome"] not in ("done", ABORTED):
            found.append(f"{migration['id']} has not ended: it is {migration['outcome']}")
        elif migration["outcome"] == ABORTED and not migration["reason"]:
            found.append(f"{migration['id']} was aborted without a reason")
    return found


def journalled(folder: Path, begun_us: int) -> list[Migration]:
    """All migrations, with the times of their stories corrected."""
    found = JournalReader(folder / "data" / JOURNAL).migrations()
    for migration in found:
        migration.story = [
            msgspec.structs.replace(line, at_us=righted(line.at_us, begun_us)) for line in migration.story
        ]
    return found


def righted(at_us: int, begun_us: int) -> int:
    """Correct a time of the run, from a clock that may have been wrong by whole hours."""
    return begun_us + (at_us - begun_us) % HOUR_US


def phase_at(migration: Migration, at_us: int) -> str:
    """The phase of a migration at a time, by its journal."""
    return next((line.phase for line in migration.story if line.at_us > at_us), migration.phase)


def recovery(struck: Struck, run: Run) -> dict[str, float | None]:
    """Milliseconds until half of the affected keys had a result again whose row was emitted after the fault
    (`flow_ms`; the others may have been hit again meanwhile), and until the process was back (`back_ms`). `ms` is the
    first, or the second if the fault delays no results; `after_ms` is `ms` without the time that the fault lasted."""
    first: dict[str, int] = {}
    for line in run.lines_behind(run.row_at(struck.at_us)):
        if len(first) == len(struck.keys):
            break
        if line["kind"] == ENTRY:
            for key in (line["account"], line["shop"]):
                if key in struck.keys and key not in first:
                    first[key] = righted(line["_released_us"], run.begun_us)
    flow = round((median(first.values()) - struck.at_us) / 1000, 1) if first else None
    is_held_up = bool(struck.keys) and struck.role != ORCHESTRATOR
    ms = flow if is_held_up else struck.back_ms
    after = None if ms is None else round(max(ms - struck.seconds * 1000, 0.0), 1)
    return {"ms": ms, "after_ms": after, "flow_ms": flow, "back_ms": struck.back_ms}


def _described(struck: Struck, migrations: Sequence[Migration], zero_us: int) -> dict[str, Any]:
    moved = next((one for one in migrations if one.move.id == struck.migration), None)
    return {
        "at_ms": round((struck.at_us - zero_us) / 1000),
        "kind": struck.kind,
        "target": f"{struck.role} {struck.target}" if struck.role != struck.target else struck.target,
        "phase": f"{struck.protocol} {phase_at(moved, struck.at_us)}" if moved else "",
        "seconds": struck.seconds,
        "migration": struck.migration,
    }
