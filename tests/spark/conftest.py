"""One SparkSession for all Spark tests: a JVM takes longer to start than most tests to run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.rig import Rig
from whimbrel.spark.session import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    spark = session("whimbrel-tests")
    yield spark
    spark.stop()


@pytest.fixture
def rig(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and stops their queries at the end."""
    made: list[Rig] = []

    def make(**settings: object) -> Rig:
        made.append(Rig(spark, tmp_path / str(len(made)), **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
