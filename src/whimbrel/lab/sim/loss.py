"""What happens in worlds with a central store: savings arrive there late, instances are lost, and some come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whimbrel.core.keys import Selection, part_of
from whimbrel.core.record import Saved
from whimbrel.core.saving import Assembly, Version
from whimbrel.lab.sim.actors import Actor

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World


class StoreActor(Actor):
    """The central store, with all that has arrived. What an instance sends it lies in a spool until it does."""

    kind = "store"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.positions = dict.fromkeys(world.spools, 0)
        self.saved: list[Saved] = []
        self.versions: dict[tuple[str, int, str, int], list[Version]] = {}
        """By instance, part and saving."""
        self._assemblies = {name: Assembly() for name in world.spools}

    def revive(self) -> None:
        """It lasts."""

    def work(self) -> bool:
        names = sorted(self.world.spools)
        for name in self.world.random.sample(names, len(names)):
            at = self.positions[name]
            posts = self.world.spools[name].posts(at)
            if posts is not None:
                for kind, _, body in posts:
                    taken = self._assemblies[name].take(kind, body)
                    if isinstance(taken, Saved):
                        self.saved.append(taken)
                    else:
                        for version in taken.unpacked():
                            part = part_of(version.bin, self.world.instances[name].count)
                            self.versions.setdefault((name, part, *taken.saving), []).append(version)
                self.positions[name] = at + 1
                return True
        return False

    def confirmed(self) -> list[Saved]:
        """Savings that are here as a whole, and whose results are out."""
        return [saved for saved in self.saved if self.counts(saved)]

    def counts(self, saved: Saved) -> bool:
        """Whether the gate has confirmed it."""
        return saved in self.world.outlet.confirmed

    def newest(self, selection: Selection) -> dict[str, Version]:
        """By key: the version that counts."""
        found: dict[str, Version] = {}
        for saved in self.confirmed():
            for version in self.versions.get((saved.instance, saved.part, *saved.saving), ()):
                if version.key in selection and version.is_newer(found.get(version.key)):
                    found[version.key] = version
        return found

    def whole(self) -> list[Version]:
        """Every version that has ever come."""
        return [version for versions in self.versions.values() for version in versions]


class LossActor(Actor):
    """Loses instances: for good, for a while, or not at all, so that who is thought lost goes on as a zombie.

    One instance of a world is never lost: somebody must be there to go on.
    """

    kind = "loss"

    def __init__(self, world: World, most: int) -> None:
        super().__init__(world)
        names = sorted(world.instances)
        count = min(most, len(names) - 1)
        self.left = world.random.sample(names, count)
        self.away: list[str] = []
        self.unnoticed: list[str] = []

    def revive(self) -> None:
        """It lasts."""

    def work(self) -> bool:
        rng = self.world.random
        worked = bool(self.left or self.unnoticed or self.away)
        if self.left and rng.random() < 0.04:
            self.lose(self.left.pop(), rng.choice(["for good", "for a while", "not at all"]))
        elif self.unnoticed and rng.random() < 0.2:
            self.world.suspects.append(self.unnoticed.pop(0))
        elif self.away and rng.random() < 0.05:
            self.world.instances[self.away.pop(0)].gone = False
        return worked

    def lose(self, name: str, how_long: str) -> None:
        """An instance is lost; sooner or later somebody notices."""
        actor = self.world.instances[name]
        self.world.tally[f"lost {how_long}"] += 1
        actor.running = True  # whoever moves it as a whole can do so no more
        if how_long != "not at all":
            actor.alive, actor.gone = False, True
        if how_long == "for a while":
            self.away.append(name)
        self.unnoticed.append(name)
