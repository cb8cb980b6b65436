"""The engine of micro-batch hosts: the SparkSession that all queries of a process share."""

from __future__ import annotations

from functools import partial

from pyspark.sql import SparkSession

from whimbrel.core.errors import Unavailable
from whimbrel.spark.checkpoint import Checkpoint
from whimbrel.spark.query import StageQuery, longest_call
from whimbrel.spark.session import session

STUCK = 120.0
"""Seconds after which a call into the JVM counts as lost. Stopping a query takes up to 60 s."""


class SparkEngine:
    """A session of its own, or the user's, which it does not stop."""

    warm_ups = 3
    """When two sites first run together, Spark starts more Python workers."""
    saved = staticmethod(Checkpoint)

    def __init__(self, name: str, spark: SparkSession | None = None) -> None:
        self.spark, self._owns = spark if spark is not None else session(name), spark is None
        self.host = partial(StageQuery, self.spark)

    def check(self) -> None:
        """Raise `Unavailable` if Spark has stopped, or its JVM does not answer."""
        if (seconds := longest_call()) > STUCK:
            raise Unavailable(f"a call into Spark's JVM has not returned for {seconds:.0f} s")
        context = self.spark.sparkContext._jsc
        if context is None or context.sc().isStopped():
            raise Unavailable("Spark has stopped")

    def stop(self) -> None:
        """Stop the session, unless it is the user's."""
        if self._owns:
            self.spark.stop()
