"""The REST API over `Control`: paths, bodies, answers. Only passes on and translates.

Every answer is JSON, also that to a call that is refused (`problems.py`). A POST may carry an `Idempotency-Key`:
sent again with the same key it has no second effect and gets the same answer, also after a restart.
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
"""Seconds between two looks at a migration that somebody waits for."""
LONGEST = 60.0
"""Seconds that one call may wait; a client that wants more calls again."""

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
    """The API as an ASGI application, behind its guard. `who`: whose token something is. `stopping`: when set, nobody
    waits any more."""
    return Guard(make_app(control, stopping or threading.Event()), who, limit)


def make_app(control: Control, stopping: threading.Event) -> FastAPI:
    """The API without its guard."""
    app = FastAPI(
        title="Whimbrel",
        description="Orders for a running application.",
        docs_url=None,  # the pages would be loaded from elsewhere
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
    app.add_exception_handler(WhimbrelError, _tell)
    app.add_exception_handler(Exception, _tell)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(HTTPException, _tell_http)
    return app


# ── Once ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def named(call: Call, idempotency_key: Annotated[str | None, Header(pattern="^[!-~]{1,200}$")] = None) -> Request:
    """The request that a call is: who sends it, and its name, if it has one."""
    user: User | None = call.scope.get(USER)
    by = "over REST" if user is None else f"{visible(user.name)} over REST"
    said = hashlib.sha256(f"{call.method} {call.url.path}\n".encode() + await call.body()).hexdigest()
    return Request(idempotency_key, said, by)


Named = Annotated[Request, Depends(named)]


class Once:
    """Answers each request that has a name once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._under_way: set[str] = set()
        self._lock = threading.Lock()

    def order(self, request: Request, act: Callable[[], Receipt]) -> Receipt:
        """The receipt of an order, which is remembered together with what it control."""
        with self._answering(request) as found:
            return act() if found is None else found

    def tell(self, request: Request, act: Callable[[], object]) -> None:
        """Do something that may be repeated; it is remembered when it is done."""
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
                raise Retry(f"the request {name!r} is being answered; ask again in a moment")
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
        """How things are."""
        return control.status()

    @router.get("/sites")
    def sites() -> list[SiteStatus]:
        """The sites, with what is there."""
        return views.sites(control)

    @router.get("/stages")
    def stages() -> list[StageStatus]:
        """The stages, with their instances."""
        return views.stages(control)

    @router.get("/stages/{stage}/routes")
    def routes(stage: str, apart: Annotated[int, Query(ge=0, le=10_000)] = 100) -> list[Route]:
        """Who owns what of a stage; `apart`: how many keys to name that are routed singly."""
        return views.routes(control, stage, apart)

    return router


