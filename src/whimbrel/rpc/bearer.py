"""The secret in a request: its value at the time of the call, and once more if it has been rotated since."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from whimbrel.rpc.access import Credential, value_of


class Bearer(httpx.Auth):
    """Adds a secret to each request."""

    def __init__(self, credential: Credential) -> None:
        self._credential = credential

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """As httpx calls it."""
        shown = value_of(self._credential)
        request.headers["Authorization"] = f"Bearer {shown}"
        response = yield request
        if response.status_code == httpx.codes.UNAUTHORIZED and (now := value_of(self._credential)) != shown:
            request.headers["Authorization"] = f"Bearer {now}"
            yield request
