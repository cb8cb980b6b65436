"""The load of a comparison: every key first, then by chance, the same for the same seed."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from whimbrel.core.instance import Instance
from whimbrel.core.record import Record
from whimbrel.lab.bench.workloads import KeyCount, Load


def keys(load: Load, count: int, start: int = 0) -> list[str]:
    return [row["key"] for _, row in islice(load.rows(start), count) if isinstance(row, dict)]


def test_every_key_comes_once_before_any_comes_twice() -> None:
    load = Load(50, 10.0)
    assert sorted(keys(load, 50)) == sorted(load.names)
    assert not load.filled
    assert set(keys(load, 500)) == set(load.names)
    assert load.filled


def test_keys_depend_on_the_seed_alone() -> None:
    first = keys(Load(20, 10.0, seed=3, skew=1.0), 5000)
    assert first == keys(Load(20, 99.0, seed=3, skew=1.0), 5000)
    assert first != keys(Load(20, 10.0, seed=4, skew=1.0), 5000)
    assert keys(Load(20, 10.0, seed=3, skew=1.0), 100, start=4500) == first[4500:4600], "it can go on amid its rows"


def test_skew_follows_zipf_and_none_is_even() -> None:
    skewed = Counter(keys(Load(100, 10.0, skew=1.0), 20_100)[100:])
    assert 1.7 < skewed["key-000000"] / skewed["key-000001"] < 2.3
    assert 7 < skewed["key-000000"] / skewed["key-000009"] < 14
    even = Counter(keys(Load(100, 10.0), 20_100)[100:])
    assert max(even.values()) < 2 * min(even.values())


def test_the_rate_is_high_while_filling_usual_then_and_multiplied_in_a_spike() -> None:
    load = Load(10, 40.0)
    assert load.rate == Load.FILL_ROWS
    keys(load, 11)
    assert load.rate == 40.0
    load.spike(3.0, 1000.0)
    assert load.rate == 120.0
    load.spike(3.0, -1.0)
    assert load.rate == 40.0


def test_heavy_states_are_filled_slowly() -> None:
    assert Load(10, 40.0, state_bytes=1 << 20).rate == 16
    assert Load(1, 40.0, state_bytes=1 << 30).rate == 1


def test_it_ends_when_told() -> None:
    load = Load(3, 10.0)
    rows = load.rows(0)
    assert len(list(islice(rows, 5))) == 5
    load.end()
    assert list(rows) == []


def applied(operator: KeyCount, count: int) -> tuple[list[dict[str, Any]], Any]:
    instance = Instance("i", operator)
    records = [Record(n, 0, 0, "k", n, 0, "s", n, n, None) for n in range(count)]
    results = [result.values for result in instance.apply(records).results]
    return results, instance.table.entries["k"].state


def test_key_count_carries_its_ballast_and_shows_it() -> None:
    results, state = applied(KeyCount(1000), 5)
    assert [result["count"] for result in results] == [1, 2, 3, 4, 5]
    assert len(state.ballast) == 1000
    assert [result["probe"] for result in results] == list(state.ballast[1:6])
    assert applied(KeyCount(1000), 9)[1].ballast == state.ballast, "records leave it as it is"


def test_churn_changes_the_ballast_with_each_record() -> None:
    one, two = (applied(KeyCount(1000, churn=True), count)[1].ballast for count in (4, 5))
    assert one != two
    assert len(one) == len(two) == 1000


def test_no_ballast_is_no_ballast() -> None:
    results, state = applied(KeyCount(), 2)
    assert state.ballast == b""
    assert results == [{"count": 1, "probe": 0}, {"count": 2, "probe": 0}]
