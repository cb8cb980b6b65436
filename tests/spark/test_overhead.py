"""Bare parts, which overhead is measured against, do the same work; and being movable costs next to nothing.

A shared machine makes a time of milliseconds what it likes: neighbouring batches were measured at 0.75 to 1.6 of each
other. So the cost is counted in lines of Python that are executed, which is the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
from pyspark.sql import SparkSession

from whimbrel.core.instance import Instance
from whimbrel.core.record import Emissions, Record
from whimbrel.core.serving import Served, Serving
from whimbrel.lab.bench.overhead import BARE, MOVABLE, in_process, through_spark
from whimbrel.spark.processor import GroupProcessor

MOST = 1.05
"""Lines of a movable part for one of a bare one. It was 1.02 when this was written."""


class Lines:
    """A clock that goes on by one with each line that is executed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        return self.count

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += event == "line"
        return self._trace

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)


def ratio() -> float:
    lines = Lines()
    with lines.counting():
        found = in_process(rounds=6, keys=50, rows=200, clock=lines)
    assert found["batches"] == 6
    assert set(found["batch_ms"]) == {MOVABLE, BARE}
    assert found["batch_ms"][BARE] > 1000 * 200, "several lines a record"
    return float(found["ratio"])


def test_being_movable_costs_next_to_nothing_while_nothing_moves() -> None:
    assert 0.9 < ratio() < MOST


class CuriousServing(Serving):
    def serve(self, record: Record, out: Emissions, silent: bool = False) -> Served:
        for place in self.table.waiting, self.table.replicas, self.table.stashed:
            if record.key in place:
                raise AssertionError
        return super().serve(record, out, silent)


class Curious(Instance):
    """A part that asks each record three questions more."""

    serving_type: ClassVar[type[Serving]] = CuriousServing


class Forgetful(Instance):
    """A part that looks at its records twice."""

    def apply(self, records: Sequence[Record]) -> Emissions:
        for record in records:
            if record.kind and record.key in self.table.entries:
                raise AssertionError
        return super().apply(records)


@pytest.mark.parametrize("part", [Curious, Forgetful])
def test_a_few_lines_more_for_each_record_are_noticed(part: type[Instance], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupProcessor, "instance_type", part)
    assert ratio() > MOST


@pytest.mark.spark
def test_both_give_the_same_results_through_spark(spark: SparkSession, tmp_path: Path) -> None:
    found = through_spark(spark, tmp_path, batches=2, keys=50, rows=200, warm_up=1)
    assert found["results_equal"]
    assert found["batches"] == 2
