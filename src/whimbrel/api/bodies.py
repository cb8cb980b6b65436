"""The bodies of calls: every field with its type and bounds, and no other field.

Bounds exclude values that could not be stored or would never end; `Control` checks whether an order is valid.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from whimbrel.core.keys import BINS

Name = Annotated[str, Field(min_length=1, max_length=200)]
Bin = Annotated[int, Field(ge=0, lt=BINS)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, Field(ge=1, le=2**40)]
Limit = Annotated[float, Field(gt=0, le=2.0**53)]

INSTANCES = 64
"""The most instances of a stage at a site: more than any site can run."""


class Body(BaseModel):
    """Strict: no type conversion, unknown fields are refused, NaN is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def given(self, *without: str) -> dict[str, Any]:
        """The fields that were given, except these."""
        return self.model_dump(exclude_none=True, exclude={*without})


class Moving(Body):
    """The options that every order has for how keys move."""

    protocol: Name | None = None
    deadline: Seconds | None = None
    budget: Bytes | None = None
    chunk: Bytes | None = None
    order: Literal["arrival", "key"] | None = None
    interval: Count | None = None
    split: Count | None = None
    step: Count | None = None
    plan: Literal["sudden", "batched", "fluid"] | list[list[Bin]] | None = None
    """Never the name of a file: the client reads the file."""


class Migrate(Moving):
    """An order to move keys of a stage to a site."""

    stage: Name
    to: Name
    keys: list[Name] | None = None
    bins: list[Bin] | None = None
    share: Share | None = None
    at: Name | None = None
    standby: bool | None = None
    from_checkpoint: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    max_stoppage_ms: Limit | None = None
    max_duration_ms: Limit | None = None
    max_bytes: Limit | None = None


class Scale(Moving):
    """An order to distribute the keys at a site over a number of instances."""

    at: Name
    instances: Annotated[int, Field(ge=1, le=INSTANCES)]


class Drain(Moving):
    """An order to move everything away from a site: to these sites, or all others."""

    to: Annotated[list[Name], Field(min_length=1)] | None = None


class Abort(Body):
    """The reason why a migration is aborted."""

    reason: Annotated[str, Field(max_length=1000)] = "called off"


class Pair(Body):
    """Two sites."""

    site: Name
    other: Name


class Invoke(Body):
    """Where to start an instance, and from which checkpoint: the newest if none is named."""

    site: Name
    checkpoint: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
