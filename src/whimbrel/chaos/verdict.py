"""The verdict on a run: every result against the sequential run, every migration, every fault and its recovery.

All of it is computed from what the deployment has left behind: the ingress log, the file of results, the journal.
Clocks may have been whole hours off; a run is shorter than that, so what they said is put right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from whimbrel.bench.measure import Release, compare, measure, percentiles, sequential
from whimbrel.bench.witness import FAULTS
from whimbrel.chaos.engine import Struck
from whimbrel.chaos.load import HOUR_US, STAGE, Load
from whimbrel.chaos.plan import ORCHESTRATOR
from whimbrel.control.journal import JOURNAL, JournalReader
from whimbrel.core.protocols.machine import ABORTED, Migration
from whimbrel.core.record import Result
from whimbrel.log import EmbeddedLog


def judge(folder: Path, load: Load, struck: Sequence[Struck], begun_us: int, zero_us: int) -> dict[str, Any]:
    """What was right, what moved, what struck, and how long it took. Nothing may run there any more.

    `begun_us`: before anything was sent. `zero_us`: when chaos began.
    """
    ingress = EmbeddedLog(folder / "data" / "logs" / f"ingress-{STAGE}.db")
    expected, sent = sequential(ingress, load.operator())
    ingress.close()
    releases, migrations = read(folder / "out.jsonl", begun_us), journalled(folder, begun_us)
    latencies = percentiles([release.latency_us for release in releases])
    return {
        "records": {"sent": sent, "delivered": len(releases), **compare(expected, releases)},
        "latency_ms": latencies,
        "migrations": [measure(one, one.move.selection, releases, 0) for one in migrations],
        "faults": [_told(one, migrations, zero_us) for one in struck],
        "recoveries": [{"fault": number, **recovery(one, releases)} for number, one in enumerate(struck)],
    }


def broken(judged: dict[str, Any]) -> list[str]:
    """What is not as it must be, a line each."""
    found = [
        f"{judged['records'][name]} results {name.replace('_', ' ')}" for name in FAULTS if judged["records"][name]
    ]
    for migration in judged["migrations"]:
        if migration["outcome"] not in ("done", ABORTED):
            found.append(f"{migration['id']} has not ended: it is {migration['outcome']}")
        elif migration["outcome"] == ABORTED and not migration["reason"]:
            found.append(f"{migration['id']} was aborted without a reason")
    return found


def read(results: Path, begun_us: int) -> list[Release]:
    """The results of a run, in the order of their release."""
    decode = msgspec.json.Decoder().decode
    found = []
    for line in results.read_bytes().splitlines():
        values = decode(line)
        key, epoch, seq, n, came, left = (
            values.pop(name) for name in ("_key", "_epoch", "_seq", "_n", "_ingress_us", "_released_us")
        )
        came, left = righted(came, begun_us), righted(left, begun_us)
        found.append(Release(left, Result(key, epoch, seq, n, came, came, values)))
    return found


def journalled(folder: Path, begun_us: int) -> list[Migration]:
    """All migrations, with the times of their stories put right."""
    found = JournalReader(folder / "data" / JOURNAL).migrations()
    for migration in found:
        migration.story = [
            msgspec.structs.replace(line, at_us=righted(line.at_us, begun_us)) for line in migration.story
        ]
    return found


def righted(at_us: int, begun_us: int) -> int:
    """A moment of the run, told by a clock that may have been some hours off."""
    return begun_us + (at_us - begun_us) % HOUR_US


def phase_at(migration: Migration, at_us: int) -> str:
    """In which phase a migration was at a moment, by its journal."""
    return next((line.phase for line in migration.story if line.at_us > at_us), migration.phase)


def recovery(struck: Struck, releases: Sequence[Release]) -> dict[str, float | None]:
    """Milliseconds until half of the stricken keys had a result again whose record had come in behind the fault
    (`flow_ms`; the others may have been struck again meanwhile), and until the process was back (`back_ms`). `ms` is
    the first, or the second if the fault holds no results up."""
    first: dict[str, int] = {}
    for at_us, result in releases:
        if result.ingress_us > struck.at_us and result.key in struck.keys:
            first.setdefault(result.key, at_us)
    flow = round((median(first.values()) - struck.at_us) / 1000, 1) if first else None
    is_held_up = bool(struck.keys) and struck.role != ORCHESTRATOR
    return {"ms": flow if is_held_up else struck.back_ms, "flow_ms": flow, "back_ms": struck.back_ms}


def _told(struck: Struck, migrations: Sequence[Migration], zero_us: int) -> dict[str, Any]:
    moved = next((one for one in migrations if one.move.id == struck.migration), None)
    return {
        "at_ms": round((struck.at_us - zero_us) / 1000),
        "kind": struck.kind,
        "target": f"{struck.role} {struck.target}" if struck.role != struck.target else struck.target,
        "phase": f"{struck.protocol} {phase_at(moved, struck.at_us)}" if moved else "",
        "seconds": struck.seconds,
        "migration": struck.migration,
    }
