"""What all protocols share: a migration as a state machine, given by a table `(phase, event) -> rule`.

Two principles:

1. A protocol never acts. It receives an event and returns commands; the orchestrator carries them out, and retries
   until they succeed. Every command is idempotent.
2. An event that the table does not have for this phase is a bug: `handle` raises, with the migration's story, and
   changes nothing.

Events are notices of instances (each part of an instance sends its own: a rule acts on the last one), answers of sites,
and `Abandoned`, which asks for an abort. Events may be duplicated or late: tables map those to `stay`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from whimbrel.core.errors import UnknownEvent
from whimbrel.core.options import HandoverOptions, Options
from whimbrel.core.record import Aborted, Evicted, Kind, Left, Move, Opened, Ready, Rejected, Report, Unreadable, Warm
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore

ORDERED, STANDBY, DONE, ABORTED = "ordered", "standby", "done", "aborted"
MOST_LINES = 1_000
"""Maximum length of a story."""

# ── Events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Ordered(msgspec.Struct, frozen=True, tag=True):
    """The migration was ordered and begins."""


class Abandoned(msgspec.Struct, frozen=True, tag=True):
    """The migration is to be aborted: by a user, a deadline, or because its destination failed."""

    reason: str
    by: str = ""
    """The user who asked for it, if any."""


class Takeover(msgspec.Struct, frozen=True, tag=True):
    """A standby is to take over."""

    by: str = ""
    """The user who asked for it, if any."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The instance no longer runs at its old site."""


class Copied(msgspec.Struct, frozen=True, tag=True):
    """The instance's complete checkpoint is at the other site."""

    size: int = 0


class Started(msgspec.Struct, frozen=True, tag=True):
    """The instance runs at this site."""

    site: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A site could not carry out a command; the command had no effect."""

    reason: str


class Fenced(msgspec.Struct, frozen=True, tag=True):
    """Every router has recorded that the keys have lost their owner, and every gate refuses its further results."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The store's versions of the keys are in the destination's inbox."""

    since: dict[str, int] = {}
    """By router: the `seq` from which on the versions may lack records."""
    keys: int = 0
    size: int = 0


Event = Ordered | Abandoned | Takeover | Report | Stopped | Copied | Started | Failed | Fenced | Loaded

# ── Commands in addition to those of the router ──────────────────────────────────────────────────────────────────────


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Send SWITCH, REPLICATE, CEASE or ABORT to an instance, in the control lane, ahead of its inbox's backlog."""

    kind: Kind
    move: Move
    instance: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Send FORGET to the destination: no further message of an aborted move can arrive."""

    move: Move


class StopInstance(msgspec.Struct, frozen=True, tag=True):
    """Stop the instance's query and wait for its end. Answer: Stopped."""

    instance: str


class CopyCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Copy the stopped instance's checkpoint to another site. Answer: Copied, or Failed."""

    instance: str
    site: str


class StartInstance(msgspec.Struct, frozen=True, tag=True):
    """Start the instance at a site, from the checkpoint stored there. Answer: Started, or Failed."""

    instance: str
    site: str


class Load(msgspec.Struct, frozen=True, tag=True):
    """Append the store's versions of the keys to the destination's inbox, with the delivered `seq` of each key:
    `restoration.loads`. Each time as a new writer, because the store may have newer versions. Answer: Loaded.

    Like `Fence`, whose answer is Fenced, it is carried out only while the migration is in the phase that issued it.
    """

    move: Move


Command = (
    Begin | Cutover | Abort | Fence | Restore | Announce | Forget | StopInstance | CopyCheckpoint | StartInstance | Load
)

# ── A migration ──────────────────────────────────────────────────────────────────────────────────────────────────────


class StoryLine(msgspec.Struct, frozen=True, array_like=True):
    """One line of a story: the phase, the event, and its time."""

    phase: str
    event: str
    at_us: int


class Received(msgspec.Struct):
    """The parts of an instance that have sent a notice."""

    parts: int
    sent: set[int] = set()


