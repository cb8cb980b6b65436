"""What Spark's JVM raises, or can raise no more, as errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, StreamingQueryException

from whimbrel.core.errors import Full, Refused, Retry, Unavailable
from whimbrel.spark.query import StageQuery, translated


@pytest.mark.parametrize(
    "error",
    [
        Py4JNetworkError("Answer from Java side is empty"),
        Py4JError("An error occurred while calling o84.isActive"),
        ConnectionRefusedError(111, "Connection refused"),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
)
def test_a_jvm_that_is_gone_is_told_as_such_with_a_way_out(error: Exception) -> None:
    told = "the JVM that Spark runs in is gone; start again with the same data directory"
    with pytest.raises(Unavailable, match=told) as raised, translated():
        raise error
    assert raised.value.__cause__ is error


def test_a_full_disk_is_full_whoever_says_so() -> None:
    with pytest.raises(Full, match="no room on the disk"), translated():
        raise StreamingQueryException("java.io.IOException: No space left on device\n\tat org.apache...")


@pytest.mark.parametrize("error", [AnalysisException("no such column"), ValueError("yours"), Refused("ours")])
def test_what_is_somebodys_own_error_stays_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, translated():
        raise error
    assert raised.value is error


def test_everything_that_is_asked_of_a_query_goes_through_it() -> None:
    class Gone:
        """A query of a JVM that is gone."""

        def __getattr__(self, name: str) -> Any:
            raise Py4JNetworkError("Answer from Java side is empty")

    query = StageQuery.__new__(StageQuery)
    query._query = Gone()  # type: ignore[assignment]
    for ask in ("is_active", "exception", "progress", "state_commits", "batch_ms"):
        with pytest.raises(Retry, match="the JVM that Spark runs in is gone"):
            getattr(query, ask)


@pytest.mark.parametrize("kind", ["Diverged", "Stale"])
def test_an_error_that_a_new_start_would_repeat_is_found_in_what_spark_says(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    said = f"Traceback\nwhimbrel.core.errors.{kind}: batch 7 is another one\n at java"
    query = StageQuery.__new__(StageQuery)
    monkeypatch.setattr(StageQuery, "exception", StreamingQueryException(said))
    assert query.contradiction == "batch 7 is another one"
    monkeypatch.setattr(StageQuery, "exception", StreamingQueryException("the worker is gone"))
    assert query.contradiction is None
