"""Closes the state stores that a query leaves in Spark's JVM when it ends.

Spark keeps them loaded for up to one minute, until its next maintenance, which then writes pending snapshots into the
checkpoint. By then the folder may belong to another run: a checkpoint that was copied there, discarded and created
anew, or restored from a backup. Its next start would load a snapshot that is not its own. So the stores of a query are
closed when it ends, and nothing is written to its checkpoint after that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

OPERATOR, STORE = 0, "default"
"""The only stateful operator of an instance's query, and its only store."""


def unload(spark: SparkSession, query: StreamingQuery, checkpoint: str) -> None:
    """Close the stores of a query that has ended. Idempotent."""
    stores = _stores(spark)
    for id in store_ids(spark, query, checkpoint):
        stores.removeFromLoadedProvidersAndClose(id)


def loaded(spark: SparkSession, query: StreamingQuery, checkpoint: str) -> int:
    """The number of stores of a query that are loaded in the JVM."""
    stores = _stores(spark)
    return sum(stores.isLoaded(id) for id in store_ids(spark, query, checkpoint))


def store_ids(spark: SparkSession, query: StreamingQuery, checkpoint: str) -> list[Any]:
    """The ids of a query's stores in Spark: one per partition."""
    execution = query._jsq.streamingQuery()
    root = f"{execution.resolvedCheckpointRoot()}/state"
    jvm = _states(spark)
    parts = Path(checkpoint, "state", str(OPERATOR)).glob("[0-9]*")
    return [
        jvm.StateStoreProviderId(jvm.StateStoreId(root, OPERATOR, int(part.name), STORE), execution.runId())
        for part in parts
    ]


def _states(spark: SparkSession) -> Any:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return jvm.org.apache.spark.sql.execution.streaming.state


def _stores(spark: SparkSession) -> Any:
    return getattr(getattr(_states(spark), "StateStore$"), "MODULE$")
