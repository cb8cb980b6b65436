"""Keys that come: what the destination instance of a move does.

A key is WAITING until its parcel is here: its records are buffered. Then it is a SHADOW: the buffered records behind
the parcel's `seq` and all that follow are applied in silence (the emission filter), because the source still speaks.
After CUTOVER the destination speaks. Parcels come through the control lane and may be here before BEGIN is.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

import msgspec

from whimbrel.core.keys import part_of
from whimbrel.core.record import Aborted, Emissions, KeyState, Kind, Move, Opened, Parcel, Ready, Record, Shipped, Tick

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


class Receiver(msgspec.Struct):
    """Puts a move's parcels together, and ends it."""

    ready: bool = False
    """Everything that is to come is here."""
    rejected: str = ""
    """Why something that came with the move was refused: it cannot become ready."""

    keeps: ClassVar[bool] = False
    """Whether there is no way back: what was refused, and all that comes behind it, waits for somebody who can read it.
    Otherwise the move is called off, and the source has everything."""
    strict: ClassVar[bool] = True
    """Whether the states of another version of the job must be what the operator's class says."""

    def is_silent(self, src: str) -> bool:
        """Whether another instance speaks for the keys that come through this router."""
        raise NotImplementedError

    def silences(self, record: Record) -> bool:
        """The emission filter: whether a record's results are thrown away."""
        return self.is_silent(record.src)

    def joined(self, instance: Instance, parcel: Parcel) -> dict[str, KeyState]:
        """What a parcel brings, or is the last piece of. Raises `Corrupt`, and nothing is taken, if it does not fit."""
        is_cut = parcel.pieces != 1
        loads = self._gathered(instance, parcel) if is_cut else parcel.keys
        for key, key_state in loads.items():
            instance.table.check(key, key_state, parcel.shape, self.strict)
        if is_cut:
            for key in loads:
                instance.table.scatter(parcel.move, key)
        return loads

    def _gathered(self, instance: Instance, parcel: Parcel) -> dict[str, KeyState]:
        loads = {}
        for key, key_state in parcel.keys.items():
            pieces = instance.table.gather(parcel.move, key, parcel.piece, key_state.state)
            if len(pieces) >= parcel.pieces:
                loads[key] = msgspec.structs.replace(key_state, state=b"".join(pieces))
        return loads

    def own(self, instance: Instance, move: Move, out: Emissions, replayed: int = 0, silent: int = 0) -> None:
        """The keys are ours for good."""
        instance.epochs.put(move.selection, move.epoch)
        part = (move.id, instance.name, instance.part, instance.parts)
        out.notices.append(Opened(*part, move.selection, move.epoch, replayed, silent))


class Arrival(Receiver):
    """How far a move has come at one part of its destination. Sets name the routers a marker has come from."""

    move: Move | None = None
    """None while only parcels have come."""
    begun: set[str] = set()
    cut: set[str] = set()
    off: set[str] = set()
    shipped: set[int] = set()
    """Which parts of the source have sent everything."""
    parts: int = 0
    sent: int = 0
    """How many parcels they have sent here; and how many have been taken."""
    taken: int = 0
    ticks: list[Tick] = []

    def takes(self, key: str) -> bool:
        """Whether the key belongs to this move."""
        return self.move is not None and key in self.move.selection

    def is_silent(self, src: str) -> bool:
        """The emission filter: until its router has cut over, a key's results come from the source."""
        return src not in self.cut

    def is_frozen(self, instance: Instance, key: str, src: str) -> bool:
        """Whether the time of a key that comes through this router stands still, at both ends."""
        return self.move is not None and self.move.hold and src not in self.cut

    def buffers(self, key: str, instance: Instance) -> bool:
        """Whether the key's state may still be under way."""
        return not self.ready and key not in instance.table.entries

    def follow(self, instance: Instance, record: Record, out: Emissions) -> None:
        """A data record of a coming key."""
        if self.buffers(record.key, instance):
            instance.table.buffer(record)
        else:
            instance.serving.serve(record, out, self.is_silent(record.src))

    def note_tick(self, record: Record) -> None:
        """A tick has come while some keys' states are under way."""
        if not self.ready and self.move is not None and not self.move.hold:
            self.ticks.append(Tick.of(record))

    def install(self, instance: Instance, parcel: Parcel, out: Emissions) -> None:
        """A parcel has come: its keys' states are here, and what waited for them is applied."""
        for key, key_state in self.joined(instance, parcel).items():
            if key not in instance.table.entries:
                instance.table.install(key, key_state)
                self._catch_up(instance, key, out)
        self.taken += 1

    def _catch_up(self, instance: Instance, key: str, out: Emissions) -> None:
        catch_up(instance, key, instance.table.unbuffer(key), self.ticks, out, self.is_silent)

    def complete(self, instance: Instance, shipped: Shipped, out: Emissions) -> None:
        """A part of the source has sent everything."""
        if shipped.part not in self.shipped:
            here = (number for bin, number in shipped.parcels if part_of(bin, instance.parts) == instance.part)
            self.sent += sum(here)
        self.shipped.add(shipped.part)
        self.parts = shipped.parts
        self._check_ready(instance, out)

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """A marker has come."""
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
                instance.table.drop(instance.keys_in(self.move))
                instance.table.scatter(self.move.id)
                for key in sorted(key for key in instance.table.waiting if self.takes(key)):
                    instance.table.unbuffer(key)
                del instance.moves.arrivals[self.move.id]
                instance.moves.aborted.add(self.move.id)
                out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))

    def _check_ready(self, instance: Instance, out: Emissions) -> None:
        """When everything is here, keys that still wait are keys the source has never had: they start from nothing."""
        if self.ready or self.rejected or self.move is None or self.begun != self.move.routers:
            return
        if not self.parts or len(self.shipped) < self.parts:
            return
        dirty = f"{instance.name} lacks parcels: it has {self.taken} of {self.sent}"
        if self.taken < self.sent and instance.incoming.turn_down({self.move.id: self}, dirty, out):
            return  # what could not be read did not say that it was ours
        for key in sorted(key for key in instance.table.waiting if self.takes(key)):
            self._catch_up(instance, key, out)
        self.ready = True
        self.ticks = []
        out.notices.append(Ready(self.move.id, instance.name, instance.part, instance.parts))


def catch_up(
    instance: Instance,
    key: str,
    records: list[Record],
    ticks: list[Tick],
    out: Emissions,
    is_silent: Callable[[str], bool],
) -> None:
    """Apply what waited for a key, ticks included, in the order of its stream."""
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
        if record.kind == Kind.DATA:
            instance.serving.serve(record, out, is_silent(record.src))
        else:
            entry = instance.table.entries.get(key)
            if entry and entry.timers and entry.timers[0] <= record.event_us and record.seq > entry.seq:
                instance.expire(entry, key, record, out, is_silent(record.src))
