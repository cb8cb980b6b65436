"""Sources: rows with their numbers from any number on, and a `BadRecord` in the place of each that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whimbrel.core.errors import BadRecord, Refused
from whimbrel.gateway.intake import Intake, parse_schema
from whimbrel.gateway.sources import CsvSource, Items, JsonLinesSource, Source

ROWS = [{"sensor": f"s{number % 3}", "value": number / 2} for number in range(250)]


def csv_file(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "values.csv"
    path.write_text(text, encoding=encoding)
    return path


def json_file(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "values.jsonl"
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def good(source: Source, start: int = 0) -> list[tuple[int, Any]]:
    return [(number, row) for number, row in source.rows(start) if not isinstance(row, BadRecord)]


def bad(source: Source) -> list[tuple[int, str]]:
    return [(number, row.reason) for number, row in source.rows(0) if isinstance(row, BadRecord)]


# ── Rows from Python ─────────────────────────────────────────────────────────────────────────────────────────────────


def generated() -> Iterator[dict[str, Any]]:
    yield from ROWS


@pytest.mark.parametrize("kind", ["list", "generator", "function"])
@pytest.mark.parametrize("inferred", [True, False])
def test_items_of_every_kind_give_all_rows_also_those_that_the_schema_was_inferred_from(
    kind: str, inferred: bool
) -> None:
    items: Any = {"list": ROWS, "generator": generated(), "function": generated}[kind]
    source = Items(items, None if inferred else parse_schema("sensor string, value double"), rate=None)
    assert source.schema() == parse_schema("sensor string, value double")
    assert list(source.rows(0)) == list(enumerate(ROWS))


@pytest.mark.parametrize("items", [ROWS, generated], ids=["list", "function"])
@pytest.mark.parametrize("start", [1, 99, 100, 101, 249, 250, 1000])
def test_items_go_on_behind_any_row(items: Any, start: int) -> None:
    source = Items(items, None, rate=None)
    source.schema()
    assert list(source.rows(start)) == list(enumerate(ROWS))[start:]


def test_items_without_rows_need_a_schema() -> None:
    with pytest.raises(Refused, match="schema="):
        Items([], None, rate=None).schema()


# ── CSV ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_csv_file_is_read_with_its_header_and_from_any_row_on(tmp_path: Path) -> None:
    path = csv_file(tmp_path, 'sensor,note\na,"two\nlines, one field"\nb,\nc,last')
    rows = [{"sensor": "a", "note": "two\nlines, one field"}, {"sensor": "b", "note": None}]
    rows.append({"sensor": "c", "note": "last"})
    for start in range(4):
        assert list(CsvSource(path, None, None).rows(start)) == list(enumerate(rows))[start:]


def test_a_csv_file_from_a_spreadsheet_begins_with_a_mark_that_is_no_part_of_its_first_column(tmp_path: Path) -> None:
    source = CsvSource(csv_file(tmp_path, "sensor,value\r\na,1\r\n", "utf-8-sig"), None, None)
    assert good(source) == [(0, {"sensor": "a", "value": "1"})]


def test_what_the_types_of_a_csv_file_seem_to_be_all_its_values_are(tmp_path: Path) -> None:
    """A column is a number only if every value of the sample can be taken in as one: `007` is a name."""
    text = "id,count,ratio,ok,code,day,huge,odd\n007,1,1,true,12,2024-05-01,12345678901234567890,1_000\n"
    text += "042,-2,2.5e3,false,1x,2024-05-02,1,2\n9,,,,,,,\n"
    source = CsvSource(csv_file(tmp_path, text), None, None)
    assert source.schema() == parse_schema(
        "id string, count long, ratio double, ok boolean, code string, day string, huge string, odd string"
    )
    intake = Intake(source.schema(), "id", lenient=source.lenient)
    assert intake.take([row for _, row in good(source)]) == [
        ("007", ("007", 1, 1.0, True, "12", "2024-05-01", "12345678901234567890", "1_000"), None),
        ("042", ("042", -2, 2500.0, False, "1x", "2024-05-02", "1", "2"), None),
        ("9", ("9", None, None, None, None, None, None, None), None),
    ]


def test_a_csv_row_that_does_not_fit_its_header(tmp_path: Path) -> None:
    source = CsvSource(csv_file(tmp_path, "sensor,value\na,1\nb\nc,3,4\n\nd,5\n"), None, None)
    assert bad(source) == [(1, "wrong type"), (2, "wrong type"), (3, "wrong type")]
    assert [number for number, _ in good(source)] == [0, 4]


@pytest.mark.parametrize(("size", "limit"), [(101, 100), (200_000, 1_000), (2_000_000, 1 << 20)])
def test_a_csv_row_that_is_too_large_is_passed_over(tmp_path: Path, size: int, limit: int) -> None:
    """Python's CSV reader has a limit of its own, and raises: the stream must go on all the same."""
    source = CsvSource(csv_file(tmp_path, f"sensor,value\na,1\n{'x' * size},2\nb,3\n"), None, None, limit)
    assert bad(source) == [(1, "too large")]
    assert [row["sensor"] for _, row in good(source)] == ["a", "b"]
    assert [number for number, _ in source.rows(2)] == [2]


