"""Instances that die, and instances that move with their checkpoint: the orchestrator and the sites, without Spark.

A site makes its queries through a function, so here it makes stand-ins: they run until they are told to fail, and leave
in their checkpoint what Spark leaves, a file for each batch begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.waiting import until
from whimbrel.control.journal import Journal
from whimbrel.control.orchestrator import Orchestrator
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Unavailable
from whimbrel.core.keys import EVERYTHING
from whimbrel.core.link import IDEAL
from whimbrel.core.protocols.machine import Copied, Stopped
from whimbrel.core.router import RouteTable
from whimbrel.log.memory import MemoryLog
from whimbrel.site.links import Links
from whimbrel.site.site import RESTARTS, Site

OUTRIGHT, LATER, SOON = "fails at once", "does a batch and fails", "serves, and dies afterwards"


class StandIn:
    """A query that only runs; `fate` says how it fails, if it does."""

    def __init__(self, checkpoint: Path, fate: str | None) -> None:
        self.checkpoint, self.fate = checkpoint, fate
        self.is_active = False
        self.exception: Exception | None = None
        self.progress: list[float] = []

    def start(self) -> None:
        self.is_active = True
        if self.fate != OUTRIGHT:
            offsets = self.checkpoint / "offsets"
            offsets.mkdir(parents=True, exist_ok=True)
            (offsets / str(len(list(offsets.iterdir())))).touch()
        if self.fate == SOON:
            self.die()

    def wait(self) -> None:
        if self.fate in (OUTRIGHT, LATER):
            self.die()
            raise Unavailable("it has ended")

    def die(self) -> None:
        self.is_active, self.exception = False, RuntimeError("the worker is gone")

    def stop(self) -> None:
        self.is_active = False


class House:
    """Two sites with their folders, and the orchestrator of the moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fates: dict[str, list[str]] = {}
        """By site: how the next queries that start there fail; later ones do not."""
        self.begin(running=True)

    def begin(self, running: bool) -> None:
        self.journal = Journal(self.folder / "journal.db")
        links = Links(["cloud", "edge"], IDEAL, self.folder, lambda _: "cloud", lambda _: MemoryLog())
        self.sites = {name: Site(name, self.folder / name, self.maker(name), links) for name in ("cloud", "edge")}
        self.coordinator = Coordinator("s", RouteTable("s-1"), {"s-1": "cloud"}, frozenset({"gateway"}))
        nobody: Any = None
        self.orchestrator = Orchestrator(self.journal, self.sites, nobody, lambda: 1)
        self.orchestrator.stages["s"] = self.coordinator
        self.orchestrator.recover()
        if running:
            self.sites["cloud"].start("s-1", wait=False)
        for site in self.sites.values():
            site.open()
        self.orchestrator.start()

    def maker(self, site: str) -> Any:
        def make(instance: str, checkpoint: Path) -> StandIn:
            fates = self.fates.get(site, [])
            return StandIn(checkpoint, fates.pop(0) if fates else None)

        return make

    def end(self) -> None:
        self.orchestrator.stop()
        for site in self.sites.values():
            site.close()
        self.journal.close()

    def relocate(self) -> str:
        (id,) = self.orchestrator.migrate("s", [(EVERYTHING, "s-1")], "edge", "restart", 60.0)
        return id

    def outcome(self, id: str = "m1") -> tuple[str, list[str]]:
        """How a migration ended, and where its instance runs then."""
        assert self.orchestrator.wait("s", [id], 20)
        return self.orchestrator.migration("s", id).phase, self.running()

    def running(self) -> list[str]:
        return [site.name for site in self.sites.values() for query in site.queries.values() if query.is_active]

    def batches(self, site: str) -> int:
        return len(list((self.sites[site].checkpoint("s-1") / "offsets").glob("*")))


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr("whimbrel.control.orchestrator.PERIOD", 0.01)
    monkeypatch.setattr("whimbrel.site.site.PERIOD", 0.01)
    house = House(tmp_path)
    yield house
    house.end()


