"""One stage of a running application: logs, gateway, coordinator, queries and outlet, put together and recovered."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whimbrel.control.orchestrator import StageControl
from whimbrel.core import balance, wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.keys import BINS, EVERYTHING, Selection
from whimbrel.core.operator import uses_timers
from whimbrel.core.record import Notice, Parked, Result
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import Intake
from whimbrel.log import EmbeddedLog
from whimbrel.log.codec import ROWS
from whimbrel.outlet.outlet import Outlet, Watch
from whimbrel.outlet.sinks import Sink
from whimbrel.pipeline import Stage
from whimbrel.spark.query import InstanceSpec, StageQuery

if TYPE_CHECKING:
    from whimbrel.app import App


class StageRuntime:
    """All that one stage is made of, put together and recovered."""

    def __init__(self, app: App, stage: Stage, intake: Intake, sinks: list[Sink], watch: Watch) -> None:
        self.app, self.stage, self.intake = app, stage, intake
        self.inboxes: dict[str, EmbeddedLog] = {}
        self.outboxes: dict[str, EmbeddedLog] = {}
        self._staffing = threading.Lock()
        """Held while somebody decides which instances there are."""
        placed, gone = (app.journal.load(f"{name}/{stage.name}") for name in ("instances", "gone"))
        sites = wire.unpack(placed, dict[str, str]) if placed else {}
        self._gone = wire.unpack(gone, list[str]) if gone else []
        """Instances that have left, whose names are not given again, and those that are to leave."""
        for instance in self._gone:
            if instance not in sites:
                app.remove(instance)
        for site in app.sites:
            if site not in sites.values():
                sites[self._new_name(sites)] = site
        app.journal.save(f"instances/{stage.name}", wire.pack(sites))
        for instance in sites:
            self._open(instance)
        first = next(iter(sites))
        name = f"gateway-{stage.name}"
        self.gateway = Gateway(
            Router(name, RouteTable(first)),
            app.log(f"ingress-{stage.name}"),
            app.log(f"keys-{stage.name}"),
            self.inboxes.__getitem__,
            intake.schema,
            app.clock_us,
            wall_clock=not intake.has_time,
            keep=app.keep,
        )
        self.gateway.recover(app.journal.load(f"router/{stage.name}"))
        self.coordinator = Coordinator(stage.name, RouteTable(first), dict(sites), frozenset({name}))
        save = lambda blob: app.journal.save(f"outlet/{stage.name}", blob)  # noqa: E731
        self.outlet = Outlet(stage.name, self.outboxes, sinks, self._hear, save, app.clock_us, watch)
        self.control = StageControl(self.coordinator, [self.gateway], self.inboxes.__getitem__)
        self._ticks = self.gateway.ingress.counter("ticks") if uses_timers(stage.operator) else None

    # ── Instances ────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_name(self, sites: Iterable[str]) -> str:
        return f"{self.stage.name}-{max(map(_number, [*sites, *self._gone]), default=0) + 1}"

    def _open(self, instance: str) -> None:
        self.inboxes[instance] = self.app.log(f"inbox-{instance}")
        self.outboxes[instance] = self.app.log(f"outbox-{instance}")

    def at(self, site: str) -> list[str]:
        """The instances at a site."""
        return [instance for instance, place in list(self.coordinator.sites.items()) if place == site]

    @contextmanager
    def staffed(self, site: str, count: int | None = None) -> Iterator[list[str]]:
        """The instances at a site, to order moves to: so many, or all there are but at least one.

        Those with the fewest keys are too many, and leave when their keys have; those that lack are made. If the order
        is not taken, or everything dies before, it is as if nothing had been asked for: a new one is listed as leaving
        until then, and whoever is listed and has keys which nobody moves stays.
        """
        with self._staffing:
            self._review()
            counts = self.counts()
            here = sorted(set(self.at(site)) - set(self._gone), key=lambda name: (-counts[name], _number(name)))
            fresh = [self._hire(site) for _ in range(max(1, count or 0) - len(here))]
            too_many = here[count:] if count else []
            self._list(*too_many)
            try:
                for instance in fresh:
                    self.app.sites[site].start(instance, wait=count is not None)
                yield [name for name in here if name not in too_many] + fresh
            except BaseException:
                self._dismiss(fresh)
                self._strike(*too_many)
                raise
            self._strike(*fresh)

    @contextmanager
    def _free_to_decide(self) -> Iterator[bool]:
        """Whether nobody else decides about the instances; if so, nobody will meanwhile."""
        free = self._staffing.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._staffing.release()

    def _hire(self, site: str) -> str:
        sites = self.coordinator.sites
        instance = self._new_name(sites)
        self._open(instance)
        self._list(instance)
        self._save("instances", {**sites, instance: site})
        sites[instance] = site
        return instance

    def _list(self, *instances: str) -> None:
        if instances:
            self._save("gone", [*self._gone, *instances])
            self._gone += instances

    def _strike(self, *instances: str) -> None:
        if instances:
            self._gone = [name for name in self._gone if name not in instances]
            self._save("gone", self._gone)

    def _save(self, name: str, value: object) -> None:
        self.app.journal.save(f"{name}/{self.stage.name}", wire.pack(value))

    def _review(self) -> list[str]:
        """Those that are to leave and have nothing any more; who still has keys, which nobody moves, is to stay."""
        moving, owning = self.app.orchestrator.engaged(self.stage.name)
        idle = {name for name in self._gone if name in self.coordinator.sites} - moving
        self._strike(*idle & owning)
        return sorted(idle - owning)

    def _dismiss(self, instances: Iterable[str]) -> None:
        """Stop instances that have nothing, and forget them. Their files are removed at the next start."""
        sites = self.coordinator.sites
        for instance in instances:
            self.app.sites[sites[instance]].stop(instance)
            self._save("instances", {name: site for name, site in sites.items() if name != instance})
            del sites[instance], self.inboxes[instance], self.outboxes[instance]

    def _has_spoken(self, instance: str) -> bool:
        """Whether an instance has done everything in its inbox, and all it said about it is delivered."""
        query = self.app.sites[self.coordinator.sites[instance]].queries.get(instance)
        return (query is None or query.is_drained) and self.outlet.has_delivered(instance)

    def make_query(self, instance: str, checkpoint: Path) -> StageQuery:
        """The query of an instance of this stage."""
        spec = InstanceSpec(
            name=instance,
            stage=self.stage.name,
            operator=self.stage.operator,
            schema=self.intake.schema,
            prepare=self.stage.prepare,
            groups=self.stage.groups,
            partitions=self.stage.partitions,
            trigger=self.app.trigger,
        )
        return StageQuery(
            self.app.spark,
            spec,
            inbox=self.app.log_path(f"inbox-{instance}"),
            outbox=self.outboxes[instance],
            inbox_of=self.inboxes.__getitem__,
            checkpoint=checkpoint,
            appended=self.outlet.wake,
        )

    def _hear(self, notice: Notice, outbox: str, place: int) -> None:
        if isinstance(notice, Parked):
            self.app.dead.park(notice, outbox, place)
        else:
            self.app.orchestrator.hear(self.stage.name, notice)

    def ingest(self, results: list[Result], number: int) -> None:
        """Take in the results of the stage before."""
        good = []
        answers = self.intake.take([result.values for result in results])
        for place, (result, taken) in enumerate(zip(results, answers, strict=True), number * ROWS):
            if isinstance(taken, tuple):
                good.append(taken)
            else:  # known by its place among all that was handed on: seqs of different keys come in no order
                source = f"results for {self.stage.name}"
                self.app.dead.put(taken, source, result.seq, result.values, counter=place)
        if good:
            self.gateway.ingest(good, "stage before", number)

    def save(self) -> None:
        """A snapshot of the router, and a tick if the operator has timers."""
        if self._ticks is not None and not (self.app.feed.ended.is_set() and self.gateway.has_told_time):
            self._ticks += 1
            self.gateway.tick(self._ticks)
        with self._free_to_decide() as free:
            idle = self._review() if free else []  # first: then the snapshot, where a replay starts, does not name them
            blob = self.gateway.save()
            if blob is not None:
                self.app.journal.save(f"router/{self.stage.name}", blob)
                self.gateway.saved(blob)
                self._dismiss(filter(self._has_spoken, idle))

    def queries(self) -> list[StageQuery]:
        """The queries of the stage that run, wherever they do."""
        places = list(self.coordinator.sites.items())
        found = [self.app.sites[site].queries.get(instance) for instance, site in places]
        return [query for query in found if query is not None]

    @property
    def is_drained(self) -> bool:
        """Whether everything that was sent has been applied and delivered, and every timer that is due has fired."""
        if self._ticks is not None and not self.gateway.has_told_time:
            return False
        for instance, site in list(self.coordinator.sites.items()):
            query = self.app.sites[site].queries.get(instance)
            if query is None or not query.is_drained:
                return False
        return self.outlet.is_idle

    def select(
        self,
        keys: Iterable[str] | None,
        bins: Iterable[int] | None,
        share: float | None,
        to: str,
        at: str | None,
    ) -> Selection:
        """The keys that a user means. Raises if that makes no sense."""
        if sum(given is not None for given in (keys, bins, share)) > 1:
            raise Refused("give keys, or bins, or a share: one of them")
        if keys is not None:
            wanted = frozenset(map(str, [keys] if isinstance(keys, str) else keys))
            unknown = sorted(wanted - self.gateway.keys.keys())
            if unknown:
                raise UnknownName("key", unknown[0], list(self.gateway.keys)[:10])
            return Selection(keys=wanted)
        if bins is not None:
            numbers = frozenset(bins)
            if not all(isinstance(bin, int) and 0 <= bin < BINS for bin in numbers):
                raise Refused(f"bins are numbers from 0 to {BINS - 1}")
            return Selection(bins=numbers)
        if share is None and at is None:
            return EVERYTHING
        if share is not None and not 0 < share <= 1:
            raise Refused(f"a share lies between 0 and 1, not {share}")
        owners, sites = self.coordinator.table.owners, self.coordinator.sites
        parts = [owners.select(i) for i, site in list(sites.items()) if site != to and at in (None, site)]
        whole = Selection(*(frozenset().union(*(getattr(p, f) for p in parts)) for f in ("bins", "keys", "without")))
        if share is None:
            return whole
        return balance.select(_prefix(balance.weigh(whole, list(self.gateway.keys)), share), whole)

    def spread(self, selection: Selection, site: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """What of a selection lies elsewhere, dealt out to these instances at a site."""
        elsewhere = {name: selection for name in list(self.coordinator.sites) if name not in self.at(site)}
        return self._pairs(elsewhere | dict.fromkeys(to), to, balance.place)

    def level(self, site: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """What lies at a site, dealt out to these instances there as evenly as it goes, with as few moves."""
        return self._pairs(dict.fromkeys(self.at(site)), to, balance.level)

    def _pairs(
        self, among: Mapping[str, Selection | None], to: Sequence[str], plan: Callable[..., balance.Transfers]
    ) -> list[tuple[Selection, str]]:
        known, owners = list(self.gateway.keys), self.coordinator.table.owners
        parts = {name: owners.select(name, within) for name, within in among.items()}
        transfers = plan({name: balance.weigh(part, known) for name, part in parts.items()}, to)
        return [(balance.select(units, parts[source]), name) for (source, name), units in sorted(transfers.items())]

    def counts(self) -> Counter[str]:
        """By instance: how many of the known keys it has."""
        owners = self.coordinator.table.owners
        return Counter(owners[key] for key in list(self.gateway.keys))

    def status(self) -> dict[str, Any]:
        """How the stage is, as plain data."""
        counts = self.counts()
        instances = {}
        for instance, site in list(self.coordinator.sites.items()):
            query = self.app.sites[site].queries.get(instance)
            instances[instance] = {
                "site": site,
                "keys": counts[instance],
                "running": query is not None and query.is_active,
                "batch_ms": round(query.batch_ms) if query is not None else None,
                "error": told(query.exception) if query is not None else None,
            }
        return {
            "instances": instances,
            "migrations": {m.move.id: m.phase for m in self.coordinator.migrations.values()},
            "error": told(self.outlet.error),
        }


def _number(instance: str) -> int:
    return int(instance.rpartition("-")[2])


def _prefix(weights: dict[balance.Unit, int], share: float) -> list[balance.Unit]:
    """The first bins and single keys that together hold a share of the keys; of the bins, if no key is known yet."""
    total = sum(weights.values())
    if not total or share == 1:
        return list(weights)[: round(len(weights) * share)]
    taken = 0
    chosen: list[balance.Unit] = []
    for bin, weight in weights.items():
        if taken >= share * total:
            break
        taken += weight
        chosen.append(bin)
    return chosen


def told(error: BaseException | None) -> str | None:
    """An error in one line."""
    return None if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
