"""Keys that leave: the source instance's role in a move.

Between BEGIN and CUTOVER the source continues to apply and emit (phase LEAVING). In addition it ships the state of each
leaving key once, as many keys per batch as the byte budget allows, a large one in pieces. The key state contains the
`seq` it includes, so keys may leave at different moments: the destination replays the missing records.

With `hold`, the routers hold the keys' records from BEGIN on, so the keys do not change here until CUTOVER or ABORT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from whimbrel.core.parcels import Parcels, reaching
from whimbrel.core.record import Aborted, Closed, Emissions, Kind, Left, Move, Record, Shipped

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


class Departure(msgspec.Struct, kw_only=True):
    """The progress of a move at one part of its source. Sets name the routers a marker has come from."""

    move: Move
    parcels: Parcels
    begun: dict[str, int] = {}
    """By router: the `seq` of its BEGIN."""
    cut: set[str] = set()
    off: set[str] = set()
    queue: list[str] | None = None
    """Keys still to ship; None before every router has begun."""
    shipped: bool = False

    @classmethod
    def of(cls, move: Move) -> Departure:
        """The departure of a move that begins."""
        return cls(move=move, parcels=Parcels.of(move))

    def is_frozen(self, src: str) -> bool:
        """Whether the event time of keys of this router is frozen here."""
        return src in self.cut or (self.move.hold and src in self.begun and src not in self.off)

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """Handle a marker."""
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
                out.notices += closings(instance, self.move)
                out.notices.append(Left(*part, *weight))
        elif kind == Kind.ABORT:
            self.off.add(record.src)
            if self.off == routers:
                self._undo(instance, out)

    def ship(self, instance: Instance, out: Emissions) -> None:
        """At the end of a batch: ship as many of the remaining keys as the budget allows."""
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

    def _undo(self, instance: Instance, out: Emissions) -> None:
        """The move is aborted: the source is ordinary owner again."""
        self.parcels.put_down(instance)
        del instance.moves.departures[self.move.id]
        out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))


def closings(instance: Instance, move: Move) -> list[Closed]:
    """The notices that this part has emitted its last result of a move's keys: one for each epoch that ends."""
    part = (move.id, instance.name, instance.part, instance.parts)
    ending = sorted(instance.epochs.values(move.selection))
    return [Closed(*part, instance.epochs.select(was, move.selection), move.epoch, was) for was in ending]
