"""The coordinator's actor: it drives the product's own decisions and deeds, over a journal and ports that fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from whimbrel.checkpoints.restoring import Restoring
from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Refused, Retry, Stop, Unavailable, Unstarted
from whimbrel.core.keys import EVERYTHING, Selection, bin_of
from whimbrel.core.protocols import PROTOCOLS, SIZES
from whimbrel.core.protocols.machine import Abandoned, Command, Loaded, Migration, Takeover
from whimbrel.core.record import Move, Report
from whimbrel.core.router import Command as RouterCommand
from whimbrel.core.router import RouteTable
from whimbrel.lab.sim.actors import STAGE, Actor, Died, Violation
from whimbrel.log.contract import Lane
from whimbrel.orchestrator.chores import Chores
from whimbrel.orchestrator.decisions import Decisions, Order, Place, RestoreOrder
from whimbrel.orchestrator.deeds import Deeds
from whimbrel.site.status import SiteStatus

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

DEADLINE = 1e9
"""Seconds until a migration is abandoned: never, because the actor abandons at random."""
MIXED = "mixed"
"""In place of a protocol: a random one for each migration, so that protocols overlap."""
RESTORE = "restore"
"""Instances are lost while keys move by any protocol."""
MOVING = sorted(name for name, protocol in PROTOCOLS.items() if name != RESTORE)

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


class Journal:
    """Migrations as they were last written, and snapshots. A write may fail without effect; its writer may die before
    and after it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.blobs: dict[str, bytes] = {}
        self.snapshots: dict[str, bytes] = {}
        self.forgotten: list[Migration] = []
        """Only for the checks: the orchestrator's journal lacks it."""

    def write(self, *migrations: Migration, answer: tuple[str, bytes] | None = None) -> None:
        self._world.maybe_stumble(0.005)
        # What fails when nothing else will happen is not made up for.
        self._world.maybe_err(0.01 if any(gateway.left for gateway in self._world.gateways.values()) else 0.1)
        self.blobs |= {migration.move.id: wire.pack(migration) for migration in migrations}
        self._world.maybe_die(0.005)

    def retire(self, gone: Sequence[Migration], name: str, blob: bytes) -> None:
        self._world.maybe_stumble(0.005)
        self.snapshots[name] = blob
        self.forgotten += gone
        for migration in gone:
            del self.blobs[migration.move.id]
        self._world.tally["migrations forgotten"] += len(gone)
        self._world.maybe_die(0.005)

    def load(self, name: str) -> bytes | None:
        return self.snapshots.get(name)

    def migrations(self) -> list[Migration]:
        return [wire.unpack(blob, Migration) for blob in self.blobs.values()]


class Todo:
    """Queued commands, in order per migration."""

    def __init__(self) -> None:
        self.queues: dict[Place, deque[Command]] = {}

    def add(self, place: Place, commands: Sequence[Command]) -> None:
        if commands:
            self.queues.setdefault(place, deque()).extend(commands)

    def has(self, place: Place) -> bool:
        return place in self.queues


