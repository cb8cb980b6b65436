"""One stage of a running application: logs, gateway, coordinator, queries and outlet, put together and recovered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whimbrel.control.orchestrator import StageControl
from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Refused, UnknownName, WhimbrelError
from whimbrel.core.keys import BINS, EVERYTHING, Selection, bin_of
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


BUDGET, LEAST_BUDGET = 8 << 20, 16 << 10
"""Bytes of state that each part ships in a batch at most, unless told; and how many on the slowest link."""


class StageRuntime:
    """All that one stage is made of, put together and recovered."""

    def __init__(self, app: App, stage: Stage, intake: Intake, sinks: list[Sink], watch: Watch) -> None:
        self.app, self.stage, self.intake = app, stage, intake
        self.inboxes: dict[str, EmbeddedLog] = {}
        self.outboxes: dict[str, EmbeddedLog] = {}
        placed = app.journal.load(f"instances/{stage.name}")
        sites = wire.unpack(placed, dict[str, str]) if placed else {}
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
        self.control = StageControl(self.coordinator, [self.gateway], app.links.inbox)
        self._ticks = self.gateway.ingress.counter("ticks") if uses_timers(stage.operator) else None

    def _new_name(self, sites: dict[str, str]) -> str:
        return f"{self.stage.name}-{len(sites) + 1}"

    def _open(self, instance: str) -> None:
        self.inboxes[instance] = self.app.log(f"inbox-{instance}")
        self.outboxes[instance] = self.app.log(f"outbox-{instance}")

    @contextmanager
    def destination(self, site: str) -> Iterator[str]:
        """The instance at a site, to order a move to; a new one if the last was moved away and the order is taken."""
        sites = self.coordinator.sites
        for instance, place in sites.items():
            if place == site:
                yield instance
                return
        instance = self._new_name(sites)
        self._open(instance)
        sites[instance] = site
        self._save_sites(sites)
        try:
            yield instance
        except WhimbrelError:
            del sites[instance]
            self._save_sites(sites)
            raise
        self.app.sites[site].start(instance, wait=False)

    def _save_sites(self, sites: dict[str, str]) -> None:
        self.app.journal.save(f"instances/{self.stage.name}", wire.pack(dict(sites)))

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
            inbox_of=partial(self.app.links.inbox, instance),
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
        blob = self.gateway.save()
        if blob is not None:
            self.app.journal.save(f"router/{self.stage.name}", blob)
            self.gateway.saved(blob)

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
        owners, sites = self.coordinator.table.owners, self.coordinator.sites
        elsewhere = [i for i, site in sites.items() if site != to and at in (None, site)]
        if share is None:
            if at is None:
                return EVERYTHING
            parts = [owners.select(instance) for instance in elsewhere]
            return Selection(*(frozenset().union(*(getattr(p, f) for p in parts)) for f in ("bins", "keys", "without")))
        if not 0 < share <= 1:
            raise Refused(f"a share lies between 0 and 1, not {share}")
        parts = [owners.select(instance) for instance in elsewhere]
        bins = sorted(bin for part in parts for bin in part.bins)
        singly = sorted(key for part in parts for key in part.keys)
        weights: dict[int | str, int] = {**dict.fromkeys(bins, 0), **dict.fromkeys(singly, 1)}
        for key in list(self.gateway.keys):
            if bin_of(key) in weights and owners[key] in elsewhere and key not in weights:
                weights[bin_of(key)] += 1
        chosen = _prefix(weights, share)
        return Selection(
            bins=frozenset(one for one in chosen if isinstance(one, int)),
            keys=frozenset(one for one in chosen if isinstance(one, str)),
            without=frozenset(key for part in parts for key in part.without),
        )

    def budget(self, to: str, at: str | None) -> int:
        """How many bytes each part may ship in a batch, so that no queue builds up in a slow link.

        What a source has not shipped yet it still serves, and may ship in another order.
        """
        fitting = [BUDGET]
        for instance, site in list(self.coordinator.sites.items()):
            query = self.app.sites[site].queries.get(instance)
            if query is not None and at in (None, site):
                carried = self.app.links.link(site, to).bytes_in(round(query.period_ms * 1000))
                fitting += [] if carried is None else [carried // self.stage.groups]
        return max(min(fitting), LEAST_BUDGET)

    def status(self) -> dict[str, Any]:
        """How the stage is, as plain data."""
        owners = self.coordinator.table.owners
        counts: dict[str, int] = dict.fromkeys(self.coordinator.sites, 0)
        for key in list(self.gateway.keys):
            counts[owners[key]] += 1
        instances = {}
        for instance, site in self.coordinator.sites.items():
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


def _prefix(weights: dict[int | str, int], share: float) -> list[int | str]:
    """The first bins and single keys that together hold a share of the keys; of the bins, if no key is known yet."""
    total = sum(weights.values())
    if not total or share == 1:
        return list(weights)[: round(len(weights) * share)]
    taken = 0
    chosen: list[int | str] = []
    for bin, weight in weights.items():
        if taken >= share * total:
            break
        taken += weight
        chosen.append(bin)
    return chosen


def told(error: BaseException | None) -> str | None:
    """An error in one line."""
    return None if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
