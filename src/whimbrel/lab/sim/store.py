"""The actor of the central store, in the gateway's process: it drives the product's own checkpointer, with its
uploaders and its compaction, over objects that fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.checkpointer import Checkpointer
from whimbrel.checkpoints.version import Segment
from whimbrel.core import wire
from whimbrel.core.errors import Retry, Stop, Unavailable
from whimbrel.core.increments import Version
from whimbrel.core.keys import Selection
from whimbrel.core.record import Barrier
from whimbrel.gateway.gateway import Gateway
from whimbrel.lab.sim.actors import STAGE, Actor, Died, Violation
from whimbrel.log.contract import Lane

if TYPE_CHECKING:
    from whimbrel.lab.sim.ingress import GatewayActor
    from whimbrel.lab.sim.world import World


class Objects:
    """Durable blobs by name. The actor that puts one may die, or get an error, before and after the write. Sometimes
    they are full for a while: they can be read, and no blob can be put."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.blobs: dict[str, bytes] = {}
        self.changes = 0
        self._full_until = 0.0

    @property
    def is_full(self) -> bool:
        """Whether no blob can be put now."""
        return self._world.now < self._full_until

    def put(self, name: str, blob: bytes) -> None:
        world = self._world
        if world.chaos and not self.is_full and world.later.random() < 0.03:
            self._full_until = world.now + world.later.randint(5, 40)
            world.tally["store full"] += 1
        if self.is_full:
            raise Unavailable("the store is full")
        world.maybe_stumble()
        self.blobs[name] = blob
        self.changes += 1
        self._world.maybe_stumble()

    def get(self, name: str) -> bytes | None:
        return self.blobs.get(name)

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        return [self.blobs.get(name) for name in names]

    def names(self, folder: str) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        return sorted([name for name in self.blobs if name.startswith(prefix)])

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.changes += self.blobs.pop(name, None) is not None
            self._world.maybe_stumble(0.005)


class StoreActor(Actor):
    """Steps the gateway's checkpointer, which orders checkpoints, uploads increments and compacts. It dies together
    with the gateway."""

    kind = "store"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.objects = Objects(world)
        self.central = CentralStore(self.objects)
        rng = world.random
        self.every = rng.choice([1.0, 4.0, 12.0])
        self.barrier = Barrier(-1, rng.choice([1, 150, 1 << 20]), rng.choice([8, 1 << 20]))
        self.checkpointer: Checkpointer | None = None
        self._gateway: Gateway | None = None

    def revive(self) -> None:
        self.checkpointer = None

    def work(self) -> bool:
        world, gateway = self.world, self.gateway
        if not gateway.is_there:
            return False
        before = self._seen()
        try:
            if self.checkpointer is None or self._gateway is not gateway.gateway:
                self._begin(gateway.gateway)
            assert self.checkpointer is not None
            self.checkpointer.step()
        except Retry:
            world.tally["store stumbled"] += 1
            return True
        except Died:
            gateway.die()
            raise
        return self._seen() != before

    @property
    def gateway(self) -> GatewayActor:
        """The stage's only gateway."""
        return next(iter(self.world.gateways.values()))

    def _begin(self, gateway: Gateway) -> None:
        world = self.world
        parts, spools = {name: one.count for name, one in world.instances.items()}, world.spools
        clock, uptime = lambda: world.now_us, lambda: world.now
        store, every, barrier = self.central, self.every, self.barrier
        self._gateway = gateway
        self.checkpointer = Checkpointer(
            STAGE,
            parts.__getitem__,
            gateway,
            spools.__getitem__,
            store,
            every,
            clock,
            "run",
            uptime=uptime,
            barrier=barrier,
        )
        self.checkpointer.place(sorted(world.instances))

    def _seen(self) -> tuple[object, ...]:
        """A value that changes when the checkpointer has done work."""
        spools = [(spool.log.head(), spool.log.head(Lane.CONTROL)) for spool in self.world.spools.values()]
        return self.objects.changes, self.gateway.ingress.tail(), spools

    def newest(self, selection: Selection) -> dict[str, Version]:
        """By key: the current version."""
        try:
            return {version.key: version for version in self.central.load(STAGE, selection)}
        except Stop as error:
            raise Violation("lost", f"the store cannot be read: {error}") from error

    def whole(self) -> Iterator[Version]:
        """Every version in the store."""
        for name in (*self.objects.names(f"{STAGE}/segments"), *self.objects.names(f"{STAGE}/base-segments")):
            segment = wire.unpack(self.objects.blobs[name], Segment)
            yield from wire.decode(segment.versions, list[Version])
