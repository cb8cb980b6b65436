"""Errors over HTTP: the status of each, its encoding as JSON, and its decoding into the same error.

    Refused        422      UnknownName  404      Conflict  409
    Retry          503      with Retry-After
    Stop, Bug      500      and every unexpected exception

A wrong token (401), a body that is not JSON (400) or too large (413), an unknown path (404) or method (405) are
`Refused` as well: nothing has happened, and the request must change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from whimbrel.core import errors
from whimbrel.core.errors import Bug, Conflict, Refused, Retry, Stop, Unavailable, UnknownName, WhimbrelError

STATUSES: list[tuple[type[WhimbrelError], int, str]] = [
    (UnknownName, 404, "use an existing name"),
    (Conflict, 409, "wait for the operation that is under way, or abort it; then retry"),
    (Refused, 422, "change the request; nothing has happened"),
    (Retry, 503, "retry later; nothing has happened"),
    (Stop, 500, "check the data directory before you do anything else"),
    (Bug, 500, "report it as a bug, with the story of the migration"),
]
"""The first class that matches counts."""


@dataclass(frozen=True)
class Problem:
    """An error as it is sent: the name of its class, its message, what to do, and its other attributes."""

    error: str
    message: str
    what_to_do: str
    details: dict[str, Any] = field(default_factory=dict)


def problem_of(error: Exception) -> tuple[int, Problem]:
    """The HTTP status of an error, and the error as it is sent."""
    if not isinstance(error, WhimbrelError):
        error = Bug(f"{type(error).__name__}: {error}")
    status, advice = next((status, advice) for kind, status, advice in STATUSES if isinstance(error, kind))
    details = {name: value for name, value in vars(error).items() if isinstance(value, (str, int, list))}
    return status, Problem(type(error).__name__, str(error), advice, details)


def error_of(status: int, body: bytes) -> WhimbrelError:
    """The error that was sent; `Unavailable` if the answer is not from Whimbrel."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except msgspec.MsgspecError:
        return Unavailable(f"the answer is not from Whimbrel: status {status}; is the address right?")
    kind = getattr(errors, problem.error, None)
    if not (isinstance(kind, type) and issubclass(kind, WhimbrelError)):
        return Bug(problem.message)
    error = kind.__new__(kind)  # the message is complete; the attributes that it was made from are in `details`
    Exception.__init__(error, problem.message)
    for name, value in problem.details.items():
        setattr(error, name, value)
    return error
