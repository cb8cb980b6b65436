"""A Python worker is killed amid a batch: its query starts again from the checkpoint, and all results are exact."""

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

COUNT, DEADLY = 1_000, 300


class Deadly(Chain):
    """Kills the worker it runs in at one record, once, as the kernel does when memory runs out."""

    def __init__(self, note: Path) -> None:
        super().__init__(ballast=10_000)
        self.note = note

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One record."""
        if event.n == DEADLY and not self.note.exists():
            self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().process(key, event, state, emit)


def test_a_worker_that_is_killed_amid_a_move_costs_nothing(spark: SparkSession, tmp_path: Path) -> None:
    out, note = tmp_path / "out.jsonl", tmp_path / "note"
    pipeline = wb.Pipeline("deadly", source=wb.Items(rows(COUNT), schema=SCHEMA, rate=250), key="key")
    pipeline.stage("chain", Deadly(note)).sink(wb.JsonLines(out))
    with wb.run(pipeline, spark=spark) as app:
        until(lambda: app.first.gateway.sent > DEADLY - 100, "its end is near")
        handle = app.migrate("chain", to="edge-1", budget=20_000)
        app.wait(150)
        assert handle.outcome == "done"
        assert app.status()["dead_letters"] == {}
    assert note.exists()
    assert compare(sequential(rows(COUNT)()), read(out)) == EXACT
