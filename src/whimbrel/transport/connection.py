"""A connection from a place to another, as a sender sees it: frames go out, frames come back, both in order.

Three implementations: `LocalConnection` (a receiver in the same process), `SocketConnection` (sockets.py: TLS), and
around either of them an emulated link (emulated.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from whimbrel.core.errors import Unavailable
from whimbrel.transport.receiver import Receiver, Session


class Connection(Protocol):
    """One connection. It fails once and for all: after an `Unavailable` the sender closes it and makes a new one."""

    def send(self, frame: bytes) -> None:
        """Hand over a frame. May block while the other side does not read; raises `Unavailable` if it is broken.

        It may arrive although this raises, and need not arrive although it does not.
        """

    def receive(self) -> bytes | None:
        """The next frame that has arrived, None: none yet. Raises `Unavailable` when no more can come."""

    @property
    def due_us(self) -> int | None:
        """When to call `receive` again; None: the connection calls `wake` then."""

    def close(self) -> None:
        """Close it; what is on the way may be lost."""


Connect = Callable[[Callable[[], None]], Connection]
"""Makes a connection, given what it calls (from any thread) when a frame has arrived. Raises `Unavailable`."""


class LocalConnection:
    """A connection to a receiver in the same process: what is sent is answered at once."""

    due_us = None

    def __init__(self, session: Session) -> None:
        self._session = session
        self._answers: deque[bytes] = deque()

    def send(self, frame: bytes) -> None:
        """Let the receiver take a frame."""
        if self._session.is_over:
            raise Unavailable("the receiver has ended the connection")
        self._answers.append(self._session.answer(frame))

    def receive(self) -> bytes | None:
        """The next answer."""
        if self._answers:
            return self._answers.popleft()
        if self._session.is_over:
            raise Unavailable("the receiver has ended the connection")
        return None

    def close(self) -> None:
        """Nothing is open."""


def local(receiver: Receiver, caller: str) -> Connect:
    """Connections of the place `caller` to a receiver in the same process."""
    return lambda wake: LocalConnection(receiver.session(caller))
