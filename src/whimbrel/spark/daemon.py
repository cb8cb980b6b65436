"""The process that Spark's Python workers are forked from, with everything they will need imported before.

Spark starts this module instead of `pyspark.daemon` (setting `spark.python.daemon.module`). Without it each new worker
imports pyarrow, pyspark's worker and Whimbrel for itself, about a second in which a batch stands still.

Only imports that start no thread are allowed here: a thread does not survive the fork, the locks it held do.
"""

from __future__ import annotations

import os

# Numeric libraries start their threads when they are imported, one a core, unless told otherwise.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas  # noqa: F401
import pyarrow.compute
import pyarrow.ipc  # noqa: F401
import pyspark.sql.streaming.proto.StateMessage_pb2
import pyspark.worker  # noqa: F401
import whimbrel.spark.processor
import whimbrel.spark.source  # noqa: F401
from pyspark.daemon import manager

if __name__ == "__main__":
    manager()
