"""The actors on a record's way: gateway, instance, outlet. Each does what its real host does, in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from whimbrel.core.gate import Gate
from whimbrel.core.instance import Instance
from whimbrel.core.keys import EVERY_BIN, bin_of, part_of
from whimbrel.core.protocols.machine import Command
from whimbrel.core.record import (
    Closed,
    Emissions,
    Evicted,
    Kind,
    Move,
    Notice,
    Opened,
    Parked,
    Post,
    Record,
    Result,
    Save,
    Saved,
)
from whimbrel.core.router import Restore, Router, RouteTable
from whimbrel.core.saving import STORE, Coverage
from whimbrel.lab.sim.job import Job, prepare
from whimbrel.log.contract import Lane
from whimbrel.log.memory import MemoryLog

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

SPAN = 1 << 20
"""A log position times this, plus the row: an offset. As in the real source."""


class Died(Exception):
    """An actor dies here: whatever it was doing stops in the middle."""


class Actor:
    """Somebody with a pace of its own."""

    kind: ClassVar[str]

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.gone = False
        """Dead, and not coming back by itself."""
        self.pace = world.random.choice([0.3, 1.0, 1.0, 3.0])

    def work(self) -> bool:
        """Do one thing; whether there was one."""
        raise NotImplementedError

    def revive(self) -> None:
        """Come back with nothing but what lasts."""
        raise NotImplementedError


class GatewayActor(Actor):
    """Takes records in, numbers them by their place in its ingress log, and routes them."""

    kind = "gateway"

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world)
        self.name = name
        self.ingress: Any = MemoryLog()
        self.history: list[tuple[int, Any]] = []
        """Everything that ever came in, with its place: what is trimmed as well."""
        self.places: dict[str, int] = {}
        """By command: its place."""
        self.mine = [key for n, key in enumerate(world.keys) if n % len(world.routers) == world.routers.index(name)]
        self.entries = self.left = world.random.randint(15, 45) if self.mine else 0
        self.saved: tuple[int, bytes | None] = (0, None)
        self.revive()

    def revive(self) -> None:
        self.router = Router(self.name, RouteTable(self.world.owner))
        self.has_stirred = True
        """Whether the router may be another one than was saved last."""
        self.position, snapshot = self.saved
        self.routed_before = self.ingress.tail()
        self.coverage = Coverage(self.name)
        self.coverage.covered = self.seq_of(self.ingress.head()) - 1
        if snapshot is not None:
            self.router.restore(snapshot)

    def order(self, command: Command, counter: str) -> None:
        """A command takes its place between the records; it lasts even if nobody is here to read it."""
        place = self.ingress.append(command, count=1, writer=counter, counter=0)
        if place is not None:
            self.places[counter] = place

    def has_routed(self, counter: str) -> bool:
        """Whether a command has been carried out."""
        return self.alive and counter in self.places and self.position > self.places[counter]

    def work(self) -> bool:
        worked = bool(self.left)
        if self.left and self.world.random.random() < 0.7:
            self.left -= 1
            self._ingest()
        for entry in self.ingress.read(self.position, self.position + self.world.random.randint(1, 4)):
            self._route(entry.position, entry.blob)
            self.position = entry.position + 1
            worked = True
        # One that comes back routes again all that is there before it does anything else.
        if worked and self.position >= self.routed_before and self.world.random.random() < 0.2:
            snapshot = self.router.snapshot() if self.has_stirred else self.saved[1]
            if snapshot is not None:
                self.saved, self.has_stirred = (self.position, snapshot), False
                if self.world.saves:
                    self.ingress.trim(min(self.position, self.covered() // SPAN))
        return worked

    def covered(self) -> int:
        """Up to where everything that came in is in the store."""
        for saved in self.world.store.confirmed():
            self.coverage.note(saved)
        return self.coverage.advance(self.router.owners(), self.router.gained, self.seq_of(self.position))

    def _ingest(self) -> None:
        rng, at = self.world.random, self.ingress.tail()
        if self.world.saves and rng.random() < 0.25:
            save = Save(self.seq_of(at), rng.choice([1, 150, 1 << 20]), rng.choice([8, 1 << 20]))
            content: Any = ("save", save)
        elif rng.random() < 0.25:
            content = ("tick", self.world.now_us)
        else:
            known = self.mine[: 1 + len(self.mine) * (self.entries - self.left) // self.entries]  # more come later
            keys = [rng.choice(known) for _ in range(rng.randint(1, 4))]
            content = [self._record(key, self.seq_of(at) + n) for n, key in enumerate(keys)]
        self.ingress.append(content, count=1, writer="devices", counter=at)
        self.history.append((at, content))

    def _record(self, key: str, seq: int) -> Record:
        rng, now = self.world.random, self.world.now_us
        event_us = now - rng.randint(0, 900)
        return Record(0, Kind.DATA, bin_of(key), key, seq, 0, self.name, event_us, now, rng.randint(0, 99))

    def _route(self, position: int, content: Any) -> None:
        seq = self.seq_of(position)
        if isinstance(content, list):
            routed = self.router.route(content)
            self.world.tally["records doubled"] += sum(map(len, routed.values())) > len(content)
            self.world.tally["records held back"] += sum(map(len, routed.values())) < len(content)
        elif isinstance(content, tuple) and content[0] == "save":
            routed = self.router.save(content[1], seq)
        elif isinstance(content, tuple):
            routed = self.router.tick(seq, content[1], content[1])
        else:
            if isinstance(content, Restore) and self.router.replays(content):
                self._replay(content, position)
            self.has_stirred = True
            routed = self.router.apply(content, seq)
        for name in self.world.random.sample(sorted(routed), len(routed)):
            self.world.maybe_die()
            for _ in range(1 + (self.world.random.random() < 0.1)):  # an append may be repeated
                self.append(name, routed[name], position)
        self.world.maybe_die()

    def _replay(self, command: Restore, position: int) -> None:
        """Put what the destination lacks into its inbox, entry by entry, each under its own number."""
        inbox, writer = self.world.inboxes[command.move.destination], f"{self.name}/{command.move.id}"
        for entry in self.ingress.read(command.since[self.name] // SPAN, position):
            content: Any = entry.blob
            if isinstance(content, tuple) and content[0] == "tick":
                seq, now = self.seq_of(entry.position), content[1]
                content = [Record(0, Kind.TICK, EVERY_BIN, "", seq, 0, self.name, now, now, b"")]
            if isinstance(content, list):
                self.world.maybe_die()
                records = self.router.replayed(command, content)
                inbox.append(records, count=1, writer=writer, counter=entry.position, replays=True)
                self.world.tally["records replayed"] += len(records)

    def seq_of(self, position: int) -> int:
        """The `seq` of the first record of an ingress entry, or of a tick or command."""
        return position * SPAN

    def append(self, name: str, records: list[Record], position: int) -> None:
        """Write one inbox's share of an ingress entry."""
        self.world.inboxes[name].append(records, count=1, writer=self.name, counter=position, replays=True)


