"""The router: decides for each record, at the last moment, which inbox it goes into (late binding).

Every producer into a stage has one. It is a deterministic function of its input, data and commands in one order. Its
host keeps that order in a log, so that a failed router is rebuilt by replaying the log.

    route(records)   → the records of each instance: a record goes to one, to two during a move (dual), or none (hold)
    apply(command)   → markers, each at an exact place between the records of every inbox concerned
    save()           → the checkpoint barrier, for every instance that has keys
    replayed(...)    → records that went to a lost instance, once more, for the new owner of its keys

Commands are idempotent: a repeated one has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from whimbrel.core import wire
from whimbrel.core.keys import EVERY_BIN, KeyMap, Selection
from whimbrel.core.record import Barrier, Kind, Move, Record, marker

Routed = dict[str, list[Record]]
"""By instance: the records to append to its inbox, in order."""


@lru_cache(maxsize=16)
def move_in(body: bytes) -> Move:
    """The move in a marker's body. Everyone who reads the marker shares the decoded move."""
    return wire.unpack(body, Move)


@lru_cache(maxsize=16)
def body_with(move: Move) -> bytes:
    """The body of a marker: the same bytes for the same move, for every instance, and when they are appended again."""
    return wire.canonical(move)


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Put BEGIN into both inboxes; from there on route the move's keys to both, hold them, or switch at once."""

    move: Move


class Cutover(msgspec.Struct, frozen=True, tag=True):
    """Put CUTOVER into both inboxes; from there on the move's keys go to the destination alone."""

    move: Move


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Put ABORT into both inboxes; from there on the move's keys go to the source alone, as before."""

    move: Move


class Fence(msgspec.Struct, frozen=True, tag=True):
    """The owner of the move's keys is lost: they have no owner from here on. Put DISCARD into the inboxes of all
    instances that held state of them, and end the migrations that the move ends."""

    move: Move


class Restore(msgspec.Struct, frozen=True, tag=True):
    """The move's keys belong to the destination: put their records into its inbox once more, then CUTOVER."""

    move: Move
    since: dict[str, int] = {}
    """By router: the `seq` to replay from. All older records are in the versions that the destination has."""


Command = Begin | Cutover | Abort | Fence | Restore

REMEMBERED = 1_000
"""Number of finished moves that a router remembers. A command is sent while its migration is open, and the log takes
each once. So only commands in flight when the move ended matter, not those that 1,000 later moves have followed."""
UNOWNED = "@unowned"
"""Placeholder owner of a lost instance's keys until they are restored. Their records stay in the ingress log."""


class Snapshot(msgspec.Struct):
    """The durable state of a router, without the records it holds back, which a replay restores."""

    owners: tuple[list[str], dict[str, str]]
    epochs: tuple[list[int], dict[str, int]]
    finished: list[str]
    gained: dict[str, int] = {}
    fenced: list[str] = []


class RouteTable:
    """The owner and the epoch of each key of a stage."""

    def __init__(self, owner: str) -> None:
        self.owners = KeyMap(owner)
        self.epochs = KeyMap(0)

    def copy(self) -> RouteTable:
        """A copy with the same routes."""
        table = RouteTable("")
        table.owners, table.epochs = self.owners.copy(), self.epochs.copy()
        return table

    def hand_over(self, move: Move) -> None:
        """Assign the move's keys to its destination."""
        self.owners.put(move.selection, move.destination)
        self.epochs.put(move.selection, move.epoch)

    def orphan(self, move: Move, owner: str) -> None:
        """Assign the move's keys, which have lost their owner, to a placeholder."""
        self.owners.put(move.selection, owner)
        self.epochs.put(move.selection, move.epoch)

    def next_epoch(self, selection: Selection) -> int:
        """An epoch above all epochs that any of these keys has had."""
        return max(self.epochs.values(selection), default=0) + 1


