"""Connections over TLS: WebSocket messages, one for each frame, between a sender's thread and an event loop.

All sockets of a process live in one event loop in a thread of its own, for connections in both directions: TLS is
handled by one thread only, which OpenSSL requires, and a connection costs no thread. Senders block in `send` while the
other side does not read: that is the back-pressure.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from whimbrel.core.errors import Unavailable
from whimbrel.transport.identity import Identity, told

T = TypeVar("T")
OPEN = 10.0
"""Seconds until a connection is open."""
PING, DEAD = 10.0, 60.0
"""Seconds between two keep-alive pings, and until an unanswered one ends the connection. A slow receiver answers late:
what is in flight is ahead of the ping."""
ANSWER = 64 << 10
"""Maximum bytes of an answer."""


class EventLoop:
    """An event loop in a thread. `call` runs a coroutine in it, and waits for its result."""

    def __init__(self, name: str = "transport") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop. Not from the loop's own thread."""
        if not self._thread.is_alive():
            coroutine.close()
            raise Unavailable("the transport of this process has been stopped")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Stop the loop; close its connections before."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Dialer:
    """Makes connections to one place; pass `connect` to a sender."""

    def __init__(self, loop: EventLoop, identity: Identity, place: str, host: str, port: int) -> None:
        self._loop, self._identity, self.place, self.host, self.port = loop, identity, place, host, port

    def connect(self, wake: Callable[[], None]) -> SocketConnection:
        """Connect, and check that it is that place. Raises `Unavailable` with what is wrong."""
        self._identity.check()
        lost: list[Exception] = []
        try:
            return self._loop.call(self._open(wake, lost))
        except (OSError, WebSocketException, EOFError) as error:
            why = told(lost[0] if lost else error, self.place)
            why = why or f"{self.place} does not answer: {error or type(error).__name__}"
            raise Unavailable(f"{why} ({self.host}:{self.port})") from error

    async def _open(self, wake: Callable[[], None], lost: list[Exception]) -> SocketConnection:
        class Watched(ClientConnection):
            """A server refuses a certificate after the client's handshake: this keeps TLS's alert, which the library
            replaces by the end of the connection."""

            def connection_lost(self, exc: Exception | None) -> None:
                lost.extend([exc] if exc else [])
                super().connection_lost(exc)

        connection = await connect(
            "wss://whimbrel/",
            host=self.host,
            port=self.port,
            ssl=self._identity.client(),
            server_hostname=self.host,
            compression=None,
            proxy=None,
            open_timeout=OPEN,
            ping_interval=PING,
            ping_timeout=DEAD,
            close_timeout=1,
            max_size=ANSWER,
            max_queue=None,  # bounded by the batches in flight
            create_connection=Watched,
        )
        try:
            self._identity.peer(shown(connection.transport), self.place)
        except BaseException:
            connection.transport.abort()
            raise
        return SocketConnection(self._loop, connection, self.place, wake)


class SocketConnection:
    """One connection to another place."""

    due_us = None

    def __init__(self, loop: EventLoop, connection: ClientConnection, place: str, wake: Callable[[], None]) -> None:
        """Called in the loop."""
        self._loop, self._connection, self._place, self._wake = loop, connection, place, wake
        self._frames: deque[bytes] = deque()
        self._end: str | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            async for frame in self._connection:
                self._frames.append(frame if isinstance(frame, bytes) else frame.encode())
                self._wake()
            self._end = f"{self._place} has closed the connection"
        except (OSError, WebSocketException) as error:
            self._end = told(error, self._place) or f"the connection to {self._place} broke: {error}"
        finally:
            self._wake()

    def send(self, frame: bytes) -> None:
        """Hand a frame to the socket; blocks while its buffer is full."""
        try:
            self._loop.call(self._connection.send(frame))
        except (OSError, WebSocketException) as error:
            self._loop.call(self._ended())
            raise Unavailable(f"the connection to {self._place} broke: {error}") from error

    async def _ended(self) -> None:
        """Wait until what arrived before the end is there to be received."""
        await asyncio.wait([self._reading], timeout=OPEN)

    def receive(self) -> bytes | None:
        """The next answer. Those that arrived before the end come first."""
        with suppress(IndexError):
            return self._frames.popleft()
        if self._end is not None:
            raise Unavailable(self._end)
        return None

    def close(self) -> None:
        """Close the socket."""
        self._loop.call(self._close())

    async def _close(self) -> None:
        self._reading.cancel()
        await self._connection.close()


def shown(transport: asyncio.BaseTransport) -> bytes | None:
    """The certificate that the other side has shown, as DER."""
    tls = transport.get_extra_info("ssl_object")
    return tls.getpeercert(binary_form=True) if isinstance(tls, ssl.SSLObject) else None
