"""The process that Spark's Python workers are forked from. Spark starts it in place of `pyspark.daemon`.

It is that daemon (setting `spark.python.daemon.module`), with three changes for the workers:

- Their modules are imported before the fork. Otherwise each new worker imports pyarrow, pandas, pyspark and Whimbrel
  for itself, more than 1 s in which a batch waits. Only imports that start no thread are allowed here: a thread does
  not survive the fork, the locks it held do.
- They collect less garbage. Spark makes a worker scan every object it has after every task: all that it has imported
  (47 ms with pandas) and all instances in its cache, each time, although there is hardly ever any garbage.
- They acknowledge at once what Spark sends. Spark sends a task in several small pieces and its kernel holds each back
  until the previous one is acknowledged (Nagle), which the worker's kernel delays by 40 ms: in each task of a source.
  Unix sockets (`spark.python.unix.domain.socket.enabled`) would help as well, but Spark stores the name of each such
  socket until the JVM ends, and creates several for each batch.
"""

from __future__ import annotations

import gc
import io
import os
import socket
import types
from typing import Any, BinaryIO

# Some libraries start threads when they are imported, unless configured otherwise.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

import pandas  # noqa: F401
import pyarrow.compute
import pyarrow.ipc  # noqa: F401
import pyspark.daemon
import pyspark.sql.streaming.proto.StateMessage_pb2
import pyspark.sql.worker.plan_data_source_read
import pyspark.worker

import whimbrel.spark.processor
import whimbrel.spark.source  # noqa: F401


def main() -> None:
    """Run the daemon."""
    gc.collect()
    gc.freeze()
    vars(pyspark.daemon)["gc"] = types.SimpleNamespace(collect=collect_young)
    if hasattr(socket, "TCP_QUICKACK"):
        vars(pyspark.worker)["main"] = _acknowledging(pyspark.worker.main)
    pyspark.daemon.manager()


def collect_young() -> int:
    """Collect the young generations after a task; Python collects the old one when it has grown."""
    return gc.collect(1)


def _acknowledging(work: Any) -> Any:
    def main(infile: io.BufferedReader, outfile: BinaryIO) -> None:
        with socket.socket(fileno=os.dup(infile.fileno())) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                work(io.BufferedReader(_Acknowledged(infile, connection), 1 << 16), outfile)
            else:
                work(infile, outfile)

    return main


class _Acknowledged(io.RawIOBase):
    """Reads from a socket's file, and sets TCP_QUICKACK after each read, because the kernel resets it."""

    def __init__(self, infile: io.BufferedReader, connection: socket.socket) -> None:
        self._infile, self._connection = infile, connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._infile.readinto1(buffer)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return read

    def fileno(self) -> int:
        return self._infile.fileno()


if __name__ == "__main__":
    main()
