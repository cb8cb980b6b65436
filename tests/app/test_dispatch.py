"""The dispatcher: each receiver gets its results, every one gets CLOSED, and nothing is sent that is not needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from whimbrel.core import wire
from whimbrel.core.errors import Unavailable
from whimbrel.core.keys import KeyMap, selection_of
from whimbrel.core.record import (
    Checkpointed,
    Closed,
    Left,
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
from whimbrel.egress.reports import Reporter
from whimbrel.egress.ways import EACH, ToHomes, ToSinks
from whimbrel.log.memory import MemoryLog

CLOSED = Closed("m1", "s-1", 0, 1, selection_of(["a", "b", "c"]), 1)
LEFT = Left("m1", "s-1", 0, 1, 3)
OPENED = Opened("m1", "s-1", 0, 1, CLOSED.selection, 1)
SAVED = Checkpointed("s-1", 0, 1, "gateway@cloud", 7, 7)


def parked(router: str) -> Parked:
    return Parked("s-1", "a", 7, router, "ValueError: no", "{}")


class ByKey:
    """Results of `a` are for edge-1, of `b` for edge-2, of `c` for here."""

    here = "cloud"
    receivers: Sequence[str] = ("cloud", "edge-1", "edge-2")

    def split(self, results: Sequence[Result]) -> Mapping[str, list[Result]]:
        return {
            place: [result for result in results if result.key == key]
            for key, place in {"a": "edge-1", "b": "edge-2", "c": "cloud"}.items()
        }

    def home_of(self, router: str) -> str:
        return router.partition("@")[2]


class Here(ByKey):
    """Everything is for here."""

    receivers: Sequence[str] = ("cloud",)

    def split(self, results: Sequence[Result]) -> Mapping[str, list[Result]]:
        raise AssertionError("results that stay here are not looked at")


class Fragile(MemoryLog):
    """Fails on request, after the append if `late`."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        self.late = False

    def append(self, *args: Any, **more: Any) -> int | None:
        if self.failures and not self.late:
            self.failures -= 1
            raise Unavailable("locked")
        position = super().append(*args, **more)
        if self.failures:
            self.failures -= 1
            raise Unavailable("locked, but appended")
        return position


class Rig:
    """The arrivals of two places elsewhere, and the reports."""

    def __init__(self, ways: ByKey, **more: Any) -> None:
        self.reports = Fragile()
        self.arrivals: dict[tuple[str, str], Fragile] = defaultdict(Fragile)
        self.dispatcher = Dispatcher(ways, lambda place, name: self.arrivals[place, name], self.reports, **more)
        self.position = 0

    def say(self, *parts: tuple[list[Result], list[Notice]]) -> list[Outgoing]:
        """Dispatch the next batch; repeat it if that fails. Returns what is for here."""
        try:
            kept = self.dispatcher.dispatch("s-1", self.position, [Outgoing(*part) for part in parts])
        except Unavailable:
            return self.say(*parts)
        self.position += 1
        return kept

    def received(self, place: str) -> list[Outgoing]:
        entries = self.arrivals[place, "s-1"].read(0)
        return [one for entry in entries for one in wire.unpack(entry.blob, OutboxEntry).outgoing]

    def reported(self) -> list[Report]:
        return [one for entry in self.reports.read(0) for one in wire.unpack(entry.blob, list[Report])]


def result(key: str, seq: int) -> Result:
    return Result(key, 0, seq, 0, 0, 0, {"z": seq, "a": key})


def test_each_receiver_gets_its_results_in_order_and_nothing_else() -> None:
    rig = Rig(ByKey())
    kept = rig.say(([result("a", 1), result("c", 2), result("b", 3), result("a", 4)], []))
    assert kept == [Outgoing([result("c", 2)], [])]
    assert [one.results for one in rig.received("edge-1")] == [[result("a", 1), result("a", 4)]]
    assert [one.results for one in rig.received("edge-2")] == [[result("b", 3)]]
    assert list(rig.received("edge-1")[0].results[0].values) == ["z", "a"], "columns keep their order"


def test_a_batch_without_results_for_a_place_sends_it_nothing() -> None:
    rig = Rig(ByKey())
    kept = rig.say(([result("c", 2)], [Ready("m1", "s-1", 0, 1)]))
    assert (kept, rig.arrivals) == ([Outgoing([result("c", 2)], [])], {})


