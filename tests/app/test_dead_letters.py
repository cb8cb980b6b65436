"""Dead letters of an outlet: each is kept once, in whatever order the gate lets them out, and wherever a process dies.

The gateway's role is real, with its journal and its logs; the test writes to the outboxes what instances would.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import whimbrel as wb
from tests.app.test_checkpointer import Sum
from tests.app.waiting import until
from whimbrel.core import wire
from whimbrel.core.keys import Selection
from whimbrel.core.record import Closed, Notice, OutboxEntry, Outgoing, Parked, Result
from whimbrel.log.folder import Logs
from whimbrel.orchestrator.journal import GATEWAY_JOURNAL, JOURNAL, GatewayJournal, Journal, JournalReader
from whimbrel.roles.gateway import GatewayRole


class House:
    """A data directory with a stage of two instances, and the gateway's role of the moment."""

    def __init__(self, folder: Path, *sinks: Any, source: Any = None, **options: Any) -> None:
        self.data, self.now = folder / "data", 1_000_000
        self.pipeline = wb.Pipeline("p", source or wb.Items([], schema="key string, n long"), key="key", **options)
        self.pipeline.stage("sum", Sum(), groups=1)
        for sink in sinks:
            self.pipeline.sink(sink)
        self.heard: list[Notice] = []
        self.begin()

    def begin(self) -> GatewayRole:
        """A gateway's role, from what the one before has left; it does not run yet."""
        journal = Journal(self.data / JOURNAL)
        journal.save("instances/sum", wire.pack({"sum-1": "cloud", "sum-2": "edge-1"}))
        journal.close()
        self.journal, self.logs = GatewayJournal(self.data / GATEWAY_JOURNAL), Logs(self.data / "logs")
        self.role = GatewayRole(
            self.pipeline,
            self.logs,
            self.journal,
            JournalReader(self.data / JOURNAL),
            lambda stage, notice: self.heard.append(notice),
            lambda: self.now,
            keep=False,
            max_backlog=1000,
            watch=lambda results, now_us: None,
        )
        return self.role

    def say(self, instance: str, results: list[Result], *notices: Notice) -> None:
        """What an instance writes to its outbox in one batch."""
        box = self.logs.outbox(instance)
        blob = wire.pack(OutboxEntry([Outgoing(results, list(notices))]))
        assert box.append(blob, count=1, writer=instance, counter=box.tail()) is not None
        self.role.first.outlet.wake()

    def settle(self) -> None:
        until(lambda: self.role.first.outlet.is_idle or self.role.errors(), "everything is delivered")
        assert self.role.errors() == []

    def end(self) -> None:
        for end in (*self.role.ends(), *self.role.outlet_ends(), self.logs.close, self.journal.close):
            end()

    def letters(self) -> list[tuple[str, int]]:
        return [(letter.reason, letter.position) for letter in self.role.dead.read()]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    one = House(tmp_path)
    one.role.start()
    yield one
    one.end()


def parked(key: str, seq: int, epoch: int = 0) -> Parked:
    return Parked("sum-2", key, seq, "gateway-sum", "ValueError: no", "{}", epoch)


CLOSED = Closed("m1", "sum-1", 0, 1, Selection(keys=frozenset({"a"})), 1)


def test_a_dead_letter_that_the_gate_held_back_is_kept_behind_a_later_one(house: House) -> None:
    house.say("sum-2", [], parked("a", 5, epoch=1))
    house.say("sum-2", [], parked("b", 6))
    house.settle()
    assert house.letters() == [("operator failed", 6)]
    house.say("sum-1", [], CLOSED)
    house.settle()
    assert house.letters() == [("operator failed", 6), ("operator failed", 5)]


def test_it_is_kept_once_across_restarts_at_every_point(house: House) -> None:
    """Held before the first end, released before the second, told again at the third."""
    house.say("sum-2", [], parked("a", 5, epoch=1), parked("b", 6))
    for said in ((), (CLOSED,), (parked("c", 7),)):
        house.settle()
        house.end()
        house.begin().start()
        house.say("sum-1", [], *said)
    house.settle()
    assert house.letters() == [("operator failed", seq) for seq in (6, 5, 7)]
