"""The actor that ingests records: it drives the product's own gateway, over logs and a journal that fail anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from whimbrel.core.errors import Retry, Unavailable
from whimbrel.core.names import place_of
from whimbrel.core.router import Command, Router, RouteTable
from whimbrel.gateway.entrance import Door, Entrance
from whimbrel.gateway.gateway import Gateway
from whimbrel.lab.sim.actors import Actor, Died
from whimbrel.lab.sim.logs import PACKED, PLAIN, Ingress, SimLog

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

Event = tuple[str, int, int | None]
"""Key, event, event time."""


class GatewayActor(Actor):
    """Sends records, ticks and save requests to the gateway, and stores its snapshots."""

    kind = "gateway"
    sleeps = True

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world)
        self.name = name
        self.ingress, self.known = Ingress(world), SimLog(world)
        self.mine = [key for key in world.keys if world.homes[key] == name]
        self.keys = world.keys if world.spread.enters else self.mine
        """The keys of the records that enter here."""
        self.entries = self.left = world.random.randint(15, 45) if self.keys else 0
        self.has_time = world.random.random() < 0.7
        """Whether events carry an event time."""
        if world.spread.enters:  # all of them, or none, wherever they enter
            self.has_time = bool(world.seed % 2)
        self.rows: dict[str, int] = {}
        """By writer: the last row that is in the logs of all homes, or on the way to them."""
        self.giving: Callable[[], object] | None = None
        """The call that is not acknowledged yet: it will be repeated."""
        self.pending: list[Event] = []
        """The records of that call, if it has any."""
        self.rest: list[Event] = []
        """Records behind them that came with them before."""
        self.acknowledged: list[list[Event]] = []
        self.saved: bytes | None = None
        self.revive()

    def revive(self) -> None:
        world = self.world
        self.has_recovered = False
        self.gateway = Gateway(
            Router(self.name, RouteTable(world.owner)),
            self.ingress,
            self.known,
            world.inboxes.__getitem__,
            PLAIN,
            lambda: world.now_us,
            wall_clock=not self.has_time,
            stores=world.saves,
            uptime=lambda: int(world.now * 1e6),
        )
        self.entrance = Entrance(
            place_of(self.name),
            world.spread.homes,
            self.gateway,
            lambda home: world.spread.senders[place_of(self.name), home].remote("door"),
            PACKED,
            lambda writer: self.rows.get(writer, -1),
            self._save_row,
        )
        self._door = Door(self.gateway, PACKED)
        if world.saves:
            self.gateway.keep_from(-1)  # as its checkpointer does, before anything is trimmed

    @property
    def is_there(self) -> bool:
        """Whether the gateway answers."""
        return self.alive and self.has_recovered

    def order(self, command: Command) -> bool:
        """Append a command between the records; return whether the caller knows that it was appended."""
        if not self.is_there:
            return False
        try:
            self.gateway.command(command)
            self.world.maybe_stumble()
        except Retry:
            return False
        except Died:  # the gateway died, not the caller
            self.die()
            return False
        return True

    def append(self, *args: Any, **more: Any) -> int | None:
        """The door: append what another place has passed on."""
        if not self.is_there:
            raise Unavailable(f"{self.name} is dead")
        self.world.wake(self)  # if this fails, it has work
        try:
            return self._door.append(*args, **more)
        except Died:  # the gateway died, not the caller
            self.die()
            raise Unavailable(f"{self.name} died") from None

    def _save_row(self, writer: str, row: int) -> None:
        self.world.maybe_stumble()
        self.rows[writer] = row
        self.world.maybe_stumble()

    def work(self) -> bool:
        try:
            return self._work()
        except Retry:
            self.world.tally["gateway stumbled"] += 1
            return True

    def _work(self) -> bool:
        if not self.has_recovered:
            self.gateway.recover(self.saved)
            self.has_recovered = True
            if self.world.is_rough and self.world.spread.enters and self.pending:
                self._go_on()
            return True
        if self.giving is not None and self.world.random.random() < 0.2:
            self._save()  # while a failed call is not repeated yet
            self.world.maybe_die(0.5, self.world.later)  # the snapshot matters if it is never repeated
        if self.giving is None and self.rest:
            self._give(self.rest)
            self.rest = []
        worked = bool(self.left or self.giving)
        if not worked and self.gateway._unsure:  # a failed command: the product's ticks never end, and flush it
            self.giving = lambda: self.gateway.tick(self.ingress.counter("ticks") + 1)
            worked = True
        if self.giving is None and self.left and self.world.random.random() < 0.7:
            self._choose()
        if self.giving is not None:
            # An append that fails with the last input is not made up for by a later one.
            self.world.append_odds = 0.005 if self.left else 0.1
            try:
                self.giving()
            finally:
                self.world.append_odds = 0.005
            self.giving = None
        if worked and self.world.random.random() < 0.2:
            self._save()
        self.world.tally["records held back"] += any(self.gateway.router.held.values())
        return worked

    def _save(self) -> None:
        blob = self.gateway.save()
        if blob is not None:
            self.world.maybe_stumble()
            self.saved = blob
            self.world.maybe_stumble()
            self.gateway.saved(blob)

    def horizon(self) -> int:
        """The seq up to which all records are in the store."""
        return self.gateway.horizon()

    def _choose(self) -> None:
        """Choose the next input: a tick, or records. It is repeated until it is acknowledged. The last one is a tick:
        no later one makes up for it."""
        rng = self.world.random
        self.left -= 1
        if not self.left or rng.random() < 0.25:
            self.giving = lambda: self.gateway.tick(self.ingress.counter("ticks") + 1)
        else:
            known = self.keys[: 1 + len(self.keys) * (self.entries - self.left) // self.entries]  # more keys later
            events = [self._event(rng.choice(known)) for _ in range(rng.randint(1, 4))]
            self._give(events)

    def _give(self, events: list[Event]) -> None:
        self.pending = events
        self.giving = lambda: self._ingest(events)

    def _go_on(self) -> None:
        """As a source after a restart: behind the last row that need not come again, perhaps in other batches."""
        done = self.entrance.counter("devices") + 1 - sum(map(len, self.acknowledged))
        if done > 0:
            self.acknowledged.append(self.pending[:done])
        again = self.pending[max(done, 0) :] + self.rest
        end = self.world.later.randint(1, len(again)) if again else 0
        self.giving, self.pending, self.rest = None, [], again[end:]
        if again:
            self._give(again[:end])

    def _ingest(self, events: list[Event]) -> None:
        moving = [move for move in self.gateway.router.moving.values() if move.is_dual]
        self.world.tally["records doubled"] += any(key in move.selection for move in moving for key, _, _ in events)
        # A record's columns are a sequence; the job's events are one number each.
        given: Any = events
        if self.world.spread.enters:
            first = sum(map(len, self.acknowledged))
            self.entrance.ingest(given, "devices", first + len(events) - 1, lambda place: first + place)
        else:
            self.gateway.ingest(given, "devices", len(self.acknowledged))
        self.acknowledged.append(events)
        self.pending = []

    def _event(self, key: str) -> Event:
        rng = self.world.random
        return key, rng.randint(0, 99), self.world.now_us - rng.randint(0, 900) if self.has_time else None
