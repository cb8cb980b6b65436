"""The gateway: the entry point of records into a stage. It numbers them, makes them durable, routes them.

    rows ──▶ intake ──▶ ingress log (gives `seq`) ──▶ router ──▶ inboxes

Data, ticks and the coordinator's commands are in one ingress log, in one order; the router is a function of that
order. So a gateway that died recovers by replaying the log from its last snapshot: the inboxes recognise repeated
appends by the gateway's name and the ingress position. An append that fails in a live gateway is replayed the same way,
before any other operation: an inbox treats a lower position after a higher one as a repetition.

An entry has a bounded size. A call to `ingest` may bring more, and a router may release more at once (a `pause` of a
busy key): that becomes several entries, numbered by their last event, or by the ingress position and their index.

If there is a central store, the log is trimmed only as far as everything is in confirmed increments
(core/increments.py): the keys of a lost instance are restored from versions, and from the log after them. While keys
have no owner nothing is trimmed at all: that is from the fence of a restoration until its RESTORE is routed, so that
the log keeps what RESTORE needs.

RESTORE replays the log, a bounded number of bytes at a time, and most of it before RESTORE is appended: only the last
piece is read while records wait. If the log cannot be read, the gateway refuses the restoration and its keys stay
without an owner until another restoration; that blocks nothing else, in particular not the start of a gateway.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Stop, Trimmed
from whimbrel.core.increments import TrimHorizon
from whimbrel.core.keys import EVERY_BIN
from whimbrel.core.record import Barrier, Checkpointed, Kind, Record
from whimbrel.core.router import UNOWNED, Command, Restore, Routed, Router, body_with, move_in
from whimbrel.gateway.clock import EventClock, uptime_ns
from whimbrel.gateway.ingress import COMMANDS, KINDS, Event, IngressWriter, entries, fits, stored, writer_of
from whimbrel.gateway.replay import Replay
from whimbrel.log.chunks import chunked
from whimbrel.log.codec import ROWS, Codec
from whimbrel.log.contract import Entry, Log, Writable

CHANGED = Barrier(-1)
"""Save what has changed. The position of BARRIER in the log gives its bound."""


class Snapshot(msgspec.Struct):
    """A router's snapshot and its ingress position."""

    position: int
    router: bytes
    sent: int
    latest_us: int
    horizon: int | None = None
    """The `seq` up to which everything is in confirmed increments; None: there is no store."""
    refused: dict[str, str] = {}
    given: dict[str, int] = {}
    """By inbox: the number of the last append to it."""


