"""Draining a site or an instance: the orders that move everything there elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from whimbrel.core.errors import Conflict, Refused, Unavailable
from whimbrel.orchestrator.decisions import Order, RestoreOrder

if TYPE_CHECKING:
    from whimbrel.orchestrator.control import Control
    from whimbrel.orchestrator.stage import StageControl


def drained(
    control: Control,
    site: str,
    to: Iterable[str] | None,
    protocol: str | None,
    deadline: float,
    budget: int | None,
    options: dict[str, Any],
) -> list[Order | RestoreOrder]:
    """The orders that empty a site: one for each stage and each site that takes some of its keys."""
    living = [name for name in control.sites if name != site and not control.is_dead(name)]
    others = living if to is None else [*dict.fromkeys(to)]
    if not others or site in others:
        raise Refused(f"draining {site} needs another site to move its keys to; name one that is not {site} itself")
    if protocol in ("restart", "auto"):
        raise Refused(f"{protocol} cannot distribute keys; use another protocol, or app.migrate(..., at={site!r})")
    stages = [control.stage_for(name, (site, *others), protocol, deadline, budget) for name in control.stages]
    for other in others:
        control.check_alive(other)
    if protocol == "restore" or (protocol is None and control.is_dead(site)):
        return [order for stage in stages for order in _restored(control, stage, site, others, options)]
    if control.is_dead(site):
        raise Unavailable(f"site {site} is dead, and cannot give its keys by {protocol}; use protocol='restore'")
    for stage in stages:
        for migration in list(stage.coordinator.open.values()):
            if not migration.is_over and migration.to_site == site:
                raise Conflict(
                    f"migration {migration.move.id} ({migration.phase}) brings keys to {site}; wait for it or abort it"
                )
    orders: list[Order | RestoreOrder] = []
    for stage in stages:
        there: dict[str, str] = {}
        for other in others:
            with stage.instances.staying(other, stage.counts()) as names:
                there |= dict.fromkeys(names, other)
        pairs = stage.clear(site, list(there))
        for other in others:
            wanted = [(selection, name) for selection, name in pairs if there[name] == other]
            chosen = {**options, "budget": stage.budget(other, site) if budget is None else budget}
            if wanted:
                orders.append(Order(stage.name, wanted, other, protocol or "live", chosen))
    return orders


def _restored(
    control: Control, stage: StageControl, site: str, others: list[str], options: dict[str, Any]
) -> list[RestoreOrder]:
    """The orders that restore the keys of each instance of a site at one instance elsewhere."""
    lost = [name for name in stage.instances.at(site) if name in stage.owners()]
    if not lost:
        return []
    control.check_restore(stage.name, None)
    there: list[str] = []
    for other in others:
        with stage.instances.staying(other, stage.counts()) as names:
            there += names
    return stage.restorations(lost, there, None, **options)


def detached(control: Control, stage: StageControl, instance: str) -> list[Order | RestoreOrder]:
    """The orders that empty an instance: one for each site that takes some of its keys."""
    sites, lost = dict(stage.coordinator.sites), stage.coordinator.losses.instances()
    placed, out = sites[instance], {instance, *stage.instances.leaving, *lost}
    fit = {name: site for name, site in sites.items() if name not in out and not control.is_dead(site)}
    there = {name: site for name, site in fit.items() if site == placed} or fit
    if not there:
        raise Refused(f"{instance} is the only instance of {stage.name} that can own its keys; start another one first")
    if instance in lost or control.is_dead(placed):
        control.check_restore(stage.name, None)
        return [*stage.restorations([instance], list(there), None)] if instance in stage.owners() else []
    pairs = stage.empty(instance, list(there))
    return [
        Order(stage.name, wanted, site, "live", {"budget": stage.budget(site, placed)})
        for site in dict.fromkeys(there.values())
        if (wanted := [(selection, name) for selection, name in pairs if there[name] == site])
    ]
