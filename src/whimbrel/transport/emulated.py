"""Connections through an emulated link: delay, rate, loss and cuts of `core/link.py`, around any connection.

    send ──▶ on the line until the link has carried it ──▶ the real connection ──▶ receiver
    receive ◀── on the line back, likewise ◀────────────── its answers

For the embedded run and for tests. A frame is one piece of the link: it arrives whole, once and in order. All
connections through a link share its rate: a frame waits for those that were sent before it, whoever sent them. A cut
breaks the connections, and lets no new one be made until it is mended.
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
        self._open: list[_Emulated] = []
        self._there, self._back = _Direction(), _Direction()

    def connect(self, wake: Callable[[], None]) -> Connection:
        """A connection through the link. Raises `Unavailable` while it is cut."""
        self.check()
        inner = self._connect(wake)
        self._open = [one for one in self._open if one.is_open]
        if not self._open:  # what was on the way for closed connections is gone
            self._there, self._back = _Direction(), _Direction()
        self._open.append(_Emulated(self, inner, self._there, self._back))
        return self._open[-1]

    def cut(self, is_cut: bool) -> None:
        """Cut the link, or mend it."""
        self.is_cut = is_cut
        if is_cut:
            for one in self._open:
                one.is_open = False

    def check(self) -> None:
        """Raise `Unavailable` while the link is cut."""
        if self.is_cut:
            raise Unavailable(f"the link {self.name} is cut")


class _Emulated:
    """One connection."""

    def __init__(self, link: EmulatedLink, inner: Connection, there: _Direction, back: _Direction) -> None:
        self._link, self._inner = link, inner
        self.is_open = True
        self._there, self._back = _Way(link, there), _Way(link, back)

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
        self.is_open = False
        self._inner.close()

    def _check(self) -> None:
        self._link.check()
        if not self.is_open:
            raise Unavailable(f"the link {self._link.name} was cut")


class _Direction:
    """One direction of a link: the line that its connections share."""

    def __init__(self) -> None:
        self.line = Line()


class _Way:
    """The frames of one connection that are on one direction of the link, each with the moment of its arrival."""

    def __init__(self, link: EmulatedLink, direction: _Direction) -> None:
        self._link, self._direction = link, direction
        self.frames: deque[tuple[int, bytes]] = deque()

    def put(self, frame: bytes) -> int:
        link = self._link
        line = self._direction.line = link.link.send(len(frame), link.now_us(), self._direction.line, link.random)
        self.frames.append((line.arrives_us, frame))
        return line.cost

    def take(self) -> bytes | None:
        if self.frames and self.frames[0][0] <= self._link.now_us():
            return self.frames.popleft()[1]
        return None

    @property
    def due_us(self) -> int | None:
        return self.frames[0][0] if self.frames else None
