"""Groups are dealt to Spark's partitions evenly."""

from collections import Counter

import pytest
from pyspark.sql import SparkSession

from whimbrel.spark.groups import group_ids, murmur3


@pytest.mark.spark
def test_the_hash_is_sparks(spark: SparkSession) -> None:
    rows = spark.range(0, 3000).selectExpr("cast(id as int) id", "hash(cast(id as int)) hash").collect()
    assert all(murmur3(row.id) == row.hash for row in rows)


@pytest.mark.parametrize("partitions", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 3])
def test_every_partition_gets_as_many_groups(partitions: int, times: int) -> None:
    ids = group_ids(partitions * times)
    assert len(set(ids)) == len(ids)
    assert set(Counter(murmur3(id) % partitions for id in ids).values()) == {times}


def test_ids_never_change() -> None:
    """They are keys in every checkpoint."""
    assert group_ids(4) == (2122, 3179, 848, 1180)
