"""Event time: no record and no wall clock moves it far ahead, and so none stops it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import whimbrel as wb
from tests.app.failing import Died, FailingLog, Fuse
from tests.app.test_dead_letters import House
from tests.app.waiting import until
from whimbrel.core.record import Kind
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import parse_schema
from whimbrel.log import codec
from whimbrel.log.memory import MemoryLog

SECOND, HOUR = 1_000_000, 3600 * 1_000_000
NOW = 1_700_000_000 * SECOND
SCHEMA = parse_schema("n long")


class Clocks:
    """A wall clock that can be set, an uptime that cannot, and a gateway whose events have no time of their own."""

    def __init__(self, **options: Any) -> None:
        self.elapsed = self.off = 0
        self.logs = {name: MemoryLog() for name in ("ingress", "known", "s-1")}
        self.options = {"wall_clock": True, **options}
        self.ticks = -1
        self.begin()

    def begin(self) -> None:
        self.gateway = Gateway(
            Router("gateway", RouteTable("s-1")),
            self.logs["ingress"],
            self.logs["known"],
            self.logs.__getitem__,
            codec.ArrowCodec(SCHEMA),
            lambda: NOW + self.elapsed + self.off,
            uptime=lambda: self.elapsed * 1000,
            **self.options,
        )
        self.gateway.recover(None)

    def tick(self) -> int:
        """A second passes; the event time of the last tick, since the start."""
        self.elapsed += SECOND
        self.ticks += 1
        self.gateway.tick(self.ticks)
        records = [record for entry in self.logs["s-1"].read(0) for record in codec.records(entry)]
        return [record.event_us for record in records if record.kind == Kind.TICK][-1] - NOW


def test_a_wall_clock_that_is_an_hour_ahead_for_a_moment_does_not_stop_the_ticks() -> None:
    clocks = Clocks()
    first = clocks.tick()
    clocks.off = HOUR
    ahead = clocks.tick()
    assert ahead < first + 5 * SECOND, "nor does it fire an hour's timers"
    clocks.off = 0
    times = [clocks.tick() for _ in range(20)]
    assert all(after > before for before, after in pairwise([ahead, *times])), "no tick is missing"
    assert times[-1] == clocks.elapsed


@pytest.mark.parametrize("off", [-HOUR, 0, HOUR])
def test_after_a_restart_time_neither_goes_back_nor_stands_still(off: int) -> None:
    clocks = Clocks()
    before = [clocks.tick() for _ in range(3)][-1]
    clocks.off = off
    clocks.begin()
    times = [clocks.tick() for _ in range(3)]
    assert times[0] > before
    assert all(after - before >= SECOND // 2 for before, after in pairwise(times))


def test_records_get_the_steered_time_and_keep_the_wall_clock_as_their_arrival() -> None:
    clocks = Clocks()
    clocks.tick()
    clocks.off = HOUR
    clocks.gateway.ingest([("a", (1,), None)], "source", 0)
    (record,) = [r for entry in clocks.logs["s-1"].read(0) for r in codec.records(entry) if r.kind == Kind.DATA]
    assert record.event_us < NOW + clocks.elapsed + 5 * SECOND
    assert record.ingress_us == NOW + clocks.elapsed + HOUR


# ── Records from the future ──────────────────────────────────────────────────────────────────────────────────────────


def timed(*ahead_s: float) -> wb.Items:
    """Rows whose times are that many seconds after the wall clock that a house has: one second after 1970."""
    rows = [{"key": f"k{number}", "at": round(1e6 + ahead * 1e6)} for number, ahead in enumerate(ahead_s)]
    return wb.Items(rows, schema="key string, at long")


def taken(house: House) -> list[str]:
    return [record.key for entry in house.logs.log("ingress-sum").read(0) for record in codec.records(entry)]


def run(house: House) -> House:
    house.role.feeds[0].start()
    until(lambda: house.role.feeds[0].ended.is_set() or house.role.errors(), "the source ends")
    return house


@pytest.mark.parametrize(
    ("max_ahead", "bad"), [(3600.0, [1, 4]), (60, [1, 2, 4]), (None, []), (7200.5, [4])], ids=["h", "min", "no", "2 h"]
)
def test_a_record_too_far_ahead_becomes_a_dead_letter_and_moves_no_timer(
    tmp_path: Path, max_ahead: float | None, bad: list[int]
) -> None:
    source = timed(0, 7100, 3000, -1e6, 130 * 365 * 86_400)
    house = run(House(tmp_path, source=source, event_time="at", max_ahead=max_ahead))
    try:
        assert house.letters() == [("from the future", position) for position in bad]
        assert taken(house) == [f"k{number}" for number in range(5) if number not in bad]
        assert all("'at'" in letter.message and "max_ahead" in letter.message for letter in house.role.dead)
    finally:
        house.end()


def test_the_default_is_an_hour(tmp_path: Path) -> None:
    house = run(House(tmp_path, source=timed(3500, 3700), event_time="at"))
    assert taken(house) == ["k0"]
    house.end()


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "1h"])
def test_a_bound_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(wb.Refused, match="max_ahead must be a number of seconds >= 0, or None"):
        wb.Pipeline("p", source=[], key="k", event_time="at", max_ahead=value)


def test_what_was_set_aside_before_a_crash_is_not_taken_in_when_its_time_has_come(tmp_path: Path) -> None:
    """The process dies between the dead letter and the append of the other rows; the next one starts an hour later."""
    house = House(tmp_path, source=timed(0, 4000, 10), event_time="at")
    gateway = house.role.first.gateway
    gateway._ingress._log = FailingLog(gateway.ingress, Fuse(0))
    house.role.feeds[0].start()
    until(lambda: house.role.feeds[0].error, "it dies")
    assert isinstance(house.role.feeds[0].error, Died)
    assert house.letters() == [("from the future", 1)]
    house.end()
    house.now = 3600 * SECOND
    house.begin()
    run(house)
    assert taken(house) == ["k0", "k2"]
    assert house.letters() == [("from the future", 1)]
    house.end()
