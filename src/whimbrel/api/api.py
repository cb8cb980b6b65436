"""The REST API over `Control`: paths, bodies, answers. Only forwards and translates.

Every answer is JSON, also that to a refused call (`problems.py`). A POST may carry an `Idempotency-Key`: sent again
with the same key it has no second effect and gets the same answer, also after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Header, Query, Security
from fastapi import Request as Call
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from whimbrel.api import views
from whimbrel.api.bodies import Abort, Drain, Invoke, Migrate, Pair, Scale
from whimbrel.api.guard import ASGI, BODY, USER, Guard
from whimbrel.api.problems import Problem, problem_of
from whimbrel.api.tokens import User
from whimbrel.core.errors import Refused, Retry, Unavailable, UnknownName, WhimbrelError
from whimbrel.core.text import visible
from whimbrel.orchestrator.control import Control
from whimbrel.orchestrator.handle import Handle
from whimbrel.orchestrator.orders import (
    Checkpoint,
    InstanceStatus,
    MigrationStatus,
    Receipt,
    Request,
    Route,
    SiteStatus,
    StageStatus,
)
from whimbrel.rpc.limits import WAITING

LOOK = 0.1
"""Seconds between two checks of a migration that a call waits for."""
LONGEST = 60.0
"""Seconds that one call may wait; a client that needs longer calls again."""

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 403, 404, 405, 409, 413, 422, 500, 503)
}


def make_api(
    control: Control,
    who: Callable[[str], User | None],
    *,
    limit: int = BODY,
    stopping: threading.Event | None = None,
) -> ASGI:
    """The API as an ASGI application, behind its guard. `who`: the user of a token. `stopping`: when set, waiting calls
    return."""
    return Guard(make_app(control, stopping or threading.Event()), who, limit)


def make_app(control: Control, stopping: threading.Event) -> FastAPI:
    """The API without its guard."""
    app = FastAPI(
        title="Whimbrel",
        description="Orders for a running application.",
        docs_url=None,  # these pages would load scripts from other hosts
        redoc_url=None,
        responses=PROBLEMS,
        dependencies=[Security(HTTPBearer(auto_error=False, description="The file `token` of the data directory."))],
    )
    once = Once(control)
    for router in (
        _looking(control),
        _moving(control, once, stopping),
        _links(control, once),
        _instances(control, once),
    ):
        app.include_router(router)
    app.add_exception_handler(WhimbrelError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    return app


# ── Once ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def named(call: Call, idempotency_key: Annotated[str | None, Header(pattern="^[!-~]{1,200}$")] = None) -> Request:
    """The request of a call: its sender, and its idempotency key, if it has one."""
    user: User | None = call.scope.get(USER)
    by = "over REST" if user is None else f"{visible(user.name)} over REST"
    digest = hashlib.sha256(f"{call.method} {call.url.path}\n".encode() + await call.body()).hexdigest()
    return Request(idempotency_key, digest, by)


Named = Annotated[Request, Depends(named)]


class Once:
    """Executes each request that has an idempotency key once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._under_way: set[str] = set()
        self._lock = threading.Lock()

    def order(self, request: Request, act: Callable[[], Receipt]) -> Receipt:
        """The receipt of an order, which is journalled together with its migrations."""
        with self._answering(request) as found:
            return act() if found is None else found

    def perform(self, request: Request, act: Callable[[], object]) -> None:
        """Do something idempotent; it is journalled when it is done."""
        with self._answering(request) as found:
            if found is None:
                act()
                if request.name is not None:
                    self._control.remember(request)

    @contextmanager
    def _answering(self, request: Request) -> Iterator[Receipt | None]:
        name = request.name
        if name is None:
            yield None
            return
        with self._lock:
            if name in self._under_way:
                raise Retry(f"the request {name!r} is being processed; retry in a moment")
            self._under_way.add(name)
        try:
            yield self._control.recall(request)
        finally:
            self._under_way.discard(name)


# ── Paths ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _looking(control: Control) -> APIRouter:
    router = APIRouter()

    @router.get("/status")
    def status() -> dict[str, Any]:
        """The status of the application."""
        return control.status()

    @router.get("/sites")
    def sites() -> list[SiteStatus]:
        """The sites, with their instances, keys and state."""
        return views.sites(control)

    @router.get("/stages")
    def stages() -> list[StageStatus]:
        """The stages, with their instances."""
        return views.stages(control)

    @router.get("/stages/{stage}/routes")
    def routes(stage: str, apart: Annotated[int, Query(ge=0, le=10_000)] = 100) -> list[Route]:
        """What each instance of a stage owns; `apart`: how many individually routed keys to name."""
        return views.routes(control, stage, apart)

    return router


