"""Connections through an emulated link: delay, rate, loss and cuts of `core/link.py`, around any connection.

    send ──▶ on the line until the link has carried it ──▶ the real connection ──▶ receiver
    receive ◀── on the line back, likewise ◀────────────── its answers

For the embedded run and for tests. A frame is one piece of the link: it arrives whole, once and in order. A cut breaks
the connection, and lets no new one be made until it is mended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

from whimbrel.core.errors import Unavailable
from whimbrel.core.link import Line, Link
from whimbrel.transport.connection import Connect, Connection


class EmulatedLink:
    """One direction of a link between two places, with the way back of the answers."""

    def __init__(self, name: str, link: Link, connect: Connect, now_us: Callable[[], int]) -> None:
        """`name` seeds the link's randomness: the same run has the same delays."""
        self.name, self.link, self.now_us = name, link, now_us
        self.random = Random(name)
        self._connect, self.is_cut = connect, False
        self.sent = 0
        """Bytes that have gone out, with retransmissions."""
        self._open: _Emulated | None = None

    def connect(self, wake: Callable[[], None]) -> Connection:
        """A connection through the link. Raises `Unavailable` while it is cut."""
        self.check()
        self._open = _Emulated(self, self._connect(wake))
        return self._open

    def cut(self, is_cut: bool) -> None:
        """Cut the link, or mend it."""
        self.is_cut = is_cut
        if is_cut and self._open is not None:
            self._open.is_broken = True

    def check(self) -> None:
        """Raise `Unavailable` while the link is cut."""
        if self.is_cut:
            raise Unavailable(f"the link {self.name} is cut")


class _Emulated:
    """One connection."""

    def __init__(self, link: EmulatedLink, inner: Connection) -> None:
        self._link, self._inner = link, inner
        self.is_broken = False
        self._there, self._back = _Way(link), _Way(link)

    def send(self, frame: bytes) -> None:
        self._check()
        self._link.sent += self._there.put(frame)

    def receive(self) -> bytes | None:
        self._check()
        while (frame := self._there.take()) is not None:
            self._inner.send(frame)
        self._collect()
        return self._back.take()

    def _collect(self) -> None:
        """Put the answers on their way. If the inner connection has ended, they still arrive."""
        try:
            while (answer := self._inner.receive()) is not None:
                self._back.put(answer)
        except Unavailable:
            if not self._back.frames:
                raise

    @property
    def due_us(self) -> int | None:
        moments = (self._there.due_us, self._back.due_us, self._inner.due_us)
        return min((moment for moment in moments if moment is not None), default=None)

    def close(self) -> None:
        self._inner.close()

    def _check(self) -> None:
        self._link.check()
        if self.is_broken:
            raise Unavailable(f"the link {self._link.name} was cut")


class _Way:
    """The frames that are on one direction of the link, each with the moment of its arrival."""

    def __init__(self, link: EmulatedLink) -> None:
        self._link, self._line = link, Line()
        self.frames: deque[tuple[int, bytes]] = deque()

    def put(self, frame: bytes) -> int:
        link = self._link
        self._line = link.link.send(len(frame), link.now_us(), self._line, link.random)
        self.frames.append((self._line.arrives_us, frame))
        return self._line.cost

    def take(self) -> bytes | None:
        if self.frames and self.frames[0][0] <= self._link.now_us():
            return self.frames.popleft()[1]
        return None

    @property
    def due_us(self) -> int | None:
        return self.frames[0][0] if self.frames else None
