"""Whimbrel's stateful stages are several times faster than stock PySpark's, with the same results."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from whimbrel.lab.bench.throughput import NATIVE, ROWS, WHIMBREL, throughput

REMEMBERED = "spark.sql.streaming.numRecentProgressUpdates"


@pytest.mark.spark
def test_a_keyed_count_is_at_least_four_times_as_fast(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set(REMEMBERED, 2)  # of a long run, Spark remembers the end: the results are those of all of it
    try:
        report = throughput(spark, tmp_path, rows=40_000, warm_up=2, candidates=(WHIMBREL, ROWS, NATIVE))
    finally:
        spark.conf.unset(REMEMBERED)
    assert report["results_equal"]
    assert report["ratio"]["vs_transformWithState"] >= 4, report
