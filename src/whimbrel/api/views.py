"""A running application as plain data: the answers of the API to GET calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from whimbrel.core.errors import UnknownName
from whimbrel.orchestrator.control import Control
from whimbrel.orchestrator.orders import (
    Checkpoint,
    InstanceStatus,
    MigrationStatus,
    Route,
    SiteStatus,
    StageStatus,
    status_of,
)


def sites(control: Control) -> list[SiteStatus]:
    """The sites, with their instances, keys and state."""
    stages = control.stages.values()
    counts = {stage.name: stage.counts() for stage in stages}
    sizes = {stage.name: stage.flow().state_bytes for stage in stages}
    running = {name for stage in stages for name, found in stage.seen().items() if found.running}
    found = []
    for site, port in control.sites.items():
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


def stages(control: Control) -> list[StageStatus]:
    """The stages, with their instances, and the migrations of each that are under way."""
    return [
        StageStatus(
            name=stage.name,
            instances=dict(stage.coordinator.sites),
            keys=sum(stage.counts().values()),
            groups=stage.shape.groups,
            partitions=stage.shape.partitions,
            migrations=[id for id, one in list(stage.coordinator.open.items()) if not one.is_over],
        )
        for stage in control.stages.values()
    ]


def routes(control: Control, stage: str, apart: int = 100) -> list[Route]:
    """What each instance of a stage owns; with at most `apart` names of individually routed keys."""
    if stage not in control.stages:
        raise UnknownName("stage", stage, list(control.stages))
    one = control.stages[stage]
    owners = one.coordinator.table.owners
    by_bin, by_key = list(owners.by_bin), dict(owners.by_key)
    counts = one.counts()
    found = []
    for name, site in list(one.coordinator.sites.items()):
        singly = sorted(key for key, owner in by_key.items() if owner == name)
        bins = [bin for bin, owner in enumerate(by_bin) if owner == name]
        found.append(Route(name, site, _ranges(bins), counts[name], singly[:apart], len(singly)))
    return found


def migrations(control: Control) -> list[MigrationStatus]:
    """All migrations, in the order in which they were ordered."""
    return [status_of(one) for stage in control.stages.values() for one in list(stage.coordinator.migrations.values())]


def migration(control: Control, id: str) -> MigrationStatus:
    """One migration."""
    return status_of(control.migration(id))


def state(control: Control, instance: str) -> InstanceStatus:
    """One instance."""
    stage, site = control.place_of(instance)
    found = stage.seen().get(instance)
    if found is None or not (found.running or found.error):
        phase = "relocating" if control.orchestrator.is_relocating(stage.name, instance) else "paused"
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


def checkpoint(control: Control, instance: str) -> Checkpoint:
    """Where the checkpoint of an instance is, and its last batch."""
    stage, site = control.place_of(instance)
    store = stage.flow().store
    path = control.data / "sites" / site / instance
    done = control.saved(path).committed
    stored = store.checkpoint if store else None
    return Checkpoint(instance, site, str(path.resolve()), done if done >= 0 else None, stored)


def _ranges(bins: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted numbers as contiguous ranges, each with its first and last."""
    runs = [list(run) for _, run in groupby(enumerate(bins), key=lambda pair: pair[1] - pair[0])]
    return [(run[0][1], run[-1][1]) for run in runs]
