"""Sinks: a file holds every result exactly once, wherever the process dies between a write and its commit.

A sink is committed together with the outlet's position: `commit` returns a mark, and after a crash a new sink is opened
with the last mark that was stored, then gets everything behind it once more.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Refused
from whimbrel.core.record import Result
from whimbrel.outlet.sinks import CsvSink, FunctionSink, JsonLinesSink, Mark, ParquetSink, Sink, StageSink


def result(number: int, **values: Any) -> Result:
    return Result(f"k{number % 2}", 1, number, 0, 10, 20, values or {"n": number, "text": f"ä,{number}\n"})


def stored(mark: Mark) -> Mark:
    """What comes back of a mark that lay in the journal."""
    return wire.unpack(wire.pack(mark), dict[str, Any])


def read_csv(path: Path) -> list[int]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(row["text"] == f"ä,{row['n']}\n" for row in rows)
    return [int(row["n"]) for row in rows]


def read_json(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text(encoding="utf-8").splitlines()]


def read_parquet(path: Path) -> list[int]:
    return [row["n"] for file in sorted(path.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


KINDS: dict[str, tuple[Callable[[Path], Sink], Callable[[Path], list[int]]]] = {
    "csv": (CsvSink, read_csv),
    "csv with columns": (lambda path: CsvSink(path, ["n", "text"]), read_csv),
    "json lines": (JsonLinesSink, read_json),
    "parquet": (ParquetSink, read_parquet),
}
WRITES = [range(3), range(3, 4), range(4, 9), range(9, 10)]


class Crash(Exception):
    """The process dies here."""


def run(make: Callable[[], Sink], journal: dict[str, Any], crash: tuple[int, str] | None) -> None:
    """Write everything from the last stored mark on, a commit after each write; die at a point of a given write."""
    sink = make()
    sink.open(stored(journal["mark"]) if journal else None)
    for number in range(journal.get("written", 0), len(WRITES)):
        for point in ("write", "commit", "store", "committed"):
            if crash == (number, point):
                raise Crash
            if point == "write":
                sink.write([result(n) for n in WRITES[number]], 30)
            elif point == "commit":
                mark = sink.commit()
            elif point == "store":
                journal |= {"mark": mark, "written": number + 1}
            else:
                sink.committed()
    sink.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", ["write", "commit", "store", "committed"])
@pytest.mark.parametrize("number", range(len(WRITES)))
def test_a_file_holds_every_result_once_wherever_the_process_dies(
    tmp_path: Path, kind: str, point: str, number: int
) -> None:
    make, read = KINDS[kind]
    path, journal = tmp_path / "out" / "results", dict[str, Any]()
    with pytest.raises(Crash):
        run(lambda: make(path), journal, (number, point))
    run(lambda: make(path), journal, None)
    assert read(path) == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_but_not_committed_is_on_disk_and_taken_back(tmp_path: Path, kind: str) -> None:
    """So that the test above cannot pass only because a buffer was lost: here it reaches the disk first."""
    make, read = KINDS[kind]
    path = tmp_path / "results"
    sink = make(path)
    sink.open(None)
    sink.write([result(0)], 30)
    mark = stored(sink.commit())
    sink.write([result(1)], 30)
    sink.commit()
    assert read(path) == [0, 1]
    again = make(path)
    again.open(mark)
    assert read(path) == [0]
    again.write([result(1)], 30)
    again.commit()
    again.close()
    assert read(path) == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_the_beginning_replaces_what_an_earlier_run_wrote(tmp_path: Path, kind: str) -> None:
    make, read = KINDS[kind]
    path = tmp_path / "results"
    for _ in range(2):
        run(lambda: make(path), {}, None)
        assert read(path) == list(range(10))


@pytest.mark.parametrize("kind", ["csv", "json lines"])
@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_file_that_lost_what_was_committed_is_not_filled_with_zeros(tmp_path: Path, kind: str, harm: str) -> None:
    make, _ = KINDS[kind]
    path, journal = tmp_path / "results", dict[str, Any]()
    run(lambda: make(path), journal, None)
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt, match="results"):
        make(path).open(stored(journal["mark"]))
    assert not path.exists() or b"\0" not in path.read_bytes()


# ── CSV ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def csv_of(path: Path, *results: Result, columns: list[str] | None = None) -> str:
    sink = CsvSink(path, columns)
    sink.open(None)
    sink.write(list(results), 30)
    sink.commit()
    sink.close()
    return path.read_text(encoding="utf-8")


def test_the_columns_of_a_csv_file_are_those_of_the_first_result(tmp_path: Path) -> None:
    text = csv_of(tmp_path / "a.csv", result(0, a=1, b="x"), result(1, b="y", a=2), result(2, a=3))
    assert text == "a,b\n1,x\n2,y\n3,\n"


def test_the_columns_of_a_csv_file_may_be_given(tmp_path: Path) -> None:
    assert csv_of(tmp_path / "a.csv", result(0, a=1), columns=["b", "a"]) == "b,a\n,1\n"


def test_a_result_with_a_new_column_is_refused_and_told_the_way_out(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "a.csv")
    sink.open(None)
    sink.write([result(0, a=1)], 30)
    mark = stored(sink.commit())
    with pytest.raises(Refused, match=r"no column \['late'\].*columns="):
        sink.write([result(1, a=2, late=3)], 30)
    again = CsvSink(tmp_path / "a.csv")
    again.open(mark)
    with pytest.raises(Refused, match="late"):
        again.write([result(1, a=2, late=3)], 30)
    assert (tmp_path / "a.csv").read_text() == "a\n1\n"


# ── JSON lines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_json_lines_may_tell_who_made_a_result_out_of_what_and_when(tmp_path: Path) -> None:
    for identity in (False, True):
        path = tmp_path / f"{identity}.jsonl"
        sink = JsonLinesSink(path, identity)
        sink.open(None)
        sink.write([result(7, at=datetime(2024, 5, 1, tzinfo=UTC), nan=float("nan"))], 30)
        sink.commit()
        sink.close()
        line = json.loads(path.read_text())
        assert (line["at"], line["nan"]) == ("2024-05-01T00:00:00Z", None)
        names = {"_key": "k1", "_epoch": 1, "_seq": 7, "_n": 0, "_ingress_us": 20, "_released_us": 30}
        assert {name: value for name, value in line.items() if name[0] == "_"} == (names if identity else {})


# ── Parquet ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_parquet_file_has_every_column_that_some_result_has(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.open(None)
    sink.write([result(0, a=1), result(1, a=2, late="x"), result(2, other=True)], 30)
    sink.commit()
    assert pq.read_table(tmp_path / "part-000000.parquet").to_pylist() == [
        {"a": 1, "late": None, "other": None},
        {"a": 2, "late": "x", "other": None},
        {"a": None, "late": None, "other": True},
    ]


def test_values_that_fit_no_parquet_column_are_refused_by_name(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.open(None)
    sink.write([result(0, a=1), result(1, a="one")], 30)
    with pytest.raises(Refused, match="'a'"):
        sink.commit()


def test_files_that_are_not_the_sinks_own_stay(tmp_path: Path) -> None:
    """Spark writes names like this one into its folders."""
    foreign = [tmp_path / name for name in ("part-00000-1b2c.c000.snappy.parquet", "part-old.parquet", "notes.txt")]
    for path in foreign:
        path.write_text("not ours")
    mine = tmp_path / "part-000000.parquet"
    pq.write_table(pa.table({"n": [99]}), mine)
    ParquetSink(tmp_path).open(None)
    assert all(path.read_text() == "not ours" for path in foreign)
    assert not mine.exists()


def test_a_commit_with_nothing_new_makes_no_file(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.open(None)
    assert sink.commit() == sink.commit() == {"files": 0}
    assert list(tmp_path.iterdir()) == []


# ── Functions and stages ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_function_gets_the_values_or_the_whole_result() -> None:
    values: list[Any] = []
    whole: list[Any] = []
    for sink in (FunctionSink(values.append), FunctionSink(whole.append, whole=True)):
        sink.open(None)
        sink.write([result(1)], 30)
        assert sink.commit() == {}
    assert (values, whole) == ([result(1).values], [result(1)])


class NextStage:
    """What the next stage's ingress log does: takes each number once."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.taken: dict[int, list[Result]] = {}

    def ingest(self, results: list[Result], number: int) -> None:
        self.calls.append(number)
        assert number > max(self.taken, default=-1) or self.taken[number] == results, (
            "another batch under a used number"
        )
        self.taken.setdefault(number, list(results))

    @property
    def results(self) -> list[int]:
        return [result.values["n"] for results in self.taken.values() for result in results]


