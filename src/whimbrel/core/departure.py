"""Keys that leave: what the source instance of a move does.

Between BEGIN and CUTOVER the source goes on as if nothing happened (phase LEAVING): it applies, it emits. Beside that
it ships the state of each leaving key once, as many per batch as the byte budget allows, a large one in pieces. Its
key state says up to which `seq` it reaches, so keys may leave at different moments: the destination replays what it
lacks.

With `hold`, the routers keep the keys' records from BEGIN on, so the keys stand still here until CUTOVER or ABORT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from whimbrel.core.parcels import Parcels, reaching
from whimbrel.core.record import Aborted, Closed, Emissions, Kind, Left, Move, Record, Shipped

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


class Departure(msgspec.Struct, kw_only=True):
    """How far a move has come at one part of its source. Sets name the routers a marker has come from."""

    move: Move
    parcels: Parcels
    begun: dict[str, int] = {}
    """By router: the `seq` at which its BEGIN stood."""
    cut: set[str] = set()
    off: set[str] = set()
    queue: list[str] | None = None
    """Keys still to ship; None before every router has begun."""
    shipped: bool = False

    @classmethod
    def of(cls, move: Move) -> Departure:
        """That of a move that begins."""
        return cls(move=move, parcels=Parcels.of(move))

    def is_frozen(self, src: str) -> bool:
        """Whether the time of keys that come through this router stands still here."""
        return src in self.cut or (self.move.hold and src in self.begun and src not in self.off)

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """A marker has come."""
        routers = self.move.routers
        if kind == Kind.BEGIN:
            self.begun[record.src] = record.seq
            if self.begun.keys() == routers and self.queue is None:
                self.queue = instance.keys_in(self.move)[::-1]
        elif kind == Kind.CUTOVER:
            self.cut.add(record.src)
            if self.cut == routers:
                keys = instance.keys_in(self.move)
                instance.table.drop(keys)
                del instance.moves.departures[self.move.id]
                part = (self.move.id, instance.name, instance.part, instance.parts)
                weight = (len(keys), self.parcels.state_bytes, self.parcels.sent_bytes)
                out.notices.append(Closed(*part, self.move.selection, self.move.epoch))
                out.notices.append(Left(*part, *weight))
        elif kind == Kind.ABORT:
            self.off.add(record.src)
            if self.off == routers:
                self.parcels.put_down(instance)
                del instance.moves.departures[self.move.id]
                out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))

    def ship(self, instance: Instance, out: Emissions) -> None:
        """At the end of a batch: send what the budget allows of the keys that have not left yet."""
        if self.queue is None or self.shipped or self.off or self.cut:
            return
        move, parcels = self.move, self.parcels
        reach = self.begun if move.hold else instance.positions
        parcels.send_some(instance, move, self.queue, lambda key: reaching(instance, key, reach), out)
        if self.queue or parcels.cutter.key:
            out.messages.append(instance.message(instance.name, Kind.WAKE))
        else:
            self.shipped = True
            shipped = Shipped(move.id, instance.part, instance.parts, sorted(parcels.numbers.items()))
            parcels.send(instance, move, Kind.SHIPPED, shipped, out)