class Migration(msgspec.Struct):
    """One migration: its order, its progress, and its story."""

    move: Move
    from_site: str
    to_site: str
    phase: str = ORDERED
    received: dict[str, Received] = {}
    """By notice and instance."""
    reason: str | None = None
    story: list[StoryLine] = []
    keys: int = 0
    state_bytes: int = 0
    sent_bytes: int = 0
    plan: str = ""
    turn: int = 0
    """It begins when all migrations of its plan with an earlier turn are done."""
    checkpoint: int | None = None
    """Of a restoration: the checkpoint that the keys come from; None: their newest versions."""
    replayed: int = 0
    silent: int = 0
    """Number of records that its destination has applied again, and how many of those without emitting."""
    since: dict[str, int] | None = None
    """Of a restoration: by router, the `seq` from which on the log is replayed."""
    ended_by: str = ""
    """The restoration that took its keys: all further events are too late."""
    deadline: float | None = None
    """Seconds that it may take from its beginning on, as long as it can be undone; None: no limit."""
    ordered_by: str = ""
    ordered_us: int = 0
    """The user who ordered it, and the time of the order."""

    @property
    def is_standby(self) -> bool:
        """Whether it is warm, and waits for the order to take over."""
        return self.phase == STANDBY

    @property
    def is_over(self) -> bool:
        """Whether its outcome, as reported to the user, is final."""
        return self.phase in (DONE, ABORTED)

    @property
    def has_begun(self) -> bool:
        """Whether any command of it was ever issued."""
        return self.begun_us is not None

    @property
    def begun_us(self) -> int | None:
        """When it began, in wall-clock time."""
        return next((line.at_us for line in self.story if line.event == Ordered.__name__), None)

    @property
    def has_stood_by(self) -> bool:
        """Whether it has been a warm standby, which may wait for its order without a time limit."""
        return self.is_standby or any(line.phase == STANDBY for line in self.story)

    def left_s(self, now_us: int) -> float | None:
        """Seconds left until its deadline by the wall clock: at least 0, and at most `deadline`, even if the clock was
        set back."""
        if self.deadline is None or self.begun_us is None:
            return self.deadline
        return min(max(self.deadline - (now_us - self.begun_us) / 1e6, 0.0), self.deadline)

    def receive(self, notice: Ready | Warm | Left | Opened | Aborted | Evicted) -> bool:
        """Record one part's notice; return whether all parts of that instance have now sent theirs."""
        self.received.setdefault(f"{type(notice).__name__} {notice.instance}", Received(notice.parts)).sent.add(
            notice.part
        )
        return self.has_received(type(notice), notice.instance)

    def has_received_part(self, notice: Ready | Warm | Left | Opened | Aborted) -> bool:
        """Whether the same notice of the same part has come before."""
        received = self.received.get(f"{type(notice).__name__} {notice.instance}")
        return received is not None and notice.part in received.sent

    def has_received(self, kind: type, instance: str) -> bool:
        """Whether all parts of an instance have sent this kind of notice."""
        received = self.received.get(f"{kind.__name__} {instance}")
        return received is not None and len(received.sent) == received.parts


Answer = tuple[str, list[Command]]
"""The next phase, and the commands to carry out."""
Rule = Callable[[Migration, Any], Answer]
Table = dict[tuple[str, type], Rule]


class Protocol(msgspec.Struct, frozen=True):
    """A protocol: its table, and for each phase the commands to repeat after a restart."""

    name: str
    table: Table
    resume: dict[str, Callable[[Migration], list[Command]]]
    options: Options = HandoverOptions()
    """The default options of its moves."""
    choices: frozenset[str] = frozenset()
    """What an order may set besides budget and chunk: fields of `options`, and how `fluid` splits a move."""


def handle(protocol: Protocol, migration: Migration, event: Event, now_us: int = 0) -> list[Command]:
    """Apply an event to a migration and return commands. Changes the migration, or raises and changes nothing."""
    if migration.ended_by:
        if isinstance(event, Evicted | Aborted):
            migration.receive(event)
        return []
    rule = protocol.table.get((migration.phase, type(event)))
    if rule is None:
        story = [f"{line.phase}: {line.event}" for line in migration.story]
        raise UnknownEvent(migration.phase, type(event).__name__, story)
    phase, commands = rule(migration, event)
    _note(migration, _described(event), now_us)
    migration.phase = phase
    return commands


def copied(migration: Migration) -> Migration:
    """A copy of a migration: events applied to it do not change the original."""
    received = {notice: Received(one.parts, {*one.sent}) for notice, one in migration.received.items()}
    return msgspec.structs.replace(migration, received=received, story=[*migration.story])


def become(migration: Migration, other: Migration) -> None:
    """Overwrite a migration with the fields of another one."""
    for name in migration.__struct_fields__:
        setattr(migration, name, getattr(other, name))


