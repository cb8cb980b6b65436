"""The witness of a run: sees every release, and judges when everything is delivered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whimbrel.app import App
from whimbrel.bench.measure import Release, compare, measure, percentiles, sequential
from whimbrel.core.operator import Operator
from whimbrel.core.protocols.machine import DONE, Migration
from whimbrel.core.record import Result

FAULTS = ("lost", "duplicated", "out_of_order", "wrong")
"""What must be zero, in every run."""


class Witness:
    """Give it to `run` as `watch`."""

    def __init__(self) -> None:
        self.releases: list[Release] = []

    def __call__(self, results: list[Result], now_us: int) -> None:
        self.releases.extend(Release(now_us, result) for result in results)

    def judge(self, app: App, operator: Operator, migrations: Sequence[Migration], timeout: float) -> dict[str, Any]:
        """Wait until everything is delivered; then what was right, and what each migration cost.

        The application must keep its ingress log, and still be running: the logs are read.
        """
        app.wait(timeout)
        counts = app.status()["records"]
        expected, sent = sequential(app.first.gateway.ingress, operator)
        batch_ms = percentiles([ms * 1000 for ms in app.batches()])
        records = {"sent": sent, "delivered": len(self.releases), **compare(expected, self.releases)}
        records |= {name: counts[name] for name in ("dead_lettered", "refused")}
        for migration in migrations:
            migration.sent_bytes += app.first.gateway.doubled[migration.move.id]
        return {
            "records": records,
            "batch_ms": batch_ms,
            "migrations": [measure(m, m.move.selection, self.releases, batch_ms.get("p50", 0)) for m in migrations],
            "held": not any(records[name] for name in FAULTS) and all(m.phase == DONE for m in migrations),
        }
