"""What a row must be to become a record: schemas, types, keys, event times, and the reason where it is not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from whimbrel.core.errors import BadRecord, Refused
from whimbrel.gateway.intake import Intake, infer_schema, parse_schema

# ── Schemas ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_schema_is_read_from_text() -> None:
    schema = parse_schema(" sensor string, `value` DOUBLE, count: bigint, n int, f float, ok boolean, at timestamp, ")
    assert schema == pa.schema(
        {
            "sensor": pa.string(),
            "value": pa.float64(),
            "count": pa.int64(),
            "n": pa.int32(),
            "f": pa.float32(),
            "ok": pa.bool_(),
            "at": pa.timestamp("us", tz="UTC"),
        }
    )
    assert parse_schema("day date, raw binary, n long") == pa.schema(
        {"day": pa.date32(), "raw": pa.binary(), "n": pa.int64()}
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "at least one column"),
        (" , ", "at least one column"),
        ("sensor", "'sensor'"),
        ("sensor text", "string, long"),
        ("_key string", "'_key string'"),
        ("1st long", "'1st long'"),
        ("price decimal(10,2)", "price decimal"),
        ("sensor string, value double, sensor long", "'sensor'"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused_with_the_place(text: str, told: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_schema(text)
    assert told in str(refused.value)


def test_a_schema_is_inferred_from_the_values_of_sample_rows() -> None:
    rows: list[dict[str, Any]] = [
        {"s": "a", "n": 1, "x": 1, "b": True, "d": date(2024, 1, 1), "t": datetime(2024, 1, 1), "empty": None},
        {"s": None, "n": 2, "x": 1.5, "b": False, "late": 3.0},
    ]
    assert infer_schema(rows) == parse_schema(
        "s string, n long, x double, b boolean, d date, t timestamp, empty string, late double"
    )
    assert infer_schema([{"mixed": 1}, {"mixed": "one"}]) == parse_schema("mixed string")


@pytest.mark.parametrize(
    "rows", [[], [{}], [{"nested": {"a": 1}}], [{"list": [1]}], [{"with space": 1}], [{"_bin": 1}]]
)
def test_what_has_no_simple_type_is_refused_and_told_the_way_out(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(Refused, match="schema='name type"):
        infer_schema(rows)


@pytest.mark.parametrize(("key", "event_time"), [("sensor", None), ("s", "when")])
def test_a_key_or_a_time_that_is_no_column_is_refused_before_anything_runs(key: str, event_time: str | None) -> None:
    with pytest.raises(Refused, match="it has: s, value"):
        Intake(parse_schema("s string, value double"), key, event_time)


# ── Rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

INTAKE = Intake(
    parse_schema("k string, n long, i int, x double, f float, b boolean, t timestamp, d date, r binary"), "k"
)


def bad(intake: Intake, row: Any) -> BadRecord:
    """The answer to one row that must not be taken in; a good row beside it must be, whatever this one is."""
    good = {"k": "good"}
    before, answer, after = intake.take([good, row, good])
    assert isinstance(before, tuple)
    assert before == after
    assert isinstance(answer, BadRecord)
    return answer


def test_good_rows_become_keyed_events_in_order() -> None:
    moment = datetime(2024, 5, 1, 12, tzinfo=UTC)
    taken = INTAKE.take(
        [
            {"k": "a", "n": -(2**63), "i": 2**31 - 1, "x": 1, "f": 0.5, "b": False, "t": moment, "r": b"\x00"},
            {"k": "b", "n": 2**63 - 1, "d": "2024-05-01", "t": "2024-05-01T12:00:00Z", "unknown": "is dropped"},
        ]
    )
    assert taken == [
        ("a", ("a", -(2**63), 2**31 - 1, 1.0, 0.5, False, moment, None, b"\x00"), None),
        ("b", ("b", 2**63 - 1, None, None, None, None, moment, date(2024, 5, 1), None), None),
    ]
    assert INTAKE.take([]) == []


@pytest.mark.parametrize("row", [{}, {"n": 1}, {"k": None}, {"k": ""}])
def test_a_row_without_key(row: dict[str, Any]) -> None:
    answer = bad(INTAKE, row)
    assert (answer.reason, str(answer)) == ("no key", "column 'k' is empty")


@pytest.mark.parametrize(
    "value",
    [
        {"n": "1"},
        {"n": 1.5},
        {"n": True},
        {"n": 2**63},
        {"n": -(2**63) - 1},
        {"i": 2**31},
        {"i": -(2**31) - 1},
        {"x": "much"},
        {"x": 10**400},
        {"b": 1},
        {"t": "yesterday"},
        {"d": "2024-02-30"},
        {"r": 7},
        {"k": 7},
        {"k": ["a"]},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_or_out_of_range_names_its_column(value: dict[str, Any]) -> None:
    answer = bad(INTAKE, {"k": "a", **value})
    assert answer.reason == "wrong type"
    assert f"$.{next(iter(value))}" in str(answer)


@pytest.mark.parametrize("row", [None, 7, "text", [1, 2], [["k", "a"]], True])
def test_what_is_no_object_at_all(row: Any) -> None:
    answer = bad(INTAKE, row)
    assert answer.reason == "wrong type"
    assert type(row).__name__ in str(answer)


def test_text_that_no_log_can_hold_is_bad_and_not_a_crash() -> None:
    """A lone surrogate is a Python string but no UTF-8: hashing or storing it would raise in the gateway."""
    assert bad(INTAKE, {"k": "a\ud800"}).reason == "wrong type"
    second = Intake(parse_schema("k string, note string"), "k")
    assert bad(second, {"k": "a", "note": "\udfff"}).reason == "wrong type"


def test_a_number_key_is_its_decimal_text() -> None:
    intake = Intake(parse_schema("id long, ok boolean"), "id")
    assert intake.take([{"id": 7}, {"id": 0}]) == [("7", (7, None), None), ("0", (0, None), None)]


def test_text_is_converted_only_where_the_source_has_nothing_but_text() -> None:
    lenient = Intake(parse_schema("k string, n long, x double, b boolean, t timestamp"), "k", lenient=True)
    row = {"k": "007", "n": "7", "x": "1e3", "b": "true", "t": "2024-05-01T00:00:00Z"}
    assert lenient.take([row]) == [("007", ("007", 7, 1000.0, True, datetime(2024, 5, 1, tzinfo=UTC)), None)]
    assert bad(lenient, {"k": "a", "n": "seven"}).reason == "wrong type"
    assert bad(INTAKE, {"k": "a", "n": "7"}).reason == "wrong type"


def test_a_type_that_only_arrow_knows_is_checked_too() -> None:
    """A schema may come from Arrow with types that have no name in `parse_schema`."""
    intake = Intake(pa.schema({"k": pa.string(), "small": pa.int8(), "list": pa.list_(pa.int64())}), "k")
    assert intake.take([{"k": "a", "small": 1, "list": [1, 2]}]) == [("a", ("a", 1, [1, 2]), None)]
    assert bad(intake, {"k": "a", "small": 300}).reason == "wrong type"
    assert bad(intake, {"k": "a", "list": "no list"}).reason == "wrong type"


# ── Event time ───────────────────────────────────────────────────────────────────────────────────────────────────────


def moment_of(kind: str, value: Any) -> Any:
    intake = Intake(parse_schema(f"k string, at {kind}"), "k", "at")
    answer = intake.take([{"k": "a", "at": value}])[0]
    return answer if isinstance(answer, BadRecord) else answer[2]


@pytest.fixture
def far_from_greenwich() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "Pacific/Auckland"
    time.tzset()
    yield
    os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
    time.tzset()


@pytest.mark.usefixtures("far_from_greenwich")
def test_event_time_is_in_microseconds_and_means_utc_wherever_the_gateway_stands() -> None:
    noon = 1_714_564_800_000_000
    assert moment_of("timestamp", "2024-05-01T12:00:00Z") == noon
    assert moment_of("timestamp", "2024-05-01T14:00:00+02:00") == noon
    assert moment_of("timestamp", "2024-05-01T12:00:00") == noon
    assert moment_of("timestamp", datetime(2024, 5, 1, 12, 0, 0, 1)) == noon + 1
    assert moment_of("date", "2024-05-01") == noon - 12 * 3_600_000_000
    assert moment_of("long", noon) == noon
    assert moment_of("long", None) is None
    assert moment_of("timestamp", datetime(1, 1, 1)) == -62_135_596_800_000_000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_an_event_time_that_is_no_moment_is_a_bad_record(value: float) -> None:
    answer = moment_of("double", value)
    assert isinstance(answer, BadRecord)
    assert answer.reason == "wrong type"


@pytest.mark.parametrize("kind", ["string", "boolean", "binary"])
def test_a_column_that_cannot_tell_time_is_refused_before_anything_runs(kind: str) -> None:
    with pytest.raises(Refused, match="timestamp"):
        Intake(parse_schema(f"k string, at {kind}"), "k", "at")