class InstanceActor(Actor):
    """Runs an instance in micro-batches, as Spark does: plan the offsets, apply, write out, commit."""

    kind = "instance"

    def __init__(self, world: World, name: str, parts: int) -> None:
        super().__init__(world)
        self.name, self.count = name, parts
        self.running = True
        self.batch = 0
        self.at = (0, 0)
        self.plan: tuple[int, int] | None = None
        self.deltas: list[list[bytes]] = [[] for _ in range(parts)]
        self.revive()

    def revive(self) -> None:
        self.parts = [Instance(self.name, Job(), int, part=n, parts=self.count) for n in range(self.count)]
        for part, deltas in zip(self.parts, self.deltas, strict=True):
            part.load(deltas)
        if any(part.incoming.has_refused for part in self.parts):  # a start is a record, as the real host makes it
            nudge, inbox = as_record(Post(self.name, Kind.NUDGE, EVERY_BIN, b"")), self.world.inboxes[self.name]
            number = inbox.counter("start", Lane.CONTROL) + 1
            inbox.append([nudge], count=1, writer="start", counter=number, lane=Lane.CONTROL)

    def work(self) -> bool:
        if not self.running:
            return False
        inbox, rng = self.world.inboxes[self.name], self.world.random
        if self.plan is None:
            ends = (inbox.tail(Lane.DATA), inbox.tail(Lane.CONTROL))
            if ends == self.at:
                return False
            self.plan = (rng.randint(self.at[0], ends[0]), rng.randint(self.at[1], ends[1]))
            if self.plan == self.at:
                self.plan = None
                return True
        self.world.maybe_die()
        rows = [
            row
            for lane in (Lane.CONTROL, Lane.DATA)
            for entry in inbox.read(self.at[lane], self.plan[lane], lane)
            for number, record in enumerate(entry.blob)
            for row in prepare(Record(entry.position * SPAN + number, *record[1:]))
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
        posts = sorted((post for emissions in out for post in emissions.posts), key=lambda post: post.kind)
        for name in sorted({post.to for post in posts}):
            self.world.maybe_die()
            records = [self.world.carried(as_record(post)) for post in posts if post.to == name]
            if name == STORE:
                self.world.spools[self.name].append(records, count=1, writer=self.name, counter=self.batch)
                continue
            self.world.inboxes[name].append(records, count=1, writer=self.name, counter=self.batch, lane=Lane.CONTROL)
        self.world.maybe_die()
        said = [(emissions.results, emissions.notices) for emissions in out]
        self.world.outboxes[self.name].append(said, count=1, writer=self.name, counter=self.batch)
        self.world.maybe_die()

    def _commit(self, called: list[bool]) -> None:
        assert self.plan is not None
        for part, kept, was_called in zip(self.parts, self.deltas, called, strict=True):
            limit = self.world.random.choice([30, 1 << 20])
            if was_called:
                kept += part.deltas(limit)
                if len(kept) > 16:
                    kept[:] = part.snapshot(limit)
        self.at, self.plan, self.batch = self.plan, None, self.batch + 1
        inbox = self.world.inboxes[self.name]
        inbox.trim(self.at[0], Lane.DATA)
        inbox.trim(self.at[1], Lane.CONTROL)

    def haunt(self) -> bool:
        """A zombie of this instance, thought dead, writes an old batch's results once more, under another name."""
        outbox = self.world.outboxes[self.name]
        current = self.world.outlet.gate.current
        old = [
            result
            for entry in outbox.read(outbox.head())
            for results, _ in entry.blob
            for result in results
            if result.epoch < current(result.key)
        ]
        if not old:
            return False
        counter = outbox.counter("zombie") + 1
        outbox.append([(old[-3:], [])], count=1, writer="zombie", counter=counter)
        return True


def as_record(post: Post) -> Record:
    """A post as it comes out of the control lane it was sent to."""
    return Record(0, post.kind, post.bin, "", -1, 0, "", 0, 0, post.body)


class OutletActor(Actor):
    """Reads the outboxes, lets results through the gate, tells the coordinator what concerns it, commits."""

    kind = "outlet"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.pace *= 1.5
        self.delivered: list[Result] = []
        self.parked: list[Parked] = []
        self.names = sorted(world.outboxes)
        self.ghosts = 2
        self.committed: dict[str, int] = {}
        self.confirmed: list[Saved] = []
        """Savings whose results are out."""
        self.saved: tuple[dict[str, int], bytes, int, int, int, dict[str, int], list[Notice]]
        self.saved = ({}, Gate().snapshot(), 0, 0, 0, {}, [])
        self.has_stirred = True
        """Whether the gate may be another one than at the last commit."""
        self.revive()

    def revive(self) -> None:
        positions, gate, results, parked, confirmed, reached, untold = self.saved
        self.untold = list(untold)
        self.reached = dict(reached)
        """By key: the `seq` up to which its results are out."""
        self.positions = dict(positions)
        self.gate = Gate()
        self.gate.restore(gate)
        del self.delivered[results:]
        del self.parked[parked:]
        del self.confirmed[confirmed:]

    def work(self) -> bool:
        rng = self.world.random
        if not self.world.coordinator.alive:
            return False
        if self.untold:
            self._tell()
            return True
        first = rng.randrange(len(self.names))
        for name in self.names[first:] + self.names[:first]:
            at = self.positions.get(name, 0)
            for entry in self.world.outboxes[name].read(at, at + 1):
                self._let_out(entry.blob)
                self.world.maybe_die(0.02)
                self.positions[name] = entry.position + 1
                self._commit()
                self._tell()
                return True
        if self.world.chaos and self.ghosts and any(self.committed.values()) and rng.random() < 0.3:
            self.ghosts -= rng.choice(list(self.world.instances.values())).haunt()
        return False

    def fence(self, move: Move) -> None:
        """Let nothing of a lost owner out any more; it lasts when this returns."""
        self.gate.fence(move)
        self.has_stirred = True
        self._commit()

    def _commit(self) -> None:
        gate = self.saved[1]
        if self.has_stirred:
            self.committed = {key: self.gate.current(key) for key in self.world.keys}
            gate, self.has_stirred = self.gate.snapshot(), False
        outcome = (len(self.delivered), len(self.parked), len(self.confirmed))
        self.saved = (dict(self.positions), gate, *outcome, dict(self.reached), list(self.untold))

    def _let_out(self, said: list[tuple[list[Result], list[Notice]]]) -> None:
        for results, notices in said:
            released = self.gate.offer(list(results))
            self.has_stirred |= len(released) != len(results) or bool(notices)
            self._deliver(released)
            self.world.tally["results held"] += bool(self.gate.held)
            for notice in notices:
                if isinstance(notice, Parked):
                    self._give_up(self.gate.park(notice))
                elif isinstance(notice, Closed):
                    self._deliver(self.gate.close(notice))
                    self._give_up(self.gate.let_go())
                    self.confirmed += self.gate.confirm()
                elif isinstance(notice, Saved):
                    self.confirmed += self.gate.confirm(notice)
                else:
                    if isinstance(notice, Opened | Evicted):
                        self.gate.note(notice)
                    self.untold.append(notice)

    def _give_up(self, letters: list[Parked]) -> None:
        self.parked += letters
        for parked in letters:
            self.reached[parked.key] = max(parked.seq, self.reached.get(parked.key, -1))

    def _deliver(self, results: list[Result]) -> None:
        self.delivered += results
        for result in results:
            self.reached[result.key] = max(result.seq, self.reached.get(result.key, -1))

    def _tell(self) -> None:
        """What is committed may be acted upon."""
        for notice in self.untold:
            assert not isinstance(notice, Parked | Closed | Saved)
            self.world.maybe_die()
            self.world.coordinator.hear(notice.move, notice)
        self.untold = []
