"""The outlet: results leave in the order of their key, once, wherever the process dies."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.app.waiting import until
from whimbrel.core import wire
from whimbrel.core.errors import Unavailable
from whimbrel.core.keys import Selection
from whimbrel.core.options import RestoreOptions
from whimbrel.core.record import (
    Checkpointed,
    Closed,
    Move,
    Notice,
    Opened,
    OutboxEntry,
    Outgoing,
    Parked,
    Ready,
    Report,
    Result,
)
from whimbrel.egress.dispatch import Dispatcher
from whimbrel.egress.outlet import Letter, Outlet
from whimbrel.egress.parquet import ParquetSink
from whimbrel.egress.sinks import JsonLinesSink, Mark, Sink, Unfit
from whimbrel.egress.threaded import ThreadedOutlet
from whimbrel.egress.ways import ToSinks
from whimbrel.log.contract import Log
from whimbrel.log.memory import MemoryLog
from whimbrel.orchestrator.journal import GatewayJournal

A = Selection(keys=frozenset({"a"}))
READY = Ready("m1", "s-2", 0, 1)
CLOSED = Closed("m1", "s-1", 0, 1, A, 1)
OPENED = Opened("m1", "s-2", 0, 1)
PARKED = Parked("s-1", "b", 7, "gateway", "ValueError: no", "{}")
HELD = Parked("s-2", "a", 7, "gateway", "ValueError: no", "{}", 1)
"""Of the destination's epoch: the gate holds it back until the source's is closed."""


def results(key: str, epoch: int, *seqs: int) -> list[Result]:
    return [Result(key, epoch, seq, 0, 0, 0, {"key": key, "n": seq}) for seq in seqs]


def said(*groups: tuple[list[Result], list[Notice]]) -> bytes:
    """An outbox entry: what each group of one micro-batch said."""
    return wire.pack(OutboxEntry([Outgoing(*group) for group in groups]))


BEGUN = 3
"""Deeds of the commit with which an outlet begins."""


class Died(Exception):
    """The process dies here."""


class Reports(MemoryLog):
    """A log in which every append is a deed, before and after it is done."""

    def __init__(self, deed: Callable[[], None]) -> None:
        super().__init__()
        self.deed = deed

    def append(self, *args: Any, **more: Any) -> int | None:
        self.deed()
        position = super().append(*args, **more)
        self.deed()
        return position


class Office:
    """All that outlives an outlet: outboxes, journal and the sink's file. And a hand that kills at a chosen deed."""

    def __init__(self, folder: Path, outboxes: Mapping[str, list[bytes]], kill_at: int | None = None) -> None:
        self.path = folder / "results.jsonl"
        self.outboxes: dict[str, Log] = {name: MemoryLog() for name in outboxes}
        for name, blobs in outboxes.items():
            self.write(name, *blobs)
        self.saved: bytes | None = None
        self.heard: list[Letter] = []
        self.numbers: dict[int, Letter] = {}
        self.reports = Reports(self.deed)
        self.deeds = 0
        self.kill_at = kill_at

    def write(self, outbox: str, *blobs: bytes) -> None:
        for blob in blobs:
            self.outboxes[outbox].append(blob, count=1, writer=outbox, counter=self.outboxes[outbox].tail())

    def deed(self) -> None:
        self.deeds += 1
        if self.deeds - 1 == self.kill_at:
            raise Died

    def hear(self, notice: Letter, number: int) -> None:
        self.deed()
        assert not isinstance(notice, Unfit)
        self.heard.append(notice)
        assert self.numbers.setdefault(number, notice) == notice, "another notice under the same number"
        assert list(self.numbers) == sorted(self.numbers), "a receiver would take a lower number for a repetition"
        self.deed()

    def save(self, blob: bytes) -> None:
        self.deed()
        self.saved = blob
        self.deed()

    def open(self) -> ThreadedOutlet:
        sinks: list[Sink] = [Watched(self.path, self.deed)]
        outlet = ThreadedOutlet(
            "s", self.outboxes, sinks, self.hear, self.save, lambda: 1, dispatch=self.dispatcher().dispatch
        )
        outlet.recover(self.saved)
        outlet.start()
        return outlet

    def dispatcher(self) -> Dispatcher:
        """All results are for here."""
        return Dispatcher(ToSinks("", [""], [""], [""]), lambda place, name: MemoryLog(), self.reports)

    def reported(self) -> set[str]:
        entries = self.reports.read(0)
        return {str(report) for entry in entries for report in wire.unpack(entry.blob, list[Report])}

    def run(self) -> ThreadedOutlet:
        """Let an outlet deliver all that is there; start another one when it dies."""
        while True:
            outlet = self.open()
            until(lambda outlet=outlet: outlet.is_idle or outlet.error, "everything is delivered")  # type: ignore[misc]
            outlet.stop()
            if not outlet.error:
                return outlet
            assert isinstance(outlet.error, Died)

    def lines(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for line in self.path.read_text().splitlines():
            values = json.loads(line)
            found.setdefault(values["key"], []).append(values["n"])
        return found


class Watched:
    """A JSON lines file in which every call is a deed, before and after it is done, on the disk at once."""

    commit_interval = 0.0
    durable = False

    def __init__(self, path: Path, deed: Callable[[], None]) -> None:
        self.sink, self.deed = JsonLinesSink(path), deed

    def open(self, mark: Mark | None) -> None:
        self.sink.open(mark)

    def check(self, mark: Mark | None) -> None:
        self.sink.check(mark)

    def write(self, results: list[Result], now_us: int) -> list[Unfit]:
        self.deed()
        refused = self.sink.write(results, now_us)
        self.sink.commit()
        self.deed()
        return refused

    def commit(self) -> Mark:
        return self.sink.commit()

    def committed(self) -> None:
        self.deed()

    def close(self) -> None:
        self.sink.close()


MOVE = {
    # The destination is ahead: its first results of epoch 1 are here before the source's last of epoch 0.
    "s-2": [
        said((results("c", 0, 1), [READY])),
        said((results("a", 1, 5, 6), []), (results("c", 0, 2), [HELD, OPENED])),
        said((results("a", 1, 7), [])),
    ],
    "s-1": [
        said((results("a", 0, 1, 2) + results("b", 0, 1), [])),
        said((results("a", 0, 3), [PARKED, PARKED]), (results("b", 0, 2), [])),
        said((results("a", 0, 4), [CLOSED])),
        said((results("b", 0, 3), [])),
    ],
}
EXPECTED = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [1, 2, 3], "c": [1, 2]}
LETTERS: list[Letter] = [PARKED, PARKED, HELD]
REPORTS = {str(READY), str(OPENED)}


