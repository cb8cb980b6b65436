"""Bare parts, which overhead is measured against, do the same work."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from whimbrel.bench.overhead import BARE, MOVABLE, in_process, through_spark


def test_both_processors_run_in_process() -> None:
    found = in_process(rounds=4, keys=50, rows=200)
    assert found["batches"] == 4
    assert set(found["batch_ms"]) == {MOVABLE, BARE}
    assert 0.2 < found["ratio"] < 5


@pytest.mark.spark
def test_both_give_the_same_results_through_spark(spark: SparkSession, tmp_path: Path) -> None:
    found = through_spark(spark, tmp_path, batches=2, keys=50, rows=200, warm_up=1)
    assert found["results_equal"]
    assert found["batches"] == 2
