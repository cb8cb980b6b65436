"""Serves an ASGI application from a thread of this process: bound before `start`, closed after `stop`."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn

from whimbrel.core.errors import Refused, Unavailable
from whimbrel.rpc.limits import HEAD_BYTES, KEEP, Limited, Loop
from whimbrel.rpc.tls import Tls

ASGI = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

GRACE = 5
"""Seconds that pending calls get when the server stops."""
WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""The address by which the machine itself reaches a server bound to all its addresses."""


class Server:
    """An ASGI application on a port, 0 for any free one. With `certificate` and `key`, PEM files, it uses TLS; with
    `ca` it accepts only clients whose certificate that authority has signed."""

    def __init__(
        self,
        app: ASGI,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        ca: str | Path | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        if (certificate is None) != (key is None):
            raise Refused("TLS needs both a certificate and its key: give two files, or neither")
        self._stopping = stopping or threading.Event()
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=GRACE,
            http=Limited,
            timeout_keep_alive=KEEP,
            h11_max_incomplete_event_size=HEAD_BYTES,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            ssl_ca_certs=None if ca is None else str(ca),
            ssl_cert_reqs=ssl.CERT_NONE if ca is None else ssl.CERT_REQUIRED,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            trusted = "" if ca is None else f", or {ca} is not a certificate of an authority"
            raise Refused(f"{certificate} and {key} are not a certificate with its key{trusted}: {error}") from error
        self._socket = _bound(host, port)
        address = self._socket.getsockname()
        shown = WILDCARDS.get(host, host)
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"{'http' if certificate is None else 'https'}://{shown}:{address[1]}"
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    @classmethod
    def between(cls, app: ASGI, tls: Tls | None, host: str = "127.0.0.1", port: int = 0) -> Self:
        """A server for other processes of the same deployment; with `tls`, only for those with a certificate."""
        if tls is None:
            return cls(app, host, port)
        return cls(app, host, port, certificate=tls.certificate, key=tls.key, ca=tls.ca)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(self._server.serve([self._socket]))

    def start(self, timeout: float = 30.0) -> Self:
        """Start the server; returns when it accepts calls."""
        self._thread.start()
        waited = threading.Event()
        while not self._server.started and self._thread.is_alive() and timeout > 0:
            waited.wait(0.01)
            timeout -= 0.01
        if not self._server.started:
            self.stop()
            raise Unavailable(f"{self.url} could not be served")
        return self

    def stop(self) -> None:
        """End the pending calls and close the port."""
        self._stopping.set()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise Refused(f"port must be 0 to 65535, got {port}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise Refused(f"{host!r} is not an address of this machine: {error}") from error
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise Unavailable(f"{host}:{port} cannot be served: {error}; choose another port, or 0 for any") from error
    return bound