class Gateway:
    """The orchestrator's port to all routers and the outlet: a call may fail, applied or not."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.loads = 0

    def command(self, stage: str, command: RouterCommand) -> None:
        """Append a command to the log of every router of its keys."""
        world = self._world
        routers = sorted(command.move.routers)
        for router in world.random.sample(routers, len(routers)):
            try:
                is_there = world.gateways[router].order(command)
            except Stop as error:  # nothing but the gateway deletes entries of its log
                raise Violation("lost", f"{router} cannot replay its log: {error}") from error
            if not is_there:
                raise Retry(f"{router} is unreachable")
            world.maybe_die(0.02)

    def fence(self, stage: str, move: Move) -> None:
        world = self._world
        if not world.outlet.fence(move):
            raise Retry("the fence is not durable yet")
        if world.chaos and world.random.random() < 0.1:
            world.outlet.die()  # its confirmation must hold nevertheless
        world.maybe_die(0.02)

    def load(self, stage: str, move: Move, checkpoint: int | None) -> Loaded:
        world = self._world
        if not all(gateway.is_there for gateway in world.gateways.values()) or not world.outlet.alive:
            raise Retry("a gateway or the outlet is unreachable")
        self.loads += 1
        inbox, (gateway,) = world.inboxes[move.destination], world.gateways.values()
        outlet: Any = world.outlet.outlet
        encode: Any = inbox.encode
        restoring = Restoring(
            STAGE, gateway.gateway, outlet, lambda name: inbox, world.store.central, encode, lambda: str(self.loads)
        )
        try:
            return restoring.load(move, checkpoint)
        except Stop as error:
            raise Violation("lost", f"the store cannot be read: {error}") from error
        except Died:  # the gateway died, which loads, not the coordinator, which has requested it
            gateway.die()
            raise Retry("the gateway is unreachable") from None


class Site:
    """The orchestrator's port to a site. Several sites may have a checkpoint of the same instance."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name = world, name

    def send(self, source: str, destination: str, blob: Any, count: int, writer: str, counter: int) -> None:
        network = self._world.network
        if network is None:
            inbox = self._world.inboxes[destination]
            inbox.append(blob, count=count, writer=writer, counter=counter, lane=Lane.CONTROL)
            return
        process = network.at(self.name)
        if not process.alive:
            raise Unavailable("the site is unreachable")
        process.links.send(source, destination, blob, count, writer, counter)

    def stop(self, instance: str) -> None:
        self._world.maybe_stumble(0.005)
        actor = self._world.instances[instance]
        if actor.gone or self._world.loss.strike(instance):
            raise Unavailable("the site is unreachable")
        if actor.site == self.name:
            actor.halt()
        self._world.maybe_stumble(0.005)

    def take(self, instance: str, origin: str) -> int:
        world, actor = self._world, self._world.instances[instance]
        if world.chaos and world.random.random() < 0.1:
            raise Unavailable("the disk is full")
        if origin != self.name:
            actor.checkpoints[self.name] = actor.checkpoints[origin].copied()
        world.maybe_stumble(0.005)
        return 0

    def carry(self, to: str, size: int) -> float:
        network = self._world.network
        return 0.0 if network is None else network.at(self.name).links.carry(self.name, to, size)

    def failed(self) -> dict[str, str]:
        reported = self._world.reported
        is_here = reported in self._world.stale and self._world.coordinator.coordinator.sites[reported] == self.name
        return {reported: "its checkpoint is gone"} if is_here else {}

    def status(self) -> SiteStatus:
        return SiteStatus(stale=[*self.failed()])

    def start(self, instance: str, wait: bool = True, anew: bool = False) -> None:
        world, actor = self._world, self._world.instances[instance]
        if world.chaos and world.random.random() < 0.3:
            raise Unavailable("the site is unreachable")
        if anew:
            actor.renew()
            world.stale.remove(instance)
            return
        if actor.running:
            assert actor.site == self.name, f"{instance} runs at two sites"
            actor.serve()
            return
        begun = actor.checkpoints[self.name].has_begun
        if world.chaos and world.random.random() < 0.1:
            if begun:
                raise Retry("the instance started, and stopped")
            if world.is_rough and world.later.random() < 0.5:
                actor.start(self.name, idle=True)  # by an earlier call, whose answer nobody waits for
            raise Unstarted("no such master")
        actor.start(self.name)
        try:
            actor.work()  # the site responds once the instance serves
        except Died:
            actor.die()
        if world.chaos and world.random.random() < 0.5:
            raise Retry("the response is lost")


