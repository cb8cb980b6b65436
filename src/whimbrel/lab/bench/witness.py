"""The witness of a run: records every release, and judges the results when everything is delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from whimbrel.core.protocols.machine import DONE, Migration
from whimbrel.core.record import Result
from whimbrel.deploy.embedded import App
from whimbrel.lab.bench.measure import Release, measure, percentiles
from whimbrel.lab.bench.oracle import FAULTS, Expected, compare


class Witness:
    """Pass it to `run` as `watch`."""

    def __init__(self) -> None:
        self.releases: list[Release] = []

    def __call__(self, results: list[Result], now_us: int) -> None:
        self.releases.extend(Release(now_us, result) for result in results)

    def judge(
        self, app: App, expect: Callable[[], Expected], migrations: Sequence[Migration], timeout: float
    ) -> dict[str, Any]:
        """Wait until everything is delivered; then judge the results, and measure each migration.

        `expect`: returns the expected results then, of a job with a result for each record that contains its `count`.
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
