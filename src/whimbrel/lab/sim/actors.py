"""The base class of actors, and the actor that drives the host of an instance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Retry
from whimbrel.core.incoming import has_refused
from whimbrel.core.increments import STORE
from whimbrel.core.instance import Instance
from whimbrel.core.record import Emissions, Outgoing, Record, Result
from whimbrel.host.checkpoint import Batch, SavedLog
from whimbrel.host.inline import InlineHost
from whimbrel.host.starting import check_age, renew, wake_up
from whimbrel.lab.sim.job import Job, prepare
from whimbrel.lab.sim.logs import PLAIN, CheckpointLog
from whimbrel.log.carrier import WHOLE, last_entry, number
from whimbrel.log.codec import ROWS
from whimbrel.log.contract import Appendable, Entry, Lane
from whimbrel.log.memory import MemoryLog

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

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


class SpokenHost(InlineHost):
    """Notes the results that reach its outbox."""

    spoken: list[Result]

    def _carry(self, batch: Batch, out: Mapping[int, Emissions]) -> None:
        writer, last = self.writer, number(batch.number)
        before = self.outbox.counter(writer)
        try:
            super()._carry(batch, out)
        finally:
            if before < last <= self.outbox.counter(writer):
                self.spoken += [result for emissions in out.values() for result in emissions.results]


class InstanceActor(Actor):
    """Steps an inline host over logs that fail, among them its checkpoint; there may be one at each site.

    A worker of Spark may keep its parts in memory from one batch to the next, or lose some: so does this one.
    """

    kind = "instance"
    sleeps = True

    def __init__(self, world: World, name: str, parts: int) -> None:
        super().__init__(world)
        self.name, self.count = name, parts
        self.running, self.site, self.lives = True, world.sites[name], 1
        self.is_idle = False
        """Whether it has been started, and does not get as far as a batch."""
        self.checkpoints = {self.site: CheckpointLog(world)}
        """By site: the checkpoint there."""
        self.spoken: list[Result] = []
        """All results that are or ever were in its outbox."""
        self.revive()

    @property
    def is_whole(self) -> bool:
        """Whether no batch is planned and not committed: then its parts are as it has told the others."""
        return self.host.checkpoint.plan is None

    @property
    def batch(self) -> int:
        """The number of the last batch."""
        return self.host.checkpoint.last.number

    @property
    def parts(self) -> list[Instance]:
        """The parts, as of the last batch."""
        return self.host.parts

    def halt(self) -> None:
        """Stop; the state in memory is lost."""
        self.running = self.is_idle = False
        self.revive()

    def resume(self) -> None:
        """Run again where it was stopped."""
        if not self.running:
            self.running = True
            self.world.wake(self)

    def serve(self) -> None:
        """Get on, if it is idle."""
        if self.is_idle:
            self.is_idle = False
            self.world.wake(self)

    def start(self, site: str, *, idle: bool = False) -> None:
        """Resume from the checkpoint at a site. `idle`: it gets no further, until it is stopped or started again."""
        self.running, self.site, self.is_idle = True, site, idle
        self.revive()
        self.world.wake(self)

    def renew(self) -> None:
        """Come back without the state of the keys."""
        renew(self.world.inboxes[self.name], self.world.outboxes[self.name])
        self.checkpoints[self.site] = CheckpointLog(self.world)
        self.gone, self.lives = False, self.lives + 1
        self.revive()
        self.world.wake(self)

    def revive(self) -> None:
        if self.world.network is not None:
            self.world.network.look(self.name, self.site)
        world, name, parts = self.world, self.name, self.count
        inbox, outbox, checkpoint = world.inboxes[name], world.outboxes[name], self.checkpoints[self.site]
        check_age(SavedLog(Path(self.site), checkpoint), name, inbox, outbox)
        self.host = SpokenHost(
            name,
            parts,
            lambda part: Instance(name, Job(), int, part=part, parts=parts),
            inbox=inbox,
            outbox=outbox,
            inbox_of=self.inbox_of,
            checkpoint=checkpoint,
            records=_rows,
            encode=inbox.encode,
            trim_every=8 if world.is_rough else 1,
            most=8,
            most_bytes=world.most_bytes,
            new_id=lambda: f"checkpoint {self.lives}",
        )
        self.host.spoken = self.spoken
        # Every start appends a WAKE; without refused messages it has no effect, and would only take steps.
        self.is_starting = any(map(has_refused, self.host.parts))

    def inbox_of(self, name: str) -> Appendable:
        """The log for messages to `name`."""
        if name == STORE:
            return self.world.spools[self.name]
        network = self.world.network
        return self.world.inboxes[name] if network is None else network.inbox(self.name, name)

    def work(self) -> bool:
        if not self.running or self.is_idle:
            return False
        world, inbox = self.world, self.world.inboxes[self.name]
        try:
            if self.is_starting:
                wake_up(inbox, inbox.encode)
                self.is_starting = False
            if not self.host.has_work:
                return False
            if world.chaos and world.random.random() < 0.1:
                self.host.forget(world.random.randint(0, self.count - 1))
                world.tally["parts forgotten"] += 1
            self.host.limit = world.random.choice([30, 1 << 20])
            self.host.step()
        except Retry:  # a failed batch is repeated without the state in memory
            world.tally["instance stumbled"] += 1
            return True
        world.tally["records waited"] += sum(bool(part.table.waiting) for part in self.host.parts)
        return True

    def haunt(self) -> bool:
        """A zombie of this instance, presumed dead, writes an old batch's results again, under another writer name."""
        outbox = self.world.outboxes[self.name]
        gates = [outlet.gate for outlet in self.world.outlets.values()]
        current = {key: min(gate.current(key) for gate in gates) for key in self.world.keys}
        old = [result for result in self.spoken if result.epoch < current[result.key]]
        if (
            not old or outbox.counter(self.host.writer) % ROWS != WHOLE
        ):  # not amid a batch: its writer would be another one
            return False
        counter = outbox.counter("zombie") + 1
        entry = msgspec.structs.replace(last_entry(outbox), outgoing=[Outgoing(old[-3:], [])], piece=0)
        MemoryLog.append(outbox, wire.pack(entry), count=1, writer="zombie", counter=counter)
        return True


def _rows(entry: Entry, lane: Lane) -> list[Record]:
    return [row for record in PLAIN.records(entry) for row in prepare(record)]
