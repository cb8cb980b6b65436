"""A Python worker is killed amid a batch: its query starts again from the checkpoint, and nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import whimbrel as wb
from tests.app.waiting import until
from tests.spark_app.jobs import EXACT, SCHEMA, Chain, compare, read, rows, sequential
from whimbrel.core.operator import Emit

pytestmark = pytest.mark.spark

COUNT = 1_200


class Deadly(Chain):
    """Kills the worker it runs in at certain records, as the kernel does when memory runs out: once each, or always."""

    def __init__(self, notes: Path, deadly: frozenset[int], always: bool = False) -> None:
        super().__init__(ballast=10_000)
        self.notes, self.deadly, self.always = notes, deadly, always

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One record."""
        if event.n in self.deadly:
            past = self.notes.read_text().split() if self.notes.exists() else []
            if self.always or str(event.n) not in past:
                with self.notes.open("a") as notes:
                    notes.write(f"{event.n}\n")
                os.kill(os.getpid(), signal.SIGKILL)
        super().process(key, event, state, emit)


def test_a_worker_that_is_killed_before_and_amid_a_move_costs_nothing(spark: SparkSession, tmp_path: Path) -> None:
    out, notes = tmp_path / "out.jsonl", tmp_path / "notes"
    source = wb.Items(rows(COUNT), schema=SCHEMA, rate=300)
    pipeline = wb.Pipeline("deadly", source=source, key="key")
    pipeline.stage("chain", Deadly(notes, frozenset({100, 400}))).sink(wb.JsonLines(out))
    with wb.run(pipeline, spark=spark) as app:
        until(lambda: app.first.gateway.sent > 350, "the first death lies behind, the second ahead")
        handle = app.migrate("chain", to="edge-1", budget=20_000)
        app.wait(150)
        assert handle.outcome == "done"
        assert app.status()["dead_letters"] == {}
    assert sorted(notes.read_text().split()) == ["100", "400"]
    assert compare(sequential(rows(COUNT)()), read(out)) == EXACT


def test_a_query_that_keeps_dying_is_told_and_not_waited_for(spark: SparkSession, tmp_path: Path) -> None:
    out, notes = tmp_path / "out.jsonl", tmp_path / "notes"
    pipeline = wb.Pipeline("doomed", source=wb.Items(rows(50), schema=SCHEMA), key="key")
    pipeline.stage("chain", Deadly(notes, frozenset({7}), always=True)).sink(wb.JsonLines(out))
    app = wb.run(pipeline, sites=["cloud"], spark=spark)
    try:
        with pytest.raises(wb.Retry, match="chain-1 at cloud keeps failing"):
            app.wait(120)
        instance = app.status()["stages"]["chain"]["instances"]["chain-1"]
        assert (instance["running"], instance["error"] is None) == (False, False)
        assert "keeps failing" in app.status()["error"]
    finally:
        app.stop()
    assert len(notes.read_text().split()) == 4, "once, and three times more"
