"""The actor that delivers results: it drives the product's own outlet, over a sink and a journal that fail anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whimbrel.core.errors import Corrupt, Retry
from whimbrel.core.gate import Gate
from whimbrel.core.record import Checkpointed, Closed, Move, Parked, Result
from whimbrel.egress.outlet import Outlet, Word
from whimbrel.egress.sinks import Mark, Unfit
from whimbrel.lab.sim.actors import Actor
from whimbrel.lab.sim.logs import SimLog
from whimbrel.log.contract import Log

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World


class Outboxes(dict[str, Log]):
    """All outboxes; an iteration returns some of them, in random order."""

    def __init__(self, world: World) -> None:
        super().__init__(world.outboxes)
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

    def __init__(self, world: World) -> None:
        super().__init__(world)
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
        self.outlet = Outlet(
            "stage",
            Outboxes(world),
            [File(world, self.delivered, self.commit_interval)],
            self._send_notice,
            self._save,
            lambda: world.now_us,
            keep=self._keep if world.saves else None,
            uptime=lambda: world.now,
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

    def _save(self, blob: bytes) -> None:
        self._keep(blob, {})

    def _keep(self, blob: bytes, reached: Mapping[str, int]) -> None:
        self.world.maybe_stumble()
        self.saved, self.reached = blob, {**self.reached, **reached}
        current = self.gate.current
        self.committed = {key: current(key) for key in self.world.keys}
        self.world.maybe_die()

    def _send_notice(self, notice: Word, number: int) -> None:
        """Send a notice. The receiver may be unreachable, or its acknowledgement may be lost."""
        world = self.world
        world.maybe_stumble()
        if isinstance(notice, Parked):
            self.letters.append(notice, count=1, writer="outlet", counter=number)
        elif isinstance(notice, Checkpointed):
            world.spools[notice.instance].confirm(notice, world.now_us)
        else:
            assert not isinstance(notice, Closed | Unfit)
            if not world.coordinator.alive:
                raise Retry("the coordinator is unreachable")
            world.coordinator.receive(notice)
        world.maybe_stumble()