def test_a_csv_row_below_the_limit_is_taken_however_large(tmp_path: Path) -> None:
    source = CsvSource(csv_file(tmp_path, f"sensor,note\na,{'x' * 500_000}\n"), None, None)
    assert [len(row["note"]) for _, row in good(source)] == [500_000]


def test_a_csv_file_without_a_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="needs a header"):
        CsvSource(csv_file(tmp_path, ""), None, None).schema()


# ── JSON lines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_json_lines_are_read_from_any_line_on(tmp_path: Path) -> None:
    path = json_file(tmp_path, '{"sensor": "ä", "value": 1}', '{"sensor": "b", "value": 2.5}\r', '{"sensor": null}')
    rows = [{"sensor": "ä", "value": 1}, {"sensor": "b", "value": 2.5}, {"sensor": None}]
    source = JsonLinesSource(path, None, None)
    assert source.schema() == parse_schema("sensor string, value double")
    for start in range(4):
        assert list(source.rows(start)) == list(enumerate(rows))[start:]


def test_json_lines_that_are_none(tmp_path: Path) -> None:
    lines: list[str | bytes] = [
        '{"sensor": "a"}',
        "sensor=a",
        '{"sensor": "a"',
        "",
        '{"sensor": "b"}',
        b'{"sensor": "\xff"}',
        "NaN",
    ]
    source = JsonLinesSource(json_file(tmp_path, *lines), None, None)
    assert bad(source) == [(number, "not JSON") for number in (1, 2, 3, 5, 6)]
    assert [row["sensor"] for _, row in good(source)] == ["a", "b"]
    assert source.schema() == parse_schema("sensor string")


def test_the_limit_of_json_lines_is_in_bytes_and_a_longer_line_is_passed_over(tmp_path: Path) -> None:
    fits, wide = '{"s": "' + "x" * 20 + '"}', '{"s": "' + "ä" * 11 + '"}'
    huge = '{"s": "' + "x" * 5_000 + '"}'
    source = JsonLinesSource(json_file(tmp_path, fits, wide, fits, huge, fits), None, None, limit=len(fits))
    assert len(wide.encode()) > len(fits) > len(wide)
    assert bad(source) == [(1, "too large"), (3, "too large")]
    assert [number for number, _ in good(source)] == [0, 2, 4]
    assert [number for number, _ in source.rows(4)] == [4]


def test_a_last_line_without_its_end_counts(tmp_path: Path) -> None:
    path = tmp_path / "values.jsonl"
    path.write_bytes(b'{"s": "a"}\n{"s": "b"}')
    assert [row["s"] for _, row in good(JsonLinesSource(path, None, None))] == ["a", "b"]


def test_a_bad_line_keeps_its_text_for_whoever_looks_for_it(tmp_path: Path) -> None:
    source = JsonLinesSource(json_file(tmp_path, "sensor=a", "y" * 50), None, None, limit=20)
    assert [row.record for _, row in source.rows(0) if isinstance(row, BadRecord)] == ["sensor=a", "y" * 20]


@pytest.mark.parametrize("kind", [CsvSource, JsonLinesSource])
def test_a_file_that_is_not_there_is_a_clear_error(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(Refused, match=r"nowhere\.csv"):
        kind(tmp_path / "nowhere.csv", None, None).schema()
