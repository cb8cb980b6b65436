"""A forwarder: sends messages through a link, in one direction.

    append ──▶ spool ──▶ pieces, each delayed as the link specifies ──▶ inbox of the destination

An entry stays in the spool, a log, until all of it has arrived; a restarted forwarder resumes there. An entry has the
messages of a batch and is sent piece by piece, so that a key need not wait for all others in the same entry.

A number is made of a batch and a message's place in it (log/carrier.py); an entry, and each piece of it, has the number
of its last message. So the inbox's counter shows at which message to continue, however an entry was cut; and it makes
no difference whether it came piece by piece or, appended directly, as a whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from random import Random
from typing import NamedTuple

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Retry, Trimmed
from whimbrel.core.link import Line, Link
from whimbrel.log import Lane, Log
from whimbrel.log.backoff import Backoff
from whimbrel.log.codec import Content, encode_messages, messages
from whimbrel.log.kept import kept

LOGGER = logging.getLogger("whimbrel.site")
PIECE_US = 20_000
"""A piece has as many messages as the link sends in this time, and at least one."""
AHEAD_US = 50_000
"""The next entry is fetched this long before the link is free."""
FIRST, MOST = 0.2, 1.0
"""Seconds until a failed delivery is retried: at first, and at most."""
LOOK = 1.0
"""Seconds between polls for entries that another process has appended."""


class Sending(msgspec.Struct, frozen=True):
    """An entry of a spool: a pending append to the control lane of the destination's inbox."""

    source: str
    destination: str
    writer: str
    counter: int
    """The number of the last message."""
    messages: bytes


class LinkSpool:
    """A spool, for its writers. Its forwarder may run in another process."""

    def __init__(self, log: Log) -> None:
        self.spool = log

    def append(self, sending: Sending, replays: bool = False) -> int | None:
        """Append messages. A spool counts bytes where other logs count records: its backlog is the bytes in transit."""
        return self.spool.append(
            wire.pack(sending),
            count=size_of(messages(sending.messages)),
            writer=f"{sending.writer} to {sending.destination}",
            counter=sending.counter,
            replays=replays,
        )

    @property
    def done(self) -> int:
        """The first position whose entry has not arrived completely."""
        return self.spool.head()

    def tail(self) -> int:
        """The first position that has not been written yet."""
        return self.spool.tail()

    def sendings(self) -> list[tuple[int, Sending]]:
        """The entries that have not arrived completely, each with its position."""
        start = self.done
        while True:
            try:
                return [(entry.position, wire.unpack(entry.blob, Sending)) for entry in self.spool.read(start)]
            except Trimmed as gone:  # some entries have just arrived
                start = gone.head


