"""Rigs for the tests of single queries."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.rig import Rig


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
