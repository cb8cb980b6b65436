"""The sender: carries the spool to one place, in calls of `step`. It has no thread and no clock of its own.

    no connection ──connect, Hello──▶ greeting ──Welcome──▶ streaming ──┐ batches out, acknowledgements back
          ▲                              │                      │ ▲─────┘
          └───── back-off ◀── Failed(retry), or broken ─────────┘
    Failed(refused, diverged) from either: stopped, for good; the spool keeps everything

It sends the spool in order, at most `batch` bytes at a time (an entry may be larger), and does not wait for one
acknowledgement before the next batch: up to `window` bytes or `BATCHES` batches are in flight, so that a link with a
round trip of 40 ms is not idle. It does not keep what is in flight: after a failure it reads it from the spool again,
from the first entry that is not acknowledged. Only what is acknowledged is trimmed.
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
from whimbrel.transport.protocol import BATCH, VERSION, Ack, Batch, Compressor, Failed, Hello, Welcome, decode, encode
from whimbrel.transport.spool import OutgoingSpool

LOGGER = logging.getLogger("whimbrel.transport")
WINDOW = 16 << 20
"""Bytes in flight: 400 MB/s over a round trip of 40 ms."""
BATCHES = 64
"""Batches in flight. Small appends that come in faster than they are acknowledged share batches beyond it."""
FIRST, MOST = 0.2, 15.0
"""Seconds until the next connection after a failure: at first, and at most."""


class _Sent(NamedTuple):
    end: int
    size: int


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
    ) -> None:
        """`wake` is called, from any thread, when `step` has something to do."""
        self.spool, self._connect, self._wake, self._window, self._batch = spool, connect, wake, window, batch
        self.there = spool.owner.there
        self.error: WhimbrelError | None = None
        """Why it has stopped for good."""
        self.sent = 0
        """Bytes of frames handed to connections, with repetitions."""
        self._now_us = self._retry_us = 0
        self._backoff = Backoff(
            f"sending to {self.there}", LOGGER, first=FIRST, most=MOST, clock=lambda: self._now_us / 1e6
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

    # ── Status ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_connected(self) -> bool:
        """Whether the other place takes batches."""
        return self._is_welcome

    @property
    def in_flight(self) -> int:
        """Bytes that have been sent and not been acknowledged."""
        return self._bytes

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
        connection.send(encode(Hello(VERSION, owner.deployment, owner.here, owner.there)))
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
        self._bytes = 0

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
            else:
                raise Unavailable(f"{self.there} sent {frame}, which does not fit: sent is all below {self._next}")
        if self._acknowledged > before:
            self.spool.trim(self._acknowledged)
            self._backoff.succeeded()
        elif self._is_welcome and self._backoff.error is not None and self.spool.is_empty:
            self._backoff.succeeded()  # not at each Welcome: a receiver with a full disk also says it

    def _acknowledge(self, position: int) -> None:
        self._acknowledged = position
        while self._in_flight and self._in_flight[0].end <= position:
            self._bytes -= self._in_flight.popleft().size

    def _fill(self, connection: Connection) -> None:
        """Send batches until the window is full or the spool is empty."""
        while self._is_welcome and len(self._in_flight) < BATCHES and self._bytes < self._window:
            entries = self.spool.entries(self._next, self._batch)
            if not entries:
                return
            frame = self._compressor.encode(Batch(self._next, entries))
            connection.send(frame)
            self.sent += len(frame)
            self._next += len(entries)
            self._in_flight.append(_Sent(self._next, len(frame)))
            self._bytes += len(frame)
