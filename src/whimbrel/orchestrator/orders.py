"""What can be asked of a running application from outside: one Protocol, and the plain data that comes back.

The API knows nothing else of the application, so it is the same over an embedded one and over an orchestrator in a
process of its own. Everything here can be sent as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from whimbrel.core import wire
from whimbrel.core.errors import Refused
from whimbrel.core.protocols.machine import ORDERED, Migration


@dataclass(frozen=True)
class Receipt:
    """An order was taken: the migrations it made, none if everything was there already; and why `auto` chose so."""

    ids: list[str] = field(default_factory=list)
    why: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answered:
    """A receipt that is kept, with a digest of the request that it answers."""

    said: str
    receipt: Receipt


@dataclass(frozen=True)
class Request:
    """A request: the name its sender gave it if it may come again, a digest of what it says, and who sends it."""

    name: str | None
    said: str = ""
    by: str = ""

    def answered(self, ids: Sequence[str] = (), why: Sequence[str] = ()) -> tuple[str, bytes] | None:
        """What the journal keeps when it has been answered: under its name, a receipt. Nothing if it has no name."""
        return None if self.name is None else (self.name, wire.pack(Answered(self.said, Receipt([*ids], [*why]))))

    def check(self, answered: Answered) -> Receipt:
        """The receipt of the first time. Raises `Refused` if the name was used for something else."""
        if answered.said != self.said:
            raise Refused(
                f"the request {self.name!r} has been answered and said something else; give this one a new name"
            )
        return answered.receipt


@dataclass(frozen=True)
class SiteStatus:
    """A site: its instances, how many keys and bytes of state are there, and whether all of them run.

    `disk` says why it takes nothing in, if its disk is full.
    """

    name: str
    instances: list[str]
    keys: int
    state_bytes: int
    running: bool
    disk: str | None = None


@dataclass(frozen=True)
class StageStatus:
    """A stage: where its instances are, how many keys it has, and the migrations of it that are under way."""

    name: str
    instances: dict[str, str]
    keys: int
    groups: int
    partitions: int
    migrations: list[str]


@dataclass(frozen=True)
class Route:
    """What an instance owns: ranges of bins, first and last, and keys that are routed singly, apart from their bin.

    `keys` is how many of the known keys that makes; `apart` has the first of the single ones, `apart_count` says how
    many there are.
    """

    instance: str
    site: str
    bins: list[tuple[int, int]]
    keys: int
    apart: list[str]
    apart_count: int


@dataclass(frozen=True)
class MigrationStatus:
    """A migration as it is now."""

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
    """Of a restoration: from which checkpoint; None: from the newest versions."""
    replayed: int = 0
    silent: int = 0
    """How many records it has applied again, and how many of those in silence."""
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
    """Who ordered migrations, and what happened in them: a line each, with its time in UTC. The line that ends a phase
    says how many seconds that took."""
    told: list[str] = []
    for migration in migrations:
        story, id, began_us = migration.story, migration.move.id, migration.ordered_us
        if migration.ordered_by:
            told.append(line_of(id, ORDERED, f"ordered by {migration.ordered_by}", began_us))
        following = [*(line.phase for line in story[1:]), migration.phase]
        for line, phase in zip(story, following, strict=False):
            took = ""
            if phase != line.phase:
                took = f" ({line.phase} took {max(line.at_us - began_us, 0) / 1e6:.3f} s)"
                began_us = line.at_us
            told.append(line_of(id, line.phase, f"{line.event}{took}", line.at_us))
    return told


def line_of(id: str, phase: str, event: str, at_us: int) -> str:
    """One line of a story."""
    at = datetime.fromtimestamp(at_us // 1_000_000, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at_us // 1000 % 1000:03d}Z {id} {phase}: {event}"


@dataclass(frozen=True)
class InstanceStatus:
    """An instance as it is now; its phase is `running`, `paused`, `relocating` or `failed`."""

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
    """The last batch that an instance has committed at its site, and where; no batch if it has done none.

    `stored` is the last checkpoint of its stage in the central store, if there is one.
    """

    instance: str
    site: str
    path: str
    batch: int | None
    stored: int | None = None


class Orders(Protocol):
    """A running application, as those outside see it. Safe to call from several threads.

    Raises `Refused` and its kinds if a request makes no sense, and nothing has happened then. With a `request`, what
    was ordered and that it was answered are remembered as one, also across a restart.
    """

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────────────────────

    def status(self) -> dict[str, Any]:
        """How things are, as plain data."""
        ...

    def sites(self) -> list[SiteStatus]: ...

    def stages(self) -> list[StageStatus]: ...

    def routes(self, stage: str, apart: int = 100) -> list[Route]:
        """Who owns what of a stage; with the names of so many keys that are routed singly."""
        ...

    # ── Moving ───────────────────────────────────────────────────────────────────────────────────────────────────

    def migrate(self, stage: str, *, to: str, request: Request | None = None, **options: Any) -> Receipt:
        """Move keys of a stage to a site; options as in `App.migrate`, but a plan is never a file."""
        ...

    def scale(self, stage: str, *, instances: int, at: str, request: Request | None = None, **options: Any) -> Receipt:
        """Let so many instances share the keys at a site; options as in `App.scale`."""
        ...

    def drain(
        self, site: str, *, to: Sequence[str] | None = None, request: Request | None = None, **options: Any
    ) -> Receipt:
        """Move everything away from a site; options as in `App.drain`."""
        ...

    def migrations(self) -> list[MigrationStatus]:
        """All of them, in the order in which they were ordered."""
        ...

    def migration(self, id: str) -> MigrationStatus:
        """One of them."""
        ...

    def wait(self, id: str, timeout: float, *, warm: bool = False) -> MigrationStatus:
        """A migration, as soon as it is over, or a warm standby if that is enough; at the latest after so many seconds.

        Raises what keeps the orchestrator from going on.
        """
        ...

    def story(self, id: str) -> list[str]:
        """What happened in a migration, a line each, with its time; the end of a phase with its duration."""
        ...

    def abort(self, id: str, reason: str, *, by: str = "") -> None:
        """Call a migration off; its story says by whom. Too late after the point of no return: then it goes on to its
        end."""
        ...

    def take_over(self, id: str, *, by: str = "") -> None:
        """Let a warm standby take its keys over. Nothing happens if it has been told before."""
        ...

    # ── Links ────────────────────────────────────────────────────────────────────────────────────────────────────

    def cut(self, site: str, other: str) -> None: ...

    def mend(self, site: str, other: str) -> None: ...

    # ── One instance ─────────────────────────────────────────────────────────────────────────────────────────────

    def pause(self, instance: str) -> None:
        """Let it end its batch and stand still. What comes for it waits in its inbox; the others go on."""
        ...

    def resume(self, instance: str) -> None:
        """Let it go on where it was; returns when it serves."""
        ...

    def state(self, instance: str) -> InstanceStatus: ...

    def checkpoint(self, instance: str) -> Checkpoint: ...

    def save(self, instance: str) -> None:
        """Let it save what has changed to the central store, now; the other instances of its stage do so, too."""
        ...

    def invoke(
        self, instance: str, site: str, checkpoint: int | None = None, *, request: Request | None = None
    ) -> Receipt:
        """Let an instance at a site go on with what this one had, from state that was saved: the newest, or that of a
        checkpoint."""
        ...

    def detach(self, instance: str, *, request: Request | None = None) -> Receipt:
        """Take it out of its stage: others get its keys, then it stops."""
        ...

    # ── What was answered ────────────────────────────────────────────────────────────────────────────────────────

    def recall(self, request: Request) -> Receipt | None:
        """What was answered to a request, if it has been. Raises `Refused` if it said something else then."""
        ...

    def remember(self, request: Request) -> None:
        """A request that orders no migration has been answered."""
        ...
