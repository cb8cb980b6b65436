"""The oracle of the benches: it agrees with their operators, and needs no number of the product's."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from whimbrel.core.instance import Instance
from whimbrel.core.operator import Operator
from whimbrel.core.record import Record, Result
from whimbrel.lab.bench.oracle import Expected, averages, compare, key_counts
from whimbrel.lab.bench.workloads import AverageSpeed, KeyCount, Load, vehicles

EXACT = {"lost": 0, "duplicated": 0, "out_of_order": 0, "wrong": 0}


def results(operator: Operator, rows: list[tuple[str, Any]]) -> list[Result]:
    records = [Record(n, 0, 0, key, n, 0, "router", n, n, body) for n, (key, body) in enumerate(rows)]
    return Instance("sequential", operator).apply(records).results


def counts(expected: Expected, found: list[Result]) -> dict[str, int]:
    return compare(expected, [(one.key, one.values["count"], one.values) for one in found])


@pytest.mark.parametrize(("state_bytes", "churn"), [(0, False), (40, False), (40, True), (300, True)])
def test_key_counts(state_bytes: int, churn: bool) -> None:
    load = Load(20, 10.0, skew=1.0)
    keys = [row["key"] for _, row in islice(load.rows(0), 3_000) if isinstance(row, dict)]
    assert list(load.emitted_keys()) == keys
    found = results(KeyCount(state_bytes, churn), [(key, None) for key in keys])
    assert counts(key_counts(keys, state_bytes, churn), found) == EXACT


def test_averages() -> None:
    class Reading:
        def __init__(self, speed: float) -> None:
            self.speed = speed

    readings = list(vehicles(10, 500, 1)())
    found = results(AverageSpeed(), [(one["vehicle"], Reading(one["speed"])) for one in readings])
    assert counts(averages(readings), found) == EXACT


def test_what_differs_is_counted() -> None:
    keys = ["a", "b", "a", "b", "a"]
    expected = key_counts(keys, 0, False)
    found = results(KeyCount(), [(key, None) for key in keys])
    assert counts(expected, found[:-1]) == {**EXACT, "lost": 1}
    assert counts(expected, [*found, found[0]]) == {**EXACT, "duplicated": 1}
    assert counts(expected, [found[2], found[0], *found[3:], found[1]]) == {**EXACT, "out_of_order": 2}
    assert counts(key_counts(["a", "b", "a", "b"], 0, False), found) == {**EXACT, "wrong": 1}, "one that nobody sent"
