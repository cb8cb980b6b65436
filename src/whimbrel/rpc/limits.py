"""What one connection may take: how long a request may be on its way, and how many connections there may be.

    connected ──HEAD s──▶ the head of a request is there ──BODY s──▶ its body is there ──▶ answered ──KEEP s──▶ closed

Whoever sends a byte now and then (a "slow loris") is closed when the time for the whole piece is over: further bytes do
not prolong it. uvicorn itself limits only the time between two requests (keep-alive), so its protocol gets two timers
more. Above `CONNECTIONS` a new connection is closed at once, so that those that are there are served.

Not limited: how slowly an answer is read. A caller without a token gets answers that fit into any socket's buffer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD, BODY, KEEP, HANDSHAKE = 10.0, 60.0, 5, 10.0
"""Seconds until a request's head is there, then its body; until the next request begins; until TLS is agreed upon."""
CONNECTIONS = 256
"""Of one server, at the same time."""
WAITING = 64
"""Calls of one server that wait for a migration, at the same time."""
HEAD_BYTES = 16 << 10


class Limited(H11Protocol):
    """One connection to a server, with these limits."""

    head, body, most = HEAD, BODY, CONNECTIONS
    _due: asyncio.TimerHandle | None = None
    _state: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio calls it."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        """As asyncio calls it."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """As uvicorn calls it. What came behind the request may be the beginning of the next."""
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio calls it."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Let a timer run for the piece of a request that is on its way, from its beginning."""
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        if state is self._state:
            return
        self._stop()
        self._state = state
        seconds = {h11.IDLE: self.head, h11.SEND_BODY: self.body}.get(state)
        if seconds is not None:
            self._due = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due, self._state = None, None


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose servers do not wait long for TLS to be agreed upon."""

    async def create_server(self, *given: Any, **named: Any) -> Any:
        """As asyncio's."""
        if named.get("ssl") is not None:
            named.setdefault("ssl_handshake_timeout", HANDSHAKE)
        return await super().create_server(*given, **named)
