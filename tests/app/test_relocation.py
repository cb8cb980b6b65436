"""Instances that die, and instances that move with their checkpoint: the orchestrator and the sites, without Spark.

A site makes its queries through a function, so here it makes stand-ins: they run until they are told to fail, and leave
in their checkpoint what Spark leaves, a file for each batch begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.waiting import until
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Overloaded, Stale, Unavailable
from whimbrel.core.keys import EVERYTHING, KeyMap
from whimbrel.core.link import IDEAL
from whimbrel.core.protocols.machine import Copied, Stopped
from whimbrel.core.router import RouteTable
from whimbrel.log.memory import MemoryLog
from whimbrel.orchestrator.decisions import Order
from whimbrel.orchestrator.journal import Journal
from whimbrel.orchestrator.orchestrator import Orchestrator
from whimbrel.site.links import Links, SpoolFolder
from whimbrel.site.site import RESTARTS, Site
from whimbrel.spark.checkpoint import Checkpoint

OUTRIGHT, LATER, SOON = "fails at once", "does a batch and fails", "serves, and dies afterwards"
STALE, OVERLOADED = "has another one's checkpoint", "has no worker that connects"


class StandIn:
    """A query that only runs; `fate` says how it fails, if it does."""

    def __init__(self, checkpoint: Path, fate: str | None) -> None:
        self.checkpoint, self.fate = checkpoint, fate
        self.is_active = False
        self.exception: Exception | None = None
        self.contradiction: str | None = None
        self.progress: list[float] = []
        self.renewed = False

    def renew(self) -> None:
        self.renewed = True

    def start(self) -> None:
        if self.fate == STALE:
            raise Stale("the checkpoint is gone")
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
        if self.fate == OVERLOADED:
            self.die()
            raise Overloaded("no worker has connected")

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

    def begin(self, running: bool, behind: Callable[[Site], Any] = lambda site: site) -> None:
        """`behind`: what the orchestrator sees of the site at the edge."""
        self.journal = Journal(self.folder / "journal.db")
        links = Links(["cloud", "edge"], IDEAL, SpoolFolder(self.folder), lambda _: "cloud", lambda _: MemoryLog())
        self.sites = {
            name: Site(name, self.folder / name, self.maker(name), Checkpoint, links) for name in ("cloud", "edge")
        }
        self.coordinator = Coordinator("s", RouteTable("s-1"), {"s-1": "cloud"}, KeyMap("gateway"))
        nobody: Any = None
        seen = {**self.sites, "edge": behind(self.sites["edge"])}
        self.orchestrator = Orchestrator(self.journal, seen, nobody, lambda: 1)
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
        (id,) = self.orchestrator.order([Order("s", [(EVERYTHING, "s-1")], "edge", "restart", {})], 60.0)
        return id

    def outcome(self, id: str = "m1") -> tuple[str, list[str]]:
        """How a migration ended, and where its instance runs then."""
        assert self.orchestrator.wait("s", [id], 20)
        return self.orchestrator.migration("s", id).phase, self.running()

    def running(self) -> list[str]:
        return [site.name for site in self.sites.values() for host in site.hosts.values() if host.is_active]

    def batches(self, site: str) -> int:
        return len(list((self.sites[site].checkpoint("s-1") / "offsets").glob("*")))


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr("whimbrel.orchestrator.orchestrator.PERIOD", 0.01)
    monkeypatch.setattr("whimbrel.orchestrator.deeds.PERIOD", 0.01)
    monkeypatch.setattr("whimbrel.site.site.PERIOD", 0.01)
    house = House(tmp_path)
    yield house
    house.end()


# ── Moving with the checkpoint ───────────────────────────────────────────────────────────────────────────────────────


def test_an_instance_goes_on_elsewhere_from_its_checkpoint(house: House) -> None:
    assert house.outcome(house.relocate()) == ("done", ["edge"])
    assert house.batches("edge") == 2, "one batch before, one after"
    assert house.coordinator.sites == {"s-1": "edge"}
    assert house.orchestrator.order([Order("s", [(EVERYTHING, "s-1")], "edge", "restart", {})], 60.0) == []


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


def run_there_unjournalled(house: House) -> None:
    """The orchestrator dies when the instance has run at its target, before that is journalled."""
    house.orchestrator.stop()
    house.relocate()
    house.sites["cloud"].stop("s-1")
    house.orchestrator.handle("s", "m1", Stopped())
    house.orchestrator.handle("s", "m1", Copied(house.sites["edge"].take("s-1", "cloud")))
    house.sites["edge"].start("s-1")


@pytest.mark.parametrize("fate", [OUTRIGHT, LATER, None])
def test_what_has_run_there_stays_there_whoever_asks_next(house: House, fate: str | None) -> None:
    """The orchestrator dies when the instance has run there, before it is journalled; then the site dies, too. What
    the next lives of both find is what lies on the disk there, and not that nothing has happened in these lives."""
    run_there_unjournalled(house)
    assert house.batches("edge") == 2
    house.end()
    house.fates["edge"] = [] if fate is None else [fate]
    house.begin(running=False)
    assert house.outcome() == ("done", ["edge"])
    assert house.batches("cloud") == 1, "it never goes on from the old checkpoint"


def test_a_site_that_cannot_be_reached_says_nothing_about_what_has_run_there(house: House) -> None:
    run_there_unjournalled(house)
    house.end()
    asked: list[str] = []

    class Unheard:
        """A site that has not been heard in this life of the orchestrator, for a while."""

        def __init__(self, site: Site) -> None:
            self._site = site

        def __getattr__(self, name: str) -> Any:
            if name == "start" and len(asked) < 3:
                asked.append(name)
                return _unavailable
            return getattr(self._site, name)

    house.begin(running=False, behind=Unheard)
    assert house.outcome() == ("done", ["edge"])
    assert len(asked) == 3


def _unavailable(*args: Any, **named: Any) -> None:
    raise Unavailable("edge has not sent a heartbeat yet")


@pytest.mark.parametrize("died_in", ["stopping", "copying", "starting"])
def test_a_successor_finishes_the_relocation(house: House, died_in: str) -> None:
    house.orchestrator.stop()
    house.relocate()
    if died_in != "stopping":
        house.sites["cloud"].stop("s-1")
        house.orchestrator.handle("s", "m1", Stopped())
    if died_in == "starting":
        size = house.sites["edge"].take("s-1", "cloud")
        house.orchestrator.handle("s", "m1", Copied(size))
    assert house.orchestrator.migration("s", "m1").phase == died_in
    house.end()
    house.begin(running=False)
    assert house.outcome() == ("done", ["edge"])
    assert house.batches("edge") == 2


# ── Dying ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_query_that_dies_is_started_again_from_its_checkpoint(house: House) -> None:
    house.fates["cloud"] = [SOON]
    house.sites["cloud"].hosts["s-1"].die()  # type: ignore[attr-defined]
    until(lambda: house.batches("cloud") == 3 and house.running() == ["cloud"], "two deaths, two starts")
    assert house.orchestrator.error is None


def test_a_query_that_keeps_dying_is_left_and_told(house: House) -> None:
    house.fates["cloud"] = [SOON] * 100
    house.sites["cloud"].hosts["s-1"].die()  # type: ignore[attr-defined]
    until(lambda: house.orchestrator.error, "it is given up")
    assert isinstance(house.orchestrator.error, Unavailable)
    assert "s-1 at cloud keeps failing" in str(house.orchestrator.error)
    assert house.batches("cloud") >= 1 + RESTARTS


def test_when_all_failed_instances_run_again_no_error_is_left(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if two were reported at once."""
    failed = {"s-1": "s-1 at cloud keeps failing", "s-2": "s-2 at cloud keeps failing"}
    monkeypatch.setattr(house.sites["cloud"], "failed", lambda: failed)
    until(lambda: house.orchestrator.error, "it is reported")
    monkeypatch.undo()
    until(lambda: house.orchestrator.error is None, "the error is withdrawn")


