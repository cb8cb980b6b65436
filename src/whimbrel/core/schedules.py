"""In which order keys leave after a switch: what `push`, `fetch` and `replicate` do differently.

    ByArrival     keys that records wait for, in the order of arrival, heaviest first; then those seen last (`push`)
    OnDemand      units that the destination asks for; keys with a backlog go unasked (`fetch`)
    FromReplica   those of which a standby has no fresh copy, by name; the others are there already (`replicate`)
    ByKey         by name: what the others are measured against (`push` with `order="key"`)

A schedule has no state of its own: what a switch must remember lasts in `SwitchOut` and `SwitchIn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from whimbrel.core.record import Order

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
        lacking = switch.lacking(keys, replication)
        switch.stale = [key for key in keys if key in lacking]
        switch.rest = switch.stale[::-1]
        switch.left = len(switch.stale)
        for key in keys:
            if key not in lacking:
                saved = instance.table.entries[key].saved
                switch.parcels.state_bytes += len(saved.state) if saved else 0
                switch.forget(instance, key)
        if replication is not None:
            replication.parcels.put_down(instance)
            switch.parcels.sent_bytes += replication.parcels.sent_bytes


SCHEDULES: Mapping[Order, Schedule] = {
    "key": ByKey(),
    "arrival": ByArrival(),
    "demand": OnDemand(),
    "replica": FromReplica(),
}
