"""One SparkSession for all tests of the process: a JVM takes longer to start than most tests to run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from whimbrel.chaos.deployed import SHORT_LIFE
from whimbrel.spark.session import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", SHORT_LIFE)
        spark = session("whimbrel-tests")
    yield spark
    spark.stop()
