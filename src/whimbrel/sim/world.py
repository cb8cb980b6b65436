"""The deterministic world: the real core, hosted by actors that a seed makes slow, fast, forgetful and mortal.

Virtual time, one thread, one random generator: the same seed is the same history. Each actor does what its real host
does, in the same order, on the same kind of log, and may die between any two of its effects:

    GatewayActor    ingress log → router → inboxes            dies: replays the log, repeats its appends
    InstanceActor   inbox → parts → inboxes, outbox, commit   dies: repeats the batch it had planned, from its deltas
    OutletActor     outboxes → gate → delivered               dies: goes back to its last commit
    CoordinatorActor   notices → migrations → commands        dies: repeats what its journal says

What an actor has not committed, its death takes away; what lies in a log, nothing takes away.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, ClassVar

from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Refused
from whimbrel.core.gate import Gate
from whimbrel.core.instance import Instance
from whimbrel.core.keys import BINS, EVERY_BIN, Selection, bin_of, part_of
from whimbrel.core.protocols import PROTOCOLS, machine
from whimbrel.core.protocols.machine import Abandoned, Command, Copied, Failed, Migration, Started, Stopped
from whimbrel.core.record import Closed, Emissions, Kind, Notice, Parked, Post, Record, Result
from whimbrel.core.router import Abort, Begin, Cutover, Router, RouteTable
from whimbrel.log.contract import Lane
from whimbrel.log.memory import MemoryLog
from whimbrel.sim.job import Job, prepare

MIXED = "mixed"
"""In place of a protocol: any of them, anew for each migration, so that they meet."""
SPAN = 1 << 20
"""A log position times this, plus the row: an offset. As in the real source."""


class Died(Exception):
    """An actor dies here: whatever it was doing stops in the middle."""


class Stuck(Exception):
    """The world does not come to rest."""


class World:
    """Everything there is, and what happens next."""

    def __init__(self, seed: int, protocol: str, *, chaos: float = 1.0) -> None:
        self.random = random.Random(f"whimbrel/{seed}/{protocol}")
        self.protocol, self.chaos = protocol, chaos
        self.now = 0.0
        self.steps = 0
        self.tally: Counter[str] = Counter()
        """How often what the simulator is there for has happened."""
        rng = self.random
        self.keys = [f"k{n}" for n in range(rng.randint(3, 9))]
        self.routers = [f"gateway-{n}" for n in range(rng.randint(1, 2))]
        names = [f"stage-{n}" for n in range(rng.randint(2, 3))]
        self.sites = {name: f"site-{n}" for n, name in enumerate(names)}
        self.owner = names[0]
        # These logs hold objects instead of their bytes: much faster, and the bytes have tests of their own.
        self.inboxes: dict[str, Any] = {name: MemoryLog() for name in names}
        self.outboxes: dict[str, Any] = {name: MemoryLog() for name in names}
        self.instances = {name: InstanceActor(self, name, rng.randint(1, 3)) for name in names}
        self.gateways = {name: GatewayActor(self, name) for name in self.routers}
        self.outlet = OutletActor(self)
        self.coordinator = CoordinatorActor(self)
        self.actors: list[Actor] = [*self.instances.values(), *self.gateways.values(), self.outlet, self.coordinator]
        self._agenda: list[tuple[float, int, Actor]] = []
        self.watchers: list[Callable[[Actor], None]] = []

    def run(self, limit: int = 20_000) -> None:
        """Until everything has been sent, moved and delivered, and nobody has anything left to do."""
        for number, actor in enumerate(self.actors):
            heappush(self._agenda, (self.random.random(), number, actor))
        idle: set[int] = set()
        while len(idle) < len(self.actors):
            if self.steps > limit:
                raise Stuck(f"not quiet after {limit} steps")
            self.now, number, actor = heappop(self._agenda)
            idle = set() if self._step(actor) else {*idle, number}
            heappush(self._agenda, (self.now + self.random.expovariate(actor.pace), number, actor))

    def _step(self, actor: Actor) -> bool:
        self.steps += 1
        if not actor.alive:
            actor.alive = True
            actor.revive()
            return True
        try:
            worked = actor.work()
        except Died:
            actor.alive = False
            self.tally[f"{actor.kind} died"] += 1
            return True
        if worked:
            for watch in self.watchers:
                watch(actor)
        return worked

    def maybe_die(self, odds: float = 0.01) -> None:
        """A place where death may strike."""
        if self.chaos and self.random.random() < odds * self.chaos:
            raise Died

    @property
    def now_us(self) -> int:
        return int(self.now * 1000)


class Actor:
    """Somebody with a pace of its own."""

    kind: ClassVar[str]

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.pace = world.random.choice([0.3, 1.0, 1.0, 3.0])

    def work(self) -> bool:
        """Do one thing; whether there was one."""
        raise NotImplementedError

    def revive(self) -> None:
        """Come back with nothing but what lasts."""
        raise NotImplementedError


class GatewayActor(Actor):
    """Takes records in, numbers them by their place in its ingress log, and routes them."""

    kind = "gateway"

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world)
        self.name = name
        self.pace *= 3
        self.ingress: Any = MemoryLog()
        self.mine = [key for n, key in enumerate(world.keys) if n % len(world.routers) == world.routers.index(name)]
        self.left = world.random.randint(15, 40) if self.mine else 0
        self.commands = 0
        self.saved: tuple[int, bytes | None] = (0, None)
        self.revive()

    def revive(self) -> None:
        self.router = Router(self.name, RouteTable(self.world.owner))
        self.position, snapshot = self.saved
        if snapshot is not None:
            self.router.restore(snapshot)

    def order(self, command: Command, counter: str) -> None:
        """A command takes its place between the records; it lasts even if nobody is here to read it."""
        self.ingress.append(command, count=1, writer=counter, counter=0)

    def work(self) -> bool:
        worked = bool(self.left)
        if self.left and self.world.random.random() < 0.5:
            self.left -= 1
            self._ingest()
        for entry in self.ingress.read(self.position, self.position + self.world.random.randint(1, 4)):
            self._route(entry.position, entry.blob)
            self.position = entry.position + 1
            worked = True
        if self.world.random.random() < 0.2:
            snapshot = self.router.snapshot()
            if snapshot is not None:
                self.saved = (self.position, snapshot)
        return worked

    def _ingest(self) -> None:
        rng, at = self.world.random, self.ingress.tail()
        now = self.world.now_us
        if rng.random() < 0.15:
            content: Any = ("tick", now)
        else:
            keys = [rng.choice(self.mine) for _ in range(rng.randint(1, 4))]
            content = [
                Record(0, Kind.DATA, bin_of(key), key, at * SPAN + n, 0, self.name, now - rng.randint(0, 900), now,
                       rng.randint(0, 99))
                for n, key in enumerate(keys)
            ]  # fmt: skip
        self.ingress.append(content, count=1, writer="devices", counter=at)

    def _route(self, position: int, content: Any) -> None:
        seq = position * SPAN
        if isinstance(content, list):
            routed = self.router.route(content)
        elif isinstance(content, tuple):
            routed = self.router.tick(seq, content[1], content[1])
        else:
            routed = self.router.apply(content, seq)
        for name in self.world.random.sample(sorted(routed), len(routed)):
            self.world.maybe_die()
            for _ in range(1 + (self.world.random.random() < 0.1)):  # an append may be repeated
                self.append(name, routed[name], position)
        self.world.maybe_die()

    def append(self, name: str, records: list[Record], position: int) -> None:
        """Write one inbox's share of an ingress entry."""
        self.world.inboxes[name].append(records, count=1, writer=self.name, counter=position)


