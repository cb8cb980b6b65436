"""The base class of actors, and the actor that runs an instance, as Spark does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Retry
from whimbrel.core.incoming import has_refused
from whimbrel.core.increments import STORE
from whimbrel.core.instance import Instance
from whimbrel.core.keys import EVERY_BIN, part_of
from whimbrel.core.record import Emissions, Kind, Outgoing, Result
from whimbrel.lab.sim.job import Job, prepare
from whimbrel.lab.sim.logs import PLAIN, as_record
from whimbrel.log.carrier import WHOLE, Carrier, encoded, last_entry, number
from whimbrel.log.codec import ROWS
from whimbrel.log.contract import Appendable, Lane
from whimbrel.log.memory import MemoryLog
from whimbrel.log.readers import LANES

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

Ends = tuple[int, int]
"""Positions in the two lanes of an inbox."""
STAGE = "stage"
"""The one stage of a world."""


class Violation(AssertionError):
    """A guarantee was violated; `what` names it."""

    def __init__(self, what: str, message: str) -> None:
        self.what = what
        super().__init__(f"{what}: {message}")


class Died(Exception):
    """An actor dies at this point, in the middle of its step."""


class Actor:
    """A component that takes steps at its own pace."""

    kind: ClassVar[str]
    sleeps: ClassVar[bool] = False
    """Whether an actor without work takes no step until it is woken."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.gone = False
        """Dead, and not restarted automatically."""
        self.pace = world.random.choice([0.3, 1.0, 1.0, 3.0])

    def work(self) -> bool:
        """Take one step; return whether there was work."""
        raise NotImplementedError

    @property
    def waits(self) -> bool:
        """Whether it will have work although it has none now, and no other actor has."""
        return False

    def die(self) -> None:
        """Lose everything but the durable state."""
        self.alive = False
        self.world.wake(self)
        self.world.tally[f"{self.kind} died"] += 1

    def revive(self) -> None:
        """Restart from the durable state."""
        raise NotImplementedError


class Checkpoint:
    """Spark's checkpoint of an instance at one site."""

    def __init__(self, deltas: list[list[bytes]], at: Ends = (0, 0), batch: int = 0, plan: Ends | None = None) -> None:
        self.deltas, self.at, self.batch = deltas, at, batch
        self.plan = plan
        """The end positions of the batch that is planned and not committed."""
        self._began = (batch, plan)

    @property
    def has_begun(self) -> bool:
        """Whether a batch was planned since the checkpoint was copied here."""
        return (self.batch, self.plan) != self._began

    def copied(self) -> Checkpoint:
        """A copy for another site."""
        return Checkpoint([list(blobs) for blobs in self.deltas], self.at, self.batch, self.plan)


