"""Keys that arrive: the destination instance's role in a move.

A key is WAITING until its parcel arrives: its records are buffered. Then it is a SHADOW: the buffered records behind
the parcel's `seq` and all later ones are applied without emitting (the emission filter), because the source still
emits. After CUTOVER the destination emits. Parcels use the control lane and may arrive before BEGIN.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

import msgspec

from whimbrel.core.keys import part_of
from whimbrel.core.record import (
    Aborted,
    Emissions,
    KeyState,
    Kind,
    Move,
    Opened,
    Parcel,
    Ready,
    Record,
    Rejected,
    Shipped,
    Tick,
)

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


class Receiver(msgspec.Struct):
    """Reassembles a move's parcels, and completes the move."""

    ready: bool = False
    """All state has arrived."""
    rejected: str = ""
    """Why a message of the move was refused: the move cannot become ready."""

    keeps: ClassVar[bool] = False
    """Whether the move is past the point of no return: a refused message, and all behind it, are kept until a version
    that can read them is started. Otherwise the move is aborted, and the source still has all keys."""
    strict: ClassVar[bool] = True
    """Whether states of another version of the job must match the operator's class."""

    def is_silent(self, src: str) -> bool:
        """Whether another instance emits the results of the keys of this router."""
        raise NotImplementedError

    def silences(self, record: Record) -> bool:
        """The emission filter: whether a record's results are discarded."""
        return self.is_silent(record.src)

    def joined(self, instance: Instance, parcel: Parcel) -> dict[str, KeyState]:
        """The states that a parcel contains or completes. Raises `Corrupt`, and takes nothing, if one does not fit."""
        is_cut = parcel.pieces != 1
        loads = self._gathered(instance, parcel) if is_cut else parcel.keys
        for key, key_state in loads.items():
            instance.table.check(key, key_state, parcel.shape, self.strict)
        if is_cut:
            for key in loads:
                instance.table.give_pieces(f"{parcel.move} {key}")
        return loads

    def _gathered(self, instance: Instance, parcel: Parcel) -> dict[str, KeyState]:
        loads = {}
        for key, key_state in parcel.keys.items():
            pieces = instance.table.gather(parcel.move, key, parcel.piece, key_state.state)
            if len(pieces) >= parcel.pieces:
                loads[key] = msgspec.structs.replace(key_state, state=b"".join(pieces))
        return loads

    def turn_down(self, instance: Instance, id: str, reason: str, out: Emissions) -> bool:
        """The move cannot become ready: notify the coordinator, which can abort it. Returns True."""
        if not self.rejected:
            self.rejected = reason
            out.notices.append(Rejected(id, instance.name, instance.part, instance.parts, reason))
        return True

    def catch_up(self, instance: Instance, key: str, records: list[Record], ticks: list[Tick], out: Emissions) -> None:
        """Apply the records and ticks that waited for a key, in the order of its stream."""
        entry = instance.table.entries.get(key)
        if entry is None and not records:
            return
        src = entry.src if entry else records[0].src
        beside = [
            Record(0, Kind.TICK, 0, "", tick.seq, 0, tick.src, tick.event_us, tick.ingress_us, None)
            for tick in ticks
            if tick.src == src
        ]
        for record in sorted([*records, *beside], key=attrgetter("seq")) if beside else records:
            silent = self.is_silent(record.src)
            if record.kind == Kind.DATA:
                instance.serving.serve(record, out, silent)
            else:
                entry = instance.table.entries.get(key)
                if entry and entry.timers and entry.timers[0] <= record.event_us and record.seq > entry.seq:
                    instance.expire(entry, key, record, out, silent)

    def own(self, instance: Instance, move: Move, out: Emissions, replayed: int = 0, silent: int = 0) -> None:
        """This part is now the owner of the keys."""
        instance.epochs.put(move.selection, move.epoch)
        part = (move.id, instance.name, instance.part, instance.parts)
        out.notices.append(Opened(*part, move.selection, move.epoch, replayed, silent))


