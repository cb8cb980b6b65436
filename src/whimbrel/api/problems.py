"""Errors on their way through HTTP: which status each has, how it is written as JSON, and what it becomes again.

    Refused        422      UnknownName  404      Conflict  409
    Retry          503      with Retry-After
    Stop, Bug      500      and whatever was not raised on purpose

A token that is wrong (401), a body that is no JSON (400) or too large (413), a path (404) or a method (405) that is not
there are `Refused` as well: nothing has happened, and the request must change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from whimbrel.core import errors
from whimbrel.core.errors import Bug, Conflict, Refused, Retry, Stop, Unavailable, UnknownName, WhimbrelError

STATUSES: list[tuple[type[WhimbrelError], int, str]] = [
    (UnknownName, 404, "use a name that is there"),
    (Conflict, 409, "wait for what is under way, or abort it; then ask again"),
    (Refused, 422, "change the request; nothing has happened"),
    (Retry, 503, "ask again later; nothing has happened"),
    (Stop, 500, "look at the data directory before anything else is done"),
    (Bug, 500, "report it, with the story of the migration"),
]
"""The first that fits."""


@dataclass(frozen=True)
class Problem:
    """An error as it is sent: the name of its class, what it says, what to do, and what it carries beside."""

    error: str
    message: str
    what_to_do: str
    details: dict[str, Any] = field(default_factory=dict)


def problem_of(error: Exception) -> tuple[int, Problem]:
    """The status of an error, and how it is sent."""
    if not isinstance(error, WhimbrelError):
        error = Bug(f"{type(error).__name__}: {error}")
    status, advice = next((status, advice) for kind, status, advice in STATUSES if isinstance(error, kind))
    details = {name: value for name, value in vars(error).items() if isinstance(value, (str, int, list))}
    return status, Problem(type(error).__name__, str(error), advice, details)


def error_of(status: int, body: bytes) -> WhimbrelError:
    """The error that was sent; `Unavailable` if whoever answered is not Whimbrel."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except msgspec.MsgspecError:
        return Unavailable(f"an answer that is not Whimbrel's: status {status}; is the address right?")
    kind = getattr(errors, problem.error, None)
    if not (isinstance(kind, type) and issubclass(kind, WhimbrelError)):
        return Bug(problem.message)
    error = kind.__new__(kind)  # the message is made already; what the class makes it of travels beside
    Exception.__init__(error, problem.message)
    for name, value in problem.details.items():
        setattr(error, name, value)
    return error
