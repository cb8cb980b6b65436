"""What one part of an instance knows of the moves that it takes part in, and which roles it has in them.

    Leaving     keys leave this part        Departure, SwitchOut
    Coming      keys come to this part      Arrival, SwitchIn, Restoration

Each kind of role has a place of its own in `Moves`: who asks for something that only one kind does looks there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import msgspec

from whimbrel.core.arrival import Arrival
from whimbrel.core.departure import Departure
from whimbrel.core.increments import Increments
from whimbrel.core.parcels import Parcels
from whimbrel.core.record import Emissions, Kind, Move, Parcel, Record, Shipped
from whimbrel.core.replica import Replication, Standby
from whimbrel.core.restoration import Eviction, Restoration
from whimbrel.core.switch import SwitchIn, SwitchOut

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


class Leaving(Protocol):
    """The role of a part that keys leave."""

    move: Move
    parcels: Parcels

    def is_frozen(self, src: str) -> bool:
        """Whether the time of keys that come through this router stands still here."""

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """A marker has come."""

    def ship(self, instance: Instance, out: Emissions) -> None:
        """At the end of a batch: send what the budget allows."""


class Taking(Protocol):
    """The role of a part that states come to: as the keys' owner, or as a standby."""

    ready: bool
    rejected: str

    @property
    def keeps(self) -> bool:
        """Whether there is no way back: what was refused waits until it can be read."""

    def install(self, instance: Instance, parcel: Parcel, out: Emissions) -> None:
        """A parcel has come. Raises `Corrupt`, and takes nothing, if it does not fit."""

    def complete(self, instance: Instance, shipped: Shipped, out: Emissions) -> None:
        """A part of the source has sent everything."""


class Coming(Taking, Protocol):
    """The role of a part that keys come to."""

    @property
    def move(self) -> Move | None:
        """None while only parcels have come."""

    def takes(self, key: str) -> bool:
        """Whether the key belongs to this move."""

    def is_silent(self, src: str) -> bool:
        """Whether another instance speaks for the keys that come through this router."""

    def silences(self, record: Record) -> bool:
        """The emission filter: whether a record's results are thrown away."""

    def is_frozen(self, instance: Instance, key: str, src: str) -> bool:
        """Whether the time of a key that comes through this router stands still."""

    def follow(self, instance: Instance, record: Record, out: Emissions) -> None:
        """A data record of a coming key."""

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """A marker has come."""


class Ticked(Protocol):
    """A role that keeps ticks for keys whose states are on their way."""

    def note_tick(self, record: Record) -> None:
        """A tick has come."""


class Moves(msgspec.Struct):
    """The moves of one part."""

    departures: dict[str, Departure] = {}
    switches_out: dict[str, SwitchOut] = {}
    arrivals: dict[str, Arrival] = {}
    switches_in: dict[str, SwitchIn] = {}
    restorations: dict[str, Restoration] = {}
    replications: dict[str, Replication] = {}
    standbys: dict[str, Standby] = {}
    aborted: set[str] = set()
    """Moves that are off, of which a parcel may still be under way."""
    epochs: tuple[list[int], dict[str, int]] | None = None
    increments: Increments | None = None
    evictions: dict[str, Eviction] = {}
    evicted: set[str] = set()
    """Restorations of which every router has told us."""
    ended: set[str] = set()
    """Moves that a restoration has ended: a zombie may speak of them at any time."""
    unread: str = ""
    """Something has come that cannot be read, maybe of a move that has not begun here: why it cannot."""

    def leaving(self) -> Iterator[Leaving]:
        """The roles in which keys leave."""
        return chain(self.departures.values(), self.switches_out.values())

    def coming(self) -> Iterator[Coming]:
        """The roles in which keys come."""
        return chain(self.arrivals.values(), self.switches_in.values(), self.restorations.values())

    def coming_with(self, id: str) -> Coming | None:
        """The role in which keys come with a move, if there is one."""
        return self.arrivals.get(id) or self.switches_in.get(id) or self.restorations.get(id)

    def taking(self) -> Iterator[Taking]:
        """The roles that states come to."""
        return chain(self.coming(), self.standbys.values())

    def ticked(self) -> Iterator[Ticked]:
        """The roles that keep ticks."""
        yield from self.arrivals.values()
        yield from self.switches_in.values()
        yield from self.switches_out.values()

    def leave(self, id: str) -> Iterator[Leaving | Replication]:
        """Give up the roles in which something leaves with a move; and which they were."""
        for place in (self.departures, self.switches_out, self.replications):
            if id in place:
                yield place.pop(id)

    def forget_coming(self, id: str) -> None:
        """Give up the role in which keys come with a move."""
        for place in (self.arrivals, self.switches_in, self.restorations):
            place.pop(id, None)

    @property
    def open(self) -> list[str]:
        """The moves in which keys leave or come."""
        places = (self.departures, self.switches_out, self.arrivals, self.switches_in, self.restorations)
        return sorted(id for place in places for id in place)

    @property
    def are_open(self) -> bool:
        """Whether any batch may change some of it. An increment's book does not count: its delta says what a batch
        did."""
        return bool(
            self.departures
            or self.switches_out
            or self.arrivals
            or self.switches_in
            or self.restorations
            or self.replications
        )

    @property
    def are_diverting(self) -> bool:
        """Whether a data record may be for somebody else than its key's state."""
        return bool(
            self.arrivals
            or self.switches_in
            or self.restorations
            or self.evictions
            or any(role.closed for role in self.switches_out.values())
        )

    @property
    def are_urgent(self) -> bool:
        """Whether keys stand still for something that is to come through the control lane, here or where it goes."""
        return (
            any(role.is_urgent for role in self.switches_out.values())
            or any(role.is_urgent for role in self.switches_in.values())
            or any(role.is_urgent for role in self.restorations.values())
        )