# ── Moving with the checkpoint ───────────────────────────────────────────────────────────────────────────────────────


def test_an_instance_goes_on_elsewhere_from_its_checkpoint(house: House) -> None:
    assert house.outcome(house.relocate()) == ("done", ["edge"])
    assert house.batches("edge") == 2, "one batch before, one after"
    assert house.coordinator.sites == {"s-1": "edge"}
    assert house.orchestrator.migrate("s", [(EVERYTHING, "s-1")], "edge", "restart", 60.0) == []


def test_a_start_that_fails_outright_brings_it_back(house: House) -> None:
    house.fates["edge"] = [OUTRIGHT]
    assert house.outcome(house.relocate()) == ("aborted", ["cloud"])
    assert "it has ended" in str(house.orchestrator.migration("s", "m1").reason)
    assert house.coordinator.sites == {"s-1": "cloud"}


def test_a_copy_that_fails_brings_it_back(house: House) -> None:
    (house.folder / "edge").write_text("no folder can be made here")
    assert house.outcome(house.relocate()) == ("aborted", ["cloud"])
    assert "cannot be copied" in str(house.orchestrator.migration("s", "m1").reason)


def test_what_has_run_there_stays_there(house: House) -> None:
    """The checkpoint there is ahead of the old one: going back would undo what has been said already."""
    house.fates["edge"] = [LATER, LATER]
    assert house.outcome(house.relocate()) == ("done", ["edge"])
    assert house.batches("edge") == 4
    assert house.batches("cloud") == 1


@pytest.mark.parametrize("died_in", ["stopping", "copying", "starting"])
def test_a_successor_finishes_the_relocation(house: House, died_in: str) -> None:
    house.orchestrator.stop()
    house.relocate()
    if died_in != "stopping":
        house.sites["cloud"].stop("s-1")
        house.orchestrator.tell("s", "m1", Stopped())
    if died_in == "starting":
        size = house.sites["edge"].take("s-1", "cloud")
        house.orchestrator.tell("s", "m1", Copied(size))
    assert house.orchestrator.migration("s", "m1").phase == died_in
    house.end()
    house.begin(running=False)
    assert house.outcome() == ("done", ["edge"])
    assert house.batches("edge") == 2


# ── Dying ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_query_that_dies_is_started_again_from_its_checkpoint(house: House) -> None:
    house.fates["cloud"] = [SOON]
    house.sites["cloud"].queries["s-1"].die()  # type: ignore[attr-defined]
    until(lambda: house.batches("cloud") == 3 and house.running() == ["cloud"], "two deaths, two starts")
    assert house.orchestrator.error is None


def test_a_query_that_keeps_dying_is_left_and_told(house: House) -> None:
    house.fates["cloud"] = [SOON] * 100
    house.sites["cloud"].queries["s-1"].die()  # type: ignore[attr-defined]
    until(lambda: house.orchestrator.error, "it is given up")
    assert isinstance(house.orchestrator.error, Unavailable)
    assert "s-1 at cloud keeps failing" in str(house.orchestrator.error)
    assert house.batches("cloud") == 1 + RESTARTS
    assert house.running() == []


def test_an_error_that_nobody_foresaw_does_not_end_the_watch(house: House) -> None:
    """For instance when the JVM is gone, and every question to it raises."""
    healthy = house.sites["cloud"].queries["s-1"]
    del house.sites["cloud"].queries["s-1"]

    class Odd:
        @property
        def is_active(self) -> bool:
            raise ConnectionRefusedError("no JVM")

    house.sites["edge"].queries["s-1"] = Odd()  # type: ignore[assignment]
    until(lambda: house.sites["edge"].error, "it is told")
    assert isinstance(house.sites["edge"].error, ConnectionRefusedError)
    house.sites["edge"].queries.clear()
    house.sites["cloud"].queries["s-1"] = healthy
    healthy.die()  # type: ignore[attr-defined]
    until(lambda: house.running() == ["cloud"], "it watches on")
