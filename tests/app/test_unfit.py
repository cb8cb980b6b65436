"""Results that a sink cannot hold become dead letters, and the others go on; files of other runs are left alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import whimbrel as wb
from tests.app.test_dead_letters import House, parked
from tests.app.test_outlet import Died
from tests.app.waiting import until
from whimbrel.core.record import Result
from whimbrel.gateway.dead_letters import DeadLetters
from whimbrel.log import backoff, chunks
from whimbrel.log.memory import MemoryLog
from whimbrel.orchestrator.journal import GatewayJournal


def result(number: int, **values: Any) -> Result:
    return Result(f"k{number % 2}", 0, number, 0, 0, 0, {"n": number, **values})


def numbers(out: Path) -> list[int]:
    if out.is_dir():
        return [row["n"] for file in sorted(out.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    return [int(line.split(",")[0]) for line in out.read_text().splitlines()[1:]]


SINKS: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "csv": (wb.Csv, {"late": 1}, "the file has no column ['late']"),
    "parquet": (wb.Parquet, {"a": "text"}, "column 'a' holds int64, which does not hold this value"),
}


@pytest.mark.parametrize("kind", SINKS)
def test_a_result_that_a_sink_cannot_hold_becomes_a_dead_letter_and_the_stream_goes_on(
    tmp_path: Path, kind: str
) -> None:
    make, odd, why = SINKS[kind]
    out = tmp_path / "out"
    house = House(tmp_path, make(out))
    house.role.start()
    house.say("sum-1", [result(0, a=1), result(1, a=2)])
    house.say("sum-1", [result(2, a=3), result(3, **{"a": 4, **odd}), result(4, a=5)], parked("k9", 9))
    house.settle()
    house.end()
    house.begin().start()
    house.say("sum-1", [result(5, **{"a": 6, **odd}), result(6, a=7)])
    house.settle()
    house.end()
    assert numbers(out) == [0, 1, 2, 4, 6]
    letters = [letter for letter in house.role.dead.read() if letter.reason == "sink refused"]
    assert [(letter.position, letter.source) for letter in letters] == [(3, str(out)), (5, str(out))]
    assert all(why in letter.message for letter in letters)
    assert letters[0].message.endswith("; key 'k1', seq 3")
    assert '"n":3' in letters[0].record


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after the commit"])
@pytest.mark.parametrize("at", range(3))
def test_it_is_kept_once_wherever_the_process_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, after: bool, at: int
) -> None:
    make, odd, _ = SINKS[kind]
    save, commits = GatewayJournal.save, 0

    def dying(journal: GatewayJournal, name: str, blob: bytes) -> None:
        nonlocal commits
        commits += name == "outlet/sum"
        dies = name == "outlet/sum" and commits == at + 1
        if dies and not after:
            raise Died
        save(journal, name, blob)
        if dies:
            raise Died

    monkeypatch.setattr(GatewayJournal, "save", dying)
    house = House(tmp_path, make(tmp_path / "out"))
    house.say("sum-1", [result(0, a=1), result(1, **{"a": 2, **odd}), result(2, a=3)])
    house.say("sum-2", [result(3, **{"a": 4, **odd})], parked("k8", 8))
    house.role.start()
    outlet = house.role.first.outlet
    until(lambda: outlet.error or outlet.is_idle, "it dies, or is done")
    house.end()
    assert isinstance(outlet.error, Died), "at its start, with the results, or at its end"
    house.begin().start()
    house.say("sum-1", [result(4, **{"a": 5, **odd})])
    house.settle()
    house.end()
    assert numbers(tmp_path / "out") == [0, 2]
    assert sorted(house.letters()) == [("operator failed", 8), *(("sink refused", seq) for seq in (1, 3, 4))]


def test_a_function_that_asks_for_another_try_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST", 0.001)
    taken: list[int] = []
    away = [wb.Retry("the database is away")] * 3

    def insert(values: dict[str, Any]) -> None:
        if values["n"] == 1 and away:
            raise away.pop()
        taken.append(values["n"])

    house = House(tmp_path, insert)
    house.role.start()
    house.say("sum-1", [result(0), result(1), result(2)])
    house.settle()
    house.end()
    assert taken == [0, 0, 0, 0, 1, 2], "what it had before the error comes again: a function cannot be taken back"


def test_a_function_that_fails_stops_the_outlet_and_is_named(tmp_path: Path) -> None:
    def insert(values: dict[str, Any]) -> None:
        raise ValueError("no such table")

    house = House(tmp_path, insert)
    house.role.start()
    house.say("sum-1", [result(0)])
    until(house.role.errors, "it fails")
    error = house.role.status().stages["sum"].error
    assert "insert raised ValueError: no such table, for key 'k0', seq 0" in str(error)
    assert not house.role.first.outlet.is_idle
    house.end()


# ── Files of other runs ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [wb.Csv, wb.JsonLines])
def test_a_file_of_another_run_is_refused_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def no_session(*arguments: Any, **options: Any) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("whimbrel.deploy.embedded.engine_of", no_session)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = tmp_path / "results"
    out.write_text("precious\n")
    pipeline = wb.Pipeline("p", source=[{"key": "a"}], key="key").stage(
        "sum", House(tmp_path).pipeline.stages[0].operator
    )
    with pytest.raises(wb.Refused, match=r"results holds 9 bytes that this run did not write; .*overwrite=True"):
        wb.run(pipeline.sink(kind(out)))
    assert out.read_text() == "precious\n"


def test_a_run_that_died_before_its_first_result_was_committed_knows_its_file_again(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    house = House(tmp_path, wb.Csv(out))
    house.role.start()
    until(lambda: house.journal.load("outlet/sum"), "the first commit")
    house.end()
    out.write_text("n\n1\n")  # what a buffer that ran over leaves behind
    house.begin().start()
    house.say("sum-1", [result(0), result(1)])
    house.settle()
    house.end()
    assert numbers(out) == [0, 1]


def test_a_run_with_another_number_of_sinks_is_refused(tmp_path: Path) -> None:
    house = House(tmp_path, wb.Csv(tmp_path / "out.csv"))
    house.role.start()
    until(lambda: house.journal.load("outlet/sum"), "the first commit")
    house.end()
    house.pipeline.sink(print)
    with pytest.raises(wb.Refused, match="began with 1 sinks after stage sum, and the pipeline has 2"):
        house.begin()


# ── Long logs ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Watched(MemoryLog):
    """A log that knows how much was read of it at once."""

    most = 0

    def within(self, *arguments: Any, **named: Any) -> int:
        most = self.most
        found = super().within(*arguments, **named)  # which reads, as logs in files do not
        self.most = most
        return found

    def read(self, *arguments: Any, **named: Any) -> Any:
        entries = super().read(*arguments, **named)
        self.most = max(self.most, sum(len(entry.blob) for entry in entries))
        return entries


def test_an_outlet_reads_no_more_of_a_long_outbox_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SIZE", 2_000)
    delivered: list[dict[str, Any]] = []
    house, box = House(tmp_path, delivered.append), Watched()
    house.role.first._outboxes["sum-1"] = box  # type: ignore[assignment]
    monkeypatch.setattr(house.logs, "outbox", lambda name: box)
    for number in range(0, 1_000, 10):
        house.say("sum-1", [result(number + place) for place in range(10)])
    house.role.start()
    house.settle()
    house.end()
    assert [values["n"] for values in delivered] == list(range(1_000))
    assert 0 < box.most <= 2_000


def test_dead_letters_are_counted_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SIZE", 2_000)
    log = Watched()
    dead = DeadLetters(log)
    for number in range(200):
        dead.park(parked("k", number), writer="outlet/s", counter=number)
    assert DeadLetters(log).counts == {"operator failed": 200}
    assert [letter.position for letter in dead] == list(range(200))
    assert 0 < log.most <= 2_000