class Room:
    """Limits the number of waiting calls to `most`; a further call is refused and may retry."""

    def __init__(self, most: int) -> None:
        self._most, self._here = most, 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Occupy one of the places. Used only by the serving thread."""
        if self._here >= self._most:
            raise Unavailable(f"{self._most} calls already wait for migrations; retry later, or without wait=")
        self._here += 1
        try:
            yield
        finally:
            self._here -= 1


def _moving(control: Control, once: Once, stopping: threading.Event) -> APIRouter:
    router, room = APIRouter(), Room(WAITING)

    @router.post("/migrations")
    def migrate(body: Migrate, request: Named) -> Receipt:
        """Move keys of a stage to a site."""
        order = body.given("stage", "to")
        return once.order(
            request, lambda: _receipt(control.orders.migrate(body.stage, to=body.to, request=request, **order))
        )

    @router.post("/stages/{stage}/scale")
    def scale(stage: str, body: Scale, request: Named) -> Receipt:
        """Distribute the keys of a stage at a site over a number of instances."""
        return once.order(request, lambda: _receipt(control.orders.scale(stage, request=request, **body.given())))

    @router.post("/sites/{site}/drain")
    def drain(site: str, body: Drain, request: Named) -> Receipt:
        """Move everything away from a site."""
        return once.order(
            request, lambda: _receipt(*control.orders.drain(site, request=request, **body.given()).values())
        )

    @router.get("/migrations")
    def migrations() -> list[MigrationStatus]:
        """All migrations, in the order in which they were ordered."""
        return views.migrations(control)

    @router.get("/migrations/{id:path}/story")
    def story(id: str) -> list[str]:
        """The events of a migration, one per line."""
        return control.story(id)

    @router.post("/migrations/{id:path}/abort")
    def abort(id: str, body: Abort, request: Named) -> MigrationStatus:
        """Abort a migration, if it has not passed its point of no return."""
        once.perform(request, lambda: control.abort(id, body.reason, by=request.by))
        return views.migration(control, id)

    @router.post("/migrations/{id:path}/take_over")
    def take_over(id: str, request: Named) -> MigrationStatus:
        """Let a warm standby take over its keys."""
        once.perform(request, lambda: control.take_over(id, by=request.by))
        return views.migration(control, id)

    @router.get("/migrations/{id:path}")
    async def migration(
        call: Call, id: str, wait: Annotated[float, Query(ge=0, le=LONGEST)] = 0, warm: bool = False
    ) -> MigrationStatus:
        """A migration now; with `wait`, when it is over (or `warm`), at the latest after that many seconds."""
        if not wait:
            return await run_in_threadpool(views.migration, control, id)
        deadline = time.monotonic() + wait
        with room.place():
            while True:
                await run_in_threadpool(control.wait_for, id, 0.0, warm=warm)
                found = await run_in_threadpool(views.migration, control, id)
                is_ready = found.is_over or (warm and found.is_standby)
                if is_ready or stopping.is_set() or await call.is_disconnected() or time.monotonic() >= deadline:
                    return found
                await asyncio.sleep(LOOK)

    return router


def _links(control: Control, once: Once) -> APIRouter:
    router = APIRouter()

    @router.post("/links/cut")
    def cut(body: Pair, request: Named) -> Receipt:
        """Cut the link between two sites."""
        once.perform(request, lambda: control.cut(body.site, body.other))
        return Receipt()

    @router.post("/links/mend")
    def mend(body: Pair, request: Named) -> Receipt:
        """Restore the link between two sites."""
        once.perform(request, lambda: control.mend(body.site, body.other))
        return Receipt()

    return router


def _instances(control: Control, once: Once) -> APIRouter:
    router = APIRouter(prefix="/instances/{instance}")

    @router.get("/state")
    def state(instance: str) -> InstanceStatus:
        """The current state of an instance."""
        return views.state(control, instance)

    @router.get("/checkpoint")
    def checkpoint(instance: str) -> Checkpoint:
        """Where the checkpoint of an instance is, and its last batch."""
        return views.checkpoint(control, instance)

    @router.post("/checkpoint")
    def save(instance: str, request: Named) -> Checkpoint:
        """Order an increment of an instance, and of its whole stage, to the central store now."""
        once.perform(request, lambda: control.save(instance))
        return views.checkpoint(control, instance)

    @router.post("/pause")
    def pause(instance: str, request: Named) -> InstanceStatus:
        """Let an instance finish its batch, then pause it."""
        once.perform(request, lambda: control.pause(instance))
        return views.state(control, instance)

    @router.post("/resume")
    def resume(instance: str, request: Named) -> InstanceStatus:
        """Resume a paused instance."""
        once.perform(request, lambda: control.resume(instance))
        return views.state(control, instance)

    @router.post("/invoke")
    def invoke(instance: str, body: Invoke, request: Named) -> Receipt:
        """Restore all keys of an instance at another instance of a site, from saved state."""
        return once.order(
            request, lambda: _receipt(control.orders.invoke(instance, body.site, body.checkpoint, request=request))
        )

    @router.post("/detach")
    def detach(instance: str, request: Named) -> Receipt:
        """Remove an instance from its stage."""
        return once.order(request, lambda: _receipt(control.orders.detach(instance, request=request)))

    return router


def _receipt(*handles: Handle) -> Receipt:
    return Receipt([id for handle in handles for id in handle.ids], [line for handle in handles for line in handle.why])


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _answer_error(call: Call, error: Exception) -> JSONResponse:
    return _answer(*problem_of(error))


async def _answer_invalid(call: Call, error: Exception) -> JSONResponse:
    """The answer to a call that does not match the schema: the first error, and where it is."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(place) for place in first["loc"])
    status, problem = problem_of(Refused(f"{where}: {first['msg']}"))
    return _answer(400 if first["type"] == "json_invalid" else status, problem)


async def _answer_http(call: Call, error: Exception) -> JSONResponse:
    """The answer to a call that the framework itself refuses."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _answer(*problem_of(UnknownName("path", call.url.path, [])))
    _, problem = problem_of(Refused(f"{call.method} {call.url.path}: {error.detail}"))
    return _answer(error.status_code, problem, error.headers)


def _answer(status: int, problem: Problem, headers: Any = None) -> JSONResponse:
    again = {"Retry-After": "1"} if status == 503 else {}
    return JSONResponse(msgspec.to_builtins(problem), status, {**again, **(headers or {})})
