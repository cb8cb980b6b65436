"""The deterministic world: the real core, hosted by actors whose pace, errors and crashes are derived from a seed.

Virtual time, one thread, one random generator: the same seed gives the same history. Actors drive the product's own
classes step by step, over durable logs, objects and journals. Each actor may die before and after any of its writes,
and each write may fail with a transient error, applied or not:

    GatewayActor    the Gateway: ingress log → router → inboxes           dies: replays the log, repeats its appends
    InstanceActor   the InlineHost: inbox → parts → inboxes, outbox       dies: repeats the planned batch
    OutletActor     the Outlet: outboxes → gate → a file                  dies: resumes from its last commit
    ReporterActor   the Reporter: reports → coordinator                   dies: sends again what it did not commit
    CoordinatorActor   notices → migrations → commands                    dies: repeats the commands of its journal
    ForwarderActor  the Links and their Forwarders: spools → inboxes      dies: sends again what has not arrived
    SenderActor     the transport: spools → arrivals of other places      dies: sends again what is not acknowledged
    StoreActor      the Uploaders: spools → segments, manifests           dies: restarts at its spools' heads
    LossActor       instances that never come back, or late               with a central store only

Spark is not simulated. Its place is taken by the product's host without Spark, over the same logs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import cycle
from math import inf, log
from typing import Any
from zlib import crc32

from whimbrel.core.errors import Unavailable
from whimbrel.core.keys import KeyMap, Selection
from whimbrel.core.names import place_of, router_of
from whimbrel.core.record import Kind, Record
from whimbrel.lab.sim.actors import Actor, Died, InstanceActor
from whimbrel.lab.sim.egress import OutletActor, ReporterActor, Spread
from whimbrel.lab.sim.ingress import GatewayActor
from whimbrel.lab.sim.links import SHARE, Network
from whimbrel.lab.sim.logs import Inbox, Outbox, SimLog, Spool
from whimbrel.lab.sim.loss import LossActor
from whimbrel.lab.sim.orders import MIXED, RESTORE, CoordinatorActor
from whimbrel.lab.sim.store import StoreActor
from whimbrel.log.carrier import MOST_BYTES
from whimbrel.log.spool import IncrementSpool

KEYS = ("k0", "k673", "k949", "k1", "k181", "k467", "k2", "k3", "k4")
"""The first three share a bin, and so do the next three: an operation on a key must not affect its neighbours."""


IDLE = 0.1
"""The pace of an idle actor relative to its usual pace, until it is woken: otherwise most steps would find no work."""


ROUGH = 0.4
"""The share of worlds with overlapping steps, older checkpoints, new stores, and rows that come in other batches."""


UNDONE = {"live", "pause", "fluid"}
"""Protocols that abort on a damaged parcel. Others keep it until a process can read it: here, forever."""


class Dice(random.Random):
    """Random choices, a few times faster than the library's."""

    def randint(self, a: int, b: int) -> int:
        return a + int(self.random() * (b - a + 1))

    def choice(self, seq: Any) -> Any:
        return seq[int(self.random() * len(seq))]

    def sample(self, population: Any, k: int, *, counts: Any = None) -> list[Any]:
        pool = list(population)
        return [pool.pop(int(self.random() * len(pool))) for _ in range(k)]


class Stuck(Exception):
    """The world has not become idle within the step limit."""


