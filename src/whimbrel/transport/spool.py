"""The outgoing spool: the appends of this place to the logs of one other place, durable until they are durable there.

    producer ──append──▶ spool ──▶ sender ──▶ link ──▶ receiver ──append──▶ a log of the other place
                           ▲                                 │
                           └──────── trimmed up to ◀── acknowledged

One spool per destination and class (`RECORDS`, `STATE`): one order for everything that goes there in that class. It
lies in a log, so several processes of a place may append to it. Its counts are bytes: the backlog of the spool is what
is still to be sent.

    DATA lane       appends, in the order in which the other place will make them
    CONTROL lane    one entry: the spool's deployment, from which place it goes to which, and its class

An entry in the log is an `Outgoing`, or the name of the file that has it (large.py): the first byte says which.

Repetitions. A spool trims what the other place has acknowledged, and can compare less than the log at the other end.
So a writer's last append is compared here; an earlier one that is repeated crosses the link once more and is compared
there, unless the writer `replays`: then it is dropped here. A difference found here raises `Diverged`; one found there
stops the sender.

Bounded. Above `limit` bytes an append raises `SpoolFull`, a `Retry`: back-pressure for the producer, long before the
disk is full. An empty spool takes any entry of at most `ENTRY` bytes.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from contextlib import suppress
from zlib import crc32

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Diverged, Refused, SpoolFull, Trimmed
from whimbrel.core.names import check_name
from whimbrel.log.chunks import chunked
from whimbrel.log.contract import Entry, Lane, Log
from whimbrel.log.large import LargeEntries

LIMIT = 4 << 30
"""Bytes that a spool holds, by default."""
ENTRY = 16 << 20
"""Maximum bytes of one append: a receiver must have room for it in memory."""
MiB = 1 << 20
RECORDS, STATE = "records", "state"
"""The two classes of what goes to a place, each with a spool, a sender and a connection of its own: records, which are
urgent, and the state of keys, which is large. Neither waits for the other, and state yields the link to records."""
KINDS = ("", RECORDS, STATE)
"""`""`: one spool for everything."""


class Outgoing(msgspec.Struct, frozen=True, array_like=True):
    """One append to a log of the other place."""

    log: str
    lane: Lane
    writer: str
    counter: int
    count: int
    blob: bytes
    replays: bool = True
    """Whether the other log may have trimmed it already. A first append may be sent twice, so it is True for it."""


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """An `Outgoing` that is in a file."""

    file: str
    checksum: int


INLINE, FILE = b"\0", b"\1"


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """To whom a spool belongs."""

    deployment: str
    here: str
    there: str
    kind: str = ""
    """The class of what it carries, one of `KINDS`."""

    def __str__(self) -> str:
        what = f", {self.kind}" if self.kind else ""
        return f"deployment {self.deployment!r}, from {self.here} to {self.there}{what}"


class OutgoingSpool:
    """The spool to one place, for producers and for its sender. Safe to use from several threads and processes."""

    def __init__(self, log: Log, owner: Owner, limit: int = LIMIT, large: LargeEntries | None = None) -> None:
        """`large`: where large entries are; without it they are in the log as well.

        Raises `Refused` if the log is a spool of another deployment, or between other places.
        """
        check_name("place", owner.here)
        check_name("place", owner.there)
        if owner.kind not in KINDS:
            raise Refused(f"a spool carries {RECORDS!r}, {STATE!r}, or everything (''), not {owner.kind!r}")
        self.log, self.owner, self.limit = log, owner, limit
        self.appended = threading.Event()
        """Set by each append through this object: it wakes the sender's thread."""
        self._large, self._read = large, deque[tuple[int, str]]()
        self._lock = threading.Lock()
        self._repeater, self._repeated = f"repetitions/{uuid.uuid4().hex}", 0
        _own(log, owner)

    # ── Writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def append(
        self, log: str, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane, replays: bool
    ) -> int | None:
        """Append to a log of the other place, as `Appendable.append`. Returns the position in the spool, or None."""
        if count < 0:
            raise Refused(f"an entry cannot hold {count} records")
        if len(blob) > ENTRY:
            raise Refused(f"an append of {writer} to {log} has {len(blob):,} bytes; a spool takes at most {ENTRY:,}")
        name = _named(check_name("log", log), lane, writer)
        last = self.log.counter(name)
        if counter < last and not replays:
            again = wire.pack(Outgoing(log, lane, writer, counter, count, blob, replays=False))
            self._repeat(again)
            return None
        first = wire.pack(Outgoing(log, lane, writer, counter, count, blob))
        file = self._large.name(name, counter, len(first)) if self._large is not None else None
        if counter > last:
            self._check_room(len(first))
            if self._large is not None and file is not None:
                self._large.write(file, first)
        entry = INLINE + first if file is None else FILE + wire.pack(Stored(file, crc32(first)))
        position = self.log.append(entry, count=len(first), writer=name, counter=counter, replays=replays)
        self.appended.set()
        return position

    def counter(self, log: str, writer: str, lane: Lane) -> int:
        """The last counter of a writer's appends to a log of the other place; -1 if there are none."""
        return self.log.counter(_named(log, lane, writer))

    def _repeat(self, again: bytes) -> None:
        """Send an earlier append once more, so that the other place compares it."""
        self._check_room(len(again))
        with self._lock:
            self.log.append(INLINE + again, count=len(again), writer=self._repeater, counter=self._repeated)
            self._repeated += 1
        self.appended.set()

    def _check_room(self, size: int) -> None:
        waiting = self.waiting
        if waiting and waiting + size > self.limit:
            raise SpoolFull(
                f"the spool to {self.owner.there} holds {waiting / MiB:,.1f} MiB of at most {self.limit / MiB:,.1f}: "
                f"{self.owner.there} is out of reach, or slower than what is sent to it"
            )

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waiting(self) -> int:
        """Bytes that have been appended, and not acknowledged by the other place."""
        while True:
            with suppress(Trimmed):  # acknowledged between the two calls: try again
                return self.log.backlog(self.log.head())

    @property
    def is_empty(self) -> bool:
        """Whether the other place has everything."""
        return self.log.head() >= self.log.tail()

    def head(self) -> int:
        """The first position that is not acknowledged."""
        return self.log.head()

    def entries(self, start: int, size: int) -> list[bytes]:
        """The appends from `start` on, as bytes, with at most `size` bytes together; at least one, if there is one.

        For the spool's one sender: a file that was read is removed when its entry is trimmed.
        """
        if start >= self.log.tail():
            return []
        end = min(self.log.within(start, size), self.log.advance(start, size))  # bytes in the log, and with files
        return [self._content(entry) for entry in self.log.read(start, end)]

    def _content(self, entry: Entry) -> bytes:
        if entry.blob[:1] == INLINE:
            return entry.blob[1:]
        stored = wire.unpack(entry.blob[1:], Stored)
        if self._large is None:
            raise Refused(
                f"entry {entry.position} is in the file {stored.file}, and this spool was opened without files"
            )
        if not self._read or self._read[-1][0] < entry.position:
            self._read.append((entry.position, stored.file))
        return self._large.read(stored.file, stored.checksum)

    def trim(self, position: int) -> None:
        """Drop what the other place has acknowledged."""
        self.log.trim(position)
        while self._large is not None and self._read and self._read[0][0] < position:
            self._large.remove(self._read.popleft()[1])

    def sweep(self) -> None:
        """Remove files that a crash has left. For the spool's one sender, when it starts."""
        if self._large is not None:
            self._large.sweep(self._files, self.log.counter)

    def _files(self) -> set[str]:
        entries = chunked(self.log, self.log.head())
        return {wire.unpack(entry.blob[1:], Stored).file for entry in entries if entry.blob[:1] == FILE}

    def close(self) -> None:
        """Close the log."""
        self.log.close()


