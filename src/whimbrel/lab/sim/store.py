"""The actor that carries increments to the central store: drives the product's own uploaders, over objects that
fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.uploader import Uploader
from whimbrel.checkpoints.version import Segment
from whimbrel.core import wire
from whimbrel.core.errors import Retry, Stop
from whimbrel.core.increments import Version
from whimbrel.core.keys import Selection
from whimbrel.core.record import Checkpointed
from whimbrel.lab.sim.actors import Actor, Violation
from whimbrel.log.contract import Lane

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

STAGE = "stage"


class Objects:
    """Blobs by name, which outlive everybody. Whoever puts one may die, or be told that it failed, before and after."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.blobs: dict[str, bytes] = {}

    def put(self, name: str, blob: bytes) -> None:
        self._world.maybe_stumble()
        self.blobs[name] = blob
        self._world.maybe_stumble()

    def get(self, name: str) -> bytes | None:
        return self.blobs.get(name)

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        return [self.blobs.get(name) for name in names]

    def names(self, folder: str) -> list[str]:
        return sorted(name for name in self.blobs if name.startswith(f"{folder}/" if folder else ""))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.blobs.pop(name, None)


class StoreActor(Actor):
    """Lets an uploader for each instance step. Its death takes away all but spools and objects."""

    kind = "store"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.objects = Objects(world)
        self.central = CentralStore(self.objects)
        self.revive()

    def revive(self) -> None:
        self.uploaders = {
            name: Uploader(STAGE, name, self.world.instances[name].count, spool, self.central, self._committed)
            for name, spool in self.world.spools.items()
        }
        self.carried: dict[str, tuple[int, int]] = {}
        """By instance: up to where its spool has been carried."""

    def work(self) -> bool:
        names = sorted(self.uploaders)
        for name in self.world.random.sample(names, len(names)):
            log = self.world.spools[name].log
            ends = (log.tail(), log.tail(Lane.CONTROL))
            if self.carried.get(name) == ends:
                continue
            try:
                self.uploaders[name].step()
            except Retry:
                self.world.tally["store stumbled"] += 1
            else:
                self.carried[name] = ends
            return True
        return False

    def _committed(self, saved: Checkpointed) -> None:
        gateway = self.world.gateways[saved.src]
        if gateway.is_there:
            gateway.gateway.count(saved)

    def newest(self, selection: Selection) -> dict[str, Version]:
        """By key: the version that counts."""
        try:
            return {version.key: version for version in self.central.load(STAGE, selection)}
        except Stop as error:
            raise Violation("lost", f"the store cannot be read: {error}") from error

    def whole(self) -> Iterator[Version]:
        """Every version that has ever come."""
        for name in self.objects.names(f"{STAGE}/segments"):
            segment = wire.unpack(self.objects.blobs[name], Segment)
            yield from wire.decode(segment.versions, list[Version])