class CoordinatorActor(Actor):
    """Orders migrations, passes them their events, journals, and only then acts."""

    kind = "coordinator"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.journal = Journal(world)
        self.kept = max(world.seed % 4 - 1, 0)
        """The number of finished migrations to retain."""
        self.wanted = world.random.randint(1, 4)
        self.ordered = self.asked = 0
        self.only: str | None = None
        """If set, order only this protocol, not the world's."""
        # Without deadlines, a migration that does not end by itself is detected. But an unreadable message does not
        # name its move, and may be attributed to another one: such moves end by deadline.
        self.abort_odds = world.random.choice([0.0, 0.02, 0.1]) if world.chaos else 0.0
        if world.is_harmful:
            self.abort_odds = max(self.abort_odds, 0.02)
        self.gateway: Any = Gateway(world)
        self.sites: Any = {site: Site(world, site) for site in {*world.sites.values()}}
        self.revive()

    def revive(self) -> None:
        world = self.world
        self.todo = Todo()
        self.decisions = Decisions(
            self.journal, self.todo, lambda: world.now_us, lambda: world.now, kept=(self.kept, 0)
        )
        self.coordinator = Coordinator(STAGE, RouteTable(world.owner), dict(world.sites), world.homes)
        self.decisions.stages[STAGE] = self.coordinator
        encode: Any = world.inboxes[world.owner].encode
        self.deeds = Deeds(self.decisions, self.sites, self.gateway, self.decisions.handle, lambda s: False, encode)
        control: Any = SimpleNamespace(coordinator=self.coordinator)
        self.chores = Chores({STAGE: control}, self.sites, self.gateway, self.deeds.renew)
        self.decisions.recover()

    @property
    def every(self) -> list[Migration]:
        """All migrations that were ever ordered."""
        return [*self.journal.forgotten, *self.coordinator.migrations.values()]

    def receive(self, notice: Report) -> None:
        """Receive a notice from the outlet. Raises `Retry` if it may not have been received."""
        self.world.wake(self)
        try:
            self.decisions.receive(STAGE, notice)
        except Died:  # the coordinator died, not the outlet
            self.die()
            raise Retry("the coordinator is unreachable") from None

    def work(self) -> bool:
        try:
            return self._work()
        except Retry:  # the journal cannot be written: nothing has changed
            self.world.tally["coordinator stumbled"] += 1
            return True

    def _work(self) -> bool:
        rng = self.world.random
        self.world.maybe_die(0.02)
        self.decisions.check_due()
        if self.todo.queues and self.world.later.random() >= (0.6 if self.world.is_rough else 0.2):
            self._do(rng.choice(list(self.todo.queues)))
            return True
        # Orders, and a restoration that ends a migration, may come while commands are pending.
        if rng.random() < 0.3:
            self.decisions.retire()
        if self._restore() or self._renew():
            return True
        open_ones = self._open()
        standbys = [m for m in open_ones if m.is_standby]
        if standbys and rng.random() < 0.2:
            self.decisions.handle(STAGE, rng.choice(standbys).move.id, Takeover())
            return True
        if open_ones and rng.random() < self.abort_odds:
            self.decisions.handle(STAGE, rng.choice(open_ones).move.id, Abandoned("a deadline has passed"))
            return True
        if self._wants_more and rng.random() < 0.3:
            self._order()
            return True
        return bool(self.todo.queues)

    @property
    def waits(self) -> bool:
        """Whether it will order, end or take over a migration at some later step."""
        open_ones = self._open()
        acts = any(m.is_standby for m in open_ones) or (open_ones and self.abort_odds)
        missing = self.world.suspects or self.world.stale
        acts = acts or self.decisions._overdue  # what could not be journalled is due
        return bool(acts or self._wants_more or missing or self.coordinator.losses.interrupted())

    @property
    def _wants_more(self) -> bool:
        return self.ordered < self.wanted and self.asked < 20

    def _open(self) -> list[Migration]:
        return [m for m in self.coordinator.open.values() if not m.is_over]

    def _do(self, place: Place) -> None:
        """Carry out the next command of a migration; if it fails, it stays the next."""
        queue = self.todo.queues[place]
        self.deeds.do(*place, queue[0])
        queue.popleft()
        if not queue:
            del self.todo.queues[place]
        self.world.maybe_die(0.02)

    def _restore(self) -> bool:
        """Order the restoration of a lost instance's keys, if the loss was noticed, or an attempt was abandoned."""
        world, rng = self.world, self.world.random
        if not world.saves:
            return False
        missing = [*world.suspects, *self.coordinator.losses.interrupted()]
        if not missing or rng.random() < 0.5:
            return False
        return any(self._restore_one(lost) for lost in missing)  # one restoration may have to wait for another

    def is_lost(self, name: str) -> bool:
        """Whether an instance may be replaced by one without state: its keys are restored, and it does not move."""
        return name in self.coordinator.losses.instances() and not self.decisions.is_relocating(STAGE, name)

    def _renew(self) -> bool:
        """Start an instance without its state, when the orchestrator's chores find that nothing depends on it."""
        before = len(self.world.stale)
        for name in list(self.world.stale):
            if self.is_lost(name):
                self.world.reported = name
                self.chores._renew_stale()
        return len(self.world.stale) < before

    def _restore_one(self, lost: str) -> bool:
        rng, world = self.world.random, self.world
        self.asked += 1
        others = sorted({*world.instances} - {lost} - self.coordinator.losses.instances() - {*world.suspects})
        options = {name: rng.choice(OPTIONS[name]) for name in sorted(SIZES)}
        order = RestoreOrder(STAGE, lost, rng.choice(others or [lost]), self._checkpoint(), options)
        try:
            (id,) = self.decisions.order([order], DEADLINE)
        except Refused:
            return False
        if lost in world.suspects:
            world.suspects.remove(lost)
        world.instances[lost].resume()  # as the orchestrator's chores do, if a restart had stopped it
        for ended in self.coordinator.losses.ended_by(self.coordinator.migrations[id]):
            world.tally[f"ended {ended.move.protocol}"] += 1
        return True

    def _checkpoint(self) -> int | None:
        """The checkpoint to restore: perhaps an older one. It may be deleted before it is loaded."""
        world = self.world
        if not world.is_rough or world.later.random() < 0.3:
            return None
        found = world.store.made
        world.tally["checkpoints restored"] += bool(found)
        return world.later.choice(found) if found else None

    def _order(self) -> None:
        """Order a random migration; it may conflict with one under way, or its keys may be there already."""
        rng, world = self.world.random, self.world
        protocol = self.only or (rng.choice(MOVING) if world.protocol in (MIXED, RESTORE) else world.protocol)
        destination = rng.choice(sorted(world.instances))
        chosen = frozenset(rng.sample(world.keys, rng.randint(1, len(world.keys))))
        some = [Selection(keys=chosen), Selection(bins=frozenset(map(bin_of, chosen)))]
        selection = rng.choice([*some, *some, EVERYTHING])  # large selections make slow worlds
        if protocol == "restart":
            selection = self.coordinator.table.owners.select(rng.choice(sorted(world.instances)))
        self.asked += 1
        choices = {name: rng.choice(choice) for name, choice in OPTIONS.items()}
        wanted = SIZES | PROTOCOLS[protocol].choices
        options = {name: choice for name, choice in choices.items() if name in wanted}
        site = self.coordinator.sites[destination]
        order = Order(STAGE, [(selection, destination)], site, protocol, options)
        try:
            self.ordered += bool(self.decisions.order([order], DEADLINE))
        except Refused:
            return
