"""In which order keys leave after a switch: what `push`, `fetch` and `replicate` do differently.

    ByArrival     keys that records wait for, in the order of arrival, heaviest first; then those seen last (`push`)
    OnDemand      units that the destination asks for; keys with a backlog go unasked (`fetch`)
    FromReplica   those of which a standby has no fresh copy, by name; the others are there already (`replicate`)
    ByKey         by name: what the others are measured against (`push` with `order="key"`)

A schedule has no state of its own: what a switch must remember lasts in `SwitchOut` and `SwitchIn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from whimbrel.core.errors import Bug
from whimbrel.core.record import FetchOptions, Move, PushOptions, ReplicateOptions

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance
    from whimbrel.core.switch import SwitchOut


class Schedule:
    """One order."""

    looks_ahead: ClassVar[bool] = True
    """Whether keys that records wait for at the source go first."""
    asks: ClassVar[bool] = False
    """Whether the destination asks for what it needs."""
    copies: ClassVar[bool] = False
    """Whether the destination has copies that become states."""

    def begin(self, switch: SwitchOut, instance: Instance, keys: list[str]) -> None:
        """The keys have stopped: say in which order they leave, if nobody needs one before its turn."""
        raise NotImplementedError


class ByKey(Schedule):
    """By name."""

    looks_ahead = False

    def begin(self, switch: SwitchOut, instance: Instance, keys: list[str]) -> None:
        switch.rest = keys[::-1]


class ByArrival(Schedule):
    """What was seen last is likely to be needed first."""

    def begin(self, switch: SwitchOut, instance: Instance, keys: list[str]) -> None:
        entries = instance.table.entries
        switch.rest = sorted(keys, key=lambda key: (entries[key].seq, key))


class OnDemand(Schedule):
    """Nothing leaves that nobody needs."""

    asks = True

    def begin(self, switch: SwitchOut, instance: Instance, keys: list[str]) -> None:
        """Questions will come."""


class FromReplica(Schedule):
    """Of a key that the standby has, nothing more has to be done than to forget it."""

    copies = True

    def begin(self, switch: SwitchOut, instance: Instance, keys: list[str]) -> None:
        replication = instance.moves.replications.pop(switch.move.id, None)
        dirty = switch.dirty(keys, replication)
        switch.stale = [key for key in keys if key in dirty]
        switch.rest = switch.stale[::-1]
        switch.left = len(switch.stale)
        for key in keys:
            if key not in dirty:
                saved = instance.table.entries[key].saved
                switch.parcels.state_bytes += len(saved.state) if saved else 0
                switch.forget(instance, key)
        if replication is not None:
            replication.parcels.put_down(instance)
            switch.parcels.sent_bytes += replication.parcels.sent_bytes


BY_KEY, BY_ARRIVAL, ON_DEMAND, FROM_REPLICA = ByKey(), ByArrival(), OnDemand(), FromReplica()


def schedule_of(move: Move) -> Schedule:
    """The schedule of a move that switches."""
    options = move.options
    if isinstance(options, PushOptions):
        return BY_ARRIVAL if options.order == "arrival" else BY_KEY
    if isinstance(options, FetchOptions):
        return ON_DEMAND
    if isinstance(options, ReplicateOptions):
        return FROM_REPLICA
    raise Bug(f"{move.id}: {move.protocol} has no schedule")


def units_of(move: Move) -> FetchOptions:
    """How a move cuts bins into units, if its destination asks for them."""
    if not isinstance(move.options, FetchOptions):
        raise Bug(f"{move.id}: the destination of {move.protocol} asks for nothing")
    return move.options
