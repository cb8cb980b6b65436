"""Orchestrator and gateway as they are between processes, with the sites' part played by hand: over real HTTP and logs,
without Spark."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import whimbrel as wb
from tests.app.test_pipeline import Count
from tests.app.waiting import until
from whimbrel.cli.processes import finished
from whimbrel.core import wire
from whimbrel.core.errors import Conflict, Unavailable, UnknownName
from whimbrel.core.names import site_role
from whimbrel.core.protocols import machine
from whimbrel.core.record import Kind, Left, Opened, OutboxEntry, Outgoing, Ready, Result
from whimbrel.deploy.deployment import Deployment
from whimbrel.deploy.gateway import GatewayProcess
from whimbrel.deploy.orchestrator import OrchestratorProcess
from whimbrel.log import EmbeddedLog, codec
from whimbrel.orchestrator.journal import GATEWAY_JOURNAL, JOURNAL, WAIT
from whimbrel.orchestrator.ports import SiteBeat, SitePort
from whimbrel.rpc.access import Credential, credential
from whimbrel.rpc.remote import bare, offer
from whimbrel.rpc.server import Server
from whimbrel.site.status import InstanceStatus, SiteStatus

SITES = ["cloud", "edge-1"]
PARTS = 4


class Place:
    """A site that only notes what it is told."""

    def __init__(self, name: str, secret: Credential) -> None:
        self.name, self.running, self.places = name, dict[str, int](), dict[str, str]()
        self.strays: list[str] = []
        self.starts = True
        api = bare(name)
        offer(api, SitePort, self, secret)
        self.server = Server(api)
        self.server.start()

    def start(self, instance: str, wait: bool = True, anew: bool = False) -> None:
        if not self.starts:
            raise Unavailable("it cannot start now")
        self.running[instance] = self.running.get(instance, 0) + 1

    def stop(self, instance: str) -> None:
        self.running.pop(instance, None)
        self.strays = [name for name in self.strays if name != instance]

    def place(self, places: dict[str, str]) -> None:
        self.places = places

    def take(self, instance: str, origin: str) -> int:
        return 0

    def send(self, source: str, destination: str, blob: bytes, count: int, writer: str, counter: int) -> None: ...

    def carry(self, to: str, size: int) -> float:
        return 0.0

    def cut(self, other: str, is_cut: bool = True) -> None: ...

    def is_idle(self) -> bool:
        return True

    def failed(self) -> dict[str, str]:
        return {}

    def status(self) -> SiteStatus:
        return SiteStatus({name: InstanceStatus(True, 1, 1, 0, 10) for name in [*self.running, *self.strays]})


class House:
    """A data directory and the processes of the moment."""

    def __init__(self, data: Path) -> None:
        self.data, self.delivered = data, list[dict[str, Any]]()
        source = wb.Items([{"k": f"k{n % 5}"} for n in range(20)], schema="k string")
        self.pipeline = wb.Pipeline("p", source=source, key="k").stage("count", Count(), groups=PARTS)
        self.pipeline.sink(self.delivered.append)
        self.dead = 30.0
        self.store: str | None = None
        self.orchestrator: OrchestratorProcess | None = None
        self.gateway: GatewayProcess | None = None
        self.sites: dict[str, Place] = {}
        self._batch = count()

    def begin(self) -> OrchestratorProcess:
        """An orchestrator, from what its predecessor has left."""
        self.orchestrator = OrchestratorProcess(
            self.pipeline, self.data, Deployment(SITES, store=self.store), dead=self.dead
        )
        self.orchestrator.start()
        return self.orchestrator

    def end(self) -> None:
        """The orchestrator is gone."""
        assert self.orchestrator is not None
        self.orchestrator.stop()
        self.orchestrator = None

    def open(self) -> GatewayProcess:
        self.gateway = GatewayProcess(self.pipeline, self.data)
        self.gateway.start()
        return self.gateway

    def site(self, name: str) -> Place:
        if name not in self.sites:
            self.sites[name] = Place(name, credential(self.data, site_role(name)))
        return self.sites[name]

    def beat(self, name: str, life: str = "first") -> Place:
        """A site says that it lives."""
        assert self.orchestrator is not None
        site = self.site(name)
        self.orchestrator.control.beat(SiteBeat(name, life, site.server.url, site.status()))
        return site

    def say(self, instance: str, *said: Any) -> None:
        """What an instance of this name writes to its outbox in one batch."""
        outgoing = Outgoing([one for one in said if isinstance(one, Result)], [n for n in said if isinstance(n, KINDS)])
        box = EmbeddedLog(self.data / "logs" / f"outbox-{instance}.db")
        assert (
            box.append(wire.pack(OutboxEntry([outgoing])), count=1, writer="by hand", counter=next(self._batch))
            is not None
        )

    def heard(self, instance: str) -> list[str]:
        """The markers in an inbox."""
        inbox = EmbeddedLog(self.data / "logs" / f"inbox-{instance}.db")
        kinds = [Kind(record.kind) for entry in inbox.read(0) for record in codec.records(entry)]
        return [kind.name for kind in kinds if kind != Kind.DATA]

    def close(self) -> None:
        if self.orchestrator is not None:
            self.orchestrator.stop()
        if self.gateway is not None:
            self.gateway.stop()
        for site in self.sites.values():
            site.server.stop()


KINDS = (Ready, Left, Opened)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


def result(n: int) -> Result:
    return Result(f"k{n}", 0, n, 0, 0, 0, {"n": n})


@pytest.mark.parametrize("stopped", [JOURNAL, GATEWAY_JOURNAL], ids=["the orchestrator", "the gateway"])
def test_a_process_that_is_stopped_inside_a_write_holds_up_no_other(house: House, stopped: str) -> None:
    """It keeps the write lock of its own file."""
    orchestrator = house.begin()
    if stopped == GATEWAY_JOURNAL:
        house.open()
        until(lambda: orchestrator.control.status()["processes"]["gateway"]["state"] == "alive", "the gateway is heard")
    with closing(sqlite3.connect(house.data / stopped, isolation_level=None, timeout=60)) as held:
        held.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        if stopped == JOURNAL:
            gateway = house.open()
            until(lambda: gateway.role.first.gateway.sent == 20, "every record")
            assert gateway.role.first.save(), "the router's snapshot"
            house.say("count-1", *map(result, range(3)))
            until(lambda: len(house.delivered) == 3 and gateway.role.first.outlet.is_idle, "results, committed")
        else:
            house.beat("edge-1")
            assert orchestrator.control.orders.migrate("count", to="edge-1").ids == ["m1"]
        assert time.monotonic() - begun < WAIT, "nobody has waited for the lock"
        held.execute("ROLLBACK")
    if house.gateway is not None:
        assert not house.gateway.role.errors()


# ── Sites ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_site_that_begins_a_life_gets_its_instances_started(house: House) -> None:
    house.begin()
    cloud, edge = house.beat("cloud"), house.beat("edge-1")
    until(lambda: cloud.running == {"count-1": 1} and edge.running == {"count-2": 1}, "each has its own")
    assert cloud.places == edge.places == {"count-1": "cloud", "count-2": "edge-1"}
    house.beat("cloud")
    house.beat("edge-1", "second")
    until(lambda: edge.running == {"count-2": 2}, "a new life is started anew")
    assert cloud.running == {"count-1": 1}, "and nobody else"
    house.end()
    house.begin()
    house.beat("cloud")
    until(lambda: cloud.running == {"count-1": 2}, "an orchestrator that comes back says again what is to run")


def test_what_runs_where_it_must_not_is_stopped(house: House) -> None:
    house.begin()
    site = house.site("cloud")
    site.strays.append("count-9")
    house.beat("cloud")
    until(lambda: not site.strays, "it is stopped")
    until(lambda: site.running == {"count-1": 1}, "what belongs there runs")


def test_what_a_relocation_had_stopped_runs_again_when_a_restoration_has_ended_it(house: House) -> None:
    orchestrator = house.begin()
    cloud, edge = house.beat("cloud"), house.beat("edge-1")
    until(lambda: cloud.running == {"count-1": 1}, "it runs")
    edge.starts = False
    (id,) = orchestrator.control.orders.migrate("count", to="edge-1", protocol="restart").ids
    migration = orchestrator.control.stages["count"].coordinator.migrations[id]
    until(lambda: migration.phase == "starting" and not cloud.running, "it is stopped, and does not start there")
    machine.end(migration, "m9")
    until(lambda: cloud.running == {"count-1": 1}, "it runs where it was")
    assert not edge.running


def test_a_site_that_cannot_be_reached_keeps_a_relocation_from_nothing(house: House) -> None:
    """Neither does it mean that nothing has run there: the migration waits, and says so."""
    orchestrator = house.begin()
    cloud, edge = house.beat("cloud"), house.beat("edge-1")
    until(lambda: cloud.running == {"count-1": 1}, "it runs")
    edge.starts = False
    (id,) = orchestrator.control.orders.migrate("count", to="edge-1", protocol="restart").ids
    control = orchestrator.control
    until(lambda: "cannot start now" in str(control.status()["stages"]["count"]["waiting"].get(id)), "it is told why")
    edge.starts = True
    until(lambda: control.status()["stages"]["count"]["migrations"][id] == "done", "it is there")
    assert (cloud.running, edge.running["count-1"]) == ({}, 1), "beside the one that edge-1 has of its own"


def test_a_site_that_nobody_named_is_not_heard(house: House) -> None:
    orchestrator = house.begin()
    with pytest.raises(UnknownName, match="there is: cloud, edge-1"):
        orchestrator.control.beat(SiteBeat("moon", "first", "http://moon", SiteStatus()))


def test_what_moves_to_a_site_that_died_is_called_off_and_status_says_so(house: House) -> None:
    house.dead = 3.0
    orchestrator = house.begin()
    house.open()
    until(lambda: orchestrator.control.status()["processes"]["gateway"]["state"] == "alive", "the gateway is heard")
    house.beat("cloud")
    house.beat("edge-1")
    (id,) = orchestrator.control.orders.migrate("count", to="edge-1").ids

    def is_over() -> bool:
        house.beat("cloud")
        return "ABORT" in house.heard("count-2")

    until(is_over, "the move is called off")
    migration = orchestrator.control.orchestrator.migration("count", id)
    assert str(migration.reason).startswith("site edge-1 is dead: no heartbeat for")
    status = orchestrator.control.status()
    assert status["processes"]["edge-1"]["state"] == "dead"
    assert status["processes"]["cloud"]["state"] == "alive"
    assert status["error"] == "site edge-1 is dead"


def test_what_a_dead_site_had_is_restored_by_itself(house: House) -> None:
    house.dead, house.store = 3.0, str(house.data / "store")
    orchestrator = house.begin()
    house.open()
    control = orchestrator.control
    until(lambda: control.status()["records"]["sent"] == 20, "the gateway is heard, and its records")
    house.beat("cloud")

    def is_restored(phase: str) -> bool:
        house.beat("edge-1")
        return [one.phase for one in control.stages["count"].coordinator.migrations.values()] == [phase]

    until(lambda: is_restored("loading"), "the keys are loaded")
    until(lambda: house.heard("count-1")[-1:] == ["DISCARD"], "the dead one will hear it")
    house.say("count-2", *(Ready("m1", "count-2", part, PARTS) for part in range(PARTS)))
    until(lambda: house.heard("count-2") == ["CUTOVER"], "records are replayed")
    house.say("count-2", *(Opened("m1", "count-2", part, PARTS) for part in range(PARTS)))
    until(lambda: is_restored("done"), "the keys are restored")
    assert control.stages["count"].owners() == {"count-2"}
    status = control.status()
    assert status["stages"]["count"]["lost"] == ["count-1"]
    assert status["restore"] == {"automatic": True, "waiting": {}}


def test_who_was_away_itself_takes_nobody_for_dead(house: House) -> None:
    control = house.begin().control
    house.beat("cloud")
    peer = control.sites["cloud"].peer
    peer._since -= 100
    control._looked -= 100
    assert control.is_dead("cloud")
    control.watch()
    assert not control.is_dead("cloud")


# ── The orchestrator goes and comes ──────────────────────────────────────────────────────────────────────────────────


def test_results_do_not_wait_for_the_orchestrator_and_notices_do(house: House) -> None:
    orchestrator = house.begin()
    gateway = house.open()
    for name in SITES:
        house.beat(name)
    until(lambda: orchestrator.control.status()["records"]["sent"] == 20, "the gateway has been heard, and its records")
    until(lambda: len(gateway.role.first.instances) == 2, "it knows the instances")
    (id,) = orchestrator.control.orders.migrate("count", to="edge-1").ids
    until(lambda: house.heard("count-1") == house.heard("count-2") == ["BEGIN"], "the move has begun")

    house.end()
    house.say("count-1", result(1))
    house.say("count-2", *(Ready(id, "count-2", part, PARTS) for part in range(PARTS)))
    for n in range(2, 5):
        house.say("count-1", result(n))
    until(lambda: [values["n"] for values in house.delivered] == [1, 2, 3, 4], "results leave")
    assert not gateway.role.is_drained("count"), "there is something to tell"
    assert house.heard("count-1") == ["BEGIN"]

    orchestrator = house.begin()
    until(lambda: house.heard("count-1") == house.heard("count-2") == ["BEGIN", "CUTOVER"], "the notices are told")
    house.say("count-1", *(Left(id, "count-1", part, PARTS) for part in range(PARTS)))
    house.say("count-2", *(Opened(id, "count-2", part, PARTS) for part in range(PARTS)))
    until(lambda: orchestrator.control.orchestrator.migration("count", id).phase == "done", "the move is done")
    until(lambda: gateway.role.is_drained("count"), "there is nothing left to tell")


def test_a_command_waits_for_the_gateway(house: House) -> None:
    orchestrator = house.begin()
    for name in SITES:
        house.beat(name)
    orchestrator.control.orders.migrate("count", to="edge-1")
    house.open()
    until(lambda: house.heard("count-1") == house.heard("count-2") == ["BEGIN"], "the move has begun")


def test_a_role_runs_once_in_a_directory(house: House) -> None:
    house.begin()
    with pytest.raises(Conflict, match="orchestrator is running already"):
        OrchestratorProcess(house.pipeline, house.data, Deployment(SITES))
    house.open()
    with pytest.raises(Conflict, match="gateway is running already"):
        GatewayProcess(house.pipeline, house.data)
    with pytest.raises(Conflict, match="another run uses"):
        wb.run(house.pipeline, SITES, data=house.data)


# ── What ends for good ───────────────────────────────────────────────────────────────────────────────────────────────


def failing_source() -> Iterator[dict[str, Any]]:
    yield {"k": "a"}
    raise OSError("the cable is cut")


def failing_sink(values: dict[str, Any]) -> None:
    raise ValueError("no such account")


@pytest.mark.parametrize("what", ["source", "sink"])
def test_what_failed_for_good_has_not_finished_and_ends_up_with_the_reason(house: House, what: str) -> None:
    """`up --until-done` must neither say that everything is delivered nor wait for ever."""
    house.pipeline.source = wb.Items(failing_source if what == "source" else [], schema="k string")
    house.pipeline.sinks[:] = [(failing_sink, None)]
    control = house.begin().control
    role = house.open().role
    has_finished = finished(house.data, None)
    for name in SITES:
        house.beat(name)
    if what == "sink":
        house.say("count-1", result(1))
    until(lambda: role.errors(), "it fails")
    until(control.failure, "the orchestrator hears of it")

    with pytest.raises(wb.WhimbrelError, match="the cable is cut" if what == "source" else "no such account"):
        until(has_finished, "`up` ends")
    assert not control.has_finished()
    status = control.status()
    assert status["source"]["ended"] == (what == "sink")
    assert ("the cable is cut" in str(status["source"]["error"])) == (what == "source")
