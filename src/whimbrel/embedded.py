"""The orders of the embedded application: what the API asks for, done by the `App` in the same process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from whimbrel.control.orchestrator import Order
from whimbrel.control.orders import (
    Answered,
    Checkpoint,
    InstanceStatus,
    MigrationStatus,
    Receipt,
    Request,
    Route,
    SiteStatus,
    StageStatus,
    status_of,
)
from whimbrel.core import wire
from whimbrel.core.errors import Conflict, Refused, UnknownName
from whimbrel.core.protocols.machine import Abandoned, Migration, Takeover
from whimbrel.runtime import StageRuntime, told

if TYPE_CHECKING:
    from whimbrel.app import App


class EmbeddedOrders:
    """`control.orders.Orders`, over an `App`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._pausing = threading.Lock()

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────────────────────

    def status(self) -> dict[str, Any]:
        return self._app.status()

    def sites(self) -> list[SiteStatus]:
        counts = {name: runtime.counts() for name, runtime in self._app.stages.items()}
        found = []
        for site in self._app.sites.values():
            here = [
                (runtime, name) for runtime in self._app.stages.values() for name in runtime.instances.at(site.name)
            ]
            running = [
                query.is_active for query in (runtime.query(name) for runtime, name in here) if query is not None
            ]
            found.append(
                SiteStatus(
                    name=site.name,
                    instances=[name for _, name in here],
                    keys=sum(counts[runtime.stage.name][name] for runtime, name in here),
                    state_bytes=sum(runtime.state_bytes(name) for runtime, name in here),
                    running=all(running) and len(running) == len(here),
                )
            )
        return found

    def stages(self) -> list[StageStatus]:
        return [
            StageStatus(
                name=stage.name,
                instances=dict(self._app.stages[stage.name].coordinator.sites),
                keys=sum(self._app.stages[stage.name].counts().values()),
                groups=stage.groups,
                partitions=stage.partitions,
                migrations=[m.move.id for m in self._migrations(stage.name) if not m.is_over],
            )
            for stage in self._app.pipeline.stages
        ]

    def routes(self, stage: str, apart: int = 100) -> list[Route]:
        if stage not in self._app.stages:
            raise UnknownName("stage", stage, list(self._app.stages))
        runtime = self._app.stages[stage]
        by_bin, by_key = runtime.coordinator.table.owners.dump()
        counts = runtime.counts()
        found = []
        for name, site in list(runtime.coordinator.sites.items()):
            singly = sorted(key for key, owner in by_key.items() if owner == name)
            bins = [bin for bin, owner in enumerate(by_bin) if owner == name]
            found.append(Route(name, site, _ranges(bins), counts[name], singly[:apart], len(singly)))
        return found

    # ── Moving ───────────────────────────────────────────────────────────────────────────────────────────────────

    def migrate(self, stage: str, *, to: str, request: Request | None = None, **options: Any) -> Receipt:
        handle = self._app.migrate(stage, to=to, request=request, **options)
        return Receipt(handle.ids, handle.why)

    def scale(self, stage: str, *, instances: int, at: str, request: Request | None = None, **options: Any) -> Receipt:
        return Receipt(self._app.scale(stage, instances=instances, at=at, request=request, **options).ids)

    def drain(
        self, site: str, *, to: Sequence[str] | None = None, request: Request | None = None, **options: Any
    ) -> Receipt:
        handles = self._app.drain(site, to=to, request=request, **options)
        return Receipt([id for handle in handles.values() for id in handle.ids])

    def migrations(self) -> list[MigrationStatus]:
        return [status_of(m) for stage in self._app.stages for m in self._migrations(stage)]

    def migration(self, id: str) -> MigrationStatus:
        return status_of(self._found(id))

    def wait(self, id: str, timeout: float, *, warm: bool = False) -> MigrationStatus:
        self._app.orchestrator.wait(self._found(id).move.stage, [id], timeout, warm=warm)
        return self.migration(id)

    def story(self, id: str) -> list[str]:
        return self._app.story(id)

    def abort(self, id: str, reason: str) -> None:
        self._app.orchestrator.tell(self._found(id).move.stage, id, Abandoned(reason))

    def take_over(self, id: str) -> None:
        migration = self._found(id)
        if migration.is_standby:
            self._app.orchestrator.tell(migration.move.stage, id, Takeover())
        elif not any(line.event == Takeover.__name__ for line in migration.story):
            raise Refused(
                f"no standby is waiting here: {id} is {migration.phase}; "
                "order one with protocol='replicate', standby=True"
            )

    def _migrations(self, stage: str) -> list[Migration]:
        return list(self._app.stages[stage].coordinator.migrations.values())

    def _found(self, id: str) -> Migration:
        known = {m.move.id: m for stage in self._app.stages for m in self._migrations(stage)}
        if id not in known:
            raise UnknownName("migration", id, list(known))
        return known[id]

    # ── Links ────────────────────────────────────────────────────────────────────────────────────────────────────

    def cut(self, site: str, other: str) -> None:
        self._app.cut(site, other)

    def mend(self, site: str, other: str) -> None:
        self._app.mend(site, other)

    # ── One instance ─────────────────────────────────────────────────────────────────────────────────────────────

    def pause(self, instance: str) -> None:
        with self._pausing:
            runtime, site = self._place(instance)
            self._check_settled(runtime, instance)
            self._app.sites[site].stop(instance)

    def resume(self, instance: str) -> None:
        with self._pausing:
            runtime, site = self._place(instance)
            self._check_settled(runtime, instance)
            self._app.sites[site].start(instance)

    def _check_settled(self, runtime: StageRuntime, instance: str) -> None:
        if self._app.orchestrator.is_relocating(runtime.stage.name, instance):
            raise Conflict(f"{instance} is being relocated, and will run when that is over; wait for it or abort it")
        if instance in runtime.instances.leaving:
            raise Conflict(f"{instance} is leaving; it stops by itself when it has nothing to do")

    def state(self, instance: str) -> InstanceStatus:
        runtime, site = self._place(instance)
        query = runtime.query(instance)
        if query is None or not (query.is_active or query.exception):
            relocating = self._app.orchestrator.is_relocating(runtime.stage.name, instance)
            phase = "relocating" if relocating else "paused"
        else:
            phase = "running" if query.is_active else "failed"
        return InstanceStatus(
            name=instance,
            stage=runtime.stage.name,
            site=site,
            phase=phase,
            keys=runtime.counts()[instance],
            state_bytes=runtime.state_bytes(instance),
            backlog=None if query is None else query.backlog,
            batch_ms=None if query is None else round(query.batch_ms),
            error=None if query is None else told(query.exception),
        )

    def checkpoint(self, instance: str) -> Checkpoint:
        _, site = self._place(instance)
        path = self._app.sites[site].checkpoint(instance)
        done = [int(file.name) for file in (path / "commits").glob("[0-9]*") if file.name.isdigit()]
        return Checkpoint(instance, site, str(path.resolve()), max(done, default=None))

    def invoke(self, instance: str, site: str, checkpoint: int | None = None) -> None:
        self._place(instance)
        raise Refused(
            f"{instance} cannot be started from saved state here: its only checkpoint is its own. "
            "To bring it to another site with all it has, migrate everything with protocol='restart'"
        )

    def detach(self, instance: str) -> None:
        runtime, site = self._place(instance)
        raise Refused(
            f"{instance} cannot be taken out of {runtime.stage.name} with its keys; "
            f"to empty it, drain {site}, or scale to fewer instances there: it leaves when it has nothing"
        )

    def _place(self, instance: str) -> tuple[StageRuntime, str]:
        """The stage of an instance, and the site where it is."""
        for runtime in self._app.stages.values():
            site = runtime.coordinator.sites.get(instance)
            if site is not None:
                return runtime, site
        known = [name for runtime in self._app.stages.values() for name in list(runtime.coordinator.sites)]
        raise UnknownName("instance", instance, known)

    # ── What was answered ────────────────────────────────────────────────────────────────────────────────────────

    def recall(self, request: Request) -> Receipt | None:
        found = self._app.journal.answer(request.name)
        return None if found is None else request.check(wire.unpack(found, Answered))

    def remember(self, request: Request) -> None:
        self._app.journal.write(answer=(request.name, wire.pack(request.answered())))


