"""A forwarder: carries messages through a link, in one direction.

    append ──▶ spool ──▶ pieces, each on its way as long as the link says ──▶ inbox of the destination

What is appended lies in the spool, a log, until all of it has arrived; a forwarder that died starts again there. An
entry of a batch's messages goes piece by piece, so that a key need not wait for all that travels in the same entry.

Pieces are numbered such that whoever repeats, in whatever cut, is recognised by the inbox: a piece's number is made of
the entry's number and the place of the piece's last message, the last piece being `WHOLE`. The inbox's counter so says
at which message to go on; and it makes no difference whether an entry came piece by piece or, appended directly, as a
whole.
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
from whimbrel.log.codec import ROWS, Content, encode_messages, messages
from whimbrel.log.kept import kept

LOGGER = logging.getLogger("whimbrel.site")
PIECE_US = 20_000
"""A piece is as many messages as go out in this time, and at least one."""
AHEAD_US = 50_000
"""How long before the link is free the next entry is fetched."""
FIRST, MOST = 0.2, 1.0
"""Seconds until something that could not be delivered is tried again: at first, and at most."""
LOOK = 1.0
"""Seconds between looks for what another process has appended."""
WHOLE = ROWS - 1
"""The number of an entry's last piece: above every place that a message can have."""


class Sending(msgspec.Struct, frozen=True):
    """A spool's entry: an append that is to happen in the control lane of the destination's inbox."""

    source: str
    destination: str
    writer: str
    counter: int
    messages: bytes


def number(counter: int, place: int = WHOLE) -> int:
    """The counter, in the inbox, of the piece of an entry that ends at this place."""
    return counter * ROWS + place


class LinkSpool:
    """A spool, as those see it who append to it. Its forwarder may run in another process."""

    def __init__(self, log: Log) -> None:
        self.spool = log

    def append(self, sending: Sending) -> int | None:
        """Take messages over. A spool counts bytes where other logs count records: its backlog is what is under way."""
        return self.spool.append(
            wire.pack(sending),
            count=size_of(messages(sending.messages)),
            writer=f"{sending.writer} to {sending.destination}",
            counter=sending.counter,
        )

    @property
    def done(self) -> int:
        """The first position that has not arrived whole."""
        return self.spool.head()

    def tail(self) -> int:
        """The first position that nobody has written yet."""
        return self.spool.tail()

    def sendings(self) -> list[tuple[int, Sending]]:
        """What has not arrived whole, each with its position."""
        start = self.done
        while True:
            try:
                return [(entry.position, wire.unpack(entry.blob, Sending)) for entry in self.spool.read(start)]
            except Trimmed as gone:  # some of it has arrived just now
                start = gone.head


