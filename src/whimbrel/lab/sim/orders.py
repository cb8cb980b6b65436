"""The actor that gives the orders: hosts the coordinator as the orchestrator does, journal before deed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Refused, Retry
from whimbrel.core.keys import EVERY_BIN, EVERYTHING, Selection, bin_of
from whimbrel.core.protocols import PROTOCOLS, machine
from whimbrel.core.protocols.machine import (
    Abandoned,
    Command,
    Copied,
    Failed,
    Fenced,
    Loaded,
    Migration,
    Started,
    Stopped,
    Takeover,
)
from whimbrel.core.protocols.restore import FENCING, LOADING
from whimbrel.core.record import Kind, Post
from whimbrel.core.restoration import loads
from whimbrel.core.retired import Retired, retirement
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore, RouteTable
from whimbrel.lab.sim.actors import Actor
from whimbrel.log.contract import Lane

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

MIXED = "mixed"
"""In place of a protocol: any of them, anew for each migration, so that they meet."""
RESTORE = "restore"
"""Instances are lost while keys move in any way."""
MOVING = sorted(name for name, protocol in PROTOCOLS.items() if protocol.routing != "replay")

OPTIONS: dict[str, list[Any]] = {
    "budget": [1, 150, 1 << 20],
    "chunk": [8, 1 << 20],
    "order": ["arrival", "key"],
    "split": [1, 4],
    "step": [50, 500],
    "interval": [1, 3],
    "standby": [False, True],
    "plan": ["sudden", "batched", "fluid", [[bin_of(key) for key in ("k0", "k1", "k2")]]],
}


class CoordinatorActor(Actor):
    """Orders migrations, tells them their events, journals, and only then acts."""

    kind = "coordinator"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.journal: dict[str, bytes] = {}
        self.retired = wire.pack(Retired())
        """What the journal has of migrations that are forgotten."""
        self.past: list[Migration] = []
        """Those; the orchestrator has no such thing, the checks have."""
        self.kept = world.seed % 3
        """How many that are over are remembered."""
        self.wanted = world.random.randint(1, 4)
        self.ordered = self.asked = 0
        self.only: str | None = None
        """Order only this, whatever the world is called."""
        # Where nobody ever gives up, what does not come to its end by itself is seen. But a message that cannot be read
        # does not say whose it was, and may be taken for another move's: that is what deadlines are for.
        self.impatience = world.random.choice([0.0, 0.02, 0.1]) if world.chaos else 0.0
        if world.is_harmful:
            self.impatience = max(self.impatience, 0.02)
        self.todo: list[tuple[str, Command]] = []
        self.loads = 0
        self.revive()

    def revive(self) -> None:
        world = self.world
        self.coordinator = Coordinator("stage", RouteTable(world.owner), dict(world.sites), frozenset(world.routers))
        self.todo = []
        self.coordinator.resume(wire.unpack(self.retired, Retired))
        for blob in self.journal.values():
            migration = wire.unpack(blob, Migration)
            self._queue(migration, self.coordinator.adopt(migration))
        self._tell_due()

    @property
    def every(self) -> list[Migration]:
        """All migrations that were ever ordered."""
        return [*self.past, *self.coordinator.migrations.values()]

    def hear(self, id: str, event: machine.Event) -> None:
        """An event: journal what it means, then let it be done. It may come too late: the migration is forgotten."""
        if id not in self.coordinator.migrations and any(one.move.id == id for one in self.past):
            return
        commands = self.coordinator.handle(id, event, self.world.now_us)
        migration = self.coordinator.migrations[id]
        self.journal[id] = wire.pack(migration)
        self._queue(migration, commands)
        self._tell_due()

    def _retire(self) -> None:
        """Forget what is over and nobody needs; what is left of it is written with that."""
        busy = {id for id, _ in self.todo}
        gone, retired = retirement(self.coordinator, self.kept, is_needed=lambda one: one.move.id in busy)
        if gone:
            self.retired = wire.pack(retired)
            for migration in gone:
                del self.journal[migration.move.id]
            self.past += gone
            self.world.tally["migrations forgotten"] += len(gone)
            self.coordinator.retire(gone, wire.unpack(self.retired, Retired))

    def _tell_due(self) -> None:
        due = self.coordinator.due()
        if due:
            self.hear(*due[0])

    def _queue(self, migration: Migration, commands: list[Command]) -> None:
        self.todo += [(migration.move.id, command) for command in commands]

    def work(self) -> bool:
        rng, world = self.world.random, self.world
        self.world.maybe_die(0.02)
        if self.todo:
            id, command = self.todo.pop(0)
            try:
                self._carry_out(id, command)
            except Retry:  # somebody is away, or has done it and could not say so
                self.todo.insert(0, (id, command))
            self.world.maybe_die(0.02)
            return True
        self._retire()
        if self._restore():
            return True
        open_ones = [m for m in self.coordinator.open.values() if not m.is_over]
        standbys = [m for m in open_ones if m.is_standby]
        if standbys and rng.random() < 0.2:
            self.hear(rng.choice(standbys).move.id, Takeover())
            return True
        if open_ones and rng.random() < self.impatience:
            self.hear(rng.choice(open_ones).move.id, Abandoned("a deadline has passed"))
            return True
        more = self.ordered < self.wanted and self.asked < 20
        if more and rng.random() < 0.3:
            self._order()
            return True
        return bool(open_ones or more or world.suspects or self.coordinator.interrupted())

    def _restore(self) -> bool:
        """Order what brings a lost instance's keys back, if somebody has noticed, or an attempt was abandoned."""
        world, rng = self.world, self.world.random
        if not world.saves:
            return False
        missing = [*world.suspects, *self.coordinator.interrupted()]
        if not missing or rng.random() < 0.5:
            return False
        return any(self._restore_one(lost) for lost in missing)  # one may have to wait for another

    def _restore_one(self, lost: str) -> bool:
        rng, world = self.world.random, self.world
        self.asked += 1
        try:
            others = sorted({*world.instances} - {lost} - self.coordinator.lost() - {*world.suspects})
            options = {name: rng.choice(OPTIONS[name]) for name in ("budget", "chunk")}
            migration = self.coordinator.plan_restore(lost, rng.choice(others or [lost]), f"m{self.asked}", **options)
        except Refused:
            return False
        if lost in world.suspects:
            world.suspects.remove(lost)
        self._start(migration)
        for ended in self.coordinator.ended_by(migration):
            self.journal[ended.move.id] = wire.pack(ended)
            world.tally[f"ended {ended.move.protocol}"] += 1
        self._tell_due()
        return True

    def _order(self) -> None:
        """Order something; it may collide with what is under way, or be there already."""
        rng, world = self.world.random, self.world
        protocol = self.only or (rng.choice(MOVING) if world.protocol in (MIXED, RESTORE) else world.protocol)
        destination = rng.choice(sorted(world.instances))
        chosen = frozenset(rng.sample(world.keys, rng.randint(1, len(world.keys))))
        some = [Selection(keys=chosen), Selection(bins=frozenset(map(bin_of, chosen)))]
        selection = rng.choice([*some, *some, EVERYTHING])  # large selections make slow worlds
        if protocol == "restart":
            selection = self.coordinator.table.owners.select(rng.choice(sorted(world.instances)))
        self.asked += 1
        try:
            site = self.coordinator.sites[destination]
            choices = {name: rng.choice(choice) for name, choice in OPTIONS.items()}
            wanted = {"budget", "chunk", *PROTOCOLS[protocol].options}
            options = {name: choice for name, choice in choices.items() if name in wanted}
            wanted_there = [(selection, destination)]
            planned = self.coordinator.plan(wanted_there, site, protocol, f"m{self.asked}", **options)
        except Refused:
            return
        self.ordered += bool(planned)
        for migration in planned:
            self._start(migration)
        self._tell_due()

    def _start(self, migration: Migration) -> None:
        commands = self.coordinator.start(migration, self.world.now_us)
        self.journal[migration.move.id] = wire.pack(migration)
        self._queue(migration, commands)

    def _post(self, post: Post, writer: str) -> None:
        inbox = self.world.inboxes[post.to]
        blob = inbox.encode([(post.kind, post.bin, memoryview(post.body))])
        inbox.append(blob, count=1, writer=writer, counter=0, lane=Lane.CONTROL)

    def _carry_out(self, id: str, command: Command) -> None:
        world, rng = self.world, self.world.random
        migration = self.coordinator.migrations[id]
        if migration.ended_by:
            return
        match command:
            case Begin() | Cutover() | Abort() | Restore():
                self._order_routers(command)
            case Fence():
                if migration.phase == FENCING:
                    self._fence(id, command)
            case machine.Load():
                if migration.phase == LOADING:
                    self._load(id, command)
            case machine.Announce(kind, move, instance):
                self._post(Post(instance, kind, EVERY_BIN, wire.canonical(move)), f"coordinator/{id}/{kind.name}")
            case machine.Forget(move):
                self._post(Post(move.destination, Kind.FORGET, EVERY_BIN, wire.pack(move.id)), f"coordinator/{id}")
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

    def _order_routers(self, command: Begin | Cutover | Abort | Fence | Restore) -> None:
        """Give a command its place in every router's log. Raises `Retry` if that is not known of one."""
        world = self.world
        for router in world.random.sample(world.routers, len(world.routers)):
            if not world.gateways[router].order(command):
                raise Retry(f"{router} is away")
            world.maybe_die(0.02)

    def _fence(self, id: str, command: Fence) -> None:
        """Ask routers and gate, again and again, until they have done it."""
        self._order_routers(command)
        if not self.world.outlet.fence(command.move):
            raise Retry("the fence does not last yet")
        self.world.maybe_die(0.02)
        self.hear(id, Fenced())

    def _load(self, id: str, command: machine.Load) -> None:
        """Bring what the store has into the destination's inbox; each time as another writer."""
        world, move = self.world, command.move
        if not all(gateway.is_there for gateway in world.gateways.values()) or not world.outlet.alive:
            raise Retry("somebody is away")
        since = {name: gateway.covered() + 1 for name, gateway in world.gateways.items()}
        delivered = world.outlet.outlet.delivered_of(move.selection)
        versions = world.store.newest(move.selection)
        self.loads += 1
        inbox, writer = world.inboxes[move.destination], f"coordinator/{id}/LOAD/{self.loads}"
        for number, post in enumerate(loads(move, versions.values(), delivered)):
            blob = inbox.encode([(post.kind, post.bin, memoryview(post.body))])
            inbox.append(blob, count=1, writer=writer, counter=number, lane=Lane.CONTROL)
            world.maybe_die(0.02)
        self.hear(id, Loaded(since, len(versions), sum(len(version.luggage) for version in versions.values())))
