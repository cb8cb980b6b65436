"""The sender: carries the spool to one place, in calls of `step`. It has no thread and no clock of its own.

    no connection ──connect, Hello──▶ greeting ──Welcome──▶ streaming ──┐ batches out, acknowledgements back
          ▲                              │                      │ ▲─────┘
          └───── back-off ◀── Failed(retry), or broken ─────────┘
    Failed(refused, diverged) from either: stopped, for good; the spool keeps everything

It sends the spool in order, at most `batch` bytes at a time (an entry may be larger), and does not wait for one
acknowledgement before the next batch: up to `window` bytes or `BATCHES` frames are in flight, so that a link with a
round trip of 40 ms is not idle. A sender of state yields the link to others (window.py): its window adapts, and large
batches go in pieces. It does not keep what is in flight: after a failure it reads it from the spool again, from the
first entry that is not acknowledged. Only what is acknowledged is trimmed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from whimbrel.core.errors import Corrupt, Retry, Unavailable, WhimbrelError
from whimbrel.log.backoff import Backoff, HeldUp
from whimbrel.transport.connection import Connect, Connection
from whimbrel.transport.protocol import (
    BATCH,
    VERSION,
    Ack,
    Batch,
    Compressor,
    Failed,
    Hello,
    Piece,
    Taken,
    Welcome,
    decode,
    encode,
)
from whimbrel.transport.spool import STATE, OutgoingSpool
from whimbrel.transport.window import WINDOW, FixedWindow, Window, YieldingWindow

LOGGER = logging.getLogger("whimbrel.transport")
BATCHES = 64
"""Frames in flight. Small appends that come in faster than they are acknowledged share batches beyond it."""
FIRST, MOST = 0.2, 5.0
"""Seconds until the next connection after a failure: at first, and at most."""


class _Sent(NamedTuple):
    end: int
    """The spool's entries below it have been sent whole."""
    size: int
    at_us: int
    more: bool = False
    """Whether it is a piece of a batch, and not the last."""


