"""The spool of an instance's savings: what its parts have posted to the central store, until it is there.

    DATA lane       posts, one entry a batch, written by the instance's sink
    CONTROL lane    which savings count, written by whoever hears it from the gate

The instance's site writes, the gateway carries it to the store (store/uploader.py): neither ever waits for the other.
What counts stands behind what was posted: an instance posts before it speaks.
"""

from __future__ import annotations

import msgspec

from whimbrel.core import wire
from whimbrel.core.record import Saved
from whimbrel.log.contract import Lane, Log


class Confirmed(msgspec.Struct, frozen=True):
    """A saving counts, since then."""

    saved: Saved
    at_us: int


class Spool:
    """One instance's spool, as those see it who write to it."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def append(self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.CONTROL) -> int | None:
        """Take posts over. An entry counts as many as it has bytes: how far behind a spool is, is told in bytes."""
        return self._log.append(blob, count=len(blob), writer=writer, counter=counter)

    def confirm(self, saved: Saved, at_us: int) -> None:
        """A saving counts. It may be heard more than once."""
        blob, writer = wire.pack(Confirmed(saved, at_us)), f"{saved.src}/{saved.part}"
        self._log.append(blob, count=1, writer=writer, counter=saved.number, lane=Lane.CONTROL)
