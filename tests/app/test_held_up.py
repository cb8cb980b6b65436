"""A log or a journal that another process holds: whoever needs it says so, tries again, and everything arrives once.

The locks are SQLite's own, held by a second connection, as a process does that was stopped inside a write.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import whimbrel as wb
from tests.app.test_dead_letters import CLOSED, House, parked
from tests.app.test_feed import SCHEMA, items, row
from tests.app.test_outlet import results
from tests.app.waiting import until
from whimbrel.core.errors import Refused, Retry, Unavailable
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway import sources
from whimbrel.gateway.dead_letters import DeadLetters
from whimbrel.gateway.feed import Feed
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import Intake
from whimbrel.log import EmbeddedLog, backoff
from whimbrel.log.codec import ArrowCodec, records
from whimbrel.roles import gateway as roles


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST", 0.001)
    monkeypatch.setattr(backoff, "MOST", 0.01)
    monkeypatch.setattr(roles, "PERIOD", 0.02)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the write lock of a SQLite file."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


# ── The feed ─────────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = ("ingress", "inbox", "known", "dead")


class Line:
    """A gateway over logs in files, which wait 20 ms for a lock."""

    def __init__(self, folder: Path) -> None:
        self.paths = {name: folder / f"{name}.db" for name in NAMES}
        self.logs = {name: EmbeddedLog(path, timeout=0.02) for name, path in self.paths.items()}
        router = Router("gateway", RouteTable("s-1"))
        ingress, known = self.logs["ingress"], self.logs["known"]
        self.gateway = Gateway(router, ingress, known, lambda _: self.logs["inbox"], ArrowCodec(SCHEMA), lambda: 1)
        self.gateway.recover(None)
        self.dead = DeadLetters(self.logs["dead"])

    def feed(self, source: sources.Source, is_full: Any = lambda: False) -> Feed:
        return Feed(source, Intake(SCHEMA, "sensor"), self.gateway, self.dead, is_full)

    def taken(self) -> list[float]:
        return [record.body[1] for entry in self.logs["inbox"].read(0) for record in records(entry)]


@pytest.mark.parametrize("name", NAMES)
def test_a_feed_goes_on_when_the_lock_is_released_and_every_row_comes_in_once(tmp_path: Path, name: str) -> None:
    line = Line(tmp_path)
    feed = line.feed(items(row(0), {"sensor": "s", "value": "no"}, *map(row, range(1, 20_000))))
    with held(line.paths[name]):
        feed.start()
        until(lambda: feed.backoff.tries > 3, "it tries again and again")
        told = feed.backoff.status()
        assert told is not None
        assert f"{name}.db: database is locked" in told.why
        assert told.for_s > 0
        assert not feed.ended.is_set()
    assert feed.ended.wait(20)
    feed.stop()
    assert (feed.error, feed.backoff.status()) == (None, None)
    assert line.taken() == [float(number) for number in range(20_000)]
    assert len(line.dead.read()) == 1


def test_a_feed_that_is_held_up_can_be_stopped_and_has_not_ended(tmp_path: Path) -> None:
    line = Line(tmp_path)
    feed = line.feed(items(row(0)))
    with held(line.paths["ingress"]):
        feed.start()
        until(lambda: feed.backoff.tries, "it is held up")
        feed.stop()
    assert not feed.ended.is_set()
    assert feed.error is None


def test_looking_for_room_is_tried_again_too(tmp_path: Path) -> None:
    line, answers = Line(tmp_path), [Unavailable("locked"), Unavailable("locked"), True, False]

    def is_full() -> bool:
        answer = answers.pop(0) if answers else False
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    feed = line.feed(items(row(0)), is_full)
    feed.start()
    assert feed.ended.wait(20)
    feed.stop()
    assert line.taken() == [0.0]


@pytest.mark.parametrize("at", [0, 1, 7_777])
def test_a_source_that_is_away_for_a_moment_is_asked_again_for_the_next_row(tmp_path: Path, at: int) -> None:
    line, away = Line(tmp_path), [Retry("the broker is away")] * 3

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(10_000):
            if number == at and away:
                raise away.pop()
            yield row(number)

    feed = line.feed(sources.Items(rows, SCHEMA, None))
    feed.start()
    assert feed.ended.wait(20)
    feed.stop()
    assert feed.error is None
    assert line.taken() == [float(number) for number in range(10_000)]


def test_an_iterator_that_cannot_be_asked_again_fails_and_does_not_look_ended(tmp_path: Path) -> None:
    line = Line(tmp_path)

    def rows() -> Iterator[dict[str, Any]]:
        yield row(0)
        raise Retry("the broker is away")

    feed = line.feed(sources.Items(rows(), SCHEMA, None))
    feed.start()
    until(lambda: feed.error, "it fails")
    feed.stop()
    assert isinstance(feed.error, Refused)
    assert "pass a function" in str(feed.error)
    assert not feed.ended.is_set()


# ── The outlet and the saver ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    delivered: list[dict[str, Any]] = []
    one = House(tmp_path, delivered.append)
    one.journal._db.execute("PRAGMA busy_timeout = 20")
    one.delivered = delivered  # type: ignore[attr-defined]
    yield one
    one.end()


def test_an_outlet_whose_commit_is_held_up_goes_back_and_delivers_everything(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    house = House(tmp_path, wb.JsonLines(out))
    house.journal._db.execute("PRAGMA busy_timeout = 20")
    house.role.start()
    house.say("sum-1", results("a", 0, 1, 2), parked("c", 3))
    house.settle()
    outlet = house.role.first.outlet
    with held(house.data / "gateway.db"):
        house.say("sum-2", results("a", 1, 4, 5))
        house.say("sum-1", results("a", 0, 3), CLOSED, parked("b", 9))
        until(lambda: outlet.backoff.tries > 3, "it tries again and again")
        told = house.role.status().held_up
        assert "the journal cannot be written: database is locked" in told["outlet of sum"].why
        until(lambda: "snapshots" in house.role.status().held_up, "the saver says so as well")
        assert house.role.errors() == []
        assert len(house.role.dead.read()) == 1, "nothing is passed on before it is committed"
    house.settle()
    until(lambda: not house.role.status().held_up, "nothing is held up any more")
    assert house.role.errors() == []
    assert house.letters() == [("operator failed", 3), ("operator failed", 9)]
    house.end()
    assert [line.split('"n":')[1] for line in out.read_text().splitlines()] == [f"{n}}}" for n in range(1, 6)]


def test_dead_letters_that_are_held_up_are_kept_when_the_lock_is_released(house: House) -> None:
    house.logs.log("dead-letters")._timeout = 0.02
    house.logs.log("dead-letters").close()
    house.role.start()
    with held(house.data / "logs" / "dead-letters.db"):
        house.say("sum-1", results("a", 0, 1), parked("b", 9))
        until(lambda: house.role.first.outlet.delivered == 1, "the result leaves")
        assert not house.role.first.outlet.is_idle
    house.settle()
    assert house.letters() == [("operator failed", 9)]