def test_every_receiver_gets_closed_behind_the_results_of_its_part() -> None:
    rig = Rig(ByKey())
    assert rig.say(([result("a", 1)], [CLOSED, LEFT])) == [Outgoing([], [CLOSED])]
    assert rig.received("edge-1") == [Outgoing([result("a", 1)], [CLOSED])]
    assert rig.received("edge-2") == [Outgoing([], [CLOSED])]
    assert rig.reported() == [LEFT]


def test_a_dead_letter_goes_to_the_home_of_its_key() -> None:
    rig = Rig(ByKey())
    kept = rig.say(([], [parked("gateway@edge-2"), parked("gateway@cloud")]))
    assert kept == [Outgoing([], [parked("gateway@cloud")])]
    assert rig.received("edge-2") == [Outgoing([], [parked("gateway@edge-2")])]
    assert rig.received("edge-1") == []


@pytest.mark.parametrize("stores", [False, True])
def test_gates_elsewhere_hear_of_increments_only_if_there_is_a_store(stores: bool) -> None:
    rig = Rig(ByKey(), stores=stores)
    rig.say(([], [OPENED, SAVED]))
    assert rig.received("edge-1") == ([Outgoing([], [OPENED, SAVED])] if stores else [])
    assert rig.reported() == [OPENED]


def test_if_every_receiver_is_here_only_reports_are_copied() -> None:
    rig = Rig(Here())
    parts: list[tuple[list[Result], list[Notice]]] = [([result("a", 1)], [CLOSED, LEFT]), ([result("b", 1)], [])]
    assert rig.say(*parts) == [Outgoing(*part) for part in parts]
    assert (rig.reported(), rig.arrivals) == ([LEFT], {})


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("victim", ["edge-1", "edge-2", "reports"])
def test_whichever_append_fails_each_entry_arrives_once_and_in_order(victim: str, late: bool) -> None:
    rig = Rig(ByKey())
    log = rig.reports if victim == "reports" else rig.arrivals[victim, "s-1"]
    log.failures, log.late = 1, late
    for seq in range(4):
        rig.say(([result("a", seq), result("b", seq)], [LEFT]))
    assert log.failures == 0
    for place, key in {"edge-1": "a", "edge-2": "b"}.items():
        assert [one.results for one in rig.received(place)] == [[result(key, seq)] for seq in range(4)]
    assert rig.reported() == [LEFT] * 4


def test_reports_are_sent_in_order_and_wait_while_the_orchestrator_is_away() -> None:
    rig, heard, away = Rig(Here()), list[Report](), True
    ready = Ready("m1", "s-1", 0, 1)

    def send(report: Report) -> None:
        if away:
            raise Unavailable("no orchestrator")
        heard.append(report)

    rig.say(([], [ready]))
    rig.say(([], [CLOSED, LEFT]))
    reporter = Reporter(rig.reports, send)
    with pytest.raises(Unavailable):
        reporter.step()
    assert not reporter.is_idle
    away = False
    assert Reporter(rig.reports, send).step()
    assert (heard, reporter.is_idle, rig.reports.head()) == ([ready, LEFT], True, 2)
    assert not reporter.step()


# ── Ways ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_results_go_to_the_place_of_every_sink_and_to_the_place_where_they_are_made() -> None:
    ways = ToSinks("edge-1", ["cloud", EACH], ["gateway-s@edge-2"], ["cloud", "edge-1", "edge-2", "edge-3"])
    some = [result("a", 1), result("b", 2)]
    assert ways.split(some) == {"cloud": some, "edge-1": some}
    assert ways.receivers == ["cloud", "edge-1", "edge-2", "edge-3"], "keys may move to any place, and close there"
    assert ToSinks("edge-1", ["cloud"], ["gateway-s@edge-2"], []).receivers == ["cloud", "edge-2"]
    assert ways.home_of("gateway-s@edge-2") == "edge-2"


def test_results_go_to_the_homes_of_the_next_stages_keys() -> None:
    homes = KeyMap("cloud")
    homes.put(selection_of(["a"]), "edge-1")
    ways = ToHomes("cloud", homes, lambda result: result.values["a"], ["gateway-s@edge-2"])
    some = [result("a", 1), result("b", 2), result("a", 3), Result("c", 0, 4, 0, 0, 0, {"a": None})]
    assert ways.split(some) == {"edge-1": [some[0], some[2]], "cloud": [some[1], some[3]]}
    assert ways.receivers == ["cloud", "edge-1", "edge-2"]