class RemoteLog:
    """A log of another place, for its writers: an `Appendable`."""

    def __init__(self, spool: OutgoingSpool, name: str) -> None:
        self._spool, self.name = spool, check_name("log", name)

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.DATA, replays: bool = False
    ) -> int | None:
        """Append to the spool: durable here at once, and there once the sender has carried it.

        Returns the position in the spool, not in the log; None if the append is a repetition.
        """
        return self._spool.append(
            self.name, blob, count=count, writer=writer, counter=counter, lane=lane, replays=replays
        )

    def counter(self, writer: str, lane: Lane = Lane.DATA) -> int:
        """The last counter of a writer here: what it appended is there, or on the way."""
        return self._spool.counter(self.name, writer, lane)

    def writers(self, lane: Lane = Lane.DATA) -> dict[str, int]:
        """All writers here to that lane, with the last counter of each."""
        start = _named(self.name, lane, "")
        found = self._spool.log.writers()
        return {name.removeprefix(start): counter for name, counter in found.items() if name.startswith(start)}


def _named(log: str, lane: Lane, writer: str) -> str:
    """The writer's name in the spool."""
    return f"{log}/{lane.name}/{writer}"


def _own(log: Log, owner: Owner) -> None:
    """Write the owner into a new spool; compare it in one that exists."""
    try:
        log.append(wire.pack(owner), count=0, writer="owner", counter=0, lane=Lane.CONTROL)
    except Diverged as error:
        found = wire.unpack(log.read(0, 1, Lane.CONTROL)[0].blob, Owner)
        raise Refused(
            f"this spool belongs to {found}, not to {owner}: its data directory was copied or mixed up; "
            "nothing of it is sent"
        ) from error