class Arrival(Receiver):
    """The progress of a move at one part of its destination. Sets name the routers a marker has come from."""

    move: Move | None = None
    """None while only parcels have arrived."""
    begun: set[str] = set()
    cut: set[str] = set()
    off: set[str] = set()
    shipped: set[int] = set()
    """The parts of the source that have sent all their parcels."""
    parts: int = 0
    sent: int = 0
    """Number of parcels they have sent to this part, and number of parcels installed."""
    taken: int = 0
    ticks: list[Tick] = []

    def takes(self, key: str) -> bool:
        """Whether the key belongs to this move."""
        return self.move is not None and key in self.move.selection

    def is_silent(self, src: str) -> bool:
        """The emission filter: until its router has cut over, the source emits a key's results."""
        return src not in self.cut

    def is_frozen(self, instance: Instance, key: str, src: str) -> bool:
        """Whether the event time of a key of this router is frozen, at both ends."""
        return self.move is not None and self.move.hold and src not in self.cut

    def buffers(self, key: str, instance: Instance) -> bool:
        """Whether the key's state may still be in transit."""
        return not self.ready and key not in instance.table.entries

    def follow(self, instance: Instance, record: Record, out: Emissions) -> None:
        """Handle a data record of an arriving key."""
        if self.buffers(record.key, instance):
            instance.table.buffer(record)
        else:
            instance.serving.serve(record, out, self.is_silent(record.src))

    def note_tick(self, record: Record) -> None:
        """Keep a tick for keys whose states are still in transit."""
        if not self.ready and self.move is not None and not self.move.hold:
            self.ticks.append(Tick.of(record))

    def install(self, instance: Instance, parcel: Parcel, out: Emissions) -> None:
        """Install the states of a parcel and apply the records buffered for them."""
        for key, key_state in self.joined(instance, parcel).items():
            if key not in instance.table.entries:
                instance.table.install(key, key_state)
                self.catch_up(instance, key, instance.table.unbuffer(key), self.ticks, out)
        self.taken += 1

    def complete(self, instance: Instance, shipped: Shipped, out: Emissions) -> None:
        """A part of the source has sent all its parcels."""
        if shipped.part not in self.shipped:
            here = (number for bin, number in shipped.parcels if part_of(bin, instance.parts) == instance.part)
            self.sent += sum(here)
        self.shipped.add(shipped.part)
        self.parts = shipped.parts
        self._check_ready(instance, out)

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """Handle a marker."""
        assert self.move is not None
        if kind == Kind.BEGIN:
            self.begun.add(record.src)
            self._check_ready(instance, out)
        elif kind == Kind.CUTOVER:
            self.cut.add(record.src)
            if self.cut == self.move.routers:
                del instance.moves.arrivals[self.move.id]
                self.own(instance, self.move, out)
        elif kind == Kind.ABORT:
            self.off.add(record.src)
            if self.off == self.move.routers:
                self._undo(instance, self.move, out)

    def _check_ready(self, instance: Instance, out: Emissions) -> None:
        """When all state has arrived, the source never had the keys that still wait: they start with a fresh state."""
        if self.ready or self.rejected or self.move is None or self.begun != self.move.routers:
            return
        if not self.parts or len(self.shipped) < self.parts:
            return
        dirty = f"{instance.name} lacks parcels: it has {self.taken} of {self.sent}"
        if self.taken < self.sent and self.turn_down(instance, self.move.id, dirty, out):
            return  # an unreadable parcel does not name its move
        for key in sorted(key for key in instance.table.waiting if self.takes(key)):
            self.catch_up(instance, key, instance.table.unbuffer(key), self.ticks, out)
        self.ready = True
        self.ticks = []
        out.notices.append(Ready(self.move.id, instance.name, instance.part, instance.parts))

    def _undo(self, instance: Instance, move: Move, out: Emissions) -> None:
        """The move is aborted: drop everything that came with it. Parcels may still be in transit."""
        instance.table.drop(instance.keys_in(move))
        instance.table.scatter(move.id)
        for key in sorted(key for key in instance.table.waiting if self.takes(key)):
            instance.table.unbuffer(key)
        del instance.moves.arrivals[move.id]
        instance.moves.aborted.add(move.id)
        out.notices.append(Aborted(move.id, instance.name, instance.part, instance.parts))
