"""The engine of micro-batch hosts: the SparkSession that all queries of a process share."""

from __future__ import annotations

from functools import partial

from pyspark.sql import SparkSession

from whimbrel.core.errors import Unavailable
from whimbrel.spark.checkpoint import Checkpoint
from whimbrel.spark.query import StageQuery
from whimbrel.spark.session import session


class SparkEngine:
    """A session of its own, or the user's, which it does not stop."""

    warm_ups = 3
    """When two sites first run together, Spark starts more Python workers."""
    saved = staticmethod(Checkpoint)

    def __init__(self, name: str, spark: SparkSession | None = None) -> None:
        self.spark, self._owns = spark if spark is not None else session(name), spark is None
        self.host = partial(StageQuery, self.spark)

    def check(self) -> None:
        """Raise `Unavailable` if Spark has stopped."""
        context = self.spark.sparkContext._jsc
        if context is None or context.sc().isStopped():
            raise Unavailable("Spark has stopped")

    def stop(self) -> None:
        """Stop the session, unless it is the user's."""
        if self._owns:
            self.spark.stop()
