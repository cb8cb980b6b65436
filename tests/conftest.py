"""For all tests: Ctrl-C means what it means at a terminal, and one SparkSession serves all that need one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A process has one JVM, and stops it once: a JVM takes longer to start than most tests to run."""
    from whimbrel.lab.chaos.deployed import SHORT_LIFE
    from whimbrel.spark.session import session

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", SHORT_LIFE)
        spark = session("whimbrel-tests")
    yield spark
    spark.stop()
