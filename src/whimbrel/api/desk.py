"""The desk where orders from outside come in: what the API asks for, done by the `Control` in the same process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from whimbrel.core import wire
from whimbrel.core.errors import Conflict, Refused, UnknownName
from whimbrel.core.protocols.machine import Abandoned, Migration, Takeover
from whimbrel.core.text import visible
from whimbrel.orchestrator.control import Control
from whimbrel.orchestrator.orders import (
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
from whimbrel.orchestrator.stage import StageControl


class Desk:
    """`Orders`, over a `Control`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._pausing = threading.Lock()

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────────────────────

    def status(self) -> dict[str, Any]:
        return self._control.status()

    def sites(self) -> list[SiteStatus]:
        stages = self._control.stages.values()
        counts = {stage.name: stage.counts() for stage in stages}
        sizes = {stage.name: stage.flow().state_bytes for stage in stages}
        running = {name for stage in stages for name, found in stage.seen().items() if found.running}
        found = []
        for site, port in self._control.sites.items():
            here = [(stage.name, name) for stage in stages for name in stage.instances.at(site)]
            found.append(
                SiteStatus(
                    name=site,
                    instances=[name for _, name in here],
                    keys=sum(counts[stage][name] for stage, name in here),
                    state_bytes=sum(sizes[stage].get(name, 0) for stage, name in here),
                    running=all(name in running for _, name in here),
                    disk=port.status().disk,
                )
            )
        return found

    def stages(self) -> list[StageStatus]:
        return [
            StageStatus(
                name=stage.name,
                instances=dict(stage.coordinator.sites),
                keys=sum(stage.counts().values()),
                groups=stage.shape.groups,
                partitions=stage.shape.partitions,
                migrations=[m.move.id for m in self._migrations(stage.name) if not m.is_over],
            )
            for stage in self._control.stages.values()
        ]

    def routes(self, stage: str, apart: int = 100) -> list[Route]:
        if stage not in self._control.stages:
            raise UnknownName("stage", stage, list(self._control.stages))
        one = self._control.stages[stage]
        by_bin, by_key = one.coordinator.table.owners.dump()
        counts = one.counts()
        found = []
        for name, site in list(one.coordinator.sites.items()):
            singly = sorted(key for key, owner in by_key.items() if owner == name)
            bins = [bin for bin, owner in enumerate(by_bin) if owner == name]
            found.append(Route(name, site, _ranges(bins), counts[name], singly[:apart], len(singly)))
        return found

    # ── Moving ───────────────────────────────────────────────────────────────────────────────────────────────────

    def migrate(self, stage: str, *, to: str, request: Request | None = None, **options: Any) -> Receipt:
        handle = self._control.migrate(stage, to=to, request=request, **options)
        return Receipt(handle.ids, handle.why)

    def scale(self, stage: str, *, instances: int, at: str, request: Request | None = None, **options: Any) -> Receipt:
        return Receipt(self._control.scale(stage, instances=instances, at=at, request=request, **options).ids)

    def drain(
        self, site: str, *, to: Sequence[str] | None = None, request: Request | None = None, **options: Any
    ) -> Receipt:
        handles = self._control.drain(site, to=to, request=request, **options)
        return Receipt([id for handle in handles.values() for id in handle.ids])

    def migrations(self) -> list[MigrationStatus]:
        return [status_of(m) for stage in self._control.stages for m in self._migrations(stage)]

    def migration(self, id: str) -> MigrationStatus:
        return status_of(self._found(id))

    def wait(self, id: str, timeout: float, *, warm: bool = False) -> MigrationStatus:
        self._control.orchestrator.wait(self._found(id).move.stage, [id], timeout, warm=warm)
        return self.migration(id)

    def story(self, id: str) -> list[str]:
        return self._control.story(id)

    def abort(self, id: str, reason: str, *, by: str = "") -> None:
        self._control.orchestrator.tell(self._found(id).move.stage, id, Abandoned(visible(reason), by))

    def take_over(self, id: str, *, by: str = "") -> None:
        migration = self._found(id)
        if migration.is_standby:
            self._control.orchestrator.tell(migration.move.stage, id, Takeover(by))
        elif not any(line.event.startswith(Takeover.__name__) for line in migration.story):
            raise Refused(
                f"no standby is waiting here: {id} is {migration.phase}; "
                "order one with protocol='replicate', standby=True"
            )

    def _migrations(self, stage: str) -> list[Migration]:
        return list(self._control.stages[stage].coordinator.migrations.values())

    def _found(self, id: str) -> Migration:
        known = {m.move.id: m for stage in self._control.stages for m in self._migrations(stage)}
        if id not in known:
            raise UnknownName("migration", id, list(known))
        return known[id]

    # ── Links ────────────────────────────────────────────────────────────────────────────────────────────────────

    def cut(self, site: str, other: str) -> None:
        self._control.cut(site, other)

    def mend(self, site: str, other: str) -> None:
        self._control.mend(site, other)

    # ── One instance ─────────────────────────────────────────────────────────────────────────────────────────────

    def pause(self, instance: str) -> None:
        with self._pausing:
            stage, site = self._place(instance)
            self._check_settled(stage, instance)
            self._control.sites[site].stop(instance)

    def resume(self, instance: str) -> None:
        with self._pausing:
            stage, site = self._place(instance)
            self._check_settled(stage, instance)
            self._control.sites[site].start(instance)

    def _check_settled(self, stage: StageControl, instance: str) -> None:
        if self._control.orchestrator.is_relocating(stage.name, instance):
            raise Conflict(f"{instance} is being relocated, and will run when that is over; wait for it or abort it")
        if instance in stage.instances.leaving:
            raise Conflict(f"{instance} is leaving; it stops by itself when it has nothing to do")

    def state(self, instance: str) -> InstanceStatus:
        stage, site = self._place(instance)
        found = stage.seen().get(instance)
        if found is None or not (found.running or found.error):
            relocating = self._control.orchestrator.is_relocating(stage.name, instance)
            phase = "relocating" if relocating else "paused"
        else:
            phase = "running" if found.running else "failed"
        return InstanceStatus(
            name=instance,
            stage=stage.name,
            site=site,
            phase=phase,
            keys=stage.counts()[instance],
            state_bytes=stage.flow().state_bytes.get(instance, 0),
            backlog=None if found is None else found.backlog,
            batch_ms=None if found is None else round(found.batch_ms),
            error=None if found is None else found.error,
        )

    def checkpoint(self, instance: str) -> Checkpoint:
        stage, site = self._place(instance)
        store = stage.flow().store
        path = self._control.data / "sites" / site / instance
        done = [int(file.name) for file in (path / "commits").glob("[0-9]*") if file.name.isdigit()]
        return Checkpoint(
            instance, site, str(path.resolve()), max(done, default=None), store.checkpoint if store else None
        )

    def save(self, instance: str) -> None:
        stage, _ = self._place(instance)
        stage.order_saving()

    def invoke(
        self, instance: str, site: str, checkpoint: int | None = None, *, request: Request | None = None
    ) -> Receipt:
        return Receipt(self._control.invoke(instance, site, checkpoint, request=request).ids)

    def detach(self, instance: str, *, request: Request | None = None) -> Receipt:
        return Receipt(self._control.detach(instance, request=request).ids)

    def _place(self, instance: str) -> tuple[StageControl, str]:
        """The stage of an instance, and the site where it is."""
        stage = self._control.stage_with(instance)
        return stage, stage.coordinator.sites[instance]

    # ── What was answered ────────────────────────────────────────────────────────────────────────────────────────

    def recall(self, request: Request) -> Receipt | None:
        found = None if request.name is None else self._control.journal.answer(request.name)
        return None if found is None else request.check(wire.unpack(found, Answered))

    def remember(self, request: Request) -> None:
        self._control.journal.write(answer=request.answered())


def _ranges(bins: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers in their order, as ranges without gaps, each with its first and last."""
    runs = [list(run) for _, run in groupby(enumerate(bins), key=lambda pair: pair[1] - pair[0])]
    return [(run[0][1], run[-1][1]) for run in runs]
