"""The operations that a user may order on a running pipeline: the orchestrator with its stages and its ports.

`wb.run` has one in the user's own process (deploy/embedded.py), `whimbrel orchestrator` one in a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Conflict, Refused, Unavailable, UnknownName
from whimbrel.core.keys import Selection
from whimbrel.core.protocols import protocol_named
from whimbrel.core.protocols.auto import Limits
from whimbrel.core.protocols.machine import Abandoned, Migration, Takeover
from whimbrel.core.record import Report
from whimbrel.core.router import RouteTable
from whimbrel.core.text import visible
from whimbrel.host.contract import Saved
from whimbrel.log.folder import Logs
from whimbrel.orchestrator.chores import Chores
from whimbrel.orchestrator.decisions import Order, RestoreOrder
from whimbrel.orchestrator.draining import detached, drained
from whimbrel.orchestrator.handle import Handle
from whimbrel.orchestrator.instances import Instances
from whimbrel.orchestrator.journal import Journal
from whimbrel.orchestrator.orchestrator import DEADLINE, Orchestrator
from whimbrel.orchestrator.orders import Answered, Receipt, Request
from whimbrel.orchestrator.plan import read_plan
from whimbrel.orchestrator.ports import FlowStatus, GatewayPort, SitePort
from whimbrel.orchestrator.stage import Reach, Shape, StageControl
from whimbrel.site.links import Given, check_pair, links_of
from whimbrel.site.status import told


class Control:
    """The orchestrator of a pipeline, with everything needed to interpret an order."""

    def __init__(
        self,
        pipeline: str,
        shapes: Mapping[str, Shape],
        data: Path,
        journal: Journal,
        logs: Logs,
        sites: Mapping[str, SitePort],
        gateway: GatewayPort,
        clock_us: Callable[[], int],
        links: Given,
        saved: Callable[[Path], Saved],
    ) -> None:
        """`shapes`: by stage, in the order of the stages. `saved` reads an instance's checkpoint in a folder."""
        self.name, self.data, self.journal, self.logs = pipeline, data, journal, logs
        self.sites, self.saved, self._pausing = sites, saved, threading.Lock()
        self._reach = Reach(sites, gateway, logs, links_of(list(sites), links), self.is_dead)
        self.stages: dict[str, StageControl] = {}
        self.chores = Chores(self.stages, sites, gateway, logs, data)
        self.orchestrator = Orchestrator(journal, sites, gateway, clock_us, self.chores.do, self.chores.is_left_behind)
        for stage, shape in shapes.items():
            engaged = partial(self.orchestrator.engaged, stage)
            instances = Instances(stage, journal, sites, engaged, self.chores.tell_places)
            first = RouteTable(next(iter(instances.sites)))
            coordinator = Coordinator(stage, first, instances.sites, frozenset({router_of(stage)}))
            self.stages[stage] = StageControl(coordinator, instances, shape, self._reach)
            self.orchestrator.stages[stage] = coordinator

    # ── Orders of a user ─────────────────────────────────────────────────────────────────────────────────────────

    def migrate(
        self,
        stage: str,
        *,
        to: str,
        keys: Iterable[str] | None = None,
        bins: Iterable[int] | None = None,
        share: float | None = None,
        at: str | None = None,
        protocol: str | None = None,
        from_checkpoint: int | None = None,
        deadline: float = DEADLINE,
        budget: int | None = None,
        request: Request | None = None,
        **options: Any,
    ) -> Handle:
        """Move keys of a stage to a site, while it runs.

        Which: these `keys`, these `bins`, a `share` (0 to 1) of the keys elsewhere, or everything; with `at`, only keys
        at that site. How: `protocol`, `live` if none is given; keys at a dead site are restored from the central store,
        if the protocol is `restore`, `auto` or not given: from the newest versions, or from the checkpoint with number
        `from_checkpoint`. `options` are those of the protocol (docs/protocols). Returns at once; the handle waits,
        reports and aborts. Raises, and changes nothing, if a name is unknown, the request is invalid, or another
        migration has some of the keys. `budget`: how many bytes of state each part of a source ships in one batch; if
        not given, no more than the link carries. `request`: journalled as answered, together with its orders.
        """
        control = self.stage_for(stage, (to, at), protocol, deadline, budget)
        self.check_alive(to)
        selection = control.select(keys, bins, share, to, at)
        lost, why = self._lost(control, selection, to, protocol, from_checkpoint)
        if protocol == "auto" and lost != control.sources(selection, to):
            standby, protocol, why = control.choose(selection, to, _limits(options))
            if protocol == "restore":
                lost = control.sources(selection, to)
                control.check_whole(lost, selection)
            if standby is not None:
                handle = Handle(self.orchestrator, stage, [standby], why).take_over()
                if request is not None:
                    self.journal.write(answer=request.answered([standby], why))
                return handle
        options = read_plan(options) | {"budget": control.budget(to, at) if budget is None else budget}
        with control.instances.staying(to, control.counts()) as there:
            orders: list[Order | RestoreOrder] = []
            if lost:
                self.check_restore(stage, from_checkpoint)
                given = options if protocol == "restore" else {}
                orders += control.restorations(lost, there, from_checkpoint, **given)
            if len(lost) < len(control.sources(selection, to)) or not lost:
                taken = "live" if protocol in (None, "restore") else protocol
                whole = [(selection, there[0])] if taken == "restart" else None
                wanted = whole or control.spread(selection, to, there, lost)
                orders.append(Order(stage, wanted, to, taken, options))
            ids = self.orchestrator.order(orders, deadline, why, request)
        return Handle(self.orchestrator, stage, ids, why)

    def _lost(
        self, control: StageControl, selection: Selection, to: str, protocol: str | None, checkpoint: int | None
    ) -> tuple[list[str], list[str]]:
        """The instances whose keys a migration restores from the store, and why. Raises if the request forbids it."""
        if protocol == "restore":
            lost, why = control.sources(selection, to), list[str]()
        else:
            lost = control.missing(selection, to)
            why = [f"{name} at {control.coordinator.sites[name]} is gone: its keys are restored" for name in lost]
        if lost and protocol not in (None, "auto", "restore"):
            raise Unavailable(
                f"{lost[0]} at {control.coordinator.sites[lost[0]]} is gone, and cannot give its keys by {protocol}; "
                "wait for it, or restore them from the central store: protocol='restore'"
            )
        if checkpoint is not None and not lost:
            raise Refused(
                "nothing is restored here, so no checkpoint is needed; leave it out, or use protocol='restore'"
            )
        control.check_whole(lost, selection)
        return lost, why

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

    def scale(
        self,
        stage: str,
        *,
        instances: int,
        at: str,
        protocol: str = "live",
        deadline: float = DEADLINE,
        budget: int | None = None,
        request: Request | None = None,
        **options: Any,
    ) -> Handle:
        """Distribute the keys of a stage at a site over `instances` instances, while it runs.

        More than now: new ones are started, which takes some seconds, and receive their share. Fewer: those with the
        fewest keys ship them to the others and are then stopped. As many: the keys are rebalanced. Returns when the
        moves are ordered; the handle is that of `migrate`. Raises, and changes nothing, as `migrate` does.
        """
        control = self.stage_for(stage, (at,), protocol, deadline, budget)
        options = read_plan(options) | {"budget": control.budget(at, at) if budget is None else budget}
        if instances < 1:
            raise Refused(
                f"the keys at {at} need at least 1 instance there, got {instances}; "
                f"to empty the site, move them away: app.migrate({stage!r}, at={at!r}, to=...)"
            )
        if protocol in ("restart", "auto"):
            raise Refused(f"{protocol} cannot distribute keys over instances of a site; use another protocol")
        self.check_alive(at)
        here, owners = control.instances.at(at), control.coordinator.table.owners
        for migration in list(control.coordinator.open.values()):
            if not migration.is_over and {migration.move.source, migration.move.destination} & {*here}:
                raise Conflict(
                    f"migration {migration.move.id} ({migration.phase}) moves keys to or from {at}, "
                    "so their distribution is not final; wait for it or abort it"
                )
        if instances > len(here) and not any(owners.select(name) for name in here):
            raise Refused(
                f"{stage} has no keys at {at} to distribute; move some there: app.migrate({stage!r}, to={at!r})"
            )
        with control.instances.staying(at, control.counts(), instances) as staying:
            wanted = control.level(at, staying)
            ids = self.orchestrator.migrate(stage, wanted, at, protocol, deadline, request=request, **options)
        return Handle(self.orchestrator, stage, ids)

    def drain(
        self,
        site: str,
        *,
        to: Iterable[str] | None = None,
        protocol: str | None = None,
        deadline: float = DEADLINE,
        budget: int | None = None,
        request: Request | None = None,
        **options: Any,
    ) -> dict[str, Handle]:
        """Move everything away from a site, while it runs: to these sites, or all others, each key to the instance with
        the fewest.

        Returns a handle for each stage with keys there. Keys at a dead site are restored, as in `migrate`: those of
        each instance at one other. Raises, and changes nothing, as `migrate` does, or if a migration moves keys to the
        site. The site's instances stay, without keys.
        """
        orders = drained(self, site, to, protocol, deadline, budget, read_plan(options))
        ids = self.orchestrator.order(orders, deadline, request=request)
        stages = {order.stage: list[str]() for order in orders}
        for name, found in stages.items():
            found += [id for id in ids if id in self.stages[name].coordinator.migrations]
        return {name: Handle(self.orchestrator, name, found) for name, found in stages.items() if found}

    def invoke(
        self,
        instance: str,
        site: str,
        checkpoint: int | None = None,
        *,
        deadline: float = DEADLINE,
        request: Request | None = None,
    ) -> Handle:
        """Restore all keys of an instance from the central store at another instance of a site: the newest versions, or
        those of a checkpoint. At the instance's own site another one is started for that.

        It does not matter whether the instance still runs: its epochs are closed, and it drops its keys. The handle is
        that of `migrate`, with protocol `restore`. Raises, and changes nothing, as `migrate` does.
        """
        control = self.stage_for(self.stage_with(instance).name, (site,), None, deadline, None)
        self.check_alive(site)
        self.check_restore(control.name, checkpoint)
        with control.taking(site, instance) as there:
            ids = self.orchestrator.order(
                control.restorations([instance], there, checkpoint), deadline, request=request
            )
        return Handle(self.orchestrator, control.name, ids)

    def detach(self, instance: str, *, deadline: float = DEADLINE, request: Request | None = None) -> Handle:
        """Remove an instance from its stage: its keys move to the others at its site, or else to all others, and it
        stops when it has none left. Keys at a dead site are restored.

        The handle is that of `migrate`. Raises, and changes nothing, as `migrate` does, or if it is the only one.
        """
        control = self.stage_for(self.stage_with(instance).name, (), None, deadline, None)
        orders = detached(self, control, instance)
        with control.instances.parting(instance):
            ids = self.orchestrator.order(orders, deadline, request=request)
        return Handle(self.orchestrator, control.name, ids)

    def abort(self, id: str, reason: str = "called off", *, by: str = "") -> None:
        """Abort a migration; its story records by whom. After its point of no return the migration completes
        instead."""
        self.orchestrator.tell(self.migration(id).move.stage, id, Abandoned(visible(reason), by))

    def take_over(self, id: str, *, by: str = "") -> None:
        """Let a warm standby take over its keys. Idempotent. Raises `Refused` if no standby is waiting."""
        migration = self.migration(id)
        if migration.is_standby:
            self.orchestrator.tell(migration.move.stage, id, Takeover(by))
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

    def _settled_site(self, instance: str) -> str:
        stage, site = self.place_of(instance)
        if self.orchestrator.is_relocating(stage.name, instance):
            raise Conflict(f"{instance} is being relocated, and will run when that is over; wait for it or abort it")
        if instance in stage.instances.leaving:
            raise Conflict(f"{instance} is leaving; it stops by itself when it has nothing to do")
        return site

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
        if deadline <= 0 or (budget is not None and budget < 1):
            raise Refused(f"deadline must be > 0 s and budget >= 1 byte or None, got {deadline} and {budget}")
        return self.stages[stage]

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
            "links": {way: msgspec.to_builtins(link) for site in sites for way, link in site.links.items()},
            "disks": {name: full for name, full in disks.items() if full},
            "held_up": {name: msgspec.to_builtins(one) for name, one in flow.held_up.items()},
            "error": told(self.orchestrator.error) or next((site.error for site in sites if site.error), None),
        }

    def _status_of(self, stage: StageControl, flow: FlowStatus) -> dict[str, Any]:
        waiting = self.orchestrator.waiting_of(stage.name)
        return {**stage.status(flow), "waiting": {id: f"waiting: {reason}" for id, reason in waiting.items()}}

    def story(self, id: str) -> list[str]:
        """The events of a migration, one per line, with their times; the end of a phase with its duration."""
        return Handle(self.orchestrator, self.migration(id).move.stage, [id]).progress

    # ── For the other roles ──────────────────────────────────────────────────────────────────────────────────────

    def hear(self, stage: str, notice: Report) -> None:
        """Handle a notice of an instance."""
        self.orchestrator.hear(stage, notice)

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


def router_of(stage: str) -> str:
    """The name of the router into a stage."""
    return f"gateway-{stage}"


def _limits(options: dict[str, Any]) -> Limits:
    """The limits for `auto`, removed from the options. Raises if other options remain."""
    known = {f"max_{name}": name for name in Limits.__struct_fields__}
    given = {name: options.pop(name) for name in list(options) if name in known}
    if options:
        raise UnknownName("option of auto", next(iter(options)), list(known))
    return Limits(**{known[name]: value for name, value in given.items()})
