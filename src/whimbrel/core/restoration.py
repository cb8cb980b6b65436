"""Keys that come out of the central store, because whoever had them is lost; and what becomes of what others have.

At the destination (`Restoration`) versions are installed first, each with up to which `seq` its key's results are out
(delivered). Then the routers put the keys' records into the inbox once more: what a version contains is dropped, what
is delivered is applied in silence, the rest for real. CUTOVER stands behind all of that.

Everybody else who had something of these keys meets DISCARD (`Eviction`): the lost instance, should it come back, and
the other ends of moves that it took part in. What they say of the keys is refused at the gate already; here they drop
them, and what comes from routers that have not heard of it yet. What they have saved, and the gate has confirmed, is as
good as any version.
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
    """How far a restoration has come at one part of its destination. `cut` names the routers that have replayed."""

    move: Move
    delivered: dict[str, int] = {}
    """By key: up to where its results are out."""
    cut: set[str] = set()
    replayed: int = 0
    """Records that were applied again; and how many of those in silence."""
    silent: int = 0

    strict: ClassVar[bool] = False
    """Nobody can say of which version of the job a version in the store is: what can be taken is taken."""

    @property
    def is_urgent(self) -> bool:
        """Whether keys stand still until their versions come, and live as soon as they are here."""
        return not self.ready

    def takes(self, key: str) -> bool:
        """Whether the key belongs to this move."""
        return key in self.move.selection

    def is_silent(self, src: str) -> bool:
        """Nobody else speaks for the keys."""
        return False

    def silences(self, record: Record) -> bool:
        """The emission filter: what is delivered is not said again."""
        return record.seq <= self.delivered.get(record.key, -1)

    def is_frozen(self, instance: Instance, key: str, src: str) -> bool:
        """Whether the time of a key stands still: the ticks it has missed come with its records."""
        return src not in self.cut

    def follow(self, instance: Instance, record: Record, out: Emissions) -> None:
        """A record of a restored key; one that an earlier owner was sent says nothing here."""
        if record.epoch >= self.move.epoch:
            silent = self.silences(record)
            if instance.serving.serve(record, out, silent) != DUPLICATE:
                self.replayed += 1
                self.silent += silent

    def install(self, instance: Instance, parcel: Parcel, out: Emissions) -> None:
        """Versions have come. An order to load that is repeated has nothing new for who has everything."""
        if self.ready:
            return
        loads = self.joined(instance, parcel)
        self.delivered.update(parcel.delivered)
        for key, key_state in loads.items():
            instance.table.install(key, key_state)

    def complete(self, instance: Instance, shipped: Shipped, out: Emissions) -> None:
        """All versions have come."""
        if self.rejected:
            return
        self.ready = True
        out.notices.append(Ready(self.move.id, instance.name, instance.part, instance.parts))

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """A router has replayed everything; or, before that, it is called off."""
        if kind == Kind.CUTOVER:
            self.cut.add(record.src)
            if self.cut == self.move.routers:
                del instance.moves.restorations[self.move.id]
                self.own(instance, self.move, out, self.replayed, self.silent)
                instance.moves.ended.add(self.move.id)
        elif kind == Kind.ABORT:
            clear(instance, self.move)
            del instance.moves.restorations[self.move.id]
            instance.moves.ended.add(self.move.id)
            out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))


class Eviction(msgspec.Struct, kw_only=True):
    """A part that must discard what it has of some keys, until every router has stopped to send it more."""

    move: Move
    seen: set[str] = set()

    def drops(self, record: Record) -> bool:
        """Whether a record was sent before its router knew."""
        return record.epoch < self.move.epoch and record.key in self.move.selection

    def mark(self, instance: Instance, record: Record, out: Emissions) -> None:
        """DISCARD has come from a router."""
        self.seen.add(record.src)
        if self.seen == self.move.routers:
            del instance.moves.evictions[self.move.id]
            instance.moves.evicted.add(self.move.id)
            if instance.moves.increments is not None:  # what was saved between a fence and this does not count
                instance.moves.increments.give_up(instance)
            out.notices.append(Evicted(self.move.id, instance.name, instance.part, instance.parts))


def evict(instance: Instance, move: Move) -> None:
    """Drop what is here of the move's keys, and all roles in the migrations that it ends."""
    moves = instance.moves
    for id in move.ends:
        for leaving in moves.leave(id):
            leaving.parcels.put_down(instance)
        moves.forget_coming(id)
        standby = moves.standbys.pop(id, None)
        if standby is not None:
            standby.clear(instance)
        instance.table.scatter(id)
        moves.aborted.discard(id)
        moves.ended.add(id)
    clear(instance, move)
    if instance.name in move.parties and move.id not in moves.evicted:
        moves.evictions.setdefault(move.id, Eviction(move=move))


def clear(instance: Instance, move: Move) -> None:
    """Drop the states of a move's keys, what waits for them, and pieces that came with it; but not what a later
    restoration has brought: that comes through the control lane, and may be here before an earlier one's DISCARD."""
    later = [role for role in instance.moves.coming() if role.move and role.move.epoch > move.epoch]
    instance.table.drop(key for key in instance.keys_in(move) if not any(role.takes(key) for role in later))
    for key in sorted(key for key in instance.table.waiting if key in move.selection):
        if not any(role.takes(key) for role in later):
            instance.table.unbuffer(key)
    instance.table.scatter(move.id)


# ── At whoever reads the store ───────────────────────────────────────────────────────────────────────────────────────


def loads(move: Move, versions: Iterable[Version], delivered: Mapping[str, int]) -> Iterator[Message]:
    """What the destination's control lane gets: that keys will come, a parcel for each version and each key without
    one, and that this was all. A large one comes in pieces."""
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
