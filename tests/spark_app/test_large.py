"""A state that is too large for any one message: it moves in pieces, is stored in pieces, and comes out whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from pyspark.sql import SparkSession

import whimbrel as wb
from tests.app.waiting import until
from whimbrel.core.operator import Emit

pytestmark = pytest.mark.spark

LARGE = 20 << 20


class Archive(wb.Operator):
    """Keeps a large thing for one of its keys, and tells its checksum with each result."""

    class State(wb.State):
        """The thing."""

        count: int = 0
        thing: bytes = b""

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One record."""
        if key == "large" and not state.thing:
            state.thing = bytes(range(256)) * (LARGE >> 8)
        state.count += 1
        emit(key=key, count=state.count, checksum=crc32(state.thing))


def test_a_key_of_many_megabytes_moves_there_live_and_back_at_once(spark: SparkSession, tmp_path: Path) -> None:
    ending: list[bool] = []

    def rows() -> Any:
        number = 0
        while not ending:
            yield {"key": "large" if number % 100 == 0 else f"k{number % 7}"}
            number += 1

    results: list[dict[str, Any]] = []
    pipeline = wb.Pipeline("archive", source=wb.Items(rows, schema="key string", rate=100), key="key")
    pipeline.stage("keep", Archive()).sink(results.append)
    with wb.run(pipeline, sites=["cloud", "edge-1"], data=tmp_path / "data", spark=spark) as app:
        until(lambda: any(result["key"] == "large" for result in results), "the large key is there")
        for to, protocol in (("edge-1", "live"), ("cloud", "push")):
            handle = app.migrate("keep", to=to, protocol=protocol, budget=4 << 20).wait(90)
            assert handle.outcome == "done"
            assert sum(migration.state_bytes for migration in handle.migrations) > LARGE
        seen = len(results)
        until(lambda: any(result["key"] == "large" for result in results[seen:]), "it still answers")
        ending.append(True)
        app.wait(60)
    large = [result for result in results if result["key"] == "large"]
    assert [result["count"] for result in large] == list(range(1, len(large) + 1))
    assert {result["checksum"] for result in large} == {crc32(bytes(range(256)) * (LARGE >> 8))}
