"""What one part of an instance knows of the moves that it takes part in."""

from __future__ import annotations

import msgspec

from whimbrel.core.arrival import Arrival
from whimbrel.core.departure import Departure
from whimbrel.core.replica import Replication, Standby
from whimbrel.core.restoration import Eviction, Restoration
from whimbrel.core.saving import Saving
from whimbrel.core.switch import SwitchIn, SwitchOut


class Moves(msgspec.Struct):
    """What an instance knows of the moves it takes part in."""

    departures: dict[str, Departure | SwitchOut] = {}
    arrivals: dict[str, Arrival | SwitchIn | Restoration] = {}
    replications: dict[str, Replication] = {}
    standbys: dict[str, Standby] = {}
    aborted: set[str] = set()
    """Moves that are off, of which a parcel may still be under way."""
    epochs: tuple[list[int], dict[str, int]] | None = None
    saving: Saving | None = None
    evictions: dict[str, Eviction] = {}
    evicted: set[str] = set()
    """Restorations of which every router has told us."""
    ended: set[str] = set()
    """Moves that a restoration has ended: a zombie may speak of them at any time."""
    unread: str = ""
    """Something has come that cannot be read, maybe of a move that has not begun here: why it cannot."""

    @property
    def are_open(self) -> bool:
        """Whether any batch may change some of it. A saving's book does not count: its delta says what a batch did."""
        return bool(self.departures or self.arrivals or self.replications)

    @property
    def are_diverting(self) -> bool:
        """Whether a data record may be for somebody else than its key's state."""
        return bool(self.arrivals or self.evictions or any(role.closed for role in self.departures.values()))