def test_results_of_two_outboxes_leave_in_the_order_of_their_key(tmp_path: Path) -> None:
    office = Office(tmp_path, MOVE)
    outlet = office.run()
    assert office.lines() == EXPECTED
    assert sorted(map(str, office.heard)) == sorted(map(str, LETTERS))
    assert office.reported() == REPORTS
    assert outlet.delivered == 12
    assert outlet.gate.refused == 0


DEEDS = 26


@pytest.mark.parametrize("kill_at", range(DEEDS))
def test_wherever_the_process_dies_everything_leaves_once_and_every_letter_is_sent(
    tmp_path: Path, kill_at: int
) -> None:
    office = Office(tmp_path, MOVE, kill_at)
    office.run()
    # Life goes on: what comes later stands behind what was there, also in a second run from the same journal.
    office.write("s-2", said((results("a", 1, 8), [])))
    outlet = office.run()
    assert office.deeds > kill_at
    assert office.lines() == {**EXPECTED, "a": [*EXPECTED["a"], 8]}
    assert {str(letter) for letter in office.heard} == {str(letter) for letter in LETTERS}
    assert office.reported() == REPORTS
    assert len(office.numbers) == len(LETTERS), "what is heard again comes with the same number"
    assert outlet.delivered == 13


def test_the_deeds_of_a_run_are_all_tried(tmp_path: Path) -> None:
    """Guards the range above."""
    office = Office(tmp_path, MOVE)
    office.run()
    office.write("s-2", said((results("a", 1, 8), [])))
    office.run()
    assert office.deeds == DEEDS