def drained(
    app: App,
    site: str,
    to: Iterable[str] | None,
    protocol: str,
    deadline: float,
    budget: int | None,
    options: dict[str, Any],
) -> list[Order]:
    """The orders that empty a site: for each stage and each site that takes some of it."""
    others = [name for name in app.sites if name != site] if to is None else [*dict.fromkeys(to)]
    if not others or site in others:
        raise Refused(f"what lies at {site} needs another site to go to; give one that is not {site} itself")
    if protocol in ("restart", "auto"):
        raise Refused(f"{protocol} does not share keys out; use another protocol, or app.migrate(..., at={site!r})")
    runtimes = [app.stage_for(name, (site, *others), protocol, deadline, budget) for name in app.stages]
    for runtime in runtimes:
        for migration in list(runtime.coordinator.migrations.values()):
            if not migration.is_over and migration.to_site == site:
                raise Conflict(
                    f"migration {migration.move.id} ({migration.phase}) brings keys to {site}; wait for it or abort it"
                )
    orders = []
    for runtime in runtimes:
        there: dict[str, str] = {}
        for other in others:
            with runtime.instances.staying(other, runtime.counts()) as names:
                there |= dict.fromkeys(names, other)
        pairs = runtime.clear(site, list(there))
        for other in others:
            wanted = [(selection, name) for selection, name in pairs if there[name] == other]
            chosen = {**options, "budget": runtime.budget(other, site) if budget is None else budget}
            if wanted:
                orders.append(Order(runtime.stage.name, wanted, other, protocol, chosen))
    return orders


def _ranges(bins: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers in their order, as ranges without gaps, each with its first and last."""
    runs = [list(run) for _, run in groupby(enumerate(bins), key=lambda pair: pair[1] - pair[0])]
    return [(run[0][1], run[-1][1]) for run in runs]