class InstanceActor(Actor):
    """Runs an instance in micro-batches, as Spark does: plan the offsets, apply, write out, commit."""

    kind = "instance"
    sleeps = True

    def __init__(self, world: World, name: str, parts: int) -> None:
        super().__init__(world)
        self.name, self.count = name, parts
        self.running, self.site = True, world.sites[name]
        self.checkpoints = {self.site: Checkpoint([[] for _ in range(parts)])}
        """By site: the checkpoint there."""
        self.spoken: list[Result] = []
        """All results that are or ever were in its outbox."""
        self.revive()

    @property
    def plan(self) -> Ends | None:
        """The end positions of the batch that it has begun."""
        return self.kept.plan

    def halt(self) -> None:
        """Stop; the state in memory is lost."""
        self.running = False
        self.revive()

    def start(self, site: str) -> None:
        """Resume from the checkpoint at a site."""
        self.running, self.site = True, site
        self.revive()
        self.world.wake(self)

    def revive(self) -> None:
        if self.world.network is not None:
            self.world.network.look(self.name, self.site)
        self.kept = self.checkpoints[self.site]
        self.parts = [Instance(self.name, Job(), int, part=n, parts=self.count) for n in range(self.count)]
        for part, deltas in zip(self.parts, self.kept.deltas, strict=True):
            part.load(deltas)
        # Starting appends a record, as the real host does.
        self.is_starting = any(has_refused(part) for part in self.parts)
        self.carrier = Carrier(
            lambda: self.name,
            self.world.outboxes[self.name],
            self.inbox_of,
            encode=self.world.inboxes[self.name].encode,
            most=self.world.most_bytes,
        )

    def inbox_of(self, name: str) -> Appendable:
        """The log for messages to `name`."""
        if name == STORE:
            return self.world.spools[self.name]
        network = self.world.network
        return self.world.inboxes[name] if network is None else network.inbox(self.name, name)

    def work(self) -> bool:
        try:
            return self.running and self._work()
        except Retry:  # a failed batch is repeated without the state in memory
            self.world.tally["instance stumbled"] += 1
            self.revive()
            return True

    def _work(self) -> bool:
        inbox, rng = self.world.inboxes[self.name], self.world.random
        if self.is_starting:
            count = inbox.counter("start", Lane.CONTROL) + 1
            wake: Any = (as_record(Kind.WAKE, EVERY_BIN, b""),)
            inbox.append(wake, count=1, writer="start", counter=count, lane=Lane.CONTROL)
            self.is_starting = False
        if self.kept.plan is None:
            ends = (inbox.tail(Lane.DATA), inbox.tail(Lane.CONTROL))
            if ends == self.kept.at:
                return False
            plan = (rng.randint(self.kept.at[0], ends[0]), rng.randint(self.kept.at[1], ends[1]))
            self.kept.plan = plan if plan != self.kept.at else ends
        self.world.maybe_die()
        rows = [
            row
            for lane in (Lane.CONTROL, Lane.DATA)
            for entry in inbox.read(self.kept.at[lane], self.kept.plan[lane], lane)
            for record in PLAIN.records(entry)
            for row in prepare(record)
        ]
        out = []
        called = []
        for part in self.parts:
            own = rows
            if self.count > 1:
                own = [row for row in rows if row.bin == EVERY_BIN or part_of(row.bin, self.count) == part.part]
            out.append(part.apply(own) if own else Emissions())  # Spark does not call a part without rows
            called.append(bool(own))
            self.world.tally["records waited"] += bool(part.table.waiting)
        self._write(out)
        self._commit(called)
        return True

    def _write(self, out: list[Emissions]) -> None:
        assert self.kept.plan is not None
        outgoing: list[bytes] = []
        messages: dict[str, list[bytes]] = {}
        for part, emissions in zip(self.parts, out, strict=True):
            encoded_part, sent = encoded(emissions, part.part, part.table.state_bytes)
            outgoing += [] if encoded_part is None else [encoded_part]
            for to, ours in sent.items():
                messages.setdefault(to, []).append(wire.encode(ours))
        start, end = dict(zip(LANES, self.kept.at, strict=True)), dict(zip(LANES, self.kept.plan, strict=True))
        results = [result for emissions in out for result in emissions.results]
        outbox, last = self.world.outboxes[self.name], number(self.kept.batch)
        before = outbox.counter(self.name)
        try:
            self.carrier.carry(self.kept.batch, start, end, outgoing, len(results), messages)
        finally:
            if before < last <= outbox.counter(self.name):
                self.spoken += results
        self.world.tally["batches in pieces"] += sum(map(len, outgoing)) > self.world.most_bytes
        self.world.maybe_die()

    def _commit(self, called: list[bool]) -> None:
        assert self.kept.plan is not None
        for part, blobs, was_called in zip(self.parts, self.kept.deltas, called, strict=True):
            limit = self.world.random.choice([30, 1 << 20])
            if was_called:
                blobs += part.deltas(limit)
                if len(blobs) > 16:
                    blobs[:] = part.snapshot(limit)
        self.kept.at, self.kept.plan, self.kept.batch = self.kept.plan, None, self.kept.batch + 1
        inbox = self.world.inboxes[self.name]
        inbox.trim(self.kept.at[0], Lane.DATA)
        inbox.trim(self.kept.at[1], Lane.CONTROL)

    def haunt(self) -> bool:
        """A zombie of this instance, presumed dead, writes an old batch's results again, under another writer name."""
        outbox = self.world.outboxes[self.name]
        current = self.world.outlet.gate.current
        old = [result for result in self.spoken if result.epoch < current(result.key)]
        if not old or outbox.counter(self.name) % ROWS != WHOLE:  # not amid a batch: its writer would be another one
            return False
        counter = outbox.counter("zombie") + 1
        entry = msgspec.structs.replace(last_entry(outbox), outgoing=[Outgoing(old[-3:], [])], piece=0)
        MemoryLog.append(outbox, wire.pack(entry), count=1, writer="zombie", counter=counter)
        return True
