"""The process that Spark's Python workers are forked from, with everything they will need imported before.

Spark starts this module instead of `pyspark.daemon` (setting `spark.python.daemon.module`). Without it each new worker
imports pyarrow, pyspark's worker and Whimbrel for itself, about a second in which a batch stands still.

It also spares workers most of their garbage collection. Spark has them look at every object they hold after every task:
that is all of pandas (50 ms) and all held instances, each time, for garbage that hardly ever is.

Only imports that start no thread are allowed here: a thread does not survive the fork, the locks it held do.
"""

from __future__ import annotations

import gc
import os
import types

# Some libraries start threads when they are imported, unless told otherwise.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

import pandas  # noqa: F401
import pyarrow.compute
import pyarrow.ipc  # noqa: F401
import pyspark.daemon
import pyspark.sql.streaming.proto.StateMessage_pb2
import pyspark.worker

import whimbrel.spark.processor
import whimbrel.spark.source  # noqa: F401


def collect_young() -> int:
    """What a worker collects after a task; what survives is left to Python, which comes to it as it grows."""
    return gc.collect(1)


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    # Its own `gc`, in which `collect` means less.
    vars(pyspark.daemon)["gc"] = types.SimpleNamespace(collect=collect_young)
    pyspark.daemon.manager()
