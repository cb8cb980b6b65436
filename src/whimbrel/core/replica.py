"""A standby: the destination of a move keeps a copy of the keys' states, long before they are handed over.

At the source (`Replication`) every key is at first one that the standby lacks, and again each time a record touches it.
At the end of every `interval`-th batch it sends what is lacking, as much as the byte budget allows. When nothing was
lacking for the first time, the standby is warm.

At the destination (`Standby`) the copies lie beside the instance's own keys, and nothing reads them. The hand-over is
a switch (switch.py): the source ships only what is lacking at that moment, and names it; all other copies open at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import msgspec

from whimbrel.core.arrival import Receiver
from whimbrel.core.parcels import Parcels
from whimbrel.core.record import Aborted, Emissions, Kind, Move, Parcel, ReplicateOptions, Shipped, Warm

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


class Replication(msgspec.Struct, kw_only=True):
    """What one part of the source sends to a standby."""

    move: Move
    parcels: Parcels
    dirty: set[str] = set()
    batches: int = 0
    warm: bool = False

    @classmethod
    def of(cls, move: Move, keys: Iterable[str] = ()) -> Replication:
        """That of a standby that has none of these keys."""
        return cls(move=move, parcels=Parcels.of(move), dirty=set(keys))

    def note(self, touched: set[str]) -> None:
        """These keys have changed."""
        self.dirty.update(key for key in touched if key in self.move.selection)

    def ship(self, instance: Instance, out: Emissions) -> None:
        """At the end of a batch: send what is lacking, if it is time."""
        self.batches += 1
        move, parcels, entries = self.move, self.parcels, instance.table.entries
        if self.warm and self.batches % _interval(move):
            return
        dirty = sorted(self.dirty, reverse=True)
        saved = lambda key: entries[key].saved if key in entries else None  # noqa: E731
        parcels.send_some(instance, move, dirty, saved, out, Kind.REPLICA)
        self.dirty = set(dirty)
        if self.dirty or parcels.cutter.key:
            out.messages.append(instance.message(instance.name, Kind.WAKE))
        elif not self.warm:
            self.warm = True
            parcels.send(instance, move, Kind.REPLICATED, Shipped(move.id, instance.part, instance.parts), out)

    def cease(self, instance: Instance, out: Emissions) -> None:
        """The standby is not wanted any more."""
        self.parcels.put_down(instance)
        out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))


class Standby(Receiver, kw_only=True):
    """How far a standby is, at one part of the destination."""

    move: Move
    shipped: set[int] = set()

    keeps: ClassVar[bool] = True
    """It may have taken over by the time that anybody hears of it."""

    def install(self, instance: Instance, parcel: Parcel, out: Emissions) -> None:
        """Copies have come."""
        for key, key_state in self.joined(instance, parcel).items():
            if key not in instance.table.entries:
                instance.table.keep_replica(self.move.id, key, key_state)

    def complete(self, instance: Instance, shipped: Shipped, out: Emissions) -> None:
        """A part of the source has sent everything once."""
        self.shipped.add(shipped.part)
        if len(self.shipped) == shipped.parts:
            out.notices.append(Warm(self.move.id, instance.name, instance.part, instance.parts))

    def cease(self, instance: Instance, out: Emissions) -> None:
        """The standby is not wanted any more."""
        self.clear(instance)
        instance.moves.aborted.add(self.move.id)
        out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))

    def clear(self, instance: Instance) -> None:
        """Forget the copies."""
        for key in instance.table.replicated(self.move.id):
            instance.table.keep_replica(self.move.id, key, None)
        instance.table.scatter(self.move.id)


def _interval(move: Move) -> int:
    return move.options.interval if isinstance(move.options, ReplicateOptions) else 1
