"""The actor that delivers results: it drives the product's own outlet, over a sink and a journal that fail anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from random import Random
from typing import TYPE_CHECKING, Any

from whimbrel.core.errors import Corrupt, Retry
from whimbrel.core.gate import Gate
from whimbrel.core.keys import KeyMap, selection_of
from whimbrel.core.record import Move, Outgoing, Parked, Report, Result
from whimbrel.egress.dispatch import Dispatcher, Ways
from whimbrel.egress.outlet import Letter, Outlet
from whimbrel.egress.reports import Reporter
from whimbrel.egress.sinks import Mark, Unfit
from whimbrel.egress.ways import EACH, ToHomes, ToSinks
from whimbrel.lab.sim.actors import Actor
from whimbrel.lab.sim.logs import SimLog
from whimbrel.lab.sim.transport import SenderActor
from whimbrel.log.contract import Appendable, Log

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World


class Spread:
    """Where results go: in some worlds several places receive them, each with an outlet and a gate of its own.

    one outlet    all results, of all instances
    homes         every key's results go to one place, as if they were records of another stage
    each          results stay at the place where they are made
    """

    SHARE = 0.4
    """The share of worlds with several places, among those without a store, and whose instances stay at their sites."""

    def __init__(self, world: World, rng: Random) -> None:
        self._world, self.how = world, "one outlet"
        self.places = [""]
        if not world.saves and world.protocol != "restart" and rng.random() < self.SHARE:
            self.how = rng.choice(["homes", "homes", "each"])
            self.places = ["cloud", *sorted({*world.sites.values()})]
        self.receivers = KeyMap(self.places[0])
        for key in world.keys:
            self.receivers.put(selection_of([key]), rng.choice(self.places))
        apart = [(name, place) for name in world.sites for place in self.places if self.place_of(name) != place]
        self.arrivals = {(place, name): SimLog(world) for name, place in apart}
        """By place and instance elsewhere: its output for that place."""
        self.enters = len(self.places) > 1 and rng.random() < 0.5
        """Whether records of any key enter at every gateway, and are passed on to the homes of their keys."""
        self.homes = KeyMap(self.places[0])
        """By key: the place of its router; filled by the world."""
        pairs = dict.fromkeys((self.place_of(name), place) for name, place in apart)
        pairs |= dict.fromkeys(permutations(self.places[:2], 2))  # between the gateways
        self.senders = {pair: SenderActor(world, *pair) for pair in pairs}

    def place_of(self, instance: str) -> str:
        """The place whose outlet reads an instance's outbox."""
        return self._world.sites[instance] if len(self.places) > 1 else ""

    def arrivals_of(self, place: str, instance: str) -> Appendable:
        """The log at another place for the output of an instance, as its own place writes to it."""
        return self.senders[self.place_of(instance), place].remote(f"arrivals-{instance}")

    def ways(self, here: str) -> Ways:
        """The ways of results from a place."""
        routers = self._world.routers
        if self.how == "homes":
            return ToHomes(here, self.receivers, lambda result: result.key, routers)
        return ToSinks(here, [EACH if self.how == "each" else here], routers, self.places)


class Outboxes(dict[str, Log]):
    """The outboxes of the instances at a place, and the arrivals from all others; an iteration returns some of them, in
    random order."""

    def __init__(self, world: World, place: str) -> None:
        spread = world.spread
        for name, outbox in world.outboxes.items():
            self[name] = outbox if spread.place_of(name) == place else spread.arrivals[place, name]
        self._world, self._names = world, sorted(self)

    def items(self) -> Any:
        rng, names = self._world.random, self._names
        return [(name, self[name]) for name in rng.sample(names, rng.randint(1, len(names)))]


class File:
    """A file of results, as a sink: results are durable once they are flushed, wherever the writer dies."""

    durable = False

    def __init__(self, world: World, results: list[Result], commit_interval: float) -> None:
        """`results`: the content on disk."""
        self._world, self.results, self.commit_interval = world, results, commit_interval
        self._buffer: list[Result] = []

    def check(self, mark: Mark | None) -> None:
        pass

    def open(self, mark: Mark | None) -> None:
        length = mark["length"] if mark is not None else 0
        if length > len(self.results):
            raise Corrupt(f"the file has {len(self.results)} results, but {length} were committed")
        del self.results[length:]
        self._buffer = []

    def write(self, results: list[Result], now_us: int) -> list[Unfit]:
        self._world.maybe_stumble()
        self._buffer += results
        if self._world.random.random() < 0.3:
            self._flush()
        self._world.maybe_stumble()
        return []

    def commit(self) -> Mark:
        self._flush()
        self._world.maybe_stumble()
        return {"length": len(self.results)}

    def committed(self) -> None:
        self._world.maybe_stumble()

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        self.results += self._buffer
        self._buffer = []