class Gateway:
    """One producer into one stage. Safe to call from several threads: a lock serializes the calls into one order."""

    def __init__(
        self,
        router: Router,
        ingress: Log,
        known: Log,
        inbox_of: Callable[[str], Writable],
        encoding: Codec,
        clock_us: Callable[[], int],
        *,
        wall_clock: bool = False,
        keep: bool = False,
        stores: bool = False,
        max_ahead_us: int | None = None,
        uptime: Callable[[], int] = uptime_ns,
    ) -> None:
        """`known`: a log of all keys seen. `encoding`: encodes records into entries. `wall_clock`: the event time of a
        record is its arrival. `keep`: do not trim the ingress log, so that a whole run can be checked afterwards.
        `stores`: there is a central store. `max_ahead_us`: how far ahead of the clock an event may be. `uptime`: see
        `clock.uptime_ns`."""
        self._horizon = TrimHorizon(router.name) if stores else None
        self._oldest: int | None = None
        self.name, self.router, self.ingress, self.keep = router.name, router, ingress, keep
        self.known, self._wall_clock = known, wall_clock
        self.keys: dict[str, None] = {}
        """All keys seen, in the order of their first records."""
        self._inbox_of, self._clock_us, self._codec = inbox_of, clock_us, encoding
        self._clock, self._uptime, self._max_ahead_us = EventClock(), uptime, max_ahead_us
        self._lock = threading.RLock()
        self._ingress = IngressWriter(router.name, ingress, encoding)
        self._replay_log = Replay(router.name, ingress, inbox_of, encoding)
        self._routed = 0
        """The ingress position up to which everything has been routed."""
        self._unsent: deque[tuple[str, bytes, int, int]] = deque()
        """Routed, but not appended to the inbox yet: inbox, blob, number of records, ingress position."""
        self._given: dict[str, int] = {}
        """By inbox: the number of the last append to it."""
        self._unsure = False
        """An append failed: the ingress log may have more than was routed, an inbox less."""
        self._blank = router.table.copy()
        self._snapshot: bytes | None = None
        """`_blank`: the initial routes. `_snapshot`: the router's last durable snapshot."""
        self._is_lost = False
        """An entry is being routed, or routing it has failed half way: then the router is rebuilt first."""
        self._latest_us = self._sent_us = 0
        self.sent = 0
        self.received = self.received_bytes = 0
        """Since this process started: records, and their bytes."""
        self.doubled: Counter[str] = Counter()
        """By move: bytes of its markers, and of records sent to both instances."""
        self.refused: dict[str, str] = {}
        """Restorations whose records could not be replayed, with the reason."""

    # ── Input ────────────────────────────────────────────────────────────────────────────────────────────────────

    def counter(self, writer: str) -> int:
        """The last counter of a writer whose events are durable here; -1 if there are none."""
        return self.ingress.counter(writer)

    def ingest(
        self,
        events: Sequence[Event],
        writer: str,
        counter: int,
        number: Callable[[int], int] | None = None,
        since: Sequence[int] | None = None,
    ) -> bool:
        """Append events as one entry, and route them. When this returns they are durable.

        `writer` and `counter` make it idempotent: the same call again, after a crash, changes nothing (False).
        `number`: allows several entries; maps the index of an event to the counter of an entry that ends with it.
        `since`: when each event entered, if another place has passed them on; now, if not given.
        """
        with self._turn():
            last = self._ingress.counter(writer)
            if counter <= last:  # its arrival time differed then: it cannot be compared
                return False
            is_begun = number is not None and number(0) <= last
            start = bisect_right(range(len(events)), last, key=number) if is_begun else 0
            while start < len(events):
                start = self._take(events, start, writer, counter, number, since)
            return True

    def _take(
        self,
        events: Sequence[Event],
        start: int,
        writer: str,
        counter: int,
        number: Callable[[int], int] | None,
        since: Sequence[int] | None,
    ) -> int:
        """Append as many events as one entry holds; return the index of the first of the rest."""
        now = self._clock_us()
        arrived = self._clock.look(now, self._uptime())
        records, blob = self._ingress.entry(events, start, since or now, arrived, whole=number is None)
        end = start + len(records)
        self._note_keys([key for key, _, _ in islice(events, start, end) if key not in self.keys])
        taken = counter if number is None or end == len(events) else number(end - 1)
        position = self._ingress.append(blob, len(records), writer, taken)
        self._latest_us = max(self._latest_us, max(record.event_us for record in records))
        self.sent += len(records)
        self.received_bytes += len(blob)
        self.received += len(records)
        self._is_lost = True
        routed = self.router.route(records)
        is_all = sum(map(len, routed.values())) == len(records)
        self._enqueue(routed, position, blob if is_all else None)
        self._is_lost = False
        self._flush()
        return end

    def _note_keys(self, fresh: list[str]) -> None:
        if fresh:
            self.known.append(wire.pack(fresh), count=len(fresh), writer=self.name, counter=self.known.tail())
            self.keys |= dict.fromkeys(fresh)

    def command(self, command: Command) -> None:
        """Append the coordinator's command between the records. Idempotent."""
        kind = KINDS[type(command)]
        body = wire.canonical(command) if isinstance(command, Restore) else body_with(command.move)
        if isinstance(command, Restore):
            # As it will be in the log, down to the order of its sets.
            self._replay_log.ahead(wire.unpack(body, Restore), lambda: self.router)
        with self._turn():
            if isinstance(command, Restore) and self._replay_log.is_new(command, self.router):
                # In the same turn, so that nothing is trimmed in between.
                self.check_readable(self._replay_log.first(command))
            self._control(kind, body, 0, writer_of(command), 0)
        if command.move.id in self.refused:
            raise Stop(self.refused[command.move.id])
        self.doubled[command.move.id] += 2 * len(body)

    def order_checkpoint(self, counter: int, save: Barrier = CHANGED) -> int | None:
        """Append BARRIER: the instances send what has changed to the central store. Returns its position in the log.

        `save.anew`: they send all their state, because the store is a new one. Until it is stored nothing is covered.
        """
        return self._control(Kind.BARRIER, wire.pack(save), 0, "increments", counter)

    def count(self, saved: Checkpointed) -> None:
        """Note an increment that is in the store and confirmed by the gate."""
        with self._lock:
            if self._horizon is not None:
                self._horizon.note(saved)

    def horizon(self) -> int:
        """The `seq` up to which everything is in confirmed increments. With a store only."""
        with self._lock:
            assert self._horizon is not None, "there is a store"
            if not self._unsure:
                self._horizon.advance(self.router.owners(), self.router.gained, self._routed * ROWS)
            return self._horizon.horizon

    @property
    def has_saved(self) -> bool:
        """Whether the whole ingress log is in confirmed increments. With a store only."""
        with self._lock:
            return self.horizon() >= (self.ingress.tail() - 1) * ROWS

    def owners(self) -> set[str]:
        """The owners of keys, as far as the log has been routed; includes `UNOWNED` if keys have lost their owner."""
        with self._lock:
            return self.router.owners()

    def behind_horizon(self) -> int:
        """The number of records that a restoration would replay now. With a store only."""
        return self.ingress.backlog(max(self.horizon() // ROWS + 1, self.ingress.head()))

    def check_readable(self, position: int) -> None:
        """Raise `Trimmed` if a position is below the head of the ingress log."""
        with self._lock:
            head = self.ingress.head()
            if position < head:
                raise Trimmed(position, head)

    def keep_from(self, seq: int) -> None:
        """Do not trim records after this `seq`: the oldest retained checkpoint covers no more."""
        with self._lock:
            self._oldest = seq

    def tick(self, counter: int) -> None:
        """Send the event time to the instances: that of the clock if events have no time of their own, else that of the
        latest event. Does nothing if they have it."""
        if self._wall_clock:
            self._latest_us = max(self._latest_us, self._clock.look(self._clock_us(), self._uptime()))
        if not self.has_sent_tick:
            with self._turn():  # flushes what a failed append left: there may never be another record
                if self._sent_us < self._latest_us:
                    self._control(Kind.TICK, b"", self._latest_us, "ticks", counter)

    def now_us(self) -> int:
        """The wall clock."""
        return self._clock_us()

    def latest_allowed_us(self) -> int | None:
        """The event time after which an event is refused as from the future; None: there is no bound."""
        if self._max_ahead_us is None:
            return None
        return self._clock.look(self._clock_us(), self._uptime()) + self._max_ahead_us

    @property
    def has_sent_tick(self) -> bool:
        """Whether the last tick is in the inboxes, and all that came before it."""
        return not self._unsure and self._sent_us >= self._latest_us

    def _control(self, kind: Kind, body: bytes, event_us: int, writer: str, counter: int) -> int | None:
        with self._turn():
            if counter <= self.ingress.counter(writer):
                return None
            record = Record(0, kind, EVERY_BIN, "", self._ingress.seq, 0, self.name, event_us, self._clock_us(), body)
            position = self._ingress.append(self._codec.encode([record]), 1, writer, counter)
            self._is_lost = True
            self._enqueue(self._apply(record), position)
            self._is_lost = False
            self._flush()
            return position

    # ── Routing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _apply(self, record: Record) -> Routed:
        if record.kind == Kind.TICK:
            self._sent_us = record.event_us
            return self.router.tick(record.seq, record.event_us, record.ingress_us)
        if record.kind == Kind.BARRIER:
            save = wire.unpack(record.body, Barrier)
            if save.anew and self._horizon is not None:
                self._horizon = TrimHorizon(self.name)
            return self.router.save(msgspec.structs.replace(save, bound=record.seq), record.seq, record.ingress_us)
        if record.kind == Kind.RESTORE:
            restore = wire.unpack(record.body, Restore)
            if self.router.replays(restore):
                try:
                    self._replay_log.rest(restore, self.router, record.seq // ROWS)
                except Stop as error:
                    self._refuse(restore, error)
            return self.router.apply(restore, record.seq, record.ingress_us)
        command = COMMANDS[Kind(record.kind)](move_in(record.body))
        return self.router.apply(command, record.seq, record.ingress_us)

    def _refuse(self, command: Restore, error: Stop) -> None:
        """Leave the keys of a restoration without an owner. The refusal is in the log, so that a replay repeats it."""
        since, seq = command.since.get(self.name, 0), self._ingress.seq
        if self.ingress.counter(writer_of(command)) < 1:
            body = wire.canonical(command)
            record = Record(0, Kind.RESTORE, EVERY_BIN, "", seq, 0, self.name, 0, self._clock_us(), body)
            self._ingress.append(self._codec.encode([record]), 1, writer_of(command), 1)
        self.router.refuse(command.move)
        self.refused[command.move.id] = (
            f"{command.move.id} needs all records of {self.name} from position {since // ROWS} on: {error}. "
            "Its keys have no owner now: restore them again, from the newest versions or another checkpoint"
        )

    # ── Appending to the inboxes ─────────────────────────────────────────────────────────────────────────────────

    def _enqueue(self, routed: Routed, position: int, blob: bytes | None = None) -> None:
        unsent = []
        for name, records in routed.items():
            # While nothing has moved, all records go to one inbox unchanged: no need to encode them twice.
            same = blob is not None and len(routed) == 1 and not self.router.moving and not records[-1].epoch
            if same and not any(record.epoch for record in records):
                assert blob is not None
                if fits(len(records), blob):
                    unsent.append((name, blob, len(records), position * ROWS))
                    continue
            for piece, (some, whole) in enumerate(entries(records, self._codec), position * ROWS):
                unsent.append((name, whole, len(some), piece))
                self._count_doubled(name, some, len(whole))
        self._unsent += unsent
        self._routed = position + 1

    def _count_doubled(self, name: str, records: list[Record], size: int) -> None:
        for move in self.router.moving.values():
            if name == move.destination and move.is_dual:
                twice = sum(1 for record in records if record.kind == Kind.DATA and record.key in move.selection)
                self.doubled[move.id] += twice * size // len(records)

    def _flush(self) -> None:
        while self._unsent:
            name, blob, count, number = self._unsent[0]
            self._inbox_of(name).append(blob, count=count, writer=self.name, counter=number, replays=True)
            self._given[name] = number
            self._unsent.popleft()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One caller at a time; first completes what an earlier one left undone."""
        with self._lock:
            try:
                if self._unsure:
                    self._flush()
                    if self._is_lost:
                        self._restore(self._snapshot)
                    self._replay_all()
                    self._unsure = False
                yield
            except Exception:
                self._unsure = True
                raise

    # ── Snapshots and recovery ───────────────────────────────────────────────────────────────────────────────────

    def save(self) -> bytes | None:
        """A snapshot from which a replay may start; None during a move. After storing it, the caller calls `saved`."""
        with self._lock:
            snapshot = None if self._unsure else self.router.snapshot()
            if snapshot is None:
                return None
            horizon = None if self._horizon is None else self.horizon()
            return wire.pack(
                Snapshot(self._routed, snapshot, self.sent, self._latest_us, horizon, self.refused, self._given)
            )

    def saved(self, blob: bytes) -> None:
        """A snapshot is durable: trim the ingress log up to it, but not beyond the trim horizon."""
        self._snapshot = blob
        snapshot = wire.unpack(blob, Snapshot)
        with self._lock:
            if not self.keep and UNOWNED not in self.router.owners():
                needed = [seq for seq in (snapshot.horizon, self._oldest) if seq is not None]
                self.ingress.trim(min([snapshot.position, *(max(seq, 0) // ROWS for seq in needed)]))

    def recover(self, blob: bytes | None) -> None:
        """Recover: restore the last snapshot, and replay the ingress log from there."""
        with self._lock:
            for entry in chunked(self.known, 0):
                self.keys |= dict.fromkeys(wire.unpack(entry.blob, list[str]))
            self._restore(blob)
            self._replay_all()
            # The clock must not go back: no event was further ahead of it than this.
            ahead = 0 if self._wall_clock else self._max_ahead_us
            if ahead is not None:
                self._clock = EventClock(self._latest_us - ahead)
                self._clock.look(self._clock_us(), self._uptime())

    def _restore(self, blob: bytes | None) -> None:
        """Reset router and position to a snapshot; None: to the beginning."""
        self.router, self._is_lost = Router(self.name, self._blank.copy()), False
        self._routed, self._snapshot, self.sent, self.refused = self.ingress.head(), blob, 0, {}
        if blob is not None:
            saved = wire.unpack(blob, Snapshot)
            self.router.restore(saved.router)
            self._routed, self.sent, self._latest_us = saved.position, saved.sent, saved.latest_us
            self.refused, self._given = saved.refused, saved.given
            if self._horizon is not None:
                self._horizon.horizon = -1 if saved.horizon is None else saved.horizon

    def _replay_all(self) -> None:
        self._ingress.look()
        for entry in chunked(self.ingress, self._routed):
            self._replay(entry)

    def _replay(self, entry: Entry) -> None:
        records = stored(entry.position, self._codec.records(entry))
        self._latest_us = max(self._latest_us, max(record.event_us for record in records))
        self._is_lost, is_data = True, records[0].kind == Kind.DATA
        routed = self.router.route(records) if is_data else self._apply(records[0])
        self._enqueue(routed, entry.position)
        self._is_lost = False
        self.sent += len(records) if is_data else 0
        self._flush()
