"""The transport between places: the product's own spools, senders and receivers, over connections that break.

    dispatcher, entrance ──▶ spool ──▶ Sender ──▶ a connection ──▶ Receiver ──▶ arrivals, door of the other place

A sender dies, is cut off and reconnects. A receiver that dies amid a batch answers nothing, as if the connection broke.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whimbrel.core import wire
from whimbrel.core.errors import Unavailable
from whimbrel.core.names import place_of
from whimbrel.lab.sim.actors import Actor
from whimbrel.lab.sim.logs import SimLog
from whimbrel.log.contract import Appendable, Lane
from whimbrel.log.memory import MemoryLog
from whimbrel.transport.connection import Connection, LocalConnection
from whimbrel.transport.receiver import Receiver
from whimbrel.transport.sender import Sender
from whimbrel.transport.spool import OutgoingSpool, Owner, RemoteLog

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

DEPLOYMENT = "sim"
STEP_US = 200_000
"""Microseconds of a sender's time per unit of the world's, in which an actor of usual pace takes one step."""


class SenderActor(Actor):
    """Steps the sender of one spool, from a place to another."""

    kind = "sender"
    sleeps = True

    def __init__(self, world: World, here: str, there: str) -> None:
        super().__init__(world)
        self.here, self.there, self.is_cut = here, there, False
        self.troubles = 5
        """How often it dies by itself, or is cut off, at most."""
        self._log = SimLog(world)
        self._log.reader = self
        self._owner = Owner(DEPLOYMENT, here, there)
        # Without a fault: the world does not run yet.
        MemoryLog.append(self._log, wire.pack(self._owner), count=0, writer="owner", counter=0, lane=Lane.CONTROL)
        self._producers = OutgoingSpool(self._log, self._owner)
        self._receiver = Receiver(there, DEPLOYMENT, self._log_of, lambda place, log, lane, writer: place == here)
        self.revive()

    def revive(self) -> None:
        self.spool = OutgoingSpool(self._log, self._owner)
        self.sender = Sender(self.spool, self._connect, batch=self.world.random.choice([1, 1 << 20]))

    def remote(self, log: str) -> RemoteLog:
        """A log of the other place, for a writer here."""
        return RemoteLog(self._producers, log)

    def _log_of(self, name: str) -> Appendable:
        if name == "door":
            return next(one for one in self.world.gateways.values() if place_of(one.name) == self.there)
        return self.world.spread.arrivals[self.there, name.removeprefix("arrivals-")]

    def _connect(self, wake: object) -> Connection:
        if self.is_cut:
            raise Unavailable(f"{self.there} is out of reach")
        return Shaky(self.world, LocalConnection(self._receiver.session(self.here)))

    def work(self) -> bool:
        world, rng = self.world, self.world.random
        if self.spool.is_empty:
            return False
        if world.chaos and (self.is_cut or self.troubles) and rng.random() < 0.1:
            self.is_cut = not self.is_cut
            self.troubles -= self.is_cut
            world.tally["places cut off"] += self.is_cut
            self.sender.close()
        if self.troubles:
            world.maybe_die(0.05)
        self.sender.step(int(world.now * STEP_US))
        return True

    def die(self) -> None:
        super().die()
        self.troubles = max(self.troubles - 1, 0)


class Shaky:
    """A connection that breaks before or after a frame has arrived, or with an answer on its way."""

    due_us = None

    def __init__(self, world: World, inner: LocalConnection) -> None:
        self._world, self._inner = world, inner

    def send(self, frame: bytes) -> None:
        self._world.maybe_stumble(0.02)
        self._inner.send(frame)
        self._world.maybe_stumble(0.02)

    def receive(self) -> bytes | None:
        self._world.maybe_stumble(0.02)
        if self._world.is_rough and self._world.later.random() < 0.3:
            return None  # the next answer is still on its way
        return self._inner.receive()

    def close(self) -> None:
        self._inner.close()