class OutletActor(Actor):
    """Steps the outlet. When it dies, everything is lost but logs, the file and the last commit."""

    kind = "outlet"
    sleeps = True

    def __init__(self, world: World, place: str) -> None:
        super().__init__(world)
        self.place = place
        self.pace *= 1.5
        self.delivered: list[Result] = []
        """The sink's file."""
        self.commit_interval = world.random.choice([0.0, 0.0, 2.0])
        self.letters: Any = SimLog(world)
        """Dead letters, with the numbers that the outlet assigned."""
        self.ghosts = 2
        self.committed: dict[str, int] = {}
        """By key: the epoch that the gate accepts, as of the last commit."""
        self.saved: bytes | None = None
        self.reached: dict[str, int] = {}
        self.revive()

    def revive(self) -> None:
        world = self.world
        self.raised: set[str] = set()
        """Fences confirmed as durable since the last restart."""
        spread = world.spread
        self.dispatcher = Dispatcher(spread.ways(self.place), spread.arrivals_of, world.reports, stores=world.saves)
        self.outlet = Outlet(
            "stage",
            Outboxes(world, self.place),
            [File(world, self.delivered, self.commit_interval)],
            self._send,
            self._save,
            lambda: world.now_us,
            keep=self._keep if world.saves else None,
            uptime=lambda: world.now,
            dispatch=self._dispatch,
        )
        self.outlet.recover(self.saved, self.reached)

    @property
    def gate(self) -> Gate:
        """The gate of the current outlet."""
        return self.outlet.gate

    @property
    def parked(self) -> list[Parked]:
        """All dead letters."""
        return [entry.blob for entry in self.letters.read(0)]

    def work(self) -> bool:
        rng = self.world.random
        try:
            was_idle = self.outlet.is_idle  # else it sends notices that it could not send before
            worked = self.outlet.step()
        except Retry:
            self.world.tally["outlet stumbled"] += 1
            return True
        self.world.tally["results held"] += bool(self.gate.held)
        if worked or not was_idle or not self.outlet.is_idle:
            return True
        if self.world.chaos and self.ghosts and any(self.committed.values()) and rng.random() < 0.3:
            self.ghosts -= rng.choice(list(self.world.instances.values())).haunt()
        return False

    def fence(self, move: Move) -> bool:
        """Request a fence, possibly again; return whether it is durable."""
        if self.alive and move.id not in self.raised:
            raised = self.raised
            self.outlet.ask_fence(move, lambda: raised.add(move.id))
            self.world.wake(self)
        return self.alive and move.id in self.raised

    def _dispatch(self, name: str, position: int, parts: list[Outgoing]) -> list[Outgoing]:
        is_here = self.world.spread.place_of(name) == self.place
        return self.dispatcher.dispatch(name, position, parts) if is_here else parts

    def _save(self, blob: bytes) -> None:
        self._keep(blob, {})

    def _keep(self, blob: bytes, reached: Mapping[str, int]) -> None:
        self.world.maybe_stumble()
        if self.outlet._fences:
            self.world.maybe_err(0.2)
        self.saved, self.reached = blob, {**self.reached, **reached}
        current = self.gate.current
        self.committed = {key: current(key) for key in self.world.keys}
        self.world.maybe_die()

    def _send(self, letter: Letter, number: int) -> None:
        """Send a letter. The receiver may be unreachable, or its acknowledgement may be lost."""
        world = self.world
        world.maybe_stumble()
        if isinstance(letter, Parked):
            self.letters.append(letter, count=1, writer="outlet", counter=number)
        else:
            assert not isinstance(letter, Unfit)
            world.spools[letter.instance].confirm(letter, world.now_us)
        world.maybe_stumble()


class ReporterActor(Actor):
    """Steps the reporter, which has nothing to lose: its position is in the log."""

    kind = "reporter"
    sleeps = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.pace *= 1.5
        self.revive()

    def revive(self) -> None:
        self.reporter = Reporter(self.world.reports, self._send)

    def work(self) -> bool:
        try:
            return self.reporter.step()
        except Retry:
            self.world.tally["reporter stumbled"] += 1
            return True

    def _send(self, report: Report) -> None:
        world = self.world
        world.maybe_stumble()
        if not world.coordinator.alive:
            raise Retry("the coordinator is unreachable")
        world.coordinator.receive(report)
        world.maybe_stumble()