class InstanceActor(Actor):
    """Runs an instance in micro-batches, as Spark does: plan the offsets, apply, write out, commit."""

    kind = "instance"

    def __init__(self, world: World, name: str, parts: int) -> None:
        super().__init__(world)
        self.name, self.count = name, parts
        self.running = True
        self.batch = 0
        self.at = (0, 0)
        self.plan: tuple[int, int] | None = None
        self.deltas: list[list[bytes]] = [[] for _ in range(parts)]
        self.revive()

    def revive(self) -> None:
        self.parts = [Instance(self.name, Job(), int, part=n, parts=self.count) for n in range(self.count)]
        for part, deltas in zip(self.parts, self.deltas, strict=True):
            part.load(deltas)

    def work(self) -> bool:
        if not self.running:
            return False
        inbox, rng = self.world.inboxes[self.name], self.world.random
        if self.plan is None:
            ends = (inbox.tail(Lane.DATA), inbox.tail(Lane.CONTROL))
            self.plan = (rng.randint(self.at[0], ends[0]), rng.randint(self.at[1], ends[1]))
            if self.plan == self.at:
                self.plan = None
                return ends != self.at
        self.world.maybe_die()
        records = [
            row
            for lane in (Lane.CONTROL, Lane.DATA)
            for entry in inbox.read(self.at[lane], self.plan[lane], lane)
            for number, record in enumerate(entry.blob)
            for row in prepare(record._replace(offset=entry.position * SPAN + number))
        ]
        out = Emissions()
        deltas = []
        for part in self.parts:
            own = [r for r in records if r.bin == EVERY_BIN or part_of(r.bin, self.count) == part.part]
            emissions = part.apply(own)
            out.posts += emissions.posts
            out.results += emissions.results
            out.notices += emissions.notices
            deltas.append(part.delta())
        self._write(out)
        self._commit(deltas)
        return True

    def _write(self, out: Emissions) -> None:
        for name in sorted({post.to for post in out.posts}):
            self.world.maybe_die()
            posts = sorted((post for post in out.posts if post.to == name), key=lambda post: post.kind)
            records = [_record(post) for post in posts]
            self.world.inboxes[name].append(records, count=1, writer=self.name, counter=self.batch, lane=Lane.CONTROL)
        self.world.maybe_die()
        self.world.outboxes[self.name].append((out.results, out.notices), count=1, writer=self.name, counter=self.batch)
        self.world.maybe_die()

    def _commit(self, deltas: list[bytes]) -> None:
        assert self.plan is not None
        for part, kept, delta in zip(self.parts, self.deltas, deltas, strict=True):
            kept.append(delta)
            if len(kept) > 8:
                kept[:] = [part.snapshot()]
        self.at, self.plan, self.batch = self.plan, None, self.batch + 1
        inbox = self.world.inboxes[self.name]
        inbox.trim(self.at[0], Lane.DATA)
        inbox.trim(self.at[1], Lane.CONTROL)

    def haunt(self) -> bool:
        """A zombie of this instance, thought dead, writes an old batch's results once more, under another name."""
        outbox = self.world.outboxes[self.name]
        entries = outbox.read(outbox.head())
        old = [r for entry in entries for r in entry.blob[0] if r.epoch < self.world.outlet.gate.epochs[r.key]]
        if not old:
            return False
        counter = outbox.counter("zombie") + 1
        outbox.append((old[-3:], []), count=1, writer="zombie", counter=counter)
        return True