class Sender:
    """Carries one spool. One thread calls `step`; any thread may read the status."""

    def __init__(
        self,
        spool: OutgoingSpool,
        connect: Connect,
        wake: Callable[[], None] = lambda: None,
        *,
        window: int = WINDOW,
        batch: int = BATCH,
        yields: bool | None = None,
    ) -> None:
        """`wake` is called, from any thread, when `step` has something to do.

        `window`: bytes in flight, at most. `yields`: whether it leaves the link to others; None: if it sends state.
        """
        self.spool, self._connect, self._wake, self._most, self._batch = spool, connect, wake, window, batch
        self._yields = spool.owner.kind == STATE if yields is None else yields
        self.there = spool.owner.there
        self.error: WhimbrelError | None = None
        """Why it has stopped for good."""
        self.sent = 0
        """Bytes of frames handed to connections, with repetitions."""
        self._now_us = self._retry_us = 0
        self._backoff = Backoff(
            f"sending to {self.there}",
            LOGGER,
            first=FIRST,
            most=MOST,
            clock=lambda: self._now_us / 1e6,
            traced=False,
        )
        self._connection: Connection | None = None
        spool.sweep()
        self._forget()

    def _forget(self) -> None:
        """The state of a new connection."""
        self._is_welcome = False
        self._compressor = Compressor()
        self._acknowledged = self._next = self.spool.head()
        self._in_flight: deque[_Sent] = deque()
        self._bytes = 0
        self._window: Window = YieldingWindow(self._most) if self._yields else FixedWindow(self._most)
        self._rest, self._rest_end = memoryview(b""), 0

    # ── Status ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_connected(self) -> bool:
        """Whether the other place takes batches."""
        return self._is_welcome

    @property
    def in_flight(self) -> int:
        """Bytes that have been sent and not been acknowledged."""
        return self._bytes

    @property
    def window(self) -> int:
        """Bytes that may be in flight now."""
        return self._window.size

    def held_up(self) -> HeldUp | None:
        """Why nothing is sent now, if it is tried again later."""
        return self._backoff.status()

    # ── Work ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, now_us: int) -> int | None:
        """Do what can be done now; return when to call again, None: when woken.

        Raises `Refused` or `Stop` if the other place, or a damaged spool, does not allow to continue.
        """
        if self.error is not None:
            raise self.error
        self._now_us = now_us
        if now_us < self._retry_us:
            return self._retry_us
        try:
            connection = self._connection or self._open()
            self._take(connection)
            self._fill(connection)
            return connection.due_us
        except WhimbrelError as raised:
            error = self._explained(raised)
            self._drop()
            if not isinstance(error, Retry):
                self.error = error
                raise error from raised
            self._retry_us = now_us + round(self._backoff.failed(error) * 1e6)
            return self._retry_us

    def close(self) -> None:
        """Close the connection; the rest of the spool is sent by the next sender."""
        self._drop()

    def _open(self) -> Connection:
        self._forget()
        connection = self._connection = self._connect(self._wake)
        owner = self.spool.owner
        connection.send(encode(Hello(VERSION, owner.deployment, owner.here, owner.there, owner.kind)))
        return connection

    def _explained(self, error: WhimbrelError) -> WhimbrelError:
        """The last answer, if it says why the receiver has closed the connection that has just failed."""
        connection, answers = self._connection, 0
        with suppress(Unavailable, Corrupt):
            while connection is not None and answers <= BATCHES and (answer := connection.receive()) is not None:
                answers += 1
                if isinstance(frame := decode(answer), Failed):
                    return frame.error(self.there)
        return error

    def _drop(self) -> None:
        self._is_welcome, connection, self._connection = False, self._connection, None
        if connection is not None:
            with suppress(Retry):
                connection.close()
        self._in_flight.clear()
        self._bytes, self._rest = 0, memoryview(b"")

    def _take(self, connection: Connection) -> None:
        """Take the answers that have arrived; then trim what they acknowledge, once."""
        before = self._acknowledged
        while (answer := connection.receive()) is not None:
            try:
                frame = decode(answer)
            except Corrupt as error:
                raise Unavailable(f"{self.there} does not speak the transport's protocol: {error}") from error
            if isinstance(frame, Failed):
                raise frame.error(self.there)
            if isinstance(frame, Welcome) and frame.place == self.there and not self._is_welcome:
                self._is_welcome = True
            elif isinstance(frame, Ack) and self._acknowledged < frame.position <= self._next:
                self._acknowledge(frame.position)
            elif isinstance(frame, Taken) and self._in_flight and self._in_flight[0].more:
                self._answered()
            else:
                raise Unavailable(f"{self.there} sent {frame}, which does not fit: sent is all below {self._next}")
        if self._acknowledged > before:
            self.spool.trim(self._acknowledged)
            self._backoff.succeeded()
        elif self._is_welcome and self._backoff.error is not None and self.spool.is_empty:
            self._backoff.succeeded()  # not at each Welcome: a receiver with a full disk also says it

    def _acknowledge(self, position: int) -> None:
        self._acknowledged = position
        # A piece of the batch that begins at `position` is not meant: it has an answer of its own.
        while self._in_flight and self._in_flight[0].end + self._in_flight[0].more <= position:
            self._answered()

    def _answered(self) -> None:
        """The first frame in flight has its answer."""
        sent = self._in_flight.popleft()
        self._window.answered(sent.size, self._now_us - sent.at_us, self._bytes, self._now_us)
        self._bytes -= sent.size

    def _fill(self, connection: Connection) -> None:
        """Send frames until the window is full or the spool is empty."""
        while self._is_welcome and len(self._in_flight) < BATCHES and self._bytes < self._window.size:
            if (found := self._frame()) is None:
                return
            frame, end = found
            connection.send(frame)
            self.sent += len(frame)
            self._in_flight.append(_Sent(end, len(frame), self._now_us, more=end == self._next))
            self._next = end
            self._bytes += len(frame)

    def _frame(self) -> tuple[bytes, int] | None:
        """The next frame, and up to which position entries are sent with it: a batch, or a piece of one."""
        piece = self._window.piece
        if not self._rest:
            entries = self.spool.entries(self._next, self._batch)
            if not entries:
                return None
            whole, end = self._compressor.encode(Batch(self._next, entries)), self._next + len(entries)
            if piece is None or len(whole) <= piece:
                return whole, end
            self._rest, self._rest_end = memoryview(whole), end
        part, self._rest = self._rest[:piece], self._rest[piece:]
        more = len(self._rest) > 0
        return encode(Piece(bytes(part), more)), self._next if more else self._rest_end
