"""The actor that ingests records: it drives the product's own gateway, over logs and a journal that fail anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from whimbrel.core.errors import Retry
from whimbrel.core.router import Command, Router, RouteTable
from whimbrel.gateway.gateway import Gateway
from whimbrel.lab.sim.actors import Actor, Died
from whimbrel.lab.sim.logs import PLAIN, Ingress, SimLog

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
        self.entries = self.left = world.random.randint(15, 45) if self.mine else 0
        self.has_time = world.random.random() < 0.7
        """Whether events carry an event time."""
        self.giving: Callable[[], object] | None = None
        """The call that is not acknowledged yet: it will be repeated."""
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
            return True
        if self.giving is not None and self.world.random.random() < 0.2:
            self._save()  # while a failed call is not repeated yet
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
            known = self.mine[: 1 + len(self.mine) * (self.entries - self.left) // self.entries]  # more keys later
            events = [self._event(rng.choice(known)) for _ in range(rng.randint(1, 4))]
            self.giving = lambda: self._ingest(events)

    def _ingest(self, events: list[Event]) -> None:
        moving = [move for move in self.gateway.router.moving.values() if move.is_dual]
        self.world.tally["records doubled"] += any(key in move.selection for move in moving for key, _, _ in events)
        # A record's columns are a sequence; the job's events are one number each.
        self.gateway.ingest(events, "devices", len(self.acknowledged))  # type: ignore[arg-type]
        self.acknowledged.append(events)

    def _event(self, key: str) -> Event:
        rng = self.world.random
        return key, rng.randint(0, 99), self.world.now_us - rng.randint(0, 900) if self.has_time else None
