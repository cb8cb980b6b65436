"""The oracle of chaos: it agrees with the job's operators, and what differs from it is counted."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from whimbrel.core.instance import Instance
from whimbrel.core.keys import bin_of
from whimbrel.core.record import Kind, Record, Result
from whimbrel.gateway.intake import Intake, parse_schema
from whimbrel.lab.chaos import rows
from whimbrel.lab.chaos.load import Ledger, Rows, Shops, emitted, moments, role_of
from whimbrel.lab.chaos.oracle import LEDGER, SHOPS, Expectation, Letter, expect, judge, judge_letters
from whimbrel.lab.chaos.rows import Load

LOAD = Load(accounts=12, shops=5, state_bytes=50, large=1, large_bytes=500)
COUNT = 2_500


def record(place: int, key: str, at: int, body: Any, kind: Kind = Kind.DATA) -> Record:
    return Record(place, kind, bin_of(key), key, place, 0, "router", at, at, body)


def first_stage(every: int) -> tuple[list[Result], Counter[Letter]]:
    """What the ledger says if the intake takes the rows, with a tick behind every so many of them."""
    intake = Intake(parse_schema(rows.SCHEMA), "account", "at")
    letters: Counter[Letter] = Counter()
    records, latest = [], 0
    for n in range(COUNT):
        taken = intake.take([rows.row(LOAD, n)])[0]
        if not isinstance(taken, tuple):
            letters[Letter("rows", n)] += 1
            continue
        key, values, at = taken
        assert at is not None
        latest, amount = at, values[3]
        for part in range(0 if rows.is_dropped(amount) else rows.parts(amount)):
            body = SimpleNamespace(row=n, part=part, account=key, shop=values[2], amount=amount)
            records.append(record(n, key, at, body))
        if n % every == 0 or n == COUNT - 1:
            records.append(Record(n, Kind.TICK, 0, "", n, 0, "router", latest, latest, b""))
    # A tick's `seq` must lie between those of records.
    for place, one in enumerate(records):
        records[place] = one._replace(seq=2 * one.seq + (one.kind == Kind.TICK))
    ledger = Ledger(LOAD)
    ledger.tries = 1  # type: ignore[misc]
    out = Instance("ledger-1", ledger).apply(records)
    for notice in out.notices:
        n, part = (int(text) for text in (_field(notice, "row"), _field(notice, "part")))
        letters[Letter(LEDGER, n, part)] += 1
    return out.results, letters


def _field(notice: Any, name: str) -> str:
    """Of an event that was told as text."""
    return str(notice.event).split(f"{name}=")[1].split(",")[0]


def both_stages(every: int = 40, mix: bool = False) -> tuple[list[dict[str, Any]], Counter[Letter]]:
    """The results of both stages; `mix`: accounts come to the shops in another order, each in its own."""
    results, letters = first_stage(every)
    if mix:
        results.sort(key=lambda result: result.key)
    made = [record(place, one.values["shop"], 0, SimpleNamespace(**one.values)) for place, one in enumerate(results)]
    out = Instance("shops-1", Shops()).apply(made)
    letters += Counter(Letter(SHOPS, int(_field(notice, "row")), int(_field(notice, "part"))) for notice in out.notices)
    return [result.values for result in out.results], letters


@pytest.fixture(scope="module")
def expected() -> Expectation:
    return expect(LOAD, COUNT)


@pytest.mark.parametrize("every", [7, 400, COUNT])
@pytest.mark.parametrize("mix", [False, True])
def test_the_job_gives_what_the_oracle_says_however_time_is_told_and_accounts_come(
    expected: Expectation, every: int, mix: bool
) -> None:
    results, letters = both_stages(every, mix)
    assert expected.timers > 50
    assert {one["kind"] for one in results} == {"entry", "timer"}
    assert {letter.where for letter in letters} == {"rows", LEDGER, SHOPS}
    assert not any(judge(expected, results).values())
    assert not any(judge_letters(expected, letters).values())


def found(expected: Expectation, results: list[dict[str, Any]]) -> dict[str, int]:
    return {name: count for name, count in judge(expected, results).items() if count}


def test_what_is_wrong_is_counted(expected: Expectation) -> None:
    right, _ = both_stages()
    assert found(expected, right[:-1]) == {"lost": 1}
    assert found(expected, [*right, right[-1]]) == {"duplicated": 1}
    assert found(expected, [{**right[0], "digest": 1}, *right[1:]]) == {"wrong": 1}
    pair = (right[0]["shop"], right[0]["account"])
    other = next(n for n, one in enumerate(right) if n and (one["shop"], one["account"]) == pair)
    swapped = [right[other], *right[1:other], right[0], *right[other + 1 :]]
    assert found(expected, swapped) == {"out_of_order": 1}
    shifted = [{**one, "place": one["place"] + (one["shop"] == pair[0])} for one in right]
    assert found(expected, shifted) == {"wrong": sum(one["shop"] == pair[0] for one in right)}


def test_a_row_that_the_intake_lost_or_took_twice_is_seen() -> None:
    """Neither leaves a trace in the product's own log, by which it once was judged."""
    right, _ = both_stages()
    more = expect(LOAD, COUNT + 40)
    assert found(more, right)["lost"] > 20
    again = [one for one in right if one["row"] == right[5]["row"]]
    assert found(expect(LOAD, COUNT), [*right, *again])["duplicated"] == len(again)


def test_dead_letters_are_expected_once_each(expected: Expectation) -> None:
    _, letters = both_stages()
    one = next(iter(letters))
    assert judge_letters(expected, letters - Counter([one])) == {"lost": 1, "duplicated": 0, "wrong": 0}
    assert judge_letters(expected, letters + Counter([one])) == {"lost": 0, "duplicated": 1, "wrong": 0}
    assert judge_letters(expected, letters + Counter([Letter(SHOPS, -1)])) == {"lost": 0, "duplicated": 0, "wrong": 1}


def test_rows_are_a_function_of_seed_and_number() -> None:
    assert [rows.row(LOAD, n) for n in range(100)] == [rows.row(LOAD, n) for n in range(100)]
    assert rows.row(LOAD, 5) != rows.row(Load(seed=2), 5)
    load = Load()
    counts = Counter(rows.row(load, n)["account"] for n in range(20_000))
    assert 0.25 < sum(counts[name] for name in load.names[: rows.HOT]) / 20_000 < 0.35, "some keys are hot"
    assert 0 < counts[load.names[-1]] < 40, "a large key comes seldom"
    assert set(counts) == {None, *load.names}


def test_the_source_goes_on_where_it_was_and_writes_down_how_many_there_were(tmp_path: Any) -> None:
    source = Rows(LOAD, tmp_path)
    given = source.rows(0)
    assert [next(given)[0] for _ in range(50)] == list(range(50))
    again = source.rows(30)
    assert next(again) == (30, rows.row(LOAD, 30))
    assert emitted(tmp_path) is None
    (tmp_path / "ending").touch()
    assert list(again) == []
    assert emitted(tmp_path) == 31, "the last one that was asked for"
    assert [n for n, _ in Rows(LOAD, tmp_path).rows(10)] == list(range(10, 31)), "a gateway that was killed meanwhile"
    assert [n for n, _ in moments(tmp_path)] == [0, 20, 40]


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["whimbrel", "gateway", "--job"], "gateway"),
        (["whimbrel", "site", "edge-1", "--job"], "edge-1"),
        (["whimbrel"], ""),
    ],
)
def test_a_process_knows_its_role(command: list[str], role: str) -> None:
    assert role_of(command) == role
