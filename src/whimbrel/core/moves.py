"""The moves that one part of an instance takes part in, and its roles in them.

    Leaving     keys leave this part        Departure, SwitchOut
    Coming      keys arrive at this part    Arrival, SwitchIn, Restoration

Each kind of role has a dictionary of its own in `Moves`: code that concerns only one kind uses that dictionary.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import msgspec

from whimbrel.core.arrival import Arrival
from whimbrel.core.departure import Departure
from whimbrel.core.increments import Increments
from whimbrel.core.options import RestoreOptions, number_of
from whimbrel.core.parcels import Parcels
from whimbrel.core.record import Emissions, Kind, Move, Parcel, Record, Shipped
from whimbrel.core.replica import Replication, Standby
from whimbrel.core.restoration import Eviction, Restoration, Undone
from whimbrel.core.switch import SwitchIn, SwitchOut

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


class Sending(Protocol):
    """A role that sends state, of a move or to the store."""

    def ship(self, instance: Instance, out: Emissions) -> None:
        """At the end of a batch: send what the budget allows."""


class Leaving(Sending, Protocol):
    """The role of a part from which keys leave."""

    move: Move
    parcels: Parcels

    def is_frozen(self, src: str) -> bool:
        """Whether the event time of keys of this router is frozen here."""

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """Handle a marker."""


class Taking(Protocol):
    """The role of a part that receives states: as the keys' owner, or as a standby."""

    ready: bool
    rejected: str

    @property
    def keeps(self) -> bool:
        """Whether the move is past the point of no return: refused messages are kept until they can be read."""

    def turn_down(self, instance: Instance, id: str, reason: str, out: Emissions) -> bool:
        """The move cannot become ready: notify the coordinator, which can abort it."""

    def install(self, instance: Instance, parcel: Parcel, out: Emissions) -> None:
        """Install a parcel. Raises `Corrupt`, and installs nothing, if it does not fit."""

    def complete(self, instance: Instance, shipped: Shipped, out: Emissions) -> None:
        """A part of the source has sent all its parcels."""


class Coming(Taking, Protocol):
    """The role of a part at which keys arrive."""

    @property
    def move(self) -> Move | None:
        """None while only parcels have arrived."""

    def takes(self, key: str) -> bool:
        """Whether the key belongs to this move."""

    def is_silent(self, src: str) -> bool:
        """Whether another instance emits the results of the keys of this router."""

    def silences(self, record: Record) -> bool:
        """The emission filter: whether a record's results are discarded."""

    def is_frozen(self, instance: Instance, key: str, src: str) -> bool:
        """Whether the event time of a key of this router is frozen."""

    def follow(self, instance: Instance, record: Record, out: Emissions) -> None:
        """Handle a data record of an arriving key."""

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """Handle a marker."""


class Ticked(Protocol):
    """A role that stores ticks for keys whose states are in transit."""

    def note_tick(self, record: Record) -> None:
        """Handle a tick."""


class Dumped(msgspec.Struct):
    """What is read of encoded `Moves` that later ones replace."""

    epochs: tuple[list[int], dict[str, int]] | None = None