def resume(protocol: Protocol, migration: Migration) -> list[Command]:
    """The commands that a restarted orchestrator repeats, because it cannot know whether they were carried out."""
    again = None if migration.ended_by else protocol.resume.get(migration.phase)
    return again(migration) if again else []


def end(migration: Migration, restoration: str, now_us: int = 0) -> None:
    """Abort a migration in any phase, because an instance it needs is lost and a restoration takes its keys."""
    if not migration.is_over:
        migration.reason = f"{restoration} restores its keys"
        _note(migration, f"Ended: {migration.reason}", now_us)
        migration.phase, migration.ended_by = ABORTED, restoration


def closing(preparing: str, committing: str) -> Table:
    """The end that all hand-overs share: Ready, CUTOVER, then the source has left and the destination owns the keys."""

    def ready(migration: Migration, event: Ready) -> Answer:
        return (committing, [Cutover(migration.move)]) if migration.receive(event) else (preparing, [])

    def settle(migration: Migration, event: Left | Opened) -> Answer:
        if not weigh(migration, event):
            return committing, []
        migration.reason = None  # clears the reason of an earlier refusal
        return DONE, []

    return {(preparing, Ready): ready, (committing, Left): settle, (committing, Opened): settle}


def cut_over(migration: Migration) -> list[Command]:
    """The command to repeat while a hand-over closes."""
    return [Cutover(migration.move)]


def late(events: Mapping[str, Sequence[type]]) -> Table:
    """By phase: events that change nothing there, because they are duplicated or late."""
    return {(phase, event): stay for phase, kinds in events.items() for event in kinds}


def weigh(migration: Migration, event: Ready | Left | Opened) -> bool:
    """Record a notice and its sizes; return whether the source is done and the destination owns the keys."""
    if isinstance(event, Left) and not migration.has_received_part(event):
        migration.keys += event.keys
        migration.state_bytes += event.state_bytes
        migration.sent_bytes += event.sent_bytes
    migration.receive(event)
    move = migration.move
    return migration.has_received(Left, move.source) and migration.has_received(Opened, move.destination)


def abandon_unbegun(migration: Migration, event: Abandoned) -> Answer:
    """Abort before any command was issued."""
    migration.reason = event.reason
    return ABORTED, []


def undone(migration: Migration, event: Aborted) -> Answer:
    """The source is ordinary owner again: for the user the abort is complete. The destination may clean up later."""
    migration.receive(event)
    back = migration.has_received(Aborted, migration.move.source)
    return (ABORTED if back else migration.phase), forget(migration)


def forget(migration: Migration) -> list[Command]:
    """Forget, once both sides have aborted: by then all that the source sent is in the destination's inbox."""
    sides = (migration.move.source, migration.move.destination)
    return [Forget(migration.move)] if all(migration.has_received(Aborted, side) for side in sides) else []


def hold_up(migration: Migration, event: Rejected) -> Answer:
    """A message was refused after the point of no return: it is kept until a version that can read it is started."""
    migration.reason = event.reason
    return migration.phase, []


def stay(migration: Migration, event: Any) -> Answer:
    """The rule for an event that changes nothing: it is duplicated or late."""
    return migration.phase, []


def _note(migration: Migration, text: str, now_us: int) -> None:
    """Add a line to a story. Repeated events, like a refusal at each start of a site, do not make it longer than
    `MOST_LINES`: beyond that a line in the middle is removed, but none that ends a phase."""
    story = migration.story
    story.append(StoryLine(migration.phase, text, now_us))
    if len(story) > MOST_LINES:
        later = range(MOST_LINES // 2, len(story) - 1)
        within = next((place for place in later if story[place].phase == story[place + 1].phase), None)
        if within is not None:
            del story[within]


def _described(event: Event) -> str:
    name = type(event).__name__
    if isinstance(event, (Ready, Warm, Left, Opened, Aborted, Evicted)):
        return f"{name} {event.instance} {event.part + 1}/{event.parts}"
    if isinstance(event, (Abandoned, Takeover)) and event.by:
        name += f" by {event.by}"
    if isinstance(event, (Abandoned, Failed, Rejected, Unreadable)):
        return f"{name}: {event.reason}"
    if isinstance(event, Loaded):
        return f"{name} {event.keys} keys, {event.size} bytes"
    return name