class Room:
    """For so many calls that wait; one more is told to come again."""

    def __init__(self, most: int) -> None:
        self._most, self._here = most, 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in it. Used by the one thread that serves."""
        if self._here >= self._most:
            raise Unavailable(f"{self._most} calls wait for migrations already; ask again later, or without wait=")
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
        act = lambda: _receipt(control.migrate(body.stage, to=body.to, request=request, **body.given("stage", "to")))  # noqa: E731
        return once.order(request, act)

    @router.post("/stages/{stage}/scale")
    def scale(stage: str, body: Scale, request: Named) -> Receipt:
        """Let so many instances of a stage share the keys at a site."""
        return once.order(request, lambda: _receipt(control.scale(stage, request=request, **body.given())))

    @router.post("/sites/{site}/drain")
    def drain(site: str, body: Drain, request: Named) -> Receipt:
        """Move everything away from a site."""
        return once.order(request, lambda: _receipt(*control.drain(site, request=request, **body.given()).values()))

    @router.get("/migrations")
    def migrations() -> list[MigrationStatus]:
        """All migrations, in the order in which they were ordered."""
        return views.migrations(control)

    @router.get("/migrations/{id:path}/story")
    def story(id: str) -> list[str]:
        """What happened in a migration, a line each."""
        return control.story(id)

    @router.post("/migrations/{id:path}/abort")
    def abort(id: str, body: Abort, request: Named) -> MigrationStatus:
        """Call a migration off, if it is not too late."""
        once.tell(request, lambda: control.abort(id, body.reason, by=request.by))
        return views.migration(control, id)

    @router.post("/migrations/{id:path}/take_over")
    def take_over(id: str, request: Named) -> MigrationStatus:
        """Let a warm standby take its keys over."""
        once.tell(request, lambda: control.take_over(id, by=request.by))
        return views.migration(control, id)

    @router.get("/migrations/{id:path}")
    async def migration(
        call: Call, id: str, wait: Annotated[float, Query(ge=0, le=LONGEST)] = 0, warm: bool = False
    ) -> MigrationStatus:
        """A migration as it is; with `wait`, when it is over (or `warm`), at the latest after so many seconds."""
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
        once.tell(request, lambda: control.cut(body.site, body.other))
        return Receipt()

    @router.post("/links/mend")
    def mend(body: Pair, request: Named) -> Receipt:
        """Mend the link between two sites."""
        once.tell(request, lambda: control.mend(body.site, body.other))
        return Receipt()

    return router


def _instances(control: Control, once: Once) -> APIRouter:
    router = APIRouter(prefix="/instances/{instance}")

    @router.get("/state")
    def state(instance: str) -> InstanceStatus:
        """An instance as it is."""
        return views.state(control, instance)

    @router.get("/checkpoint")
    def checkpoint(instance: str) -> Checkpoint:
        """Where the checkpoint of an instance is, and its last batch."""
        return views.checkpoint(control, instance)

    @router.post("/checkpoint")
    def save(instance: str, request: Named) -> Checkpoint:
        """Let an instance, and with it its stage, save what has changed to the central store, now."""
        once.tell(request, lambda: control.save(instance))
        return views.checkpoint(control, instance)

    @router.post("/pause")
    def pause(instance: str, request: Named) -> InstanceStatus:
        """Let an instance end its batch and stand still."""
        once.tell(request, lambda: control.pause(instance))
        return views.state(control, instance)

    @router.post("/resume")
    def resume(instance: str, request: Named) -> InstanceStatus:
        """Let an instance go on."""
        once.tell(request, lambda: control.resume(instance))
        return views.state(control, instance)

    @router.post("/invoke")
    def invoke(instance: str, body: Invoke, request: Named) -> Receipt:
        """Let an instance at a site go on with what this one had, from saved state."""
        return once.order(
            request, lambda: _receipt(control.invoke(instance, body.site, body.checkpoint, request=request))
        )

    @router.post("/detach")
    def detach(instance: str, request: Named) -> Receipt:
        """Take an instance out of its stage."""
        return once.order(request, lambda: _receipt(control.detach(instance, request=request)))

    return router


def _receipt(*handles: Handle) -> Receipt:
    return Receipt([id for handle in handles for id in handle.ids], [line for handle in handles for line in handle.why])


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _tell(call: Call, error: Exception) -> JSONResponse:
    return _answer(*problem_of(error))


async def _tell_invalid(call: Call, error: Exception) -> JSONResponse:
    """What does not fit the schema: the first thing that is wrong, and where."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(place) for place in first["loc"])
    status, problem = problem_of(Refused(f"{where}: {first['msg']}"))
    return _answer(400 if first["type"] == "json_invalid" else status, problem)


async def _tell_http(call: Call, error: Exception) -> JSONResponse:
    """What the framework itself refuses."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _answer(*problem_of(UnknownName("path", call.url.path, [])))
    _, problem = problem_of(Refused(f"{call.method} {call.url.path}: {error.detail}"))
    return _answer(error.status_code, problem, error.headers)


def _answer(status: int, problem: Problem, headers: Any = None) -> JSONResponse:
    again = {"Retry-After": "1"} if status == 503 else {}
    return JSONResponse(msgspec.to_builtins(problem), status, {**again, **(headers or {})})