class Forwarder(LinkSpool):
    """One direction of a link. `step` does what is due; `start` lets a thread do so all the time."""

    def __init__(self, name: str, link: Link, spool: Log, inbox_of: Callable[[str], Log]) -> None:
        super().__init__(spool)
        self.name, self.link, self._inbox_of = name, link, inbox_of
        self.is_cut = False
        self.error: Exception | None = None
        self._backoff = Backoff(f"the link {name}", LOGGER, first=FIRST, most=MOST)
        self.sent = 0
        """Bytes that have gone through, with those that went out again."""
        self._done = spool.head()
        self._through = 0  # bytes of that entry which have arrived
        self._left: int | None = None  # bytes under way when it was stopped: its file may be gone since
        self._way: deque[_Piece] = deque()
        self._taken, self._line, self._random = self._done, Line(), Random(name)
        self._lock = threading.Lock()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; what is under way goes on at the next start."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._left = self.under_way
        self.spool.close()

    def append(self, sending: Sending) -> int | None:
        """Take messages over."""
        position = super().append(sending)
        self._wake.set()
        return position

    @property
    def done(self) -> int:
        """The first position that has not arrived whole."""
        return self._done

    def cut(self, is_cut: bool) -> None:
        """Cut the link, or mend it. What is on it then is sent again; once cut, nothing more arrives."""
        with self._lock:
            self.is_cut = is_cut
            self._recall()
        self._wake.set()

    @property
    def under_way(self) -> int:
        """Bytes that have been taken over and not delivered."""
        if self._left is not None:
            return self._left
        with self._lock:
            return self.spool.backlog(self.done) - self._through

    @property
    def is_idle(self) -> bool:
        """Whether everything has arrived."""
        return self.done >= self.spool.tail()

    # ── Under way ────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, now_us: int) -> int | None:
        """Do all that is due now; return when there will be more, None if not before something changes."""
        with self._lock:
            if self.is_cut:
                return None
            free_us = self._send(now_us)
            while self._way and self._way[0].due_us <= now_us:
                self._deliver(self._way[0])
                self._way.popleft()
            due_us = self._way[0].due_us if self._way else None
            return min((moment for moment in (free_us, due_us) if moment is not None), default=None)

    def _send(self, now_us: int) -> int | None:
        """Put onto the link what it has room for; return when to come again, None if the spool is empty."""
        while self._line.free_us <= now_us + AHEAD_US:
            entries = self.spool.read(self._taken, self._taken + 1)
            if not entries:
                return None
            for piece in self._pieces(wire.unpack(entries[0].blob, Sending)):
                self._line = self.link.send(piece.size, now_us, self._line, self._random)
                self._way.append(piece._replace(due_us=self._line.arrives_us, cost=self._line.cost))
            self._taken += 1
        return self._line.free_us - AHEAD_US

    def _pieces(self, sending: Sending) -> list[_Piece]:
        """What has not arrived of an entry; if all has, a piece of nothing, so that the entry ends all the same."""
        every = messages(sending.messages)
        arrived = self._inbox_of(sending.destination).counter(sending.writer, Lane.CONTROL)
        first = min(max(arrived - number(sending.counter, -1), 0), len(every))
        if self._taken == self.done:
            self._through = size_of(every[:first])
        groups = _grouped(every[first:], self.link.bytes_in(PIECE_US))
        ends = [*accumulate(map(len, groups), initial=first - 1)][1:-1]
        return [_Piece(sending, end, one, size_of(one)) for end, one in zip([*ends, WHOLE], groups, strict=True)]

    def _deliver(self, piece: _Piece) -> None:
        writer, counter = piece.sending.writer, number(piece.sending.counter, piece.place)
        if piece.messages:
            blob, count = encode_messages(piece.messages), len(piece.messages)
            inbox = self._inbox_of(piece.sending.destination)
            inbox.append(blob, count=count, writer=writer, counter=counter, lane=Lane.CONTROL)
        self.sent += piece.cost
        self._through += piece.size
        if piece.place == WHOLE:
            self.spool.trim(self._done + 1)
            self._done, self._through = self._done + 1, 0

    def _recall(self) -> None:
        """Forget what is on the link; it is in the spool."""
        self._way.clear()
        self._taken, self._line = self.done, Line()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                due_us = self.step(_now_us())
            except Retry as error:
                with self._lock:
                    self._recall()
                self._stopping.wait(self._backoff.failed(error))
            except Exception as error:  # told by whoever waits
                self.error = kept(LOGGER, f"the link {self.name} has failed for good", error)
                return
            else:
                self._backoff.succeeded()
                self._wake.wait(LOOK if due_us is None else max(due_us - _now_us(), 0) / 1e6)


class _Piece(NamedTuple):
    sending: Sending
    place: int
    messages: list[Content]
    size: int
    cost: int = 0
    due_us: int = 0


def size_of(messages: list[Content]) -> int:
    """Bytes of messages: of their bodies, for the rest is how they lie in logs here."""
    return sum(len(body) for _, _, body in messages)


def _grouped(messages: list[Content], limit: int | None) -> list[list[Content]]:
    """As few groups as the limit allows, each of one message at least; one group of nothing if there is none."""
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
