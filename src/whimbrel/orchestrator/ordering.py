"""The orders of a user that move keys: each becomes migrations, which the orchestrator journals and carries out.

Every order is checked as a whole before it has any effect. Whoever may give orders calls these methods: the user's own
process (deploy/embedded.py), the REST API (api/api.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from whimbrel.core.errors import Conflict, Refused, Unavailable, UnknownName
from whimbrel.core.keys import Selection
from whimbrel.core.protocols.auto import Limits
from whimbrel.orchestrator.decisions import Order, RestoreOrder
from whimbrel.orchestrator.draining import detached, drained
from whimbrel.orchestrator.handle import Handle
from whimbrel.orchestrator.orchestrator import DEADLINE
from whimbrel.orchestrator.orders import Request
from whimbrel.orchestrator.plan import read_plan
from whimbrel.orchestrator.stage import StageControl

if TYPE_CHECKING:
    from whimbrel.orchestrator.control import Control


class Ordering:
    """The orders of one pipeline."""

    def __init__(self, pipeline: Control) -> None:
        self._pipeline = pipeline

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
        control = self._pipeline.stage_for(stage, (to, at), protocol, deadline, budget)
        self._pipeline.check_alive(to)
        selection = control.select(keys, bins, share, to, at)
        lost, why = self._lost(control, selection, to, protocol, from_checkpoint)
        if protocol == "auto" and lost != control.sources(selection, to):
            standby, protocol, why = control.choose(selection, to, _limits(options))
            if protocol == "restore":
                lost = control.sources(selection, to)
                control.check_whole(lost, selection)
            if standby is not None:
                handle = Handle(self._pipeline.orchestrator, stage, [standby], why).take_over()
                if request is not None:
                    self._pipeline.journal.write(answer=request.answered([standby], why))
                return handle
        options = read_plan(options) | {"budget": control.budget(to, at) if budget is None else budget}
        with control.instances.staying(to, control.counts()) as there:
            orders: list[Order | RestoreOrder] = []
            if lost:
                self._pipeline.check_restore(stage, from_checkpoint)
                given = options if protocol == "restore" else {}
                orders += control.restorations(lost, there, from_checkpoint, **given)
            if len(lost) < len(control.sources(selection, to)) or not lost:
                taken = "live" if protocol in (None, "restore") else protocol
                whole = [(selection, there[0])] if taken == "restart" else None
                wanted = whole or control.spread(selection, to, there, lost)
                orders.append(Order(stage, wanted, to, taken, options))
            ids = self._pipeline.orchestrator.order(orders, deadline, why, request)
        return Handle(self._pipeline.orchestrator, stage, ids, why)

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
        control = self._pipeline.stage_for(stage, (at,), protocol, deadline, budget)
        options = read_plan(options) | {"budget": control.budget(at, at) if budget is None else budget}
        if instances < 1:
            raise Refused(
                f"the keys at {at} need at least 1 instance there, got {instances}; "
                f"to empty the site, move them away: app.migrate({stage!r}, at={at!r}, to=...)"
            )
        if protocol in ("restart", "auto"):
            raise Refused(f"{protocol} cannot distribute keys over instances of a site; use another protocol")
        self._pipeline.check_alive(at)
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
            ids = self._pipeline.orchestrator.order(
                [Order(stage, wanted, at, protocol, options)], deadline, request=request
            )
        return Handle(self._pipeline.orchestrator, stage, ids)

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
        orders = drained(self._pipeline, site, to, protocol, deadline, budget, read_plan(options))
        ids = self._pipeline.orchestrator.order(orders, deadline, request=request)
        stages = {order.stage: list[str]() for order in orders}
        for name, found in stages.items():
            found += [id for id in ids if id in self._pipeline.stages[name].coordinator.migrations]
        return {name: Handle(self._pipeline.orchestrator, name, found) for name, found in stages.items() if found}

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
        control = self._pipeline.stage_for(self._pipeline.stage_with(instance).name, (site,), None, deadline, None)
        self._pipeline.check_alive(site)
        self._pipeline.check_restore(control.name, checkpoint)
        with control.taking(site, instance) as there:
            ids = self._pipeline.orchestrator.order(
                control.restorations([instance], there, checkpoint), deadline, request=request
            )
        return Handle(self._pipeline.orchestrator, control.name, ids)

    def detach(self, instance: str, *, deadline: float = DEADLINE, request: Request | None = None) -> Handle:
        """Remove an instance from its stage: its keys move to the others at its site, or else to all others, and it
        stops when it has none left. Keys at a dead site are restored.

        The handle is that of `migrate`. Raises, and changes nothing, as `migrate` does, or if it is the only one.
        """
        control = self._pipeline.stage_for(self._pipeline.stage_with(instance).name, (), None, deadline, None)
        orders = detached(self._pipeline, control, instance)
        with control.instances.parting(instance):
            ids = self._pipeline.orchestrator.order(orders, deadline, request=request)
        return Handle(self._pipeline.orchestrator, control.name, ids)


def _limits(options: dict[str, Any]) -> Limits:
    """The limits for `auto`, removed from the options. Raises if other options remain."""
    known = {f"max_{name}": name for name in Limits.__struct_fields__}
    given = {name: options.pop(name) for name in list(options) if name in known}
    if options:
        raise UnknownName("option of auto", next(iter(options)), list(known))
    return Limits(**{known[name]: value for name, value in given.items()})
