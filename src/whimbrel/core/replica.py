"""A standby: the destination of a move holds a copy of the keys' states, long before they are handed over.

At the source (`Replication`) every key is dirty at first, and again each time a record touches it. At the end of every
`interval`-th batch the source sends the dirty keys, as many as the byte budget allows. The standby is warm when no key
is dirty for the first time.

At the destination (`Standby`) the copies are stored beside the instance's own keys and are not read. The hand-over is
a switch (switch.py): the source ships only the keys that are dirty then, and names them; all other copies open at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import msgspec

from whimbrel.core.arrival import Receiver
from whimbrel.core.options import ReplicateOptions
from whimbrel.core.parcels import Parcels
from whimbrel.core.record import Aborted, Emissions, Kind, Move, Parcel, Shipped, Warm

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


class Replication(msgspec.Struct, kw_only=True):
    """One part of the source of a standby."""

    move: Move
    parcels: Parcels
    dirty: set[str] = set()
    batches: int = 0
    warm: bool = False

    @classmethod
    def of(cls, move: Move, keys: Iterable[str] = ()) -> Replication:
        """The replication to a standby that has none of these keys."""
        return cls(move=move, parcels=Parcels.of(move), dirty=set(keys))

    def note(self, touched: set[str]) -> None:
        """These keys have changed."""
        self.dirty.update(key for key in touched if key in self.move.selection)

    def ship(self, instance: Instance, out: Emissions) -> None:
        """At the end of a batch: send dirty keys, if the interval has passed."""
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
        """Stop the replication."""
        self.parcels.put_down(instance)
        out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))


class Standby(Receiver, kw_only=True):
    """The progress of a standby at one part of the destination."""

    move: Move
    shipped: set[int] = set()

    keeps: ClassVar[bool] = True
    """True, because the standby may have taken over before the coordinator receives the refusal."""

    def install(self, instance: Instance, parcel: Parcel, out: Emissions) -> None:
        """Store the copies of a parcel."""
        for key, key_state in self.joined(instance, parcel).items():
            if key not in instance.table.entries:
                instance.table.keep_replica(self.move.id, key, key_state)

    def complete(self, instance: Instance, shipped: Shipped, out: Emissions) -> None:
        """A part of the source has sent every key once."""
        self.shipped.add(shipped.part)
        if len(self.shipped) == shipped.parts:
            out.notices.append(Warm(self.move.id, instance.name, instance.part, instance.parts))

    def cease(self, instance: Instance, out: Emissions) -> None:
        """Stop the standby."""
        self.clear(instance)
        instance.moves.aborted.add(self.move.id)
        out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))

    def clear(self, instance: Instance) -> None:
        """Drop the copies."""
        for key in instance.table.replicated(self.move.id):
            instance.table.keep_replica(self.move.id, key, None)
        instance.table.scatter(self.move.id)


def _interval(move: Move) -> int:
    return move.options.interval if isinstance(move.options, ReplicateOptions) else 1
