"""What the orchestrator forgets: old migrations that are over, and old answers; across restarts, and all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.app.test_orchestrator import House as Usual
from tests.app.waiting import until
from whimbrel.core.errors import Unavailable, UnknownName
from whimbrel.core.keys import selection_of
from whimbrel.core.record import Left, Opened, Ready
from whimbrel.orchestrator import journal, retention
from whimbrel.orchestrator.decisions import Order
from whimbrel.orchestrator.handle import Handle
from whimbrel.orchestrator.journal import Journal


class House(Usual):
    """A stage whose keys go there and back."""

    def move(self, *keys: str, is_ended: bool = True) -> Handle:
        """Move keys to where they are not."""
        there = {self.coordinator.table.owners[key] for key in keys}
        to, site = ("s-2", "edge") if there == {"s-1"} else ("s-1", "cloud")
        ids = self.orchestrator.order([Order("s", [(selection_of(keys), to)], site, "live", {})], 60.0)
        handle = Handle(self.orchestrator, "s", ids)
        if is_ended:
            self.finish(handle)
        return handle

    def finish(self, handle: Handle) -> None:
        (id,), (migration,) = handle.ids, handle.migrations
        source, to = migration.move.source, migration.move.destination
        for notice in (Ready(id, to, 0, 1), Left(id, source, 0, 1), Opened(id, to, 0, 1)):
            self.orchestrator.receive("s", notice)
        handle.wait(30)

    def settle(self, count: int) -> None:
        until(lambda: len(self.coordinator.migrations) == count, f"{count} to be left")

    @property
    def routes(self) -> Any:
        table = self.coordinator.table
        return table.owners.dump(), table.epochs.dump()


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.orchestrator.orchestrator.PERIOD", 0.005)
    monkeypatch.setattr("whimbrel.orchestrator.deeds.PERIOD", 0.005)
    monkeypatch.setattr(retention, "KEPT", 3)
    monkeypatch.setattr(retention, "SLACK", 0)


@pytest.fixture
def house(tmp_path: Path) -> Any:
    house = House(tmp_path)
    yield house
    house.end()


def test_old_migrations_are_forgotten_and_the_routes_are_not(house: House) -> None:
    handles = [house.move("a", "b") for _ in range(7)]
    house.settle(3)
    assert [one.move.id for one in house.journal.migrations()] == ["m5", "m6", "m7"]
    before = house.routes
    assert house.coordinator.table.owners["a"] == "s-2"
    house.restart()
    assert house.routes == before
    assert house.move("a").ids == ["m8"], "no name is given twice"
    assert handles[0].wait(1) is handles[0], "it was over"
    with pytest.raises(UnknownName, match="migration 'm1'"):
        _ = handles[0].outcome


def test_one_that_is_open_outlives_all_that_come_behind_it(house: House) -> None:
    slow = house.move("slow", is_ended=False)
    for _ in range(6):
        house.move("a")
    house.settle(4)
    assert next(iter(house.coordinator.migrations)) == "m1"
    house.restart()
    again = Handle(house.orchestrator, "s", slow.ids)
    house.finish(again)
    before = house.routes
    house.settle(3)
    house.restart()
    assert house.routes == before
    assert house.coordinator.table.owners["slow"] == "s-2"


def test_a_notice_of_a_forgotten_migration_comes_too_late(house: House) -> None:
    for _ in range(5):
        house.move("a")
    house.settle(3)
    house.orchestrator.receive("s", Opened("m1", "s-2", 0, 1))
    assert house.orchestrator.error is None


def test_what_cannot_be_journalled_is_not_forgotten(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def fail(*arguments: Any) -> None:
        tried.append(arguments)
        raise Unavailable("locked")

    with monkeypatch.context() as patched:
        patched.setattr(house.journal, "retire", fail)
        for _ in range(5):
            house.move("a")
        until(lambda: len(tried) > 2, "some tries")
        assert list(house.coordinator.migrations) == ["m1", "m2", "m3", "m4", "m5"]
    house.settle(3)


def test_what_is_left_and_what_is_forgotten_are_written_as_one(tmp_path: Path, house: House) -> None:
    house.move("a")
    (migration,) = house.journal.migrations()
    with pytest.raises(Exception, match="type 'object' is not supported"):
        house.journal.retire([migration], "retired/s", object())  # type: ignore[arg-type]
    assert house.journal.migrations() == [migration]


def test_the_last_answers_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "ANSWERS", 3)
    one = Journal(tmp_path / "journal.db")
    for number in range(6):
        one.write(answer=(f"r{number}", b"%d" % number))
    assert [one.answer(f"r{number}") for number in range(6)] == [None, None, None, b"3", b"4", b"5"]
    one.close()
