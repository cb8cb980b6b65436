"""The feed and the dead letters: rows reach the gateway at their rate, bad ones are kept with reason and position."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.waiting import until
from whimbrel.core.errors import BadRecord, Corrupt
from whimbrel.core.record import Kind, Parked
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway import sources
from whimbrel.gateway.dead_letters import DeadLetters
from whimbrel.gateway.feed import Feed
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import Intake, parse_schema
from whimbrel.log import EmbeddedLog
from whimbrel.log.codec import ArrowCodec, records
from whimbrel.log.memory import MemoryLog

SCHEMA = parse_schema("sensor string, value double")


class Line:
    """A source, a gateway and the dead letters, with their logs; a second one over the same logs is a restart."""

    def __init__(self, before: Line | None = None) -> None:
        self.ingress: MemoryLog = before.ingress if before else MemoryLog()
        self.inbox: MemoryLog = before.inbox if before else MemoryLog()
        self.buried: MemoryLog = before.buried if before else MemoryLog()
        router = Router("gateway", RouteTable("s-1"))
        self.gateway = Gateway(
            router, self.ingress, MemoryLog(), lambda name: self.inbox, ArrowCodec(SCHEMA), lambda: 1
        )
        self.gateway.recover(None)
        self.dead = DeadLetters(self.buried)

    def feed(self, source: sources.Source, is_full: Callable[[], bool] = lambda: False) -> Feed:
        return Feed(source, Intake(SCHEMA, "sensor", lenient=source.lenient), self.gateway, self.dead, is_full)

    def run(self, source: sources.Source) -> Feed:
        feed = self.feed(source)
        feed.start()
        until(lambda: feed.ended.is_set() or feed.error, "it ends or fails")
        feed.stop()
        assert feed.ended.is_set() == (feed.error is None)
        return feed

    def taken(self) -> list[tuple[Any, ...]]:
        found = [record for entry in self.inbox.read(0) for record in records(entry)]
        assert all(record.kind == Kind.DATA for record in found)
        return [record.body for record in found]


def items(*rows: Any, rate: float | None = None) -> sources.Items:
    return sources.Items(list(rows), SCHEMA, rate)


def row(number: int) -> dict[str, Any]:
    return {"sensor": f"s{number}", "value": float(number)}


# ── The way of the good ones ─────────────────────────────────────────────────────────────────────────────────────────


def test_all_rows_arrive_in_order() -> None:
    line = Line()
    feed = line.run(items(*map(row, range(12_345))))
    assert feed.error is None
    assert line.taken() == [(f"s{number}", float(number)) for number in range(12_345)]
    assert line.gateway.sent == 12_345


def test_a_feed_goes_on_behind_the_last_row_that_is_safe() -> None:
    line, cut = Line(), threading.Event()

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(20_000):
            if number == 12_000 and not cut.is_set():
                cut.set()
                raise OSError("the cable")
            yield row(number)

    feed = line.run(sources.Items(rows, SCHEMA, None))
    assert isinstance(feed.error, OSError)
    assert 0 < len(line.taken()) <= 12_000
    again = Line(line)
    assert again.run(sources.Items(rows, SCHEMA, None)).error is None
    assert again.taken() == [(f"s{number}", float(number)) for number in range(20_000)]


def test_a_full_inbox_makes_the_source_wait() -> None:
    line, asked, room = Line(), 0, threading.Event()

    def is_full() -> bool:
        nonlocal asked
        asked += 1
        return not room.is_set()

    feed = line.feed(items(row(1)), is_full)
    feed.start()
    until(lambda: asked > 3, "the feed asks again and again")
    assert line.taken() == []
    room.set()
    assert feed.ended.wait(10)
    assert line.taken() == [("s1", 1.0)]
    feed.stop()


def test_no_row_comes_before_its_moment() -> None:
    line, rate = Line(), 500.0
    feed = line.feed(items(*map(row, range(100_000)), rate=rate))
    start = time.monotonic()
    feed.start()
    until(lambda: line.gateway.sent >= 50, "fifty rows")
    feed.stop()
    assert line.gateway.sent <= (time.monotonic() - start) * rate


def test_a_source_that_gives_nothing_more_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.gateway.feed.JOIN_TIMEOUT", 0.1)
    line, begun, never = Line(), threading.Event(), threading.Event()

    def rows() -> Iterator[dict[str, Any]]:
        yield row(1)
        begun.set()
        never.wait(60)

    feed = line.feed(sources.Items(rows, SCHEMA, None))
    feed.start()
    until(lambda: begun.is_set(), "the source is asked for rows")
    stopper = threading.Thread(target=feed.stop, daemon=True)
    stopper.start()
    stopper.join(20)
    assert not stopper.is_alive()
    never.set()


# ── The way of the bad ones ──────────────────────────────────────────────────────────────────────────────────────────


def test_bad_rows_of_every_kind_are_kept_with_reason_and_position_and_the_stream_goes_on(tmp_path: Path) -> None:
    lines = [
        '{"sensor": "a", "value": 1}',
        '{"sensor": "a", "value": "high"}',
        "not json at all",
        '{"value": 2}',
        '{"sensor": "a", "value": 1' + "0" * 200 + "}",
        '{"sensor": "", "value": 3}',
        "[1, 2]",
        '{"sensor": "b", "value": 4}',
    ]
    path = tmp_path / "values.jsonl"
    path.write_text("\n".join(lines))
    line = Line()
    feed = line.run(sources.JsonLinesSource(path, SCHEMA, None, limit=100))
    assert feed.error is None
    assert line.taken() == [("a", 1.0), ("b", 4.0)]
    letters = line.dead.read()
    assert [(letter.position, letter.reason) for letter in letters] == [
        (1, "wrong type"),
        (2, "not JSON"),
        (3, "no key"),
        (4, "too large"),
        (5, "no key"),
        (6, "wrong type"),
    ]
    assert line.dead.counts == {"wrong type": 2, "not JSON": 1, "no key": 2, "too large": 1}
    assert {letter.source for letter in letters} == {str(path)}
    assert [letter.record for letter in letters[:3]] == [
        '{"sensor":"a","value":"high"}',
        "not json at all",
        '{"value":2}',
    ]
    assert all(letter.message for letter in letters)


def test_bad_rows_that_come_again_after_a_restart_are_kept_once() -> None:
    bad: list[Any] = [{"value": 1.0}, row(1), {"sensor": 7}, {"value": 2.0}]
    line = Line()
    line.run(items(*bad))
    again = Line(line)
    again.run(items(*bad, row(2), None))
    assert [letter.position for letter in again.dead.read()] == [0, 2, 3, 5]
    assert again.dead.counts == {"no key": 2, "wrong type": 2}
    assert again.taken() == [("s1", 1.0), ("s2", 2.0)]


@pytest.mark.parametrize(
    "odd",
    [{"sensor": 2**70}, {"sensor": "\ud800"}, {"value": object()}, {(1, 2): 3}, {"value": {1, 2}}, b"\xff"],
    ids=["too large", "no text", "no value", "no name", "a set", "no row"],
)
def test_whatever_a_bad_row_holds_it_can_be_kept(odd: Any) -> None:
    line = Line()
    assert line.run(items(odd, row(1))).error is None
    (letter,) = line.dead.read()
    assert letter.position == 0
    assert letter.record
    assert line.taken() == [("s1", 1.0)]


def test_a_long_row_is_kept_as_its_beginning() -> None:
    dead = DeadLetters(MemoryLog())
    dead.put(BadRecord("wrong type", "no"), "rows.csv", 0, {"text": "x" * 100_000}, writer="source", counter=0)
    assert len(dead.read()[0].record) == 1_000


def test_a_feed_whose_gateway_cannot_write_tells_it(tmp_path: Path) -> None:
    line = Line()

    def append(*args: Any, **named: Any) -> int | None:
        raise Corrupt("it is no log")

    line.ingress.append = append  # type: ignore[method-assign]
    feed = line.run(items(row(1)))
    assert isinstance(feed.error, Corrupt)


# ── Parked records ───────────────────────────────────────────────────────────────────────────────────────────────────


def parked(seq: int, key: str = "a", error: str = "ValueError: no") -> Parked:
    return Parked("s-1", key, seq, "gateway", error, '{"value":1}')


def test_a_parked_record_that_is_heard_again_is_kept_once(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path / "dead.db")
    dead = DeadLetters(log)
    heard = [(parked(5), 0), (parked(3, key="b"), 1), (parked(6), 2)]
    for notice, number in heard:
        dead.park(notice, writer="outlet/s", counter=number)
    again = DeadLetters(EmbeddedLog(tmp_path / "dead.db"))
    for notice, number in heard:
        again.park(notice, writer="outlet/s", counter=number)
    assert [(letter.position, letter.reason, letter.message) for letter in again.read()] == [
        (5, "operator failed", "ValueError: no"),
        (3, "operator failed", "ValueError: no"),
        (6, "operator failed", "ValueError: no"),
    ]
    assert again.counts == {"operator failed": 3}


def test_two_rows_that_prepare_made_of_one_record_are_both_kept() -> None:
    """They share the record's `seq`; what tells them apart is the number of each notice."""
    dead = DeadLetters(MemoryLog())
    dead.park(parked(5, error="first"), writer="outlet/s", counter=0)
    dead.park(parked(5, error="second"), writer="outlet/s", counter=1)
    assert [letter.message for letter in dead.read()] == ["first", "second"]
