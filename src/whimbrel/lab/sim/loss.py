"""The actor that loses instances in worlds with a central store; some come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whimbrel.lab.sim.actors import Actor

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

WAYS = ("for good", "for a while", "with its checkpoint", "not at all")
"""How an instance is lost."""


class LossActor(Actor):
    """Loses instances: for good, for a while, or not at all: then an instance presumed lost continues as a zombie. One
    that is lost with its checkpoint comes back without its state.

    One instance of a world is never lost: it must be able to take over the keys.
    """

    kind = "loss"

    def __init__(self, world: World, most: int) -> None:
        super().__init__(world)
        names = sorted(world.instances)
        count = min(most, len(names) - 1)
        self.left = world.random.sample(names, count)
        self.away: list[str] = []
        self.without: set[str] = set()
        """Those that are to come back without their state."""
        self.unnoticed: list[str] = []

    def revive(self) -> None:
        """Does nothing: this actor has only durable state."""

    def work(self) -> bool:
        rng = self.world.random
        worked = bool(self.left or self.unnoticed or self.away)
        # Troubles come together: what is not in the store when an instance is lost must not count as stored.
        odds = 0.4 if self.world.store.objects.is_full else 0.04
        if self.left and not self._is_early and rng.random() < odds:
            self.lose(self.left.pop(), rng.choice(WAYS))
        elif self.unnoticed and rng.random() < 0.2:
            self.world.suspects.append(self.unnoticed.pop(0))
        elif self.away and rng.random() < 0.05:
            self._come_back(self.away.pop(0))
        return worked

    @property
    def _is_early(self) -> bool:
        """Whether to wait for the first checkpoint, so that older ones are restored as well."""
        world = self.world
        if not world.is_rough or not any(gateway.left for gateway in world.gateways.values()):
            return False
        return not world.store.made

    def strike(self, name: str) -> bool:
        """Perhaps lose an instance now, if it is to be lost at all: whoever calls its site gets no answer."""
        if name not in self.left or self.world.later.random() < 0.5:
            return False
        self.left.remove(name)
        self.lose(name, self.world.later.choice(WAYS))
        return True

    def lose(self, name: str, how_long: str) -> None:
        """Lose an instance; it becomes a suspect later."""
        actor = self.world.instances[name]
        self.world.tally[f"lost {how_long}"] += 1
        if how_long != "not at all":
            actor.alive, actor.gone = False, True
        if how_long in ("for a while", "with its checkpoint"):
            self.away.append(name)
        if how_long == "with its checkpoint":
            self.without.add(name)
        self.unnoticed.append(name)

    def _come_back(self, name: str) -> None:
        world, actor = self.world, self.world.instances[name]
        if name not in self.without:
            actor.gone = False
            world.wake(actor)
        elif world.coordinator.is_lost(name):
            world.stale.append(name)  # the coordinator starts it
            world.tally["checkpoints lost"] += 1
        else:
            self.away.append(name)  # not noticed yet
