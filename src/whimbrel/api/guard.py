"""The guard before the API: for every call it checks the token, the role of the token, and the size of the body.

Plain ASGI. Without a token a caller learns nothing, not even which paths exist, and its body is not read. A token with
the role `read` may only use methods that change nothing: every order is a POST.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from whimbrel.api.problems import Problem
from whimbrel.api.tokens import User

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY = 1 << 20
"""Bytes of the largest accepted body, unless configured."""
DISCARD_FACTOR = 8
"""How many times that many bytes are read and discarded, so that the client can read the error, before closing."""

USER = "whimbrel.user"
"""The key of the calling `User` in an ASGI scope."""
LOOKING = ("GET", "HEAD", "OPTIONS")
"""The methods that change nothing."""
SCHEME = b"Bearer "

NO_TOKEN = Problem(
    "Refused",
    "no token, or a wrong one",
    "send 'Authorization: Bearer TOKEN'; the token is in the file 'token' of the data directory",
)


class Gone(Exception):
    """The client has closed the connection before its request was complete."""


class Guard:
    """Passes calls to an ASGI application if their token permits it and their body is within the limit."""

    def __init__(self, app: ASGI, who: Callable[[str], User | None], limit: int = BODY) -> None:
        """`who`: the user of a token, now."""
        self._app, self._who, self._limit = app, who, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there are no others here
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        user = self._who(given.removeprefix(SCHEME).decode("latin-1")) if given.startswith(SCHEME) else None
        if user is None:
            await _answer(send, 401, NO_TOKEN, (b"www-authenticate", b"Bearer"))
            return
        if user.role != "operate" and scope["method"] not in LOOKING:
            await _answer(send, 403, _may_only_read(user, scope))
            return
        try:
            body = await self._read(receive)
        except Gone:  # an incomplete request is dropped, though it may look complete
            return
        if body is None:
            problem = Problem(
                "Refused", f"the body has more than {self._limit} bytes", "send less, e.g. bins instead of keys"
            )
            await _answer(send, 413, problem, (b"connection", b"close"))
            return
        read = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return read.pop() if read else await receive()

        await self._app({**scope, USER: user}, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None if it is larger than the limit. Never holds more than the limit in memory."""
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= self._limit:
                chunks.append(chunk)
            else:
                chunks.clear()
            if not message.get("more_body", False) or size > DISCARD_FACTOR * self._limit:
                return None if size > self._limit else b"".join(chunks)


def _may_only_read(user: User, scope: Scope) -> Problem:
    return Problem(
        "Refused",
        f"the token of {user.name} may only read, and {scope['method']} {scope['path']} is an order",
        "use a token of the role operate: the file 'token' of the data directory, or whimbrel token add NAME",
    )


async def _answer(send: Send, status: int, problem: Problem, *headers: tuple[bytes, bytes]) -> None:
    body = msgspec.json.encode(problem)
    given = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": given})
    await send({"type": "http.response.body", "body": body})