class Router:
    """One producer's router into one stage."""

    def __init__(self, name: str, table: RouteTable) -> None:
        self.name, self.table = name, table
        self.moving: dict[str, Move] = {}
        self.held: dict[str, list[Record]] = {}
        self.hinted: dict[str, set[str]] = {}
        """By move: the keys for which a HINT has been sent to its source."""
        self.finished: dict[str, None] = {}
        """The last `REMEMBERED` moves that are cut over or aborted: further commands about them are too late."""
        self.fenced: dict[str, None] = {}
        """The last `REMEMBERED` restorations whose keys have lost their owner."""
        self.gained: dict[str, int] = {}
        """By instance: the position in this router's stream where it last gained keys."""

    def route(self, records: Sequence[Record]) -> Routed:
        """Bind each record to its inbox or inboxes."""
        routed: Routed = {}
        hints: dict[str, list[str]] = {}
        by_bin, by_key = self.table.owners.by_bin, self.table.owners.by_key
        epochs = self.table.epochs
        for record in records:
            owner = by_key.get(record.key) or by_bin[record.bin]
            epoch = epochs.by_key[record.key] if record.key in epochs.by_key else epochs.by_bin[record.bin]
            if epoch != record.epoch:
                record = Record(*record[:5], epoch, *record[6:])
            if self.moving:
                move = self._move_of(record.key)
                if move is not None and move.hold:
                    self.held[move.id].append(record)
                    continue
                if move is not None and move.switch:
                    if move.hints and record.key not in self.hinted[move.id]:
                        self.hinted[move.id].add(record.key)
                        hints.setdefault(move.id, []).append(record.key)
                elif move is not None:
                    routed.setdefault(move.destination, []).append(record)
            if owner in routed:
                routed[owner].append(record)
            else:
                routed[owner] = [record]
        for id, keys in hints.items():
            hint = marker(Kind.HINT, wire.canonical((id, keys)), self.name, records[-1].seq, records[-1].ingress_us)
            routed.setdefault(self.moving[id].source, []).append(hint)
        routed.pop(UNOWNED, None)
        return routed

    def tick(self, seq: int, event_us: int, now_us: int) -> Routed:
        """Send the event time to every instance that may hold keys of this router; held keys get it in their order."""
        tick = Record(0, Kind.TICK, EVERY_BIN, "", seq, 0, self.name, event_us, now_us, b"")
        for move in self.moving.values():
            if move.hold:
                self.held[move.id].append(tick._replace(body=body_with(move)))
        return {instance: [tick] for instance in self._concerned()}

    def save(self, save: Barrier, seq: int, now_us: int = 0) -> Routed:
        """Send BARRIER to every instance that may hold keys of this router. Its bound excludes held records."""
        held = [records[0].seq for records in self.held.values() if records]
        bound = min([save.bound, *(first - 1 for first in held)])
        order = marker(Kind.BARRIER, wire.canonical(msgspec.structs.replace(save, bound=bound)), self.name, seq, now_us)
        return {instance: [order] for instance in self._concerned()}

    def owners(self) -> set[str]:
        """All owners of keys; `UNOWNED` among them, if keys have lost their owner."""
        return self.table.owners.values()

    def _concerned(self) -> list[str]:
        return sorted({*self.owners(), *(move.destination for move in self.moving.values())} - {UNOWNED})

    def apply(self, command: Command, seq: int, now_us: int = 0) -> Routed:
        """Carry out a command at this position of the stream."""
        move = command.move
        if move.id in self.finished:
            return {}
        if isinstance(command, Fence):
            return self._fence(move, seq, now_us)
        if isinstance(command, Begin):
            if move.id in self.moving:
                return {}
            self.moving[move.id] = move
            self.held[move.id] = []
            self.hinted[move.id] = set()
            if move.switch:
                self._hand_over(move, seq)
            return self._markers(Kind.BEGIN, move, seq, now_us)
        kind, owner = Kind.ABORT, move.source
        if isinstance(command, Cutover | Restore):
            kind, owner = Kind.CUTOVER, move.destination
            self._hand_over(move, seq)
        self._finish(move.id)
        if isinstance(command, Restore):
            return {owner: [marker(kind, body_with(move), self.name, seq, now_us)]}
        routed = self._markers(kind, move, seq, now_us)
        routed[owner].extend(self._stamped(record) for record in self.held.pop(move.id, []))
        return routed

    def replays(self, command: Restore) -> bool:
        """Whether the log must be replayed for a command: not if it has been, nor if the lost instance had no keys. If
        not, nothing prevents the log from being trimmed, either."""
        return command.move.id not in self.finished and bool(command.move.selection)

    def refuse(self, move: Move) -> None:
        """A restoration cannot be replayed: its keys have no owner until another restoration takes them."""
        self._finish(move.id)

    def replayed(self, command: Restore, records: Sequence[Record]) -> list[Record]:
        """The records of an older log entry that the destination gets, ahead of those that `apply` returns."""
        move, since = command.move, command.since.get(self.name, 0)
        if records[0].kind == Kind.TICK:
            return [record._replace(body=body_with(move)) for record in records if record.seq >= since]
        return [
            record._replace(epoch=move.epoch)
            for record in records
            if record.kind == Kind.DATA and record.seq >= since and record.key in move.selection
        ]

    def _fence(self, move: Move, seq: int, now_us: int) -> Routed:
        if move.id in self.fenced:
            return {}
        _remember(self.fenced, move.id)
        if max(self.table.epochs.values(move.selection), default=0) >= move.epoch:
            return {}  # late: this restoration was abandoned, and a later attempt has fenced the keys
        for id in move.ends:
            self._finish(id)
            self.held.pop(id, None)
        self.table.orphan(move, UNOWNED)
        return {name: [marker(Kind.DISCARD, body_with(move), self.name, seq, now_us)] for name in sorted(move.parties)}

    def _hand_over(self, move: Move, seq: int) -> None:
        self.table.hand_over(move)
        self.gained[move.destination] = seq

    def _finish(self, id: str) -> None:
        self.moving.pop(id, None)
        self.hinted.pop(id, None)
        _remember(self.finished, id)

    def _markers(self, kind: Kind, move: Move, seq: int, now_us: int) -> Routed:
        record = marker(kind, body_with(move), self.name, seq, now_us)
        return {move.source: [record], move.destination: [record]}

    def _stamped(self, record: Record) -> Record:
        return record._replace(epoch=self.table.epochs[record.key]) if record.kind == Kind.DATA else record

    def _move_of(self, key: str) -> Move | None:
        for move in self.moving.values():
            if key in move.selection:
                return move
        return None

    # ── Snapshots ────────────────────────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> bytes | None:
        """A state from which a replay may start; None during a move: then the replay starts from an earlier one."""
        if self.moving:
            return None
        routes = (self.table.owners.encode(), self.table.epochs.encode())
        return wire.pack(Snapshot(*routes, list(self.finished), self.gained, list(self.fenced)))

    def restore(self, blob: bytes) -> None:
        """Restore the state from a snapshot."""
        snapshot = wire.unpack(blob, Snapshot)
        self.table.owners.restore(snapshot.owners)
        self.table.epochs.restore(snapshot.epochs)
        self.finished, self.fenced = dict.fromkeys(snapshot.finished), dict.fromkeys(snapshot.fenced)
        self.gained = snapshot.gained


def _remember(known: dict[str, None], id: str) -> None:
    """Add a move as the last one, and drop the first if there are too many."""
    known[id] = None
    if len(known) > REMEMBERED:
        del known[next(iter(known))]
