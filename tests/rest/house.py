"""An application that is served, without Spark: everything is real but the queries, which only stand there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

import whimbrel as wb
from tests.app.waiting import until
from whimbrel.api.server import ApiServer
from whimbrel.core.operator import Emit
from whimbrel.deploy.embedded import App

KEYS = [f"k{n:02}" for n in range(12)]
SITES = ["cloud", "edge-1", "edge-2"]


class Count(wb.Operator):
    """Counts."""

    class State(wb.State):
        """How many."""

        n: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One more."""


class Standing:
    """In place of a query: it can be started and stopped, and does nothing else."""

    progress: tuple[float, ...] = ()
    batch_ms = 500.0
    backlog = 0
    exception = None
    is_drained = False
    spec = SimpleNamespace(max_records=1000, trigger_ms=500.0)

    def __init__(self) -> None:
        self.is_active = False

    def start(self) -> None:
        self.is_active = True

    def stop(self) -> None:
        self.is_active = False

    def wait(self) -> None:
        """It has nothing to get ready."""


class House:
    """The application, its server, and calls to it."""

    def __init__(self, app: App, server: ApiServer) -> None:
        self.app, self.server = app, server
        self.http = httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"})

    def post(self, path: str, body: Any = None, name: str | None = None) -> httpx.Response:
        headers = {} if name is None else {"Idempotency-Key": name}
        return self.http.post(path, json={} if body is None else body, headers=headers)

    def count(self) -> int:
        """How many migrations were ever ordered."""
        return len(self.app.control.stages["count"].coordinator.migrations)


@contextmanager
def standing(data: Path, sites: list[str] = SITES, store: str | None = None) -> Iterator[App]:
    """Such an application; all its keys have come."""
    pipeline = wb.Pipeline("p", source=[{"k": key} for key in KEYS], key="k").stage("count", Count())
    nothing: Any = SimpleNamespace(stop=lambda: None)
    settings: dict[str, Any] = {"keep": False, "trigger": "0 seconds", "max_backlog": 10, "watch": lambda *seen: None}
    app = App(pipeline, sites, data, temporary=False, spark=nothing, store=store, **settings)
    for site in app.sites.values():
        site._make = lambda instance, checkpoint: Standing()  # type: ignore[assignment,return-value]
    try:
        app.start()
        until(lambda: len(app.first.gateway.keys) == len(KEYS), "all keys have come")
        yield app
    finally:
        app.stop()


@contextmanager
def served(data: Path, store: str | None = None, **options: Any) -> Iterator[House]:
    """Such an application, served."""
    with standing(data, store=store) as app:
        house = House(app, app.serve(**options))
        with house.http:
            yield house
