"""The log contract: an append-only, ordered, replayable sequence of entries.

Everything that must survive a crash on a record's way is in a log: the gateway's ingress, the inbox of each
instance, the outbox of each instance. A log does not interpret records; an entry is an opaque blob with the number of
records in it. The contract requires only what an embedded file, Kafka and NATS JetStream can all implement.

The positions of one lane of a log::

        trimmed            readable              not written yet
    ├──────────────┼──────────────────────────┼───────────────────▶
    0            head                        tail

    position 0 is the first entry ever; `head` is the first position that can still be read;
    `tail` is the first position that is not written yet. Positions are consecutive integers.

Rules for every backend (tests/contracts/test_log.py checks each backend against them):

1. Order: a lane's entries have one order, the same for every reader, for ever.
2. Idempotence: each writer numbers its appends to a lane with a counter that only grows. An append whose counter is
   not above the writer's last one is a repetition: it changes nothing. So a writer that does not know whether its
   append succeeded repeats it. The log verifies repetitions: it stores counter and checksum of each entry that is not
   trimmed, and of each writer's last. Other content under a stored counter raises `Diverged`. So does a counter below
   the last that is not stored, unless the writer passes `replays`: it starts from a snapshot and may be far behind.
3. Atomicity: an entry is there whole or not at all, whichever process dies.
4. Durability: when `append` returns, the entry survives the death of every process.
5. Lanes: `DATA` and `CONTROL` are two sequences in one log, independent in positions, counters and trimming.
6. Trim: `trim(p)` drops everything below p. It never moves head backwards, and never beyond the tail.
   Writers' counters survive it: trimming must not make an old append look new.
7. Readers: `commit` stores, under a reader's name, the position in each lane below which the reader has finished: the
   effects of every entry there are durable elsewhere. So a reader commits after the effect, never before it. Positions
   of several lanes are stored atomically. A position only grows: a lower one changes nothing, unless the reader passes
   `resets`, as it does at each start, because its own state decides what it has finished. A position above the tail, or
   below 0, is `Refused`. A position is as durable as an append through the same object; after a power failure that
   loses the last commits it is too low, and never above the tail.
   Trimming ignores positions, and positions do not trim. The log does not know which readers are still in use, and
   its owner may have to retain more than its readers need: the last outbox entry, the entries a restoration replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from whimbrel.core.errors import Diverged, Refused


class Lane(IntEnum):
    """The two sequences of a log: DATA for the records of keys, CONTROL for messages, which are read before them."""

    DATA = 0
    CONTROL = 1


class Entry(NamedTuple):
    """One append, as read from a log."""

    position: int
    records: int
    blob: bytes


class Append(msgspec.Struct, frozen=True):
    """The arguments of one `append`."""

    blob: bytes
    count: int
    writer: str
    counter: int
    lane: Lane = Lane.DATA
    replays: bool = False


class Appendable(Protocol):
    """The writer's interface of a log, or of a proxy to one."""

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.DATA, replays: bool = False
    ) -> int | None:
        """Append one entry of `count` records; return its position, or None if this counter was appended before.

        If it raises `Unavailable`, the entry may still be appended: repeat the append, and treat None as success.
        `replays`: the writer may repeat appends that the log has trimmed and can no longer compare.
        """


class Writable(Appendable, Protocol):
    """A log as its writers see it: they can continue after what they have appended. A log of another place is one."""

    def counter(self, writer: str, lane: Lane = Lane.DATA) -> int:
        """The writer's last counter in this lane, -1 if it never wrote: a restarted writer continues after it."""

    def writers(self, lane: Lane = Lane.DATA) -> dict[str, int]:
        """All writers that ever wrote to this lane, with the last counter of each."""


@runtime_checkable
class Batching(Protocol):
    """A log that makes several appends for little more than the price of one. Use it through `append_all`."""

    def append_all(self, appends: Sequence[Append]) -> list[int | None]:
        """As `append` for each, in order."""


def append_all(log: Appendable, appends: Sequence[Append]) -> list[int | None]:
    """Append several entries, in order; return what each `append` returns.

    If it raises, a prefix of them is appended: for `Diverged`, all before the one that differs. So repeat the whole.
    """
    if isinstance(log, Batching):
        return log.append_all(appends)
    return [
        log.append(
            one.blob, count=one.count, writer=one.writer, counter=one.counter, lane=one.lane, replays=one.replays
        )
        for one in appends
    ]


class Log(Writable, Protocol):
    """One log. Safe to use from several threads; several processes may open the same one."""

    def read(self, start: int, end: int | None = None, lane: Lane = Lane.DATA) -> list[Entry]:
        """The entries with start <= position < end, in order; `end` None means up to the tail; beyond it is nothing.

        Like `advance`, `within` and `backlog` it raises `Trimmed` if start is below the head: trimmed entries must not
        look as if they had never been written.
        """

    def advance(self, start: int, records: int, lane: Lane = Lane.DATA) -> int:
        """The furthest position such that the entries from `start` up to it hold at most `records` records.

        It includes at least one entry if there is one, so that a reader never starves on a large entry.
        """

    def within(self, start: int, size: int, lane: Lane = Lane.DATA) -> int:
        """The furthest position such that the entries from `start` up to it have at most `size` bytes; at least one."""

    def backlog(self, start: int, lane: Lane = Lane.DATA) -> int:
        """The number of records from `start` to the tail."""

    def head(self, lane: Lane = Lane.DATA) -> int:
        """The first position that can still be read."""

    def tail(self, lane: Lane = Lane.DATA) -> int:
        """The first position that is not written yet."""

    def trim(self, position: int, lane: Lane = Lane.DATA) -> None:
        """Drop the entries below `position`."""

    def commit(self, reader: str, positions: Mapping[Lane, int], *, resets: bool = False) -> None:
        """Store that a reader has finished everything below these positions. `resets`: a position may be lower now."""

    def committed(self, reader: str, lane: Lane = Lane.DATA) -> int | None:
        """The position that a reader has committed, None if it never did."""

    def readers(self, lane: Lane = Lane.DATA) -> dict[str, int]:
        """All readers that ever committed a position in this lane, with the position of each."""

    def lag(self, reader: str, lane: Lane = Lane.DATA) -> int:
        """The number of records from a reader's position, or from the head if that is higher, to the tail.

        For a reader that never committed, the lag is everything that can be read.
        """

    def close(self) -> None:
        """Release the resources of this object; the log itself stays, and using the object reopens it."""


def diverged(log: str, writer: str, counter: int, last: int, taken: str, given: str) -> Diverged:
    """The error for a repeated counter with other content; it names both contents."""
    return Diverged(
        f"{log}: {writer} repeats its append {counter} (its last is {last}) with other content: "
        f"the log has {taken}, the writer sent {given}. The writer runs from an older checkpoint, with changed code, "
        "or with an operator that is not deterministic; nothing was appended"
    )


def check_position(log: str, reader: str, lane: Lane, position: int, tail: int) -> None:
    """Raise `Refused` unless a reader can have reached this position."""
    if not 0 <= position <= tail:
        raise Refused(f"{log}: {reader} cannot have read up to position {position} of {lane.name}: it ends at {tail}")


def fitting(sizes: Iterable[int], size: int) -> int:
    """How many of these, in order, fit into `size` together; at least the first."""
    number = 0
    for one in sizes:
        size -= one
        if number and size < 0:
            break
        number += 1
    return number