def test_results_wait_for_the_epoch_before_as_long_as_it_takes_and_through_a_restart(tmp_path: Path) -> None:
    office = Office(tmp_path, {**MOVE, "s-1": []})
    outlet = office.run()
    assert office.lines() == {"c": [1, 2]}
    assert outlet.is_idle, "held results are safe with the gate: nothing is left to do"
    office.write("s-1", *MOVE["s-1"][:2])
    office.run()
    assert office.lines() == {"c": [1, 2], "a": [1, 2, 3], "b": [1, 2]}
    office.write("s-1", *MOVE["s-1"][2:])
    office.run()
    assert office.lines() == EXPECTED


def test_a_zombie_is_refused_and_counted_also_after_a_restart(tmp_path: Path) -> None:
    office = Office(tmp_path, MOVE)
    office.run()
    office.write("s-1", said((results("a", 0, 99), [])))
    outlet = office.run()
    assert office.lines() == EXPECTED
    assert outlet.gate.refused == 1
    assert office.open().gate.refused == 1


def test_an_outbox_that_appears_while_it_runs_is_read(tmp_path: Path) -> None:
    office = Office(tmp_path, {"s-1": [said((results("b", 0, 1), []))]})
    outlet = office.open()
    until(lambda: outlet.delivered == 1, "the first result")
    office.outboxes["s-9"] = MemoryLog()
    office.write("s-9", said((results("c", 0, 1), [])))
    outlet.wake()
    until(lambda: outlet.delivered == 2, "the new outbox's result")
    outlet.stop()
    assert office.lines() == {"b": [1], "c": [1]}


def test_while_the_receiver_is_away_letters_wait_in_their_order_and_results_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whimbrel.egress.outlet.FIRST", 0.01)
    office = Office(tmp_path, {"s-1": [], "s-2": []})
    hear, away = office.hear, [True]
    later = Parked("s-1", "b", 8, "gateway", "ValueError: no", "{}")

    def hear_if_there(letter: Letter, number: int) -> None:
        if away:
            raise Unavailable("no disk")
        hear(letter, number)

    monkeypatch.setattr(office, "hear", hear_if_there)
    outlet = office.open()
    office.write("s-1", said((results("a", 0, 1), [PARKED])), said((results("a", 0, 2), [])))
    until(lambda: outlet.delivered == 2, "results leave")
    assert not outlet.is_idle
    outlet.stop()
    assert (office.heard, outlet.error) == ([], None)
    again = office.open()
    office.write("s-1", said(([], [later])))
    away.clear()
    until(lambda: again.is_idle, "all letters are sent")
    assert office.heard == [PARKED, later]
    again.stop()
    assert len(office.path.read_text().splitlines()) == 2


def test_what_is_delivered_is_trimmed_and_not_before(tmp_path: Path) -> None:
    office = Office(tmp_path, MOVE, kill_at=BEGUN + 1)
    outlet = office.open()
    until(lambda: outlet.error, "the death")
    assert [box.head() for box in office.outboxes.values()] == [0, 0], "nothing is committed yet"
    office.run()
    assert [box.tail() - box.head() for box in office.outboxes.values()] == [1, 1], "the last says how far it came"


