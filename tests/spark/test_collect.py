"""Rows of a batch, also if the process has no file handle left."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark.sql import DataFrame, SparkSession

from whimbrel.core.errors import Unavailable
from whimbrel.spark.collect import collected

pytestmark = pytest.mark.spark
SECONDS = 60.0


@pytest.fixture
def batch(spark: SparkSession) -> DataFrame:
    return spark.range(3).selectExpr("id as _part", "cast('abc' as binary) as _body", "cast(null as string) as _file")


@contextmanager
def no_files() -> Iterator[None]:
    """This process can open no more files or sockets."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_rows_are_those_of_the_batch(batch: DataFrame) -> None:
    assert collected(batch) == [{"_part": part, "_body": b"abc", "_file": None} for part in range(3)]


def test_without_file_handles_it_fails_and_works_again_later(batch: DataFrame) -> None:
    """A thread of its own, as the test would never end if it hung."""
    seen: list[BaseException | int] = []

    def collect() -> None:
        for attempt in range(2):
            try:
                if attempt:
                    seen.append(len(collected(batch)))
                else:
                    collected(batch)  # its connection for calls is open from now on
                    with no_files():
                        collected(batch)
            except Exception as error:
                seen.append(error)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it waits for ever"
    error, count = seen
    assert isinstance(error, Unavailable)
    assert count == 3
