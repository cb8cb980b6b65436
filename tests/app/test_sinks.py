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
from whimbrel.core.errors import Corrupt, Refused, Retry
from whimbrel.core.record import Result
from whimbrel.egress.parquet import ParquetSink
from whimbrel.egress.sinks import CsvSink, FunctionSink, JsonLinesSink, Mark, Sink, StageSink


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


KINDS: dict[str, tuple[Callable[..., Sink], Callable[[Path], list[int]]]] = {
    "csv": (lambda path, overwrite=False: CsvSink(path, None, overwrite), read_csv),
    "csv with columns": (lambda path, overwrite=False: CsvSink(path, ["n", "text"], overwrite), read_csv),
    "json lines": (lambda path, overwrite=False: JsonLinesSink(path, False, overwrite), read_json),
    "parquet": (ParquetSink, read_parquet),
}
WRITES = [range(3), range(3, 4), range(4, 9), range(9, 10)]


class Crash(Exception):
    """The process dies here."""


def run(make: Callable[[], Sink], journal: dict[str, Any], crash: tuple[int, str] | None) -> None:
    """Write everything from the last stored mark on, a commit after each write; die at a point of a given write."""
    sink = make()
    sink.open(stored(journal["mark"]) if journal else None)
    if not journal:  # as the outlet does it: from now on the files are this run's
        journal |= {"mark": stored(sink.commit()), "written": 0}
    for number in range(journal.get("written", 0), len(WRITES)):
        for point in ("write", "commit", "store", "committed"):
            if crash == (number, point):
                raise Crash
            if point == "write":
                assert sink.write([result(n) for n in WRITES[number]], 30) == []
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
def test_what_another_run_wrote_is_replaced_only_if_that_is_wanted(tmp_path: Path, kind: str) -> None:
    make, read = KINDS[kind]
    path = tmp_path / "results"
    for overwrite in (False, True):
        run(lambda overwrite=overwrite: make(path, overwrite), {}, None)  # type: ignore[misc]
        assert read(path) == list(range(10))
    before = sorted((file, file.read_bytes()) for file in [path, *path.glob("*")] if file.is_file())
    for act in (Sink.check, Sink.open):
        with pytest.raises(Refused, match=r"results holds .* did not write; .*overwrite=True.*data=.*another path"):
            getattr(make(path), act.__name__)(None)
    assert sorted((file, file.read_bytes()) for file in [path, *path.glob("*")] if file.is_file()) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_goes_on_with_another_path_begins_there_and_destroys_nothing(tmp_path: Path, kind: str) -> None:
    make, read = KINDS[kind]
    journal: dict[str, Any] = {}
    run(lambda: make(tmp_path / "old"), journal, None)
    run(lambda: make(tmp_path / "foreign"), {}, None)
    with pytest.raises(Refused, match="foreign holds"):
        make(tmp_path / "foreign").open(stored(journal["mark"]))
    assert read(tmp_path / "foreign") == list(range(10))
    sink = make(tmp_path / "new")
    sink.open(stored(journal["mark"]))
    sink.write([result(10)], 30)
    sink.commit()
    sink.close()
    assert (read(tmp_path / "new"), read(tmp_path / "old")) == ([10], list(range(10)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_of_the_wrong_kind_is_said_before_anything_is_written(tmp_path: Path, kind: str) -> None:
    make, _ = KINDS[kind]
    path = tmp_path / "results"
    if kind == "parquet":
        path.write_text("")
    else:
        path.mkdir()
    with pytest.raises(Refused, match="choose another path"):
        make(path).check(None)


@pytest.mark.parametrize("kind", ["csv", "json lines"])
def test_an_empty_file_is_nobodys(tmp_path: Path, kind: str) -> None:
    (tmp_path / "results").write_text("")
    KINDS[kind][0](tmp_path / "results").check(None)


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
    again = CsvSink(tmp_path / "a.csv")
    again.open(mark)
    (refused,) = again.write([result(1, a=2, late=3), result(2, a=4)], 30)
    assert (refused.sink, refused.key, refused.seq) == (str(tmp_path / "a.csv"), "k1", 1)
    assert refused.values == '{"a":2,"late":3}'
    assert "no column ['late']" in refused.error
    assert "columns=" in refused.error
    again.commit()
    assert (tmp_path / "a.csv").read_text() == "a\n1\n4\n"


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


def test_a_value_that_is_no_json_is_refused_alone(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "a.jsonl")
    sink.open(None)
    (refused,) = sink.write([result(0, n=1), result(1, n=2, odd="\ud800"), result(2, n=3)], 30)
    assert (refused.key, refused.seq) == ("k1", 1)
    assert "column 'odd'" in refused.error
    assert "ud800" in refused.values
    sink.commit()
    assert read_json(tmp_path / "a.jsonl") == [1, 3]


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


BIG = 2**53 + 1
"""A whole number that no double is."""

COLUMNS: dict[str, tuple[list[list[Any]], list[Any], list[int]]] = {
    # Values of one column, a list a write; what the file holds; which are refused.
    "a text among numbers": ([[1, "one", 2]], [1, 2], [1]),
    "a number among texts": ([["one", 1, None]], ["one", None], [1]),
    "a text in a later write": ([[1], ["one", 2]], [1, 2], [1]),
    "no bool is a number": ([[1, True]], [1], [1]),
    "fractions widen whole numbers": ([[1, 1.5], [2]], [1.0, 1.5, 2.0], []),
    "in a later write too": ([[1], [1.5]], [1.0, 1.5], []),
    "unless a whole number would change": ([[BIG], [1.5, 2]], [BIG, 2], [1]),
    "nor does a whole number change": ([[1.5], [BIG, 2]], [1.5, 2.0], [1]),
    "too large a number": ([[1, 2**63, 2]], [1, 2], [1]),
    "nothing first": ([[None], [None, "x"], [1]], [None, None, "x"], [3]),
    "lists": ([[[]], [[1], ["x"], [2.5]]], [[], [1.0], [2.5]], [2]),
    "objects gain fields": ([[{"a": 1}], [{"b": 2}, {"a": "x"}]], [{"a": 1, "b": None}, {"a": None, "b": 2}], [2]),
    "an object without fields": ([[{}], [{"a": 1}, {}]], [{"a": 1}, {"a": None}], [0]),
}


@pytest.mark.parametrize("commits", [False, True], ids=["one file", "a file a write"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_keeps_its_type_or_widens_and_what_does_not_fit_is_refused_alone(
    tmp_path: Path, name: str, commits: bool
) -> None:
    writes, kept, bad = COLUMNS[name]
    sink, number, refused, mark = ParquetSink(tmp_path), 0, list[Any](), None
    for values in writes:
        if commits or not number:  # a restart between two commits: types are part of the mark
            sink = ParquetSink(tmp_path)
            sink.open(mark)
        refused += sink.write([result(number + place, n=number + place, a=a) for place, a in enumerate(values)], 30)
        number += len(values)
        mark = stored(sink.commit()) if commits else None
    sink.commit()
    files = [pq.read_table(file) for file in sorted(tmp_path.glob("*.parquet"))]
    rows = [row for file in files for row in file.to_pylist()]
    assert [one.seq for one in refused] == [one for one in bad if one not in [row["n"] for row in rows]]
    if not commits:
        assert [row["a"] for row in rows] == kept
        assert [one.seq for one in refused] == bad
    assert all("column 'a'" in one.error for one in refused)
    assert sorted([one.seq for one in refused] + [row["n"] for row in rows]) == list(range(number)), "none is lost"


def test_files_that_are_not_the_sinks_own_stay(tmp_path: Path) -> None:
    """Spark writes names like this one into its folders."""
    foreign = [tmp_path / name for name in ("part-00000-1b2c.c000.snappy.parquet", "part-old.parquet", "notes.txt")]
    for path in foreign:
        path.write_text("not ours")
    mine = tmp_path / "part-000000.parquet"
    pq.write_table(pa.table({"n": [99]}), mine)
    ParquetSink(tmp_path, overwrite=True).open(None)
    assert all(path.read_text() == "not ours" for path in foreign)
    assert not mine.exists()


def test_a_commit_with_nothing_new_makes_no_file(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.open(None)
    assert sink.commit() == sink.commit()
    assert sink.commit()["files"] == 0
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


def test_a_function_that_raises_is_named_and_one_that_asks_for_another_try_is_not_wrapped() -> None:
    def account(values: dict[str, Any]) -> None:
        raise Retry("busy") if values["n"] else KeyError("no such account")

    sink = FunctionSink(account)
    sink.open(None)
    with pytest.raises(Refused, match=r"account raised KeyError: 'no such account', for key 'k0', seq 0"):
        sink.write([result(0, n=0)], 30)
    with pytest.raises(Retry, match="busy"):
        sink.write([result(0, n=1)], 30)


class NextStage:
    """What the next stage's ingress log does: takes each number once."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.taken: dict[int, list[Result]] = {}

    def ingest(self, results: list[Result], number: int) -> bool:
        self.calls.append(number)
        assert number > max(self.taken, default=-1) or self.taken[number] == results, (
            "another batch under a used number"
        )
        self.taken.setdefault(number, list(results))
        return True

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


def test_many_results_are_handed_on_in_pieces_of_which_each_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageSink, "MOST", 3)
    stage = NextStage()
    sink = StageSink(stage.ingest)
    sink.open(None)
    sink.write([result(n) for n in range(7)], 30)
    mark = stored(sink.commit())
    sink.committed()
    assert {number: len(results) for number, results in stage.taken.items()} == {0: 3, 1: 3, 2: 1}
    again = StageSink(stage.ingest)
    again.open(mark)
    again.write([result(7)], 30)
    again.commit()
    again.committed()
    assert stage.results == list(range(8))
    assert stage.calls == [0, 1, 2, 0, 1, 2, 3]