def _record(post: Post) -> Record:
    return Record(0, post.kind, post.bin, "", -1, 0, "", 0, 0, post.body)


class OutletActor(Actor):
    """Reads the outboxes, lets results through the gate, tells the coordinator what concerns it, commits."""

    kind = "outlet"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.pace *= 3
        self.delivered: list[Result] = []
        self.parked: list[Parked] = []
        self.ghosts = 2
        self.committed: dict[str, int] = {}
        self.saved: tuple[dict[str, int], bytes, int, int] = ({}, Gate().snapshot(), 0, 0)
        self.revive()

    def revive(self) -> None:
        positions, gate, results, parked = self.saved
        self.positions = dict(positions)
        self.gate = Gate()
        self.gate.restore(gate)
        del self.delivered[results:]
        del self.parked[parked:]

    def work(self) -> bool:
        rng = self.world.random
        if not self.world.coordinator.alive:
            return False
        for name in rng.sample(sorted(self.world.outboxes), len(self.world.outboxes)):
            at = self.positions.get(name, 0)
            for entry in self.world.outboxes[name].read(at, at + 1):
                results, notices = entry.blob
                self.delivered += self.gate.offer(list(results))
                self.world.tally["results held"] += bool(self.gate.held)
                for notice in notices:
                    self._notice(notice)
                self.world.maybe_die()
                self.positions[name] = entry.position + 1
                self.committed = {key: self.gate.epochs[key] for key in self.world.keys}
                self.saved = (dict(self.positions), self.gate.snapshot(), len(self.delivered), len(self.parked))
                return True
        if self.world.chaos and self.ghosts and rng.random() < 0.3:
            self.ghosts -= rng.choice(list(self.world.instances.values())).haunt()
        return False

    def _notice(self, notice: Notice) -> None:
        if isinstance(notice, Parked):
            self.parked.append(notice)
            return
        if isinstance(notice, Closed):
            self.delivered += self.gate.close(notice)
        self.world.coordinator.hear(notice.move, notice)


