"""Serves the API of an orchestrator that runs in this process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

from whimbrel.api.api import make_api
from whimbrel.api.guard import BODY
from whimbrel.api.tokens import Tokens
from whimbrel.orchestrator.control import Control
from whimbrel.rpc.access import announce, withdraw
from whimbrel.rpc.server import Server


class ApiServer(Server):
    """The API of a data directory, which holds the users' tokens and the server's address.

    `token`: the one with the role `operate`, as of the start.
    """

    def __init__(
        self,
        control: Control,
        data: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        limit: int = BODY,
    ) -> None:
        tokens = Tokens(data)
        self.data, self.token = data, tokens.prepare()
        stopping = threading.Event()
        api = make_api(control, tokens.who, limit=limit, stopping=stopping)
        super().__init__(api, host, port, certificate=certificate, key=key, stopping=stopping)

    def start(self, timeout: float = 30.0) -> Self:
        """As `Server.start`; then writes its address to the data directory."""
        super().start(timeout)
        announce(self.data, self.url)
        return self

    def stop(self) -> None:
        """As `Server.stop`."""
        withdraw(self.data)
        super().stop()

    def __repr__(self) -> str:
        return f"<api at {self.url}>"