class Forwarder(LinkSpool):
    """One direction of a link. `step` does what is due; `start` runs a thread that calls it repeatedly."""

    def __init__(self, name: str, link: Link, spool: Log, inbox_of: Callable[[str], Log]) -> None:
        super().__init__(spool)
        self.name, self.link, self._inbox_of = name, link, inbox_of
        self.is_cut = False
        self.error: Exception | None = None
        self._backoff = Backoff(f"the link {name}", LOGGER, first=FIRST, most=MOST)
        self.sent = 0
        """Bytes that have gone through, including retransmissions."""
        self._done = spool.head()
        self._through = 0  # bytes of that entry which have arrived
        self._left: int | None = None  # bytes in transit when it was stopped: its file may be deleted since
        self._way: deque[Piece] = deque()
        self._taken, self._line, self._random = self._done, Line(), Random(name)
        self._lock = threading.Lock()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; the rest of the spool is sent after the next start."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._left = self.under_way
        self.spool.close()

    def append(self, sending: Sending, replays: bool = False) -> int | None:
        """Append messages and wake the thread."""
        position = super().append(sending, replays)
        self._wake.set()
        return position

    @property
    def done(self) -> int:
        """The first position whose entry has not arrived completely."""
        return self._done

    def cut(self, is_cut: bool) -> None:
        """Cut the link, or mend it. Pieces in transit are sent again; nothing arrives while it is cut."""
        with self._lock:
            self.is_cut = is_cut
            self._recall()
        self._wake.set()

    @property
    def under_way(self) -> int:
        """Bytes that have been appended and not delivered."""
        if self._left is not None:
            return self._left
        with self._lock:
            return self.spool.backlog(self.done) - self._through

    @property
    def is_idle(self) -> bool:
        """Whether everything has arrived."""
        return self.done >= self.spool.tail()

    # ── Delivery ─────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, now_us: int) -> int | None:
        """Do all that is due now; return when more will be due, None if not before something changes. Raises `Retry`
        if a log is unavailable: then the pieces in transit are sent again."""
        with self._lock:
            if self.is_cut:
                return None
            try:
                free_us = self._send(now_us)
                while self._way and self._way[0].due_us <= now_us:
                    self._deliver(self._way[0])
                    self._way.popleft()
            except Retry:
                self._recall()
                raise
            due_us = self._way[0].due_us if self._way else None
            return min((moment for moment in (free_us, due_us) if moment is not None), default=None)

    def _send(self, now_us: int) -> int | None:
        """Send what the link has capacity for; return when to call again, None if the spool is empty."""
        while self._line.free_us <= now_us + AHEAD_US:
            entries = self.spool.read(self._taken, self._taken + 1)
            if not entries:
                return None
            for piece in self._pieces(wire.unpack(entries[0].blob, Sending)):
                self._line = self.link.send(piece.size, now_us, self._line, self._random)
                self._way.append(piece._replace(due_us=self._line.arrives_us, cost=self._line.cost))
            self._taken += 1
        return self._line.free_us - AHEAD_US

    def _pieces(self, sending: Sending) -> list[Piece]:
        """The pieces of an entry that have not arrived; if all have, an empty piece, so that the entry is completed."""
        every = messages(sending.messages)
        start = sending.counter - len(every) + 1
        arrived = self._inbox_of(sending.destination).counter(sending.writer, Lane.CONTROL)
        first = min(max(arrived + 1 - start, 0), len(every))
        if self._taken == self.done:
            self._through = size_of(every[:first])
        groups = _grouped(every[first:], self.link.bytes_in(PIECE_US))
        ends = accumulate(map(len, groups), initial=start + first - 1)
        return [Piece(sending, end, one, size_of(one)) for end, one in zip([*ends][1:], groups, strict=True)]

    def _deliver(self, piece: Piece) -> None:
        if piece.messages:
            blob, count = encode_messages(piece.messages), len(piece.messages)
            inbox = self._inbox_of(piece.sending.destination)
            inbox.append(blob, count=count, writer=piece.sending.writer, counter=piece.counter, lane=Lane.CONTROL)
        self.sent += piece.cost
        self._through += piece.size
        if piece.is_last:
            self.spool.trim(self._done + 1)
            self._done, self._through = self._done + 1, 0

    def _recall(self) -> None:
        """Drop the pieces in transit; they are still in the spool."""
        self._way.clear()
        self._taken, self._line = self.done, Line()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                due_us = self.step(_now_us())
            except Retry as error:
                self._stopping.wait(self._backoff.failed(error))
            except Exception as error:  # reported in the status
                self.error = kept(LOGGER, f"the link {self.name} has failed for good", error)
                return
            else:
                self._backoff.succeeded()
                self._wake.wait(LOOK if due_us is None else max(due_us - _now_us(), 0) / 1e6)


class Piece(NamedTuple):
    """Some messages of an entry, in transit; `counter`: the number of the last one."""

    sending: Sending
    counter: int
    messages: list[Content]
    size: int
    cost: int = 0
    due_us: int = 0

    @property
    def is_last(self) -> bool:
        return self.counter == self.sending.counter


def size_of(messages: list[Content]) -> int:
    """Bytes of messages: of their bodies only, since the rest is the encoding of local logs."""
    return sum(len(body) for _, _, body in messages)


def _grouped(messages: list[Content], limit: int | None) -> list[list[Content]]:
    """As few groups as the limit allows, each with at least one message; one empty group if there is none."""
    groups: list[list[Content]] = [[]]
    size = 0
    for message in messages:
        size += len(message[2])
        if groups[-1] and limit is not None and size > limit:
            groups.append([])
            size = len(message[2])
        groups[-1].append(message)
    return groups


def _now_us() -> int:
    return time.monotonic_ns() // 1000
