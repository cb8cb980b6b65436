"""A running pipeline as its orchestrator sees it: stages, sites and gateway, what a user may do with them, the status.

Orders that move keys are in ordering.py. `wb.run` has a `Control` in the user's own process (deploy/embedded.py),
`whimbrel orchestrator` one in a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Conflict, Refused, Unavailable, UnknownName
from whimbrel.core.keys import KeyMap
from whimbrel.core.names import router_of
from whimbrel.core.protocols import protocol_named
from whimbrel.core.protocols.machine import Abandoned, Migration, Takeover
from whimbrel.core.record import Report
from whimbrel.core.router import RouteTable
from whimbrel.core.text import visible
from whimbrel.host.contract import Saved
from whimbrel.orchestrator.chores import Chores
from whimbrel.orchestrator.handle import Handle
from whimbrel.orchestrator.instances import Instances
from whimbrel.orchestrator.journal import Journal
from whimbrel.orchestrator.known_keys import Follow, KnownKeys
from whimbrel.orchestrator.orchestrator import Orchestrator
from whimbrel.orchestrator.ordering import Ordering
from whimbrel.orchestrator.orders import Answered, Receipt, Request
from whimbrel.orchestrator.ports import FlowStatus, GatewayPort, SitePort
from whimbrel.orchestrator.stage import Reach, Shape, StageControl
from whimbrel.site.links import Given, check_pair, links_of
from whimbrel.site.status import described, joined


class Control:
    """The orchestrator of a pipeline, with everything needed to interpret an order."""

    def __init__(
        self,
        pipeline: str,
        shapes: Mapping[str, Shape],
        data: Path,
        journal: Journal,
        keys: Callable[[str], Sequence[Follow]],
        sites: Mapping[str, SitePort],
        gateway: GatewayPort,
        clock_us: Callable[[], int],
        links: Given,
        saved: Callable[[Path], Saved],
        homes: Callable[[str], KeyMap[str]] = lambda stage: KeyMap(""),
    ) -> None:
        """`shapes`: by stage, in the order of the stages. `keys`: by stage, its logs of keys. `saved` reads an
        instance's checkpoint in a folder. `homes`: by stage, the place that is each key's home; each of these places
        has one site, of its name. By default there is one place, without a name, and all sites share its disk."""
        self.name, self.data, self.journal = pipeline, data, journal
        self.sites, self.saved, self._pausing = sites, saved, threading.Lock()
        shares_disk = all(homes(stage).values() == {""} for stage in shapes)
        self._reach = Reach(sites, gateway, links_of(list(sites), links), self.is_dead, shares_disk)
        self.stages: dict[str, StageControl] = {}
        self.chores = Chores(self.stages, sites, gateway, lambda *named: self.orchestrator.renew(*named))
        self.orchestrator = Orchestrator(journal, sites, gateway, clock_us, self.chores.do, self.chores.is_left_behind)
        for stage, shape in shapes.items():
            engaged = partial(self.orchestrator.engaged, stage)
            instances = Instances(stage, journal, sites, engaged, self.chores.send_places)
            coordinator = Coordinator(stage, *_first_routes(stage, homes(stage), instances.sites))
            self.stages[stage] = StageControl(coordinator, instances, shape, self._reach, KnownKeys(keys(stage)))
            self.orchestrator.stages[stage] = coordinator
        self.orders = Ordering(self)

    # ── What an order needs to know ──────────────────────────────────────────────────────────────────────────────

    def check_restore(self, stage: str, checkpoint: int | None) -> None:
        """Raise if keys of a stage cannot be restored."""
        self._reach.gateway.check_restore(stage, checkpoint)

    def checkpoints(self, stage: str) -> list[int]:
        """The checkpoints that keys of a stage can be restored from, oldest first."""
        return self._reach.gateway.checkpoints(stage)

    def is_dead(self, site: str) -> bool:
        """Whether a site is considered dead. In a single process none ever is."""
        return False

    def check_alive(self, site: str) -> None:
        """Raise if keys cannot move to a site."""
        if self.is_dead(site):
            raise Unavailable(f"site {site} is dead; choose another one, or wait until it is back")

    def migration(self, id: str) -> Migration:
        """The migration with this id."""
        for control in self.stages.values():
            if id in control.coordinator.migrations:
                return control.coordinator.migrations[id]
        known = [id for control in self.stages.values() for id in list(control.coordinator.migrations)]
        raise UnknownName("migration", id, known)

    def place_of(self, instance: str) -> tuple[StageControl, str]:
        """The stage of an instance, and the site where it is."""
        stage = self.stage_with(instance)
        return stage, stage.coordinator.sites[instance]

    def stage_with(self, instance: str) -> StageControl:
        """The stage that an instance belongs to."""
        for control in self.stages.values():
            if instance in control.coordinator.sites:
                return control
        known = [name for control in self.stages.values() for name in list(control.coordinator.sites)]
        raise UnknownName("instance", instance, known)

    def stage_for(
        self, stage: str, sites: Iterable[str | None], protocol: str | None, deadline: float, budget: int | None
    ) -> StageControl:
        """The stage of an order. Raises if the order is invalid."""
        if stage not in self.stages:
            raise UnknownName("stage", stage, list(self.stages))
        for site in filter(None, sites):
            if site not in self.sites:
                raise UnknownName("site", site, list(self.sites))
        if protocol is not None and protocol != "auto":
            protocol_named(protocol)
        if protocol == "restart" and not self._reach.shares_disk:
            raise Refused(
                "restart copies a checkpoint, and the sites of this deployment do not share a disk; choose another "
                "protocol: live moves the same keys without stopping them"
            )
        if deadline <= 0 or (budget is not None and budget < 1):
            raise Refused(f"deadline must be > 0 s and budget >= 1 byte or None, got {deadline} and {budget}")
        return self.stages[stage]

    # ── Single steps: of a migration, an instance, a link ────────────────────────────────────────────────────────

    def abort(self, id: str, reason: str = "called off", *, by: str = "") -> None:
        """Abort a migration; its story records by whom. After its point of no return the migration completes
        instead."""
        self.orchestrator.handle(self.migration(id).move.stage, id, Abandoned(visible(reason), by))

    def take_over(self, id: str, *, by: str = "") -> None:
        """Let a warm standby take over its keys. Idempotent. Raises `Refused` if no standby is waiting."""
        migration = self.migration(id)
        if migration.is_standby:
            self.orchestrator.handle(migration.move.stage, id, Takeover(by))
        elif not any(line.event.startswith(Takeover.__name__) for line in migration.story):
            raise Refused(
                f"no standby is waiting here: {id} is {migration.phase}; "
                "order one with protocol='replicate', standby=True"
            )

    def wait_for(self, id: str, timeout: float, *, warm: bool = False) -> bool:
        """Block until a migration is over, or, with `warm`, a warm standby; False on timeout (in seconds)."""
        return self.orchestrator.wait(self.migration(id).move.stage, [id], timeout, warm=warm)

    def pause(self, instance: str) -> None:
        """Let an instance finish its batch, then pause it. Its records wait in its inbox; the others continue."""
        with self._pausing:
            self.sites[self._settled_site(instance)].stop(instance)

    def resume(self, instance: str) -> None:
        """Resume a paused instance where it stopped; returns when it serves."""
        with self._pausing:
            self.sites[self._settled_site(instance)].start(instance)

    def _settled_site(self, instance: str) -> str:
        stage, site = self.place_of(instance)
        if self.orchestrator.is_relocating(stage.name, instance):
            raise Conflict(f"{instance} is being relocated, and will run when that is over; wait for it or abort it")
        if instance in stage.instances.leaving:
            raise Conflict(f"{instance} is leaving; it stops by itself when it has nothing to do")
        return site

    def save(self, instance: str) -> None:
        """Order an increment of an instance to the central store now; the others of its stage save one, too."""
        self.stage_with(instance).order_checkpoint()

    def recall(self, request: Request) -> Receipt | None:
        """The receipt of a repeated request; None if it is new. Raises `Refused` if its content has changed."""
        found = None if request.name is None else self.journal.answer(request.name)
        return None if found is None else request.check(wire.unpack(found, Answered))

    def remember(self, request: Request) -> None:
        """Journal a request that orders no migration as answered."""
        self.journal.write(answer=request.answered())

    def cut(self, site: str, other: str) -> None:
        """Cut the link between two sites, in both directions: until `mend`, nothing is delivered. Nothing is lost."""
        self._cut(site, other, True)

    def mend(self, site: str, other: str) -> None:
        """Restore the link between two sites: pending messages are delivered."""
        self._cut(site, other, False)

    def _cut(self, one: str, other: str, is_cut: bool) -> None:
        check_pair(list(self.sites), one, other)
        self.sites[one].cut(other, is_cut)
        self.sites[other].cut(one, is_cut)

    # ── Status ───────────────────────────────────────────────────────────────────────────────────────────────────

    def status(self) -> dict[str, Any]:
        """The status as plain data: records, stages with their instances, migrations, links, dead letters."""
        flow = self._reach.gateway.status()
        there = {name: site.status() for name, site in self.sites.items()}
        stages = self.stages.items()
        sites, disks = list(there.values()), {"gateway": flow.disk, **{name: one.disk for name, one in there.items()}}
        return {
            "pipeline": self.name,
            "records": {
                "sent": flow.sent,
                "delivered": flow.delivered,
                "refused": sum(stage.refused for stage in flow.stages.values()),
                "dead_lettered": sum(flow.dead_letters.values()),
            },
            "dead_letters": flow.dead_letters,
            "source": {"ended": flow.ended, "error": flow.error},
            "stages": {name: self._status_of(one, flow.stages.get(name, FlowStatus())) for name, one in stages},
            "links": {
                way: msgspec.to_builtins(link)
                for way, link in joined([flow.links, *(site.links for site in sites)]).items()
            },
            "disks": {name: full for name, full in disks.items() if full},
            "held_up": {name: msgspec.to_builtins(one) for name, one in flow.held_up.items()},
            "error": described(self.orchestrator.error) or next((site.error for site in sites if site.error), None),
        }

    def _status_of(self, stage: StageControl, flow: FlowStatus) -> dict[str, Any]:
        waiting = self.orchestrator.waiting_of(stage.name)
        return {**stage.status(flow), "waiting": {id: f"waiting: {reason}" for id, reason in waiting.items()}}

    def story(self, id: str) -> list[str]:
        """The events of a migration, one per line, with their times; the end of a phase with its duration."""
        return Handle(self.orchestrator, self.migration(id).move.stage, [id]).progress

    # ── For the other roles ──────────────────────────────────────────────────────────────────────────────────────

    def receive(self, stage: str, notice: Report) -> None:
        """Handle a notice of an instance."""
        self.orchestrator.receive(stage, notice)

    def is_settled(self) -> bool:
        """Whether no migration is under way, and all records sent are applied and their results delivered."""
        moving = any(
            not migration.is_over and not migration.is_standby
            for control in self.stages.values()
            for migration in list(control.coordinator.open.values())
        )
        # In the order of a record's path: what a link or stage has passed on is then seen at the next, checked later.
        return (
            not moving
            and all(site.is_idle() for name, site in self.sites.items() if not self._is_given_up(name))
            and all(control.is_drained for control in self.stages.values())
        )

    def _is_given_up(self, site: str) -> bool:
        """Whether a site is dead and owns no keys any more, so that its messages need not be awaited."""
        stages = self.stages.values()
        return self.is_dead(site) and not any({*one.instances.at(site)} & one.owners() for one in stages)

    def instances_at(self, site: str) -> list[str]:
        """The instances that are to run at a site, without those that a migration relocates now."""
        here = [(stage, name) for stage, control in self.stages.items() for name in control.instances.at(site)]
        return [name for stage, name in here if not self.orchestrator.is_relocating(stage, name)]


def _first_routes(
    stage: str, homes: KeyMap[str], sites: dict[str, str]
) -> tuple[RouteTable, dict[str, str], KeyMap[str]]:
    """The routes before any move, the site of each instance, and the router of each key: a key begins at its home, with
    the first instance there."""
    table, routers = RouteTable(next(iter(sites))), KeyMap(router_of(stage, homes.by_bin[0]))
    for home in homes.values() - {""}:
        here = homes.select(home)
        table.owners.put(here, next(name for name, site in sites.items() if site == home))
        routers.put(here, router_of(stage, home))
    return table, sites, routers
