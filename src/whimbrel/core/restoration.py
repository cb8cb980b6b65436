"""Keys that are restored from the central store, because their owner is lost; and the eviction of remaining state.

At the destination (`Restoration`) versions are installed first, each with the `seq` up to which its key's results are
delivered. Then the routers append the keys' records to the inbox once more. The destination drops records that a
version contains, applies delivered ones without emitting, and the rest normally. CUTOVER is behind all of them.

Every other instance that had state of these keys receives DISCARD (`Eviction`): the lost instance, if it comes back,
and the other ends of its moves. The gate already refuses their results of the keys; on DISCARD they drop the keys, and
records from routers that have not processed the fence yet. Their increments that the gate has confirmed stay valid.

An instance that starts without its checkpoint has also lost its roles. It may still read messages of moves that are
over; and records that were routed to both ends of a move to it that is being undone, whose keys DISCARD does not name,
because they stay with their source. So it receives RENEW (`Renewal`) ahead of the data: those messages and records are
void, and it must not take them for its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from whimbrel.core import wire
from whimbrel.core.arrival import Receiver
from whimbrel.core.increments import Version
from whimbrel.core.keys import EVERY_BIN, bin_of
from whimbrel.core.record import (
    Aborted,
    Emissions,
    Evicted,
    Kind,
    Message,
    Move,
    Parcel,
    Ready,
    Record,
    Shipped,
)
from whimbrel.core.serving import DUPLICATE

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


class Restoration(Receiver, kw_only=True):
    """The progress of a restoration at one part of its destination. `cut` names the routers that have replayed."""

    move: Move
    delivered: dict[str, int] = {}
    """By key: the `seq` up to which its results are delivered."""
    cut: set[str] = set()
    replayed: int = 0
    """Number of records that were applied again, and how many of those without emitting."""
    silent: int = 0

    strict: ClassVar[bool] = False
    """False, because it is unknown which job version wrote a version: every decodable state is accepted."""

    @property
    def is_urgent(self) -> bool:
        """Whether keys are blocked until their versions arrive."""
        return not self.ready

    def takes(self, key: str) -> bool:
        """Whether the key belongs to this move."""
        return key in self.move.selection

    def is_silent(self, src: str) -> bool:
        """Never: no other instance emits results of the keys."""
        return False

    def silences(self, record: Record) -> bool:
        """The emission filter: delivered results are not emitted again."""
        return record.seq <= self.delivered.get(record.key, -1)

    def is_frozen(self, instance: Instance, key: str, src: str) -> bool:
        """Whether the event time of a key is frozen: the ticks it has missed are replayed with its records."""
        return src not in self.cut

    def follow(self, instance: Instance, record: Record, out: Emissions) -> None:
        """Handle a record of a restored key; records stamped for an earlier owner are ignored."""
        if record.epoch >= self.move.epoch:
            silent = self.silences(record)
            if instance.serving.serve(record, out, silent) != DUPLICATE:
                self.replayed += 1
                self.silent += silent

    def install(self, instance: Instance, parcel: Parcel, out: Emissions) -> None:
        """Install versions. A repeated load is ignored if all versions have arrived."""
        if self.ready:
            return
        loads = self.joined(instance, parcel)
        self.delivered.update(parcel.delivered)
        for key, key_state in loads.items():
            instance.table.install(key, key_state)

    def complete(self, instance: Instance, shipped: Shipped, out: Emissions) -> None:
        """All versions have arrived."""
        if self.rejected:
            return
        self.ready = True
        out.notices.append(Ready(self.move.id, instance.name, instance.part, instance.parts))

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """Handle CUTOVER, behind all replayed records of a router, or an ABORT before it."""
        if kind == Kind.CUTOVER:
            self.cut.add(record.src)
            if self.cut == self.move.routers:
                del instance.moves.restorations[self.move.id]
                self.own(instance, self.move, out, self.replayed, self.silent)
                instance.moves.ended.add(self.move.id)
        elif kind == Kind.ABORT:
            # Without RESTORE nothing was loaded here, and perhaps no router has fenced the keys: they may be ours.
            if instance.moves.restorations.pop(self.move.id, None) is not None:
                clear(instance, self.move)
            instance.moves.ended.add(self.move.id)
            out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))


class Eviction(msgspec.Struct, kw_only=True):
    """A part that must discard its state of some keys, until every router has stopped sending records of them."""

    move: Move
    seen: set[str] = set()

    def drops(self, record: Record) -> bool:
        """Whether a record was routed before its router processed the fence."""
        return record.epoch < self.move.epoch and record.key in self.move.selection

    def mark(self, instance: Instance, record: Record, out: Emissions) -> None:
        """DISCARD has come from a router."""
        self.seen.add(record.src)
        if self.seen == self.move.routers:
            del instance.moves.evictions[self.move.id]
            instance.moves.evicted.add(self.move.id)
            if instance.moves.increments is not None:  # increments between a fence and DISCARD are not confirmed
                instance.moves.increments.give_up(instance)
            out.notices.append(Evicted(self.move.id, instance.name, instance.part, instance.parts))


class Renewal(msgspec.Struct):
    """What an instance that starts without its state must know."""

    floor: int
    """Migrations with a lower number are over, except those in `open`."""
    open: frozenset[str]
    undoing: list[Move]
    """Moves to this instance that are being undone."""

    def apply(self, instance: Instance, out: Emissions) -> None:
        """Drop what came with moves that are over or undone. A repetition in the same life drops nothing."""
        moves = instance.moves
        if self.floor > moves.floor:
            moves.floor, moves.spared = self.floor, self.open
        moves.undone |= {move.id: Undone(move=move) for move in self.undoing}
        if moves.renewed:
            return
        moves.renewed = True
        for id in [*moves.known, *moves.evictions]:
            if id in moves.undone or moves.is_past(id):
                forget(instance, id)
                moves.evictions.pop(id, None)
        for id, arrival in moves.arrivals.items():  # their keys are unknown before BEGIN: what came for them is void
            arrival.turn_down(instance, id, f"{instance.name} has lost its state", out)
        kept = [role for role in moves.coming() if role.move]
        instance.table.drop([key for key in instance.table.entries if not any(role.takes(key) for role in kept)])


class Undone(msgspec.Struct, kw_only=True):
    """A move that is being undone, at a part of its destination that does not know it, because its state is lost."""

    move: Move
    off: set[str] = set()
    """The routers that no longer send records of the move here."""

    def drops(self, record: Record) -> bool:
        """Whether a record was routed to both ends. It is stamped for the source: its epoch is before the move's."""
        is_ours = record.epoch < self.move.epoch and record.src not in self.off
        return is_ours and record.key in self.move.selection

    def mark(self, kind: Kind, move: Move, src: str) -> bool:
        """Handle a marker; return whether no router sends records of the move any more. A router's ABORT may have been
        read before the state was lost. Then the next move of the keys that the router begins is another one."""
        is_over = move.id == self.move.id if kind == Kind.ABORT else move.id != self.move.id
        if is_over and kind in (Kind.ABORT, Kind.BEGIN) and move.selection.overlaps(self.move.selection):
            self.off.add(src)
        return self.off >= self.move.routers