@pytest.mark.parametrize("point", ["write", "commit", "store", "committed"])
@pytest.mark.parametrize("number", range(len(WRITES)))
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_the_next_stage_gets_every_result_once_wherever_the_process_dies(point: str, number: int, again: bool) -> None:
    stage, journal = NextStage(), dict[str, Any]()
    for _ in range(1 + again):
        with pytest.raises(Crash):
            run(lambda: StageSink(stage.ingest), journal, (number, point))
        if journal.get("written", 0) > number:
            break
    run(lambda: StageSink(stage.ingest), journal, None)
    assert stage.results == list(range(10))


def test_what_is_pending_is_handed_on_only_once_its_mark_is_safe_and_again_after_a_crash() -> None:
    stage = NextStage()
    sink = StageSink(stage.ingest)
    sink.open(None)
    sink.write([result(0), result(1)], 30)
    mark = stored(sink.commit())
    assert stage.calls == [], "the mark is not safe yet"
    for _ in range(2):
        StageSink(stage.ingest).open(mark)
    assert stage.calls == [0, 0]
    assert stage.taken == {0: [result(0), result(1)]}


def test_pending_results_keep_their_types_in_a_mark() -> None:
    stage = NextStage()
    sink = StageSink(stage.ingest)
    sink.open(None)
    values = {"n": 1, "at": datetime(2024, 5, 1, tzinfo=UTC), "raw": b"\xff", "list": [1, None], "x": float("inf")}
    sink.write([result(0, **values)], 30)
    StageSink(stage.ingest).open(stored(sink.commit()))
    assert stage.taken[0] == [result(0, **values)]
    assert isinstance(stage.taken[0][0], Result)
