"""The order in which keys leave after a switch: the difference between `push`, `fetch` and `replicate`.

    ByArrival     keys that records wait for, by arrival, largest backlog first; then the last used first (`push`)
    OnDemand      units that the destination requests; keys with a backlog are sent without a request (`fetch`)
    FromReplica   keys of which a standby has no up-to-date copy, sorted; the others are there already (`replicate`)
    ByKey         sorted by key: the baseline for comparisons (`push` with `order="key"`)

A schedule has no state of its own: the state of a switch is in `SwitchOut` and `SwitchIn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from whimbrel.core.errors import Bug
from whimbrel.core.options import FetchOptions, PushOptions, ReplicateOptions
from whimbrel.core.record import Move

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance
    from whimbrel.core.switch import SwitchOut


class Schedule:
    """An order in which keys leave."""

    looks_ahead: ClassVar[bool] = True
    """Whether keys with a backlog at the source go first."""
    asks: ClassVar[bool] = False
    """Whether the destination requests the units it needs."""
    copies: ClassVar[bool] = False
    """Whether the destination has copies that become states."""

    def begin(self, switch: SwitchOut, instance: Instance, keys: list[str]) -> None:
        """The keys have stopped: set the order in which they leave, unless one is needed before its turn."""
        raise NotImplementedError


class ByKey(Schedule):
    """Sorted by key."""

    looks_ahead = False

    def begin(self, switch: SwitchOut, instance: Instance, keys: list[str]) -> None:
        switch.rest = keys[::-1]


class ByArrival(Schedule):
    """By arrival: the key used last is likely to be needed first."""

    def begin(self, switch: SwitchOut, instance: Instance, keys: list[str]) -> None:
        entries = instance.table.entries
        switch.rest = sorted(keys, key=lambda key: (entries[key].seq, key))


class OnDemand(Schedule):
    """Keys leave only on request."""

    asks = True

    def begin(self, switch: SwitchOut, instance: Instance, keys: list[str]) -> None:
        """No order: requests will come."""


class FromReplica(Schedule):
    """The source only drops a key of which the standby has an up-to-date copy."""

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
    """How a move splits bins into units, if its destination requests them."""
    if not isinstance(move.options, FetchOptions):
        raise Bug(f"{move.id}: the destination of {move.protocol} requests no units")
    return move.options
