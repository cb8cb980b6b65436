"""The witness of a run: sees every release, and judges when everything is delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from whimbrel.core.protocols.machine import DONE, Migration
from whimbrel.core.record import Result
from whimbrel.deploy.embedded import App
from whimbrel.lab.bench.measure import Release, measure, percentiles
from whimbrel.lab.bench.oracle import FAULTS, Expected, compare


class Witness:
    """Give it to `run` as `watch`."""

    def __init__(self) -> None:
        self.releases: list[Release] = []

    def __call__(self, results: list[Result], now_us: int) -> None:
        self.releases.extend(Release(now_us, result) for result in results)

    def judge(
        self, app: App, expect: Callable[[], Expected], migrations: Sequence[Migration], timeout: float
    ) -> dict[str, Any]:
        """Wait until everything is delivered; then what was right, and what each migration cost.

        `expect`: asked then what must have come, of a job with a result for each record that tells its `count`.
        """
        app.wait(timeout)
        counts, expected = app.status()["records"], expect()
        delivered = [(result.key, result.values.get("count"), result.values) for _, result in self.releases]
        batch_ms = percentiles([ms * 1000 for ms in app.batches()])
        records = {
            "sent": sum(map(len, expected.values())),
            "delivered": len(self.releases),
            **compare(expected, delivered),
            **{name: counts[name] for name in ("dead_lettered", "refused")},
        }
        for migration in migrations:
            migration.sent_bytes += app.first.gateway.doubled[migration.move.id]
        return {
            "records": records,
            "batch_ms": batch_ms,
            "migrations": [measure(m, m.move.selection, self.releases, batch_ms.get("p50", 0)) for m in migrations],
            "held": not any(records[name] for name in FAULTS) and all(m.phase == DONE for m in migrations),
        }