def test_a_sink_that_would_rather_wait_is_committed_at_the_end_all_the_same(tmp_path: Path) -> None:
    """Parquet files are better large, so the outlet commits them seldom; stopping commits what is left."""
    boxes = {"s-1": MemoryLog()}
    saved: list[bytes] = []
    sink: Sink = ParquetSink(tmp_path / "out")
    outlet = ThreadedOutlet("s", boxes, [sink], _never, saved.append, lambda: 1)
    outlet.recover(None)
    outlet.start()
    boxes["s-1"].append(said((results("a", 0, 1), [])), count=1, writer="s", counter=0)
    outlet.wake()
    until(lambda: outlet.delivered == 1, "the result")
    assert not outlet.is_idle, "delivered, but not committed"
    outlet.stop()
    assert outlet.is_idle
    assert len(saved) == 2, "when it began, and at the end"
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 1


def test_a_sink_that_raises_stops_the_outlet_and_is_told(tmp_path: Path) -> None:
    office = Office(tmp_path, MOVE, kill_at=BEGUN)
    outlet = office.open()
    until(lambda: outlet.error, "the error")
    assert isinstance(outlet.error, Died)
    assert not outlet.is_idle
    outlet.stop()


def _never(notice: Letter, number: int) -> Any:
    raise AssertionError(notice)


# ── With a central store ─────────────────────────────────────────────────────────────────────────────────────────────

LOST = Move(
    "r1", "s", "restore", "s-1", "s-2", A, 2, frozenset({"gateway"}), RestoreOptions(parties=frozenset({"s-1"}))
)
CHECKPOINTED = Checkpointed("s-1", 0, 1, "gateway", 9, 9)


class Treasury(Office):
    """An office with a journal in a file, which keeps up to where the results of each key are out."""

    def __init__(self, folder: Path, outboxes: Mapping[str, list[bytes]], kill_at: int | None = None) -> None:
        super().__init__(folder, outboxes, kill_at)
        self.journal = GatewayJournal(folder / "gateway.db")

    def keep(self, blob: bytes, reached: Mapping[str, int]) -> None:
        self.deed()
        self.journal.keep("outlet/s", blob, reached)
        self.deed()

    def open(self) -> ThreadedOutlet:
        sinks: list[Sink] = [Watched(self.path, self.deed)]
        outlet = ThreadedOutlet("s", self.outboxes, sinks, self.hear, self.save, lambda: 1, keep=self.keep)
        outlet.recover(self.journal.load("outlet/s"), self.journal.reached("outlet/s"))
        outlet.start()
        return outlet


def test_up_to_where_results_are_out_is_kept_with_the_rest(tmp_path: Path) -> None:
    office = Treasury(tmp_path, MOVE)
    outlet = office.run()
    assert office.lines() == EXPECTED
    assert outlet.reached == office.journal.reached("outlet/s") == {"a": 7, "b": 7, "c": 2}, "b: what was given up"
    assert outlet.delivered_of(A) == {"a": 7}


def test_it_is_what_lies_in_the_file_wherever_the_process_dies(tmp_path: Path) -> None:
    deeds = Treasury(tmp_path, MOVE)
    deeds.run()
    for kill_at in range(deeds.deeds):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        office = Treasury(folder, MOVE, kill_at)
        office.run()
        assert office.lines() == EXPECTED
        assert office.journal.reached("outlet/s") == {"a": 7, "b": 7, "c": 2}


