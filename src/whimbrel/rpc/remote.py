"""A port between two processes: the methods of an object as HTTP calls.

    port.start("s-1", wait=False) ──POST /internal/start: a wire message──▶ site.start("s-1", wait=False)
                                  ◀──200: the answer, or 500: a `Fault`───

Nothing is declared twice: arguments and answer of a method are typed in its Protocol (ports.py), and both sides
validate messages by these types. An error raised there is raised here, as the same type. These calls are between
processes of one deployment, each of which has a credential (access.py); users have a separate interface, with its own
rules. A process that uses TLS sends nothing to one that does not.
"""

from __future__ import annotations

import hmac
import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import httpx
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from whimbrel.core import errors, wire
from whimbrel.core.errors import Bug, Refused, Retry, Unavailable, WhimbrelError
from whimbrel.log.kept import kept
from whimbrel.rpc.access import Credential, value_of
from whimbrel.rpc.bearer import Bearer
from whimbrel.rpc.tls import Tls

LOGGER = logging.getLogger("whimbrel.rpc")
P = TypeVar("P")
PATH = "/internal"
LIMIT = 64 << 20
"""The most bytes of a message."""
CONNECT = 2.0
"""Seconds to connect."""
ANSWER_TIMEOUT = 10.0
"""Seconds to wait for an answer, unless a method takes longer."""


FAULTS = (httpx.codes.BAD_REQUEST, httpx.codes.FORBIDDEN, httpx.codes.INTERNAL_SERVER_ERROR)
"""The statuses of an answer that is a `Fault`."""


class Fault(msgspec.Struct, frozen=True):
    """An error as an answer: the name of its type, and its message."""

    kind: str
    message: str


class Method(NamedTuple):
    """The arguments of a method, as a message type, and the type of its answer."""

    call: type[msgspec.Struct]
    answer: Any
    signature: inspect.Signature


def methods(port: type) -> dict[str, Method]:
    """The methods of a Protocol."""
    found = {}
    for name, function in inspect.getmembers(port, inspect.isfunction):
        if name.startswith("_"):
            continue
        hints, signature = get_type_hints(function, include_extras=True), inspect.signature(function)
        fields = [
            (one.name, hints[one.name]) if one.default is one.empty else (one.name, hints[one.name], one.default)
            for one in list(signature.parameters.values())[1:]
        ]
        found[name] = Method(msgspec.defstruct(name, fields), hints["return"], signature)
    return found


# ── Client side ──────────────────────────────────────────────────────────────────────────────────────────────────────


def remote(
    port: type[P],
    url: Callable[[], str],
    credential: Credential,
    timeouts: Mapping[str, float] | None = None,
    tls: Tls | None = None,
) -> P:
    """A client of an object that offers this port. `url` returns its address at each call, or raises `Unavailable`.

    `timeouts`: by method, how many seconds its answer may take. `tls`: own certificate, and the trusted authority.
    """
    return cast(P, _Remote(methods(port), url, credential, timeouts or {}, tls))