def evict(instance: Instance, move: Move) -> None:
    """Drop this part's state of the move's keys, and all roles in the migrations that it ends."""
    moves = instance.moves
    moves.forget_ended(move)
    for id in move.ends:
        forget(instance, id)
        moves.aborted.discard(id)
        if not moves.has_ended(id):
            moves.ended.add(id)
    clear(instance, move)
    if instance.name in move.parties and move.id not in moves.evicted:
        moves.evictions.setdefault(move.id, Eviction(move=move))


def forget(instance: Instance, id: str) -> None:
    """Drop all roles in a move, and its pieces."""
    moves = instance.moves
    for leaving in moves.leave(id):
        leaving.parcels.put_down(instance)
    moves.forget_coming(id)
    standby = moves.standbys.pop(id, None)
    if standby is not None:
        standby.clear(instance)
    instance.table.scatter(id)


def clear(instance: Instance, move: Move) -> None:
    """Drop the states of a move's keys, their buffered records, and the move's pieces; but not states of a later
    restoration: they use the control lane, and may arrive before an earlier restoration's DISCARD."""
    later = [role for role in instance.moves.coming() if role.move and role.move.epoch > move.epoch]
    instance.table.drop(key for key in instance.keys_in(move) if not any(role.takes(key) for role in later))
    for key in sorted(key for key in instance.table.waiting if key in move.selection):
        if not any(role.takes(key) for role in later):
            instance.table.unbuffer(key)
    instance.table.scatter(move.id)


# ── At the reader of the store ───────────────────────────────────────────────────────────────────────────────────────


def loads(move: Move, versions: Iterable[Version], delivered: Mapping[str, int]) -> Iterator[Message]:
    """The messages for the destination's control lane: RESTORE, a parcel for each version and each key without one, and
    SHIPPED. A large version is sent in pieces."""
    to, left = move.destination, dict(delivered)
    yield Message(to, Kind.RESTORE, EVERY_BIN, wire.canonical(move))
    for version in versions:
        key, bin = version.key, version.bin
        key_state = version.unpacked()
        known = {key: left.pop(key)} if key in left else {}
        pieces = max(1, -(-len(key_state.state) // move.chunk))
        for piece in range(pieces):
            state = key_state.state[piece * move.chunk : (piece + 1) * move.chunk]
            load = {key: msgspec.structs.replace(key_state, state=state)}
            yield Message(
                to, Kind.PARCEL, bin, wire.canonical(Parcel(move.id, bin, load, piece, pieces, delivered=known))
            )
    for key, seq in left.items():
        yield Message(
            to, Kind.PARCEL, bin_of(key), wire.canonical(Parcel(move.id, bin_of(key), {}, delivered={key: seq}))
        )
    yield Message(to, Kind.SHIPPED, EVERY_BIN, wire.canonical(Shipped(move.id, 0, 1)))