def test_a_query_that_kept_dying_is_tried_again_and_forgiven_when_it_runs(house: House) -> None:
    house.fates["cloud"] = [SOON] * (RESTARTS + 2)
    house.sites["cloud"].hosts["s-1"].die()  # type: ignore[attr-defined]
    until(lambda: house.sites["cloud"].failed(), "it is reported")
    until(lambda: house.running() == ["cloud"], "it is tried again")
    house.sites["cloud"].hosts["s-1"].progress.append(1.0)  # type: ignore[attr-defined]
    until(lambda: not house.sites["cloud"].failed(), "it is forgiven")


def test_a_host_that_is_not_where_its_logs_are_is_not_started_again(house: House) -> None:
    host: Any = house.sites["cloud"].hosts["s-1"]
    host.contradiction = "batch 7 is another one"
    host.die()
    until(lambda: house.sites["cloud"].failed(), "it is reported")
    assert house.sites["cloud"].failed() == {"s-1": "batch 7 is another one"}
    assert house.sites["cloud"].stale == ["s-1"]
    assert house.batches("cloud") == 1


def test_a_checkpoint_that_does_not_fit_is_reported_and_not_run(house: House) -> None:
    house.fates["edge"] = [STALE]
    with pytest.raises(Stale, match="is gone"):
        house.sites["edge"].start("s-2")
    assert house.sites["edge"].stale == ["s-2"]
    assert "is gone" in house.sites["edge"].failed()["s-2"]
    house.sites["edge"].start("s-2", anew=True)
    assert house.sites["edge"].hosts["s-2"].renewed  # type: ignore[attr-defined]
    assert house.sites["edge"].stale == []


def test_a_start_that_an_overloaded_machine_lets_fail_is_tried_again(house: House) -> None:
    house.fates["edge"] = [OVERLOADED, OVERLOADED]
    house.sites["edge"].start("s-2")
    assert house.running() == ["cloud", "edge"]


def test_an_error_that_nobody_foresaw_does_not_end_the_watch(house: House) -> None:
    """For instance when the JVM is gone, and every question to it raises."""
    healthy = house.sites["cloud"].hosts["s-1"]
    del house.sites["cloud"].hosts["s-1"]

    class Odd:
        @property
        def is_active(self) -> bool:
            raise ConnectionRefusedError("no JVM")

    house.sites["edge"].hosts["s-1"] = Odd()  # type: ignore[assignment]
    until(lambda: house.sites["edge"].error, "it is told")
    assert isinstance(house.sites["edge"].error, ConnectionRefusedError)
    house.sites["edge"].hosts.clear()
    house.sites["cloud"].hosts["s-1"] = healthy
    healthy.die()  # type: ignore[attr-defined]
    until(lambda: house.running() == ["cloud"], "it watches on")
