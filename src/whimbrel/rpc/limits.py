"""Limits on connections: how long a request may take to arrive, and how many connections a server accepts.

    connected ──HEAD s──▶ the head of a request is there ──BODY s──▶ its body is there ──▶ answered ──KEEP s──▶ closed

The server closes a connection that sends a byte now and then (a "slow loris") when the time for the whole head or body
is over: further bytes do not extend it. uvicorn itself limits only the time between two requests (keep-alive), so its
protocol gets two more timers. Above `CONNECTIONS` a new connection is closed at once, so that existing ones are served.

Not limited: how slowly an answer is read. A caller without a token gets answers that fit into any socket's buffer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD, BODY, KEEP, HANDSHAKE = 10.0, 60.0, 5, 10.0
"""Seconds until a request's head is complete, then its body; until the next request begins; for the TLS handshake."""
CONNECTIONS = 256
"""Concurrent connections of one server."""
WAITING = 64
"""Concurrent calls of one server that wait for a migration."""
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
        """As uvicorn calls it. Bytes behind the request may be the beginning of the next."""
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio calls it."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Run a timer for the head or body that is being received, from its beginning."""
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
    """An event loop whose servers limit the time of the TLS handshake."""

    async def create_server(self, *given: Any, **named: Any) -> Any:
        """As asyncio's."""
        if named.get("ssl") is not None:
            named.setdefault("ssl_handshake_timeout", HANDSHAKE)
        return await super().create_server(*given, **named)
