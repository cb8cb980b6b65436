"""What a protocol does with a move, and how: one options object for each kind. Travels in the move."""

from __future__ import annotations

import re
import sys
from typing import Literal

import msgspec


class HandoverOptions(msgspec.Struct, frozen=True, tag=True):
    """`live`, `pause` and `fluid`: CUTOVER hands the keys over."""

    hold: bool = False
    """Whether the routers hold the records from BEGIN until CUTOVER. If not, records go to both instances."""


class SwitchOptions(msgspec.Struct, frozen=True):
    """`push`, `fetch` and `replicate`: records go to the destination at once."""


class PushOptions(SwitchOptions, frozen=True, tag=True):
    """`push`: records go to the destination at once, and the source chooses which keys leave first."""

    order: Literal["arrival", "key"] = "arrival"
    """In the order in which records need the keys, or sorted by key."""


class FetchOptions(SwitchOptions, frozen=True, tag=True):
    """`fetch`: records go to the destination at once, and it requests the keys it needs."""

    split: int = 32
    """Number of units per bin."""
    step: int = 16
    """Number of bins that the destination requests at a time, in addition to the units it needs."""


class ReplicateOptions(SwitchOptions, frozen=True, tag=True):
    """`replicate`: a standby holds copies; at its takeover, records go to it at once."""

    interval: int = 1
    """Number of batches after which the source sends the changed keys to the standby."""
    standby: bool = False
    """Whether a warm standby waits for the order to take over."""


class RestartOptions(msgspec.Struct, frozen=True, tag=True):
    """`restart`: the whole instance moves to another site, and no route changes."""


class RestoreOptions(msgspec.Struct, frozen=True, tag=True):
    """`restore`: the source is lost; the routers replay their logs to the destination."""

    ends: frozenset[str] = frozenset()
    """Migrations that the restoration ends."""
    parties: frozenset[str] = frozenset()
    """Instances that must discard the restored keys: the lost instance, and the other ends of those migrations."""
    floor: int = 0
    """Migrations with a lower number are over, except those in `open`: no message of them has an effect any more."""
    open: frozenset[str] = frozenset()


Options = HandoverOptions | PushOptions | FetchOptions | ReplicateOptions | RestartOptions | RestoreOptions


def number_of(id: str) -> int:
    """The number in a migration's id, which grows with every order: 12 of m12, of m12.3 and of its turn m12/1. An id
    without a number counts as a later order's."""
    found = re.search(r"\d+", id)
    return int(found[0]) if found else sys.maxsize
