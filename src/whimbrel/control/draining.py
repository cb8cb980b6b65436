"""What empties a site: the orders that bring everything there elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from whimbrel.control.orchestrator import Order
from whimbrel.core.errors import Conflict, Refused

if TYPE_CHECKING:
    from whimbrel.control.control import Control


def drained(
    control: Control,
    site: str,
    to: Iterable[str] | None,
    protocol: str,
    deadline: float,
    budget: int | None,
    options: dict[str, Any],
) -> list[Order]:
    """The orders that empty a site: for each stage and each site that takes some of it."""
    others = [name for name in control.sites if name != site] if to is None else [*dict.fromkeys(to)]
    if not others or site in others:
        raise Refused(f"what lies at {site} needs another site to go to; give one that is not {site} itself")
    if protocol in ("restart", "auto"):
        raise Refused(f"{protocol} does not share keys out; use another protocol, or app.migrate(..., at={site!r})")
    stages = [control.stage_for(name, (site, *others), protocol, deadline, budget) for name in control.stages]
    for stage in stages:
        for migration in list(stage.coordinator.migrations.values()):
            if not migration.is_over and migration.to_site == site:
                raise Conflict(
                    f"migration {migration.move.id} ({migration.phase}) brings keys to {site}; wait for it or abort it"
                )
    orders = []
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
                orders.append(Order(stage.name, wanted, other, protocol, chosen))
    return orders