def test_a_commit_and_what_it_delivers_are_written_both_or_neither(tmp_path: Path) -> None:
    journal = GatewayJournal(tmp_path / "gateway.db")
    journal.keep("outlet/s", b"first", {"a": 1})
    with closing(sqlite3.connect(tmp_path / "gateway.db")) as db:
        db.execute("CREATE TRIGGER no BEFORE INSERT ON reached BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(sqlite3.Error):
        journal.keep("outlet/s", b"second", {"a": 2})
    assert (journal.load("outlet/s"), journal.reached("outlet/s")) == (b"first", {"a": 1})


def test_what_could_not_be_committed_does_not_count_as_delivered(tmp_path: Path) -> None:
    """Or a restoration would apply its records again in silence, and nobody would ever see their results."""
    office = Treasury(tmp_path, {"s-1": [said((results("a", 0, 1), []))]})
    tries: list[bytes] = []

    def keep(blob: bytes, reached: Mapping[str, int]) -> None:
        tries.append(blob)
        if len(tries) == 2:
            raise Unavailable("the disk is full")

    boxes = dict(office.outboxes)
    sinks: list[Sink] = [JsonLinesSink(tmp_path / "x.jsonl")]
    outlet = Outlet("s", boxes, sinks, office.hear, office.save, lambda: 1, keep=keep)
    outlet.recover(None, {})
    with pytest.raises(Unavailable):
        outlet.step()
    assert outlet.delivered_of(A) == {"a": 1}, "as far as it had come"
    boxes.clear()
    outlet.step()
    assert outlet.delivered_of(A) == {}


def test_behind_a_fence_nothing_of_a_lost_owner_gets_out_also_after_a_restart(tmp_path: Path) -> None:
    office = Treasury(tmp_path, {"s-1": [said((results("a", 0, 1), []))], "s-2": []})
    outlet = office.open()
    until(lambda: outlet.is_idle, "the first result is out")
    assert outlet.fence(LOST, 10)
    assert outlet.delivered_of(A) == {"a": 1}
    zombie = Parked("s-1", "a", 3, "gateway", "ValueError: no", "{}")
    office.write("s-1", said((results("a", 0, 2), [zombie, CLOSED, CHECKPOINTED])))
    office.write("s-2", said((results("a", 2, 2), [])))
    until(lambda: outlet.is_idle, "everything is read")
    outlet.stop()
    office.write("s-1", said((results("a", 0, 4), [])))
    again = office.run()
    assert office.lines() == {"a": [1, 2]}
    assert (again.gate.refused, office.heard) == (3, [])


def test_a_saving_is_told_when_it_counts(tmp_path: Path) -> None:
    ahead = Checkpointed("s-2", 0, 1, "gateway", 9, 9)
    opened = Opened("m1", "s-2", 0, 1, A, 1)
    boxes = {"s-2": [said((results("a", 1, 5), [opened, ahead]))], "s-1": [said((results("b", 0, 1), [CHECKPOINTED]))]}
    office = Treasury(tmp_path, boxes)
    office.run()
    assert office.heard == [CHECKPOINTED]
    office.write("s-1", said((results("a", 0, 4), [CLOSED])))
    office.run()
    assert office.heard == [CHECKPOINTED, ahead]


def test_a_fence_that_nobody_raises_is_not_there(tmp_path: Path) -> None:
    outlet = ThreadedOutlet("s", {}, [], lambda *heard: None, lambda blob: None, lambda: 1)
    assert not outlet.fence(LOST, 0)


def test_an_outlet_that_went_back_has_not_delivered_what_it_has_to_read_again(tmp_path: Path) -> None:
    """Otherwise its instance could be removed, and its outbox with it."""
    office = Office(tmp_path, {"s-1": [said((results("a", 0, 1), []))]})
    sink = Watched(office.path, office.deed)
    sink.commit_interval = 1e9
    failing: list[str] = []

    def save(blob: bytes) -> None:
        if "save" in failing:
            raise Unavailable("the journal is locked")
        office.save(blob)

    def dispatch(name: str, position: int, parts: list[Outgoing]) -> list[Outgoing]:
        if "dispatch" in failing:
            raise Unavailable("the log of reports is locked")
        return parts

    outlet = Outlet("s", office.outboxes, [sink], office.hear, save, lambda: 1, dispatch=dispatch)
    outlet.recover(None)
    assert outlet.step()
    assert not outlet.step(), "all is read, and nothing is committed"
    failing[:] = ["save"]
    with pytest.raises(Unavailable):
        outlet.step(closing=True)
    failing[:] = ["dispatch"]
    with pytest.raises(Unavailable):
        outlet.step()
    assert not outlet.has_delivered("s-1")
    failing.clear()
    outlet.step(closing=True)
    assert outlet.has_delivered("s-1")