class _Remote:
    def __init__(
        self,
        offered: dict[str, Method],
        url: Callable[[], str],
        credential: Credential,
        timeouts: Mapping[str, float],
        tls: Tls | None,
    ) -> None:
        self._methods, self._url, self._timeouts, self._scheme = offered, url, timeouts, "https" if tls else "http"
        # No proxies: the server is on this machine, or named by the user.
        self._http = httpx.Client(auth=Bearer(credential), verify=tls.client() if tls else True, trust_env=False)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._methods:
            raise AttributeError(name)
        return partial(self._ask, name)

    def _ask(self, name: str, *values: Any, **named: Any) -> Any:
        method = self._methods[name]
        arguments = method.signature.bind(self, *values, **named).arguments
        call = method.call(**{key: value for key, value in arguments.items() if key != "self"})
        url = self._url()
        if not url.startswith(f"{self._scheme}://"):
            raise Unavailable(
                f"{url} does not use TLS, and this process sends nothing unencrypted: start that one with "
                "--certificate, --key and --ca, too"
                if self._scheme == "https"
                else f"{url} uses TLS: start this process with --certificate, --key and --ca, too"
            )
        timeout = httpx.Timeout(self._timeouts.get(name, ANSWER_TIMEOUT), connect=CONNECT)
        try:
            response = self._http.post(f"{url}{PATH}/{name}", content=wire.pack(call), timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            problem = "cannot be trusted" if "CERTIFICATE" in str(error) else "does not answer"
            raise Unavailable(f"{url} {problem}: {error}") from error
        except httpx.TransportError as error:
            raise Retry(f"no answer from {url} to {name}: {error or type(error).__name__}") from error
        if response.status_code == httpx.codes.OK:
            return wire.unpack(response.content, method.answer)
        if response.status_code in FAULTS:
            raise raised(wire.unpack(response.content, Fault))
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise Unavailable(f"{url} does not accept the credential of this process; are both of one deployment?")
        raise Bug(f"{url} answered {name} with {response.status_code}: {response.text[:200]}")


def raised(fault: Fault) -> WhimbrelError:
    """The error of a fault, without attributes other than its message."""
    kind = getattr(errors, fault.kind, Bug)
    error: WhimbrelError = kind.__new__(kind)
    error.args = (fault.message,)
    return error


# ── Server side ──────────────────────────────────────────────────────────────────────────────────────────────────────


Check = Callable[[str, msgspec.Struct], None]
"""Raises `Refused` if a caller of that name may not make this call."""


def offer(
    app: FastAPI,
    port: type,
    target: object,
    callers: Credential | Mapping[str, Credential],
    check: Check = lambda caller, call: None,
) -> None:
    """Offer an object's methods that are in a port to callers with the credential, or with one of several credentials,
    by the names of their owners."""
    known = callers if isinstance(callers, Mapping) else {"": callers}
    for name, method in methods(port).items():
        endpoint = partial(_answer, getattr(target, name), method, known, check)
        app.add_route(f"{PATH}/{name}", endpoint, methods=["POST"], include_in_schema=False)


async def _answer(
    act: Callable[..., Any], method: Method, callers: Mapping[str, Credential], check: Check, request: Request
) -> Response:
    caller = _caller(callers, request.headers.get("Authorization", ""))
    if caller is None:
        return Response("the credential is missing or wrong", 401)
    body = b""
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LIMIT:
                return Response(f"a message may have at most {LIMIT} bytes", 413)
    except ClientDisconnect:  # an incomplete message is dropped; no client reads this
        return Response("the message is incomplete", 400)
    try:
        call = wire.unpack(body, method.call)
    except WhimbrelError as error:
        return _fault(400, Refused(f"{method.call.__name__} was called with invalid arguments: {error}"))
    try:
        check(caller, call)
    except Refused as error:
        return _fault(403, error)
    try:
        answer = await run_in_threadpool(act, **{name: getattr(call, name) for name in call.__struct_fields__})
        return Response(wire.pack(answer), media_type="application/octet-stream")
    except WhimbrelError as error:
        return _fault(500, error)
    except OSError as error:  # out of files, a full or failing disk: it may pass, and the call may have had an effect
        kept(LOGGER, f"the call {method.call.__name__} from {caller}", error)
        return _fault(500, Retry(f"{method.call.__name__} failed there: {error}"))
    except Exception as error:  # the caller must receive any error
        kept(LOGGER, f"the call {method.call.__name__} from {caller}", error)
        return _fault(500, Bug(f"{type(error).__name__}: {error}"))


def _caller(callers: Mapping[str, Credential], given: str) -> str | None:
    """The name of the caller with this credential."""
    for name, credential in callers.items():
        with suppress(Unavailable):  # a missing credential matches no caller
            if hmac.compare_digest(given.encode(), f"Bearer {value_of(credential)}".encode()):
                return name
    return None


def _fault(status: int, error: WhimbrelError) -> Response:
    fault = Fault(type(error).__name__, str(error))
    return Response(wire.pack(fault), status, media_type="application/octet-stream")


def bare(title: str) -> FastAPI:
    """An app without any documentation pages."""
    return FastAPI(title=title, openapi_url=None, docs_url=None, redoc_url=None)
