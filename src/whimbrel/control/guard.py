"""What stands before the API, for every call: the token is right, and the body is small enough to be read.

Plain ASGI. Who has no token learns nothing, not even which paths there are, and nothing of what he sends is read.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from whimbrel.control.problems import Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY = 1 << 20
"""Bytes of the largest body that is taken, unless told."""
PATIENCE = 8
"""How many times as many bytes are thrown away, so that a client can read why, before the connection is closed."""

NO_TOKEN = Problem(
    "Refused",
    "no token, or a wrong one",
    "send 'Authorization: Bearer TOKEN'; the token is in the file 'token' of the data directory",
)


class Guard:
    """Lets calls through to an ASGI application that have the token and a body within the limit."""

    def __init__(self, app: ASGI, token: str, limit: int = BODY) -> None:
        self._app, self._limit = app, limit
        self._wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there are no others here
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._wanted):
            await _answer(send, 401, NO_TOKEN, (b"www-authenticate", b"Bearer"))
            return
        body = await self._read(receive)
        if body is None:
            problem = Problem(
                "Refused", f"the body has more than {self._limit} bytes", "send less, e.g. bins instead of keys"
            )
            await _answer(send, 413, problem, (b"connection", b"close"))
            return
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, never more than the limit of it at a time; None if it is larger."""
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= self._limit:
                chunks.append(chunk)
            else:
                chunks.clear()
            if not message.get("more_body", False) or size > PATIENCE * self._limit:
                return None if size > self._limit else b"".join(chunks)


async def _answer(send: Send, status: int, problem: Problem, *headers: tuple[bytes, bytes]) -> None:
    body = msgspec.json.encode(problem)
    given = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": given})
    await send({"type": "http.response.body", "body": body})
