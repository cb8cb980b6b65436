"""External orders, and their results as plain data: the API sends all of it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from whimbrel.core import wire
from whimbrel.core.errors import Refused
from whimbrel.core.protocols.machine import ORDERED, Migration


@dataclass(frozen=True)
class Receipt:
    """An accepted order: its migrations, none if everything was already there; and why `auto` chose its protocol."""

    ids: list[str] = field(default_factory=list)
    why: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answered:
    """A journalled receipt, with a digest of the request that it answers."""

    digest: str
    receipt: Receipt


@dataclass(frozen=True)
class Request:
    """A request: its idempotency name, if it may be retried; a digest of its content; and its sender."""

    name: str | None
    digest: str = ""
    by: str = ""

    def answered(self, ids: Sequence[str] = (), why: Sequence[str] = ()) -> tuple[str, bytes] | None:
        """The journal entry of the answered request: its name and a receipt. None if it has no name."""
        return None if self.name is None else (self.name, wire.pack(Answered(self.digest, Receipt([*ids], [*why]))))

    def check(self, answered: Answered) -> Receipt:
        """The receipt of the first attempt. Raises `Refused` if the name was used for a different request."""
        if answered.digest != self.digest:
            raise Refused(
                f"the request {self.name!r} was already answered for different content; give this one a new name"
            )
        return answered.receipt


@dataclass(frozen=True)
class SiteStatus:
    """A site: its instances, its number of keys and bytes of state, and whether all instances run.

    `disk`: why the site accepts no input, if its disk is full.
    """

    name: str
    instances: list[str]
    keys: int
    state_bytes: int
    running: bool
    disk: str | None = None


@dataclass(frozen=True)
class StageStatus:
    """A stage: the site of each instance, its number of keys, and its migrations that are under way."""

    name: str
    instances: dict[str, str]
    keys: int
    groups: int
    partitions: int
    migrations: list[str]


@dataclass(frozen=True)
class Route:
    """What an instance owns: ranges of bins, first and last, and keys that are routed individually, not by their bin.

    `keys`: how many of the known keys these are; `apart`: the first of the individually routed keys; `apart_count`:
    their number.
    """

    instance: str
    site: str
    bins: list[tuple[int, int]]
    keys: int
    apart: list[str]
    apart_count: int


@dataclass(frozen=True)
class MigrationStatus:
    """The current state of a migration."""

    id: str
    stage: str
    protocol: str
    phase: str
    source: str
    destination: str
    from_site: str
    to_site: str
    keys: int
    state_bytes: int
    sent_bytes: int
    reason: str | None
    is_over: bool
    is_standby: bool
    checkpoint: int | None = None
    """For a restoration: the source checkpoint; None: the newest versions."""
    replayed: int = 0
    silent: int = 0
    """How many records it has replayed, and how many of those without emitting results."""
    ordered_by: str = ""
    """A user's name with `over REST`, `the process itself`, or `the policy`."""


def status_of(migration: Migration) -> MigrationStatus:
    """A migration as plain data."""
    move = migration.move
    return MigrationStatus(
        id=move.id,
        stage=move.stage,
        protocol=move.protocol,
        phase=migration.phase,
        source=move.source,
        destination=move.destination,
        from_site=migration.from_site,
        to_site=migration.to_site,
        keys=migration.keys,
        state_bytes=migration.state_bytes,
        sent_bytes=migration.sent_bytes,
        reason=migration.reason,
        is_over=migration.is_over,
        is_standby=migration.is_standby,
        checkpoint=migration.checkpoint,
        replayed=migration.replayed,
        silent=migration.silent,
        ordered_by=migration.ordered_by,
    )


def story_of(migrations: Sequence[Migration]) -> list[str]:
    """The sender and the events of migrations: one line each, with its time in UTC. The line that ends a phase has the
    phase's duration in seconds."""
    lines: list[str] = []
    for migration in migrations:
        story, id, began_us = migration.story, migration.move.id, migration.ordered_us
        if migration.ordered_by:
            lines.append(line_of(id, ORDERED, f"ordered by {migration.ordered_by}", began_us))
        following = [*(line.phase for line in story[1:]), migration.phase]
        for line, phase in zip(story, following, strict=False):
            took = ""
            if phase != line.phase:
                took = f" ({line.phase} took {max(line.at_us - began_us, 0) / 1e6:.3f} s)"
                began_us = line.at_us
            lines.append(line_of(id, line.phase, f"{line.event}{took}", line.at_us))
    return lines


def line_of(id: str, phase: str, event: str, at_us: int) -> str:
    """One line of a story."""
    at = datetime.fromtimestamp(at_us // 1_000_000, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at_us // 1000 % 1000:03d}Z {id} {phase}: {event}"


@dataclass(frozen=True)
class InstanceStatus:
    """The current state of an instance; its phase is `running`, `paused`, `relocating` or `failed`."""

    name: str
    stage: str
    site: str
    phase: str
    keys: int
    state_bytes: int
    backlog: int | None
    batch_ms: int | None
    error: str | None


@dataclass(frozen=True)
class Checkpoint:
    """The last batch that an instance has committed at its site, and where; None if there is none.

    `stored`: the last checkpoint of its stage in the central store, if there is one.
    """

    instance: str
    site: str
    path: str
    batch: int | None
    stored: int | None = None