class Moves(msgspec.Struct, omit_defaults=True):
    """The moves of one part."""

    departures: dict[str, Departure] = {}
    switches_out: dict[str, SwitchOut] = {}
    arrivals: dict[str, Arrival] = {}
    switches_in: dict[str, SwitchIn] = {}
    restorations: dict[str, Restoration] = {}
    replications: dict[str, Replication] = {}
    standbys: dict[str, Standby] = {}
    aborted: set[str] = set()
    """Aborted moves of which a parcel may still be in transit."""
    epochs: tuple[list[int], dict[str, int]] | None = None
    increments: Increments | None = None
    evictions: dict[str, Eviction] = {}
    evicted: set[str] = set()
    """Restorations whose DISCARD has come from every router. Only while `has_ended` does not know it otherwise."""
    undone: dict[str, Undone] = {}
    """Moves to this part that are being undone, which it does not know because its state was lost."""
    renewed: bool = False
    """Whether this part has started without its state, and knows it."""
    ended: set[str] = set()
    """Moves that a restoration has ended: a zombie may send messages of them at any time. Likewise."""
    floor: int = 0
    """Moves with a lower number are over, except those in `spared`, as of the last restoration."""
    spared: frozenset[str] = frozenset()
    unread: str = ""
    """The reason why a message was unreadable that may belong to a move that has not begun here."""

    def sending(self) -> Iterator[Sending]:
        """The roles that send state."""
        to_store = (self.increments,) if self.increments else ()
        return chain(to_store, self.departures.values(), self.switches_out.values(), self.replications.values())

    def leaving(self) -> Iterator[Leaving]:
        """The roles in which keys leave."""
        return chain(self.departures.values(), self.switches_out.values())

    def coming(self) -> Iterator[Coming]:
        """The roles in which keys arrive."""
        return chain(self.arrivals.values(), self.switches_in.values(), self.restorations.values())

    def coming_with(self, id: str) -> Coming | None:
        """The role in which keys arrive with a move, if there is one."""
        return self.arrivals.get(id) or self.switches_in.get(id) or self.restorations.get(id)

    def taking(self) -> Iterator[Taking]:
        """The roles that receive states."""
        return chain(self.coming(), self.standbys.values())

    def ticked(self) -> Iterator[Ticked]:
        """The roles that store ticks."""
        yield from self.arrivals.values()
        yield from self.switches_in.values()
        yield from self.switches_out.values()

    def leave(self, id: str) -> Iterator[Leaving | Replication]:
        """Remove and yield the roles in which keys or copies leave with a move."""
        for place in (self.departures, self.switches_out, self.replications):
            if id in place:
                yield place.pop(id)

    def forget_coming(self, id: str) -> None:
        """Remove the role in which keys arrive with a move."""
        for place in (self.arrivals, self.switches_in, self.restorations):
            place.pop(id, None)

    def has_ended(self, id: str) -> bool:
        """Whether messages of a move have no effect here: it is over, and this part has no role in it."""
        return id in self.ended or (self.is_past(id) and id not in self.known)

    def is_past(self, id: str) -> bool:
        """Whether a move was over when the last restoration was ordered, or this part started without its state."""
        return id not in self.spared and number_of(id) < self.floor

    @property
    def known(self) -> list[str]:
        """The moves in which this part has a role."""
        return [*self.open, *self.replications, *self.standbys]

    def forget_ended(self, move: Move) -> None:
        """Forget single moves that ended before a restoration was ordered: its `floor` stands for all of them.

        Why that is safe: when the coordinator orders a restoration, it lists the migrations that are open. Every other
        one with a lower number is over for ever: all parts have reported its end, or a restoration has ended it. So
        none of its messages, however late, may have an effect, and one rule refuses them all. What remains to be
        stored is bounded by the number of migrations that are open, or were ordered later.
        """
        options = move.options
        if isinstance(options, RestoreOptions) and options.floor > self.floor:
            self.floor, self.spared = options.floor, options.open
            for ids in (self.ended, self.evicted):
                ids.intersection_update([id for id in ids if id in self.spared or number_of(id) >= self.floor])

    @property
    def open(self) -> list[str]:
        """The moves in which keys leave or arrive."""
        places = (self.departures, self.switches_out, self.arrivals, self.switches_in, self.restorations)
        return sorted(id for place in places for id in place)

    @property
    def are_open(self) -> bool:
        """Whether any batch may change this object. Increments do not count: the delta's keys tell what a batch
        changed."""
        leaving = self.departures or self.switches_out or self.replications
        return bool(leaving or self.arrivals or self.switches_in or self.restorations)

    @property
    def are_diverting(self) -> bool:
        """Whether a data record may have to be buffered, forwarded or dropped instead of being applied as usual."""
        return bool(
            self.arrivals
            or self.switches_in
            or self.restorations
            or self.evictions
            or self.undone
            or (self.switches_out and any(role.closed for role in self.switches_out.values()))
        )

    @property
    def are_urgent(self) -> bool:
        """Whether keys are blocked, here or at the receiver, until a message comes through the control lane."""
        return (
            any(role.is_urgent for role in self.switches_out.values())
            or any(role.is_urgent for role in self.switches_in.values())
            or any(role.is_urgent for role in self.restorations.values())
        )
