"""The port of a receiver: TLS connections of other places, each passed frame by frame to a session.

    accepted ──TLS handshake──▶ verified ──not revoked──▶ session: frame in, answer out

A place has one connection for each class of what it sends: a new one ends the one before it, which its sender has
given up.

Appending happens in threads beside the event loop: while a session appends one batch, the next one arrives. No more
than `QUEUE` frames wait for a session; then the socket is not read, and the sender's `send` blocks.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import WebSocketException

from whimbrel.core.errors import Unavailable, WhimbrelError
from whimbrel.transport.identity import Identity, told
from whimbrel.transport.protocol import FRAME, Failed, encode
from whimbrel.transport.receiver import Receiver
from whimbrel.transport.sockets import DEAD, OPEN, PING, EventLoop, shown

LOGGER = logging.getLogger("whimbrel.transport")
QUEUE = 2
"""Frames that wait for a session."""
THREADS = 32
"""Sessions that append at the same time."""
LOOK = 10.0
"""Seconds between two looks at the certificate's files."""


class ReceiverServer:
    """Serves a receiver on a port. Port 0 takes a free one."""

    def __init__(
        self, loop: EventLoop, receiver: Receiver, identity: Identity, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        """Raises `Unavailable` if the place's own certificate is not acceptable, or the port is taken."""
        identity.check()
        identity.peer(ssl.PEM_cert_to_DER_cert(identity.certificate.read_text()), receiver.place)
        self._loop, self._receiver, self._identity = loop, receiver, identity
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=f"receiver at {receiver.place}")
        self._open: dict[tuple[str, str], ServerConnection] = {}
        context = identity.server()
        context.sslobject_class = _Reporting
        try:
            self._server, self._renewing = loop.call(self._start(context, host, port))
        except OSError as error:
            raise Unavailable(f"{receiver.place} cannot listen on {host}:{port}: {error}") from error
        self.port: int = next(iter(self._server.sockets)).getsockname()[1]

    async def _start(self, context: ssl.SSLContext, host: str, port: int) -> tuple[Server, asyncio.Task[None]]:
        server = await serve(
            self._serve,
            host,
            port,
            ssl=context,
            ssl_handshake_timeout=OPEN,
            compression=None,
            open_timeout=OPEN,
            ping_interval=PING,
            ping_timeout=DEAD,
            close_timeout=1,
            max_size=FRAME + 64,
            max_queue=QUEUE,
            server_header=None,
        )
        return server, asyncio.get_running_loop().create_task(self._renew(context))

    async def _renew(self, context: ssl.SSLContext) -> None:
        """Load the files into the context when they have changed."""
        before = self._identity.changed()
        while True:
            await asyncio.sleep(LOOK)
            if (now := self._identity.changed()) != before:
                try:
                    self._identity.load(context)
                    before = now
                except Unavailable as error:  # half of them is written
                    LOGGER.warning("the new certificate of %s is not used yet: %s", self._receiver.place, error)

    async def _serve(self, connection: ServerConnection) -> None:
        with suppress(WebSocketException, OSError):
            try:
                await self._converse(connection)
            except WhimbrelError as error:  # revoked: no session, or no more
                LOGGER.warning("%s refuses a connection: %s", self._receiver.place, error)
                await connection.send(encode(Failed.of(error)))

    async def _converse(self, connection: ServerConnection) -> None:
        certificate, files = shown(connection.transport), self._identity.changed()
        caller = self._identity.peer(certificate)
        session, slot = self._receiver.session(caller), None
        waiting = asyncio.get_running_loop().call_later(OPEN, connection.transport.abort)
        try:
            async for frame in connection:
                if (now := self._identity.changed()) != files:  # it may have been revoked meanwhile
                    self._identity.peer(certificate)
                    files = now
                blob = frame if isinstance(frame, bytes) else frame.encode()
                answer = asyncio.get_running_loop().run_in_executor(self._pool, session.answer, blob)
                await connection.send(await answer)
                if session.is_over:
                    return
                if slot is None and session.kind is not None:
                    waiting.cancel()
                    slot = (caller, session.kind)
                    self._replace(slot, connection)
        finally:
            waiting.cancel()
            if slot is not None and self._open.get(slot) is connection:
                del self._open[slot]

    def _replace(self, slot: tuple[str, str], connection: ServerConnection) -> None:
        before = self._open.get(slot)
        self._open[slot] = connection
        if before is not None:
            before.transport.abort()

    def close(self) -> None:
        """Stop listening, end all connections, and wait for the appends in progress."""
        self._loop.call(self._stop())
        self._pool.shutdown()

    async def _stop(self) -> None:
        self._renewing.cancel()
        self._server.close()
        await self._server.wait_closed()


class _Reporting(ssl.SSLObject):
    """Logs why the certificate of a caller was refused, and lets the caller know.

    asyncio does neither: it closes the socket with TLS's alert still in its buffer. It sends the buffer when the
    handshake wants to read more, so the failure is reported as that, and raised when more comes or the time is up.
    """

    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            LOGGER.warning("a connection was refused: %s", told(error, "the caller"))
            self._failure = error
            raise ssl.SSLWantReadError from error
