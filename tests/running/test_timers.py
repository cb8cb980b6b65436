"""A stage with timers: every timer that is due fires once, in its place, also while its key moves, and the run ends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import whimbrel as wb
from tests.app.waiting import until
from tests.spark_app.jobs import read, rows
from whimbrel.core.operator import Context, Emit
from whimbrel.host.contract import INLINE

COUNT = 1_000
PERIOD = 70
"""In microseconds of event time; row `n` happens at `n`."""


class Periods(wb.Operator):
    """How many records a key had in each period: told when the period is over."""

    class State(wb.State):
        """Of the current period."""

        count: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Emit, ctx: Context) -> None:
        """One record; the first of a period sets the timer for its end."""
        state.count += 1
        end = (event.n // PERIOD + 1) * PERIOD
        ctx.timer(timedelta(microseconds=end - ctx.now_us))

    def on_timer(self, key: str, state: Any, emit: Emit, ctx: Context) -> None:
        """The period is over."""
        emit(key=key, end=ctx.now_us, count=state.count)
        state.count = 0


def expected() -> dict[str, list[tuple[int, int]]]:
    """By key: the ends of its periods, and how many records it had. The last period is not over."""
    counts: dict[tuple[str, int], int] = {}
    for row in rows(COUNT)():
        place = (row["key"], (row["n"] // PERIOD + 1) * PERIOD)
        counts[place] = counts.get(place, 0) + 1
    found: dict[str, list[tuple[int, int]]] = {}
    for (key, end), count in counts.items():
        if end <= COUNT - 1:
            found.setdefault(key, []).append((end, count))
    return found


def timed() -> Iterator[dict[str, Any]]:
    for row in rows(COUNT)():
        yield {**row, "at": row["n"]}


def test_every_timer_fires_once_in_its_place_and_the_run_ends(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    source = wb.Items(timed, schema="key string, n long, at long", rate=250)
    pipeline = wb.Pipeline("timed", source=source, key="key", event_time="at")
    pipeline.stage("periods", Periods(), groups=2).sink(wb.JsonLines(out))
    with wb.run(pipeline, host=INLINE) as app:
        until(lambda: app.status()["records"]["delivered"], "the first period is over", 60)
        for site, protocol in (("edge-1", "live"), ("cloud", "pause")):
            assert app.migrate("periods", to=site, protocol=protocol).wait(60).outcome == "done"
        app.wait(120)
    found: dict[str, list[tuple[int, int]]] = {}
    for line in read(out):
        found.setdefault(line["key"], []).append((line["end"], line["count"]))
    assert found == expected()