class World:
    """All logs and actors, and the schedule of their steps."""

    def __init__(self, seed: int, protocol: str, *, chaos: float = 1.0, links: bool | None = None) -> None:
        """`links`: whether sites have links between them; None: the seed decides."""
        self.seed = seed
        self.random = Dice(f"whimbrel/{seed}/{protocol}")
        self.protocol, self.chaos = protocol, chaos
        self.now = 0.0
        self.steps = 0
        self.tally: Counter[str] = Counter()
        """Counts of the events that the simulator is meant to provoke."""
        # A separate generator, so that histories without damage stay as they were before damage was introduced.
        self._harm = f"harm/{seed}/{protocol}"
        self.is_harmful = chaos and protocol in UNDONE and random.Random(self._harm).random() < 0.2
        # For the same reason, faults that were introduced later have a generator of their own.
        self.later = Dice(f"later/{seed}/{protocol}")
        self.is_rough = bool(chaos) and random.Random(f"rough/{seed}/{protocol}").random() < ROUGH
        """Whether faults occur that were introduced last; the histories of all other worlds are as before."""
        self.append_odds = 0.005
        """How likely an append fails before it takes effect."""
        self.most_bytes = random.Random(f"edges/{seed}/{protocol}").choice([MOST_BYTES, 100, 500])
        """The bound of an entry that an instance writes."""
        self.splits = self.most_bytes < MOST_BYTES
        """Whether it is so small that most batches are split."""
        self.watchers: list[Callable[[Actor], None]] = []
        self._agenda: list[tuple[float, int]] = []
        """Times, each with the number of an actor. Entries that differ from `_due` are obsolete."""
        self._stepping: list[Actor] = []
        """The actor that takes a step, and one that takes a step meanwhile."""
        self._due: list[float] = []
        """By actor: the time of its next step, infinite if it sleeps."""

        rng = self.random
        self.keys = rng.sample(KEYS, rng.randint(3, len(KEYS)))
        self.saves = protocol in (RESTORE, MIXED)
        """Whether there is a central store. It numbers increments by the stage's only gateway."""
        names = [f"stage-{n}" for n in range(rng.randint(2, 3))]
        shared = len(names) > 2  # of three instances, two are at one site
        self.sites = {name: f"site-{max(0, n - shared)}" for n, name in enumerate(names)}
        self.spread = Spread(self, random.Random(f"places/{seed}/{protocol}"))
        """Which places receive results."""
        places = cycle(self.places)
        self.routers = [router_of(f"{n}", next(places)) for n in range(1 if self.saves else rng.randint(1, 2))]
        self.homes = KeyMap(self.routers[0])
        for number, key in enumerate(self.keys):
            router = self.routers[number % len(self.routers)]
            self.homes.put(Selection(keys=frozenset({key})), router)
            self.spread.homes.put(Selection(keys=frozenset({key})), place_of(router))
        self.owner = names[0]
        self.inboxes = {name: Inbox(self) for name in names}
        self.outboxes = {name: Outbox(self) for name in names}
        self.reports = SimLog(self)
        """The reports of instances to the coordinator."""
        self.spools = {name: IncrementSpool(Spool(self)) for name in names if self.saves}
        """By instance: the spool of its messages to the store."""
        self.suspects: list[str] = []
        """Instances that are suspected lost."""
        self.stale: list[str] = []
        """Instances that are back without their checkpoint."""
        self.reported = ""
        """The one of them that its site reports."""
        # As for damage: histories without links stay as they were before links were introduced.
        dice = random.Random(f"spools/{seed}/{protocol}")
        linked = dice.random() < SHARE if links is None else links
        self.network = Network(self, dice) if linked else None
        """The links between the sites; None: messages go to the inboxes at once."""
        self.instances = {name: InstanceActor(self, name, rng.randint(1, 3)) for name in names}
        self.gateways = {name: GatewayActor(self, name) for name in self.routers}
        self.outlets = {place: OutletActor(self, place) for place in self.places}
        self.reporter = ReporterActor(self)
        self.coordinator = CoordinatorActor(self)
        self.store = StoreActor(self)
        self.loss = LossActor(self, self._losses())
        self.actors: list[Actor] = [*self.instances.values(), *self.gateways.values(), *self.outlets.values()]
        self.actors += [self.reporter, self.coordinator, *self.spread.senders.values()]
        self.actors += [self.store, self.loss] if self.saves else []
        self.actors += self.network.actors if self.network is not None else []
        self._numbers = {id(actor): number for number, actor in enumerate(self.actors)}
        for name, instance in self.instances.items():
            self.inboxes[name].reader = instance
            self.outboxes[name].reader = self.outlets[self.spread.place_of(name)]
        for (place, _), arrivals in self.spread.arrivals.items():
            arrivals.reader = self.outlets[place]
        self.reports.reader = self.reporter
        for spool in self.spools.values():
            spool.log.reader = self.store  # type: ignore[attr-defined]

    @property
    def places(self) -> list[str]:
        """The places with an outlet; one without a name, unless results are spread."""
        return self.spread.places

    @property
    def outlet(self) -> OutletActor:
        """The only outlet, in a world with one; otherwise the first."""
        return next(iter(self.outlets.values()))

    def _losses(self) -> int:
        """The maximum number of instances to lose."""
        if not self.saves or not self.chaos:
            return 0
        return self.random.randint(1, 2) if self.protocol == RESTORE else self.random.randint(0, 1)

    def run(self, limit: int = 20_000) -> None:
        """Run until all records are sent, moved and delivered, and no actor has work left."""
        self._due = [inf] * len(self.actors)
        for actor in self.actors:
            self.wake(actor)
        while True:
            idle: set[int] = set()
            while len(idle) + self._due.count(inf) < len(self.actors):
                moment, number = heappop(self._agenda)
                if moment != self._due[number]:
                    continue
                if self.steps > limit:
                    raise Stuck(f"not quiet after {limit} steps")
                self.now, actor = moment, self.actors[number]
                self._due[number] = inf
                if self._step(actor):
                    idle.clear()
                    self._schedule(number, actor.pace)
                elif not actor.sleeps:
                    idle.add(number)
                    self._schedule(number, actor.pace * IDLE)
            woken = [actor for actor in self.actors if actor.sleeps and self._step(actor)]
            for actor in woken:
                self.wake(actor)
            if not woken and not any(actor.waits for actor in self.actors):
                return

    def _schedule(self, number: int, pace: float) -> None:
        moment = self._due[number] = self.now - log(1.0 - self.random.random()) / pace
        heappush(self._agenda, (moment, number))

    def wake(self, actor: Actor) -> None:
        """Schedule an actor, which may be idle, at its usual pace: there is work for it."""
        number = self._numbers[id(actor)]
        if self._due and self._due[number] > self.now + 1.0 / actor.pace:
            self._schedule(number, actor.pace)

    def _step(self, actor: Actor) -> bool:
        self._stepping.append(actor)
        overlaps = self.tally["steps overlapped"]
        try:
            return self._take_step(actor) or self.tally["steps overlapped"] > overlaps
        finally:
            self._stepping.pop()

    def maybe_err(self, odds: float) -> None:
        """A point where the current actor may die or get a transient error, in a rough world only."""
        if self.is_rough:
            self.maybe_stumble(odds, self.later)

    def meanwhile(self, odds: float = 0.05) -> None:
        """A point where others may take steps in the middle of the current actor's, as other threads and processes do.
        It may be dead afterwards."""
        if not self.is_rough or len(self._stepping) != 1 or self.later.random() >= odds:
            return
        (busy,) = self._stepping
        others = [actor for actor in self.actors if actor is not busy]
        for _ in range(self.later.randint(1, 12)):
            self._step(self.later.choice(others))
        for actor in others:
            self.wake(actor)
        self.tally["steps overlapped"] += 1
        if not busy.alive:
            raise Died

    def _take_step(self, actor: Actor) -> bool:
        self.steps += 1
        if not actor.alive:
            if actor.gone:
                return False
            actor.alive = True
            try:
                actor.revive()
            except Died:  # recovery writes, too
                actor.die()
            return True
        try:
            worked = actor.work()
        except Died:
            actor.die()
            return True
        if worked:
            for watch in self.watchers:
                watch(actor)
        return worked

    def maybe_die(self, odds: float = 0.01, dice: Dice | None = None) -> None:
        """A point where the current actor may die."""
        if self.chaos and (dice or self.random).random() < odds * self.chaos:
            raise Died

    def maybe_stumble(self, odds: float = 0.01, dice: Dice | None = None) -> None:
        """A point where the current actor may die or get a transient error."""
        if self.chaos:
            chance, odds = (dice or self.random).random(), odds * self.chaos
            if chance < odds:
                raise Died
            if chance > 1 - odds:
                raise Unavailable("injected transient error")

    def vanish(self) -> None:
        """Break the reference cycles of a world that is no longer used, so that it is freed at once. Leaving thousands
        of worlds to the garbage collector costs a tenth of the time."""
        for actor in self.actors:
            vars(actor).clear()
        vars(self).clear()

    def carried(self, record: Record) -> Record:
        """A message as it arrives: occasionally damaged, and then every time it is sent."""
        if not self.is_harmful or record.kind not in (Kind.PARCEL, Kind.SHIPPED):
            return record
        if random.Random(f"{self._harm} {crc32(record.body)}").random() > 0.2:
            return record
        self.tally["parcels damaged"] += 1
        return record._replace(body=record.body[:-1] + bytes((record.body[-1] ^ 1,)))

    @property
    def now_us(self) -> int:
        return int(self.now * 1000)
