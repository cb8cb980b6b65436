"""A full disk: whoever meets it stands still, says so, loses nothing, and goes on when there is room."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.full import FullDisk
from tests.app.test_feed import SCHEMA, items, row
from tests.app.test_outlet import EXPECTED, LETTERS, MOVE, REPORTS, Office, results, said
from tests.app.test_site import nowhere
from tests.app.waiting import until
from whimbrel.core.errors import Full, Unavailable
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway.dead_letters import DeadLetters
from whimbrel.gateway.feed import Feed
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import Intake
from whimbrel.log import EmbeddedLog, backoff
from whimbrel.log.codec import ArrowCodec, records
from whimbrel.log.disk import Disk, is_full
from whimbrel.site import site as sites
from whimbrel.site.site import Site
from whimbrel.spark.checkpoint import Checkpoint


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST", 0.001)
    monkeypatch.setattr(backoff, "MOST", 0.01)


# ── How it shows ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "error",
    [
        Full("here"),
        OSError(errno.ENOSPC, "no"),
        OSError(errno.EDQUOT, "no"),
        OSError(errno.EFBIG, "no"),
        RuntimeError("java.io.IOException: No space left on device\n\tat ..."),
        RuntimeError("  whimbrel.core.errors.Full: no room on the disk: inbox-s-1.db: database or disk is full"),
    ],
)
def test_a_full_disk_is_known_in_whatever_words(error: Exception) -> None:
    assert is_full(error)
    caused = Unavailable("something else")
    caused.__cause__ = error
    assert is_full(caused)
    assert not is_full(OSError(errno.EACCES, "no"))
    assert not is_full(Unavailable("busy"))


def test_below_the_reserve_nothing_is_taken_in_and_some_more_is_needed_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100 << 20
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1 << 40, 0, free))
    disk = Disk("edge-1", [tmp_path / "not" / "there" / "yet"], 64 << 20)
    assert disk.full is None
    free = 12 << 20
    told = disk.full
    assert told is not None
    assert told.startswith("the disk of edge-1 is full (12 MiB free at ")
    assert told.endswith("its intake is paused; free space and it resumes by itself")
    free = 65 << 20
    assert disk.full is not None, "at its limit it would stutter"
    free = 80 << 20
    assert disk.full is None


# ── The gateway: records wait at the source ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("small", ["ingress", "inbox", "known", "dead"])
def test_a_feed_goes_on_when_there_is_room_and_every_row_comes_in_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: str
) -> None:
    names = ("ingress", "inbox", "known", "dead")
    logs = {name: EmbeddedLog(tmp_path / name / f"{name}.db") for name in names}
    disk = FullDisk(monkeypatch, tmp_path / small)
    gateway = Gateway(
        Router("gateway", RouteTable("s-1")),
        logs["ingress"],
        logs["known"],
        lambda _: logs["inbox"],
        ArrowCodec(SCHEMA),
        lambda: 1,
    )
    gateway.recover(None)
    given = [row(number) | {"sensor": f"{number} {'x' * 40_000}"} for number in range(3)]
    given[1:1] = [{"sensor": "s", "value": "no number" * 200}] * 30
    dead = DeadLetters(logs["dead"])
    feed = Feed(items(*given), Intake(SCHEMA, "sensor"), gateway, dead, lambda: False)
    disk.fill(logs[small])
    feed.start()
    try:
        until(lambda: feed.backoff.error is not None, "it stands still")
        assert is_full(feed.backoff.error)
        assert not feed.ended.is_set()
        disk.make_room()
        assert feed.ended.wait(10)
    finally:
        feed.stop()
    assert (feed.error, feed.backoff.error) == (None, None)
    assert len(dead.read()) == 30
    taken = [record.body[1] for entry in logs["inbox"].read(0) for record in records(entry)]
    assert taken == [0.0, 1.0, 2.0]
    assert {*gateway.keys} == {one["sensor"] for one in given if one["sensor"] != "s"}


# ── The outlet: results wait in the outboxes ─────────────────────────────────────────────────────────────────────────


class FullOffice(Office):
    """An office whose disk is full at one deed, three times, and then has room."""

    def deed(self) -> None:
        self.deeds += 1
        if self.kill_at is not None and self.kill_at < self.deeds <= self.kill_at + 3:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("at", range(16))
def test_an_outlet_goes_on_when_there_is_room_and_everything_leaves_once(tmp_path: Path, at: int) -> None:
    office = FullOffice(tmp_path, MOVE, at)
    outlet = office.open()
    until(lambda: outlet.is_idle, "everything is delivered")
    office.write("s-2", said((results("a", 1, 8), [])))
    outlet.wake()
    until(lambda: outlet.is_idle, "and what came later")
    assert office.deeds > at + 3
    outlet.stop()
    assert (outlet.error, outlet.backoff.error) == (None, None)
    assert office.lines() == {**EXPECTED, "a": [*EXPECTED["a"], 8]}
    assert outlet.delivered == 13
    assert {str(letter) for letter in office.heard} == {str(letter) for letter in LETTERS}
    assert office.reported() == REPORTS


# ── A site: it begins no batch ───────────────────────────────────────────────────────────────────────────────────────


class Query:
    """A query that dies, or does not."""

    def __init__(self, error: Exception | None) -> None:
        self.exception, self.is_active = error, error is None
        self.progress = [5.0] if error is None else []
        self.held: list[bool] = []
        self.contradiction: str | None = None

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.is_active = False

    def hold(self, held: bool) -> None:
        self.held.append(held)


class Place:
    """A site with a disk, whose next queries die of what `fates` says."""

    def __init__(self, folder: Path) -> None:
        self.disk = Disk("edge-1", [folder], 0)
        self.fates: list[Exception] = []
        self.made: list[Query] = []
        self.site = Site("edge-1", folder, self._make, Checkpoint, nowhere(folder), self.disk)
        self.site.open()

    def _make(self, instance: str, checkpoint: Path) -> Any:
        self.made.append(Query(self.fates.pop(0) if self.fates else None))
        return self.made[-1]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(sites, "PERIOD", 0.005)
    monkeypatch.setattr(sites, "_status", lambda query: None)
    place = Place(tmp_path)
    yield place
    place.site.close()


def test_a_site_whose_disk_is_nearly_full_holds_its_queries_and_lets_them_go_on(place: Place) -> None:
    place.site.start("s-1", wait=False)
    (query,) = place.made
    place.disk.reserve = 1 << 60
    until(lambda: query.held == [True], "it is held")
    assert str(place.site.status().disk).startswith("the disk of edge-1 is full (")
    with pytest.raises(Unavailable, match="the disk of edge-1 is full"):
        place.site.start("s-2", wait=False)
    place.disk.reserve = 0
    until(lambda: query.held == [True, False], "it goes on")
    assert place.site.status().disk is None
    assert (len(place.made), place.site.error, query.is_active) == (1, None, True)


def test_a_query_that_a_full_disk_ends_is_tried_until_there_is_room(place: Place) -> None:
    often = sites.RESTARTS + 5
    place.fates = [RuntimeError("java.io.IOException: No space left on device")] * often
    place.site.start("s-1", wait=False)
    until(lambda: "No space left on device" in str(place.site.status().disk), "it says why it stands still")
    until(lambda: len(place.made) == often + 1, "it is tried again and again")
    until(lambda: place.site.status().disk is None, "it goes on")
    assert place.made[-1].is_active
    assert (place.site.failed(), place.site.error) == ({}, None)


def test_a_query_that_dies_while_the_disk_is_nearly_full_waits_for_room(place: Place) -> None:
    place.site.start("s-1", wait=False)
    place.disk.reserve = 1 << 60
    until(lambda: place.made[0].held == [True], "the site stands still")
    place.made[0].exception, place.made[0].is_active = RuntimeError("whatever"), False
    place.disk.reserve = 0
    until(lambda: len(place.made) == 2, "it is started again")
    assert place.site.failed() == {}


def test_what_keeps_dying_of_something_else_is_left_and_the_reason_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whimbrel.log.backoff.FIRST", 600.0)  # it is retried after a pause, which must not end here
    place.fates = [RuntimeError("no such column")] * (sites.RESTARTS + 1)
    place.site.start("s-1", wait=False)
    until(place.site.failed, "it is left alone")
    assert place.site.failed() == {"s-1": "s-1 at edge-1 keeps failing: RuntimeError: no such column"}
    assert len(place.made) == sites.RESTARTS + 1
