"""The actor of the central store, in the gateway's process: it drives the product's own checkpointer, with its
uploaders and its compaction, over objects that fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from whimbrel.checkpoints import names
from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.checkpointer import Checkpointer
from whimbrel.checkpoints.keeper import Keeper
from whimbrel.checkpoints.version import Retention, Segment
from whimbrel.core import wire
from whimbrel.core.errors import Retry, Stop, Unavailable
from whimbrel.core.increments import Version
from whimbrel.core.keys import EVERYTHING, Selection
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
        world.store.pause()
        odds = 0.2 if world.is_rough and "/manifests/" in name else 0.03
        if world.chaos and not self.is_full and world.later.random() < odds:
            self._full_until = world.now + world.later.randint(5, 40)
            world.tally["store full"] += 1
        if self.is_full:
            raise Unavailable("the store is full")
        world.maybe_stumble()
        self.blobs[name] = blob
        self.changes += 1
        self._world.maybe_stumble()
        if name == names.owner(STAGE):
            world.maybe_err(0.2)

    def get(self, name: str) -> bytes | None:
        self._world.store.pause()
        return self.blobs.get(name)

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        self._world.store.pause()
        return [self.blobs.get(name) for name in names]

    def names(self, folder: str) -> list[str]:
        self._world.store.pause()
        prefix = f"{folder}/" if folder else ""
        return sorted([name for name in self.blobs if name.startswith(prefix)])

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._world.store.pause()
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
        self.covered: list[tuple[int, dict[str, int]]] = []
        """Each horizon of the gateway, and of a checkpoint, with the `seq` of every key's version as of then."""
        self.noted: set[int] = set()
        """The checkpoints among them."""
        self.horizon = -1
        """The gateway's last one."""
        self.is_watched = False
        """Whether a check reads the store: the world stands still."""
        self.is_new = False
        """Whether the store was replaced by an empty one, while the gateway did not run."""
        rng = world.random
        self.every = rng.choice([1.0, 4.0, 12.0])
        if world.is_rough:  # many checkpoints, of which few are kept, and many bases
            self.every = world.later.choice([0.5, 1.0])
            self.retention, self.slack = Retention(world.later.randint(1, 3)), world.later.choice([0.0, 0.5])
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
        if world.is_rough and self._may_be_new() and world.later.random() < 0.5:
            self.objects.blobs.clear()
            self.noted.clear()
            self.is_new = True
            world.tally["stores replaced"] += 1
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
        if world.is_rough:
            self.checkpointer.keeper = Keeper(store, STAGE, self.retention, self.slack)

    def _may_be_new(self) -> bool:
        """Whether a new store loses nothing: no instance is lost, or will be, whose keys it must have. Once a world."""
        world = self.world
        if not self.objects.blobs or self.is_new or not world.coordinator.alive:
            return False
        losses = world.coordinator.coordinator.losses.instances()
        replays = any(migration.move.replays for migration in world.coordinator.coordinator.open.values())
        loss = world.loss
        return not (losses or replays or loss.left or loss.away or loss.unnoticed or world.suspects or world.stale)

    @property
    def made(self) -> list[int]:
        """The numbers of all checkpoints that exist now."""
        found = [names.number_of(name) for name in self.objects.blobs if name.startswith(f"{STAGE}/checkpoints/")]
        return sorted(number for number in found if number is not None)

    def note(self) -> None:
        """Note what is in the store if the gateway has another horizon, or if there is another checkpoint."""
        if names.owner(STAGE) not in self.objects.blobs:
            return  # the store is new, and the gateway does not know it yet
        self.is_watched = True
        try:
            horizon = self.gateway.gateway._horizon
            if horizon is not None and horizon.horizon != self.horizon:
                self.horizon = horizon.horizon
                self._note(self.horizon)
            for number in {*self.made} - self.noted:
                self.noted.add(number)
                self._note(self.central.horizon(STAGE, number), number)
        finally:
            self.is_watched = False

    def _note(self, horizon: int, checkpoint: int | None = None) -> None:
        newest = self.newest(EVERYTHING, checkpoint)
        self.covered.append((horizon, {key: version.seq for key, version in newest.items()}))

    def of_bases(self) -> list[str]:
        """The objects of bases of which any one may be damaged. Not the only index, if there are segments without an
        index: their base may be unfinished, or the reason why increments were deleted, and readers refuse both."""
        every = sorted(self.objects.blobs)
        indexes = [name for name in every if name.startswith(f"{STAGE}/bases/")]
        segments = [name for name in every if name.startswith(f"{STAGE}/base-segments/")]
        strange = {*map(names.number_of, segments)} - {*map(names.number_of, indexes)}
        return [*segments, *(indexes if len(indexes) > 1 or not strange else [])]

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """An object is damaged."""
        blob = self.objects.blobs[name]
        self.objects.blobs[name] = blob[:-1] + bytes((blob[-1] ^ 1,))
        try:
            yield
        finally:
            self.objects.blobs[name] = blob

    def pause(self, odds: float = 0.05) -> None:
        """A point where others go on while the gateway's process works with the store, or with a spool."""
        if self.is_watched:
            return
        actor = self.gateway
        before = actor.gateway
        self.world.meanwhile(odds)
        if actor.gateway is not before or not actor.alive:
            raise Died

    def _seen(self) -> tuple[object, ...]:
        """A value that changes when the checkpointer has done work."""
        spools = [(spool.log.head(), spool.log.head(Lane.CONTROL)) for spool in self.world.spools.values()]
        return self.objects.changes, self.gateway.ingress.tail(), spools

    def newest(self, selection: Selection, at: int | None = None) -> dict[str, Version]:
        """By key: the current version, or the one as of a checkpoint."""
        try:
            return {version.key: version for version in self.central.load(STAGE, selection, at)}
        except Stop as error:
            raise Violation("lost", f"the store cannot be read: {error}") from error

    def whole(self) -> Iterator[Version]:
        """Every version in the store."""
        for name in (*self.objects.names(f"{STAGE}/segments"), *self.objects.names(f"{STAGE}/base-segments")):
            segment = wire.unpack(self.objects.blobs[name], Segment)
            yield from wire.decode(segment.versions, list[Version])