class CoordinatorActor(Actor):
    """Orders migrations, tells them their events, journals, and only then acts."""

    kind = "coordinator"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.journal: dict[str, bytes] = {}
        self.wanted = world.random.randint(1, 3)
        self.ordered = 0
        self.todo: list[tuple[str, Command]] = []
        self.revive()

    def revive(self) -> None:
        world = self.world
        self.coordinator = Coordinator("stage", RouteTable(world.owner), dict(world.sites), frozenset(world.routers))
        self.todo = []
        for blob in self.journal.values():
            migration = wire.unpack(blob, Migration)
            self._queue(migration, self.coordinator.adopt(migration))

    def hear(self, id: str, event: machine.Event) -> None:
        """An event: journal what it means, then let it be done."""
        commands = self.coordinator.handle(id, event, self.world.now_us)
        migration = self.coordinator.migrations[id]
        self.journal[id] = wire.pack(migration)
        self._queue(migration, commands)

    def _queue(self, migration: Migration, commands: list[Command]) -> None:
        self.todo += [(migration.move.id, command) for command in commands]

    def work(self) -> bool:
        rng = self.world.random
        self.world.maybe_die(0.02)
        if self.todo:
            id, command = self.todo.pop(0)
            self._carry_out(id, command)
            self.world.maybe_die(0.02)
            return True
        open_ones = [m for m in self.coordinator.migrations.values() if not m.is_over]
        if open_ones and self.world.chaos and rng.random() < 0.02:
            self.hear(rng.choice(open_ones).move.id, Abandoned("a deadline has passed"))
            return True
        if self.ordered < self.wanted and rng.random() < 0.1:
            return self._order()
        return bool(open_ones) or self.ordered < self.wanted

    def _order(self) -> bool:
        rng, world = self.world.random, self.world
        protocol = rng.choice(sorted(PROTOCOLS)) if world.protocol == MIXED else world.protocol
        destination = rng.choice(sorted(world.instances))
        chosen = frozenset(rng.sample(world.keys, rng.randint(1, len(world.keys))))
        selection = rng.choice(
            [
                Selection(keys=chosen),
                Selection(bins=frozenset(map(bin_of, chosen))),
                Selection(bins=frozenset(range(BINS))),
            ]
        )
        table = self.coordinator.table
        if protocol == "restart":
            selection = table.owners.select(rng.choice(sorted(world.instances)))
        self.ordered += 1
        try:
            site = self.coordinator.sites[destination]
            limits = {"budget": rng.choice([1, 150, 1 << 20]), "chunk": rng.choice([8, 1 << 20])}
            planned = self.coordinator.plan(selection, destination, site, protocol, f"m{self.ordered}", **limits)
        except Refused:
            return True
        for migration in planned:
            commands = self.coordinator.start(migration, world.now_us)
            self.journal[migration.move.id] = wire.pack(migration)
            self._queue(migration, commands)
        return True

    def _carry_out(self, id: str, command: Command) -> None:
        world, rng = self.world, self.world.random
        migration = self.coordinator.migrations[id]
        match command:
            case Begin() | Cutover() | Abort():
                for name in rng.sample(world.routers, len(world.routers)):
                    world.gateways[name].order(command, f"coordinator/{id}/{type(command).__name__}")
                    world.maybe_die(0.02)
            case machine.Forget(move):
                record = Record(0, Kind.FORGET, EVERY_BIN, "", -1, 0, "", 0, 0, wire.pack(move.id))
                world.inboxes[move.destination].append(
                    [record], count=1, writer=f"coordinator/{id}", counter=0, lane=Lane.CONTROL
                )
            case machine.StopInstance(instance):
                world.instances[instance].running = False
                world.instances[instance].revive()
                self.hear(id, Stopped())
            case machine.CopyCheckpoint():
                failed = world.chaos and rng.random() < 0.1
                self.hear(id, Failed("the disk is full") if failed else Copied())
            case machine.StartInstance(instance, site):
                here = site == migration.from_site
                if not here and world.chaos and rng.random() < 0.1 and not world.instances[instance].running:
                    self.hear(id, Failed("no such master"))
                    return
                world.instances[instance].running = True
                self.hear(id, Started(site))
