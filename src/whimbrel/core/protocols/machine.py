"""What all protocols share: a migration's life as a table `(phase, event) -> rule`.

Two rules of the game:

1. A protocol never acts. It is told an event and answers with commands; whoever runs it carries them out, as often as
   it takes. Every command may be repeated without harm.
2. An event that the table does not have for this phase is a bug: it raises, with the migration's story, and nothing
   has changed.

Events are notices of instances (each part of an instance sends its own: a rule acts when the last one is in), answers
of sites, and `Abandoned` from whoever wants out. They may come twice or late: tables say so with `stay`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from whimbrel.core.errors import UnknownEvent
from whimbrel.core.record import (
    Aborted,
    Evicted,
    HandoverOptions,
    Kind,
    Left,
    Move,
    Opened,
    Options,
    Ready,
    Rejected,
    Report,
    Unreadable,
    Warm,
)
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore

ORDERED, STANDBY, DONE, ABORTED = "ordered", "standby", "done", "aborted"
MOST_LINES = 1_000
"""Of a story."""

# ── Events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Ordered(msgspec.Struct, frozen=True, tag=True):
    """Somebody ordered the migration."""


class Abandoned(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants out: a user, a deadline, a failed destination."""

    reason: str
    by: str = ""
    """The user who wants it, if it is one."""


class Takeover(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants a standby to take over."""

    by: str = ""
    """The user who wants it, if it is one."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The instance no longer runs where it ran."""


class Copied(msgspec.Struct, frozen=True, tag=True):
    """The instance's checkpoint lies, whole, at the other site."""

    size: int = 0


class Started(msgspec.Struct, frozen=True, tag=True):
    """The instance runs at this site."""

    site: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A site could not carry a command out, and nothing of it has happened."""

    reason: str


class Fenced(msgspec.Struct, frozen=True, tag=True):
    """Every router knows that the keys have lost their owner, and every gate refuses what it still says of them."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """What the store has of the keys is in the destination's inbox."""

    since: dict[str, int] = {}
    """By router: from which `seq` on records are not in it for sure."""
    keys: int = 0
    size: int = 0


Event = Ordered | Abandoned | Takeover | Report | Stopped | Copied | Started | Failed | Fenced | Loaded

# ── Commands beside those of the router ──────────────────────────────────────────────────────────────────────────────


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Tell an instance, ahead of all that waits in its inbox: a move will switch; a standby is wanted, or is not."""

    kind: Kind
    move: Move
    instance: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Tell the destination that nothing of an aborted move can arrive any more."""

    move: Move


class StopInstance(msgspec.Struct, frozen=True, tag=True):
    """Stop the instance's query and wait for its end. Answer: Stopped."""

    instance: str


class CopyCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Copy the stopped instance's checkpoint to another site. Answer: Copied, or Failed."""

    instance: str
    site: str


class StartInstance(msgspec.Struct, frozen=True, tag=True):
    """Start the instance at a site, from the checkpoint that lies there. Answer: Started, or Failed."""

    instance: str
    site: str


class Load(msgspec.Struct, frozen=True, tag=True):
    """Bring what the store has of the keys into the destination's inbox, with up to where each key's results are out:
    `restoration.loads`. As another writer each time: what the store has may have grown. Answer: Loaded.

    Like `Fence`, whose answer is Fenced, it is carried out only while the migration is in the phase that asks for it.
    """

    move: Move


Command = (
    Begin | Cutover | Abort | Fence | Restore | Announce | Forget | StopInstance | CopyCheckpoint | StartInstance | Load
)

# ── A migration ──────────────────────────────────────────────────────────────────────────────────────────────────────


class StoryLine(msgspec.Struct, frozen=True, array_like=True):
    """One line of a story: in which phase what happened, and when."""

    phase: str
    event: str
    at_us: int


class Heard(msgspec.Struct):
    """Which parts of an instance have sent a notice."""

    parts: int
    sent: set[int] = set()


class Migration(msgspec.Struct):
    """One migration: what was ordered, how far it is, and its story."""

    move: Move
    from_site: str
    to_site: str
    phase: str = ORDERED
    heard: dict[str, Heard] = {}
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
    """Of a restoration: from which checkpoint the keys come; None: their newest versions."""
    replayed: int = 0
    silent: int = 0
    """How many records its destination has applied again, and how many of those in silence."""
    since: dict[str, int] | None = None
    """Of a restoration: from where on the routers read their logs again."""
    ended_by: str = ""
    """The restoration that took its keys: whatever else is said of it comes too late."""
    deadline: float | None = None
    """Seconds that it may take from its beginning on, as long as it can be undone; None: as many as need be."""
    ordered_by: str = ""
    ordered_us: int = 0
    """Who ordered it, and when."""

    @property
    def is_standby(self) -> bool:
        """Whether it is warm, and waits for the order to take over."""
        return self.phase == STANDBY

    @property
    def is_over(self) -> bool:
        """Whether the user may know its outcome."""
        return self.phase in (DONE, ABORTED)

    @property
    def has_begun(self) -> bool:
        """Whether anything was ever said to anybody."""
        return self.begun_us is not None

    @property
    def begun_us(self) -> int | None:
        """When it began, by the wall clock of that moment."""
        return next((line.at_us for line in self.story if line.event == Ordered.__name__), None)

    @property
    def has_stood_by(self) -> bool:
        """Whether it was a warm standby once, which may wait for its order for as long as it likes."""
        return self.is_standby or any(line.phase == STANDBY for line in self.story)

    def left_s(self, now_us: int) -> float | None:
        """How many seconds of its deadline are left by the wall clock: never more than all of them, if that was put
        back, nor fewer than none."""
        if self.deadline is None or self.begun_us is None:
            return self.deadline
        return min(max(self.deadline - (now_us - self.begun_us) / 1e6, 0.0), self.deadline)

    def hear(self, notice: Ready | Warm | Left | Opened | Aborted | Evicted) -> bool:
        """Note one part's notice; whether all parts of that instance have now sent theirs."""
        self.heard.setdefault(f"{type(notice).__name__} {notice.instance}", Heard(notice.parts)).sent.add(notice.part)
        return self.has_heard(type(notice), notice.instance)

    def has_heard_part(self, notice: Ready | Warm | Left | Opened | Aborted) -> bool:
        """Whether this very notice has come before."""
        heard = self.heard.get(f"{type(notice).__name__} {notice.instance}")
        return heard is not None and notice.part in heard.sent

    def has_heard(self, kind: type, instance: str) -> bool:
        """Whether all parts of an instance have sent this kind of notice."""
        heard = self.heard.get(f"{kind.__name__} {instance}")
        return heard is not None and len(heard.sent) == heard.parts


Answer = tuple[str, list[Command]]
"""The phase that follows, and what is to be done."""
Rule = Callable[[Migration, Any], Answer]
Table = dict[tuple[str, type], Rule]


class Protocol(msgspec.Struct, frozen=True):
    """A protocol: its table, and for each phase the commands that are repeated after a restart."""

    name: str
    table: Table
    resume: dict[str, Callable[[Migration], list[Command]]]
    options: Options = HandoverOptions()
    """Those of its moves, unless an order chooses others."""
    choices: frozenset[str] = frozenset()
    """What an order may choose beside budget and chunk: fields of `options`, and how `fluid` cuts a move."""
    copies: frozenset[str] = frozenset()
    """Phases in which it is only a copy, which ends when its keys move in another way."""


def handle(protocol: Protocol, migration: Migration, event: Event, now_us: int = 0) -> list[Command]:
    """Tell a migration an event; get what is to be done. Changes the migration, or raises and changes nothing."""
    if migration.ended_by:
        if isinstance(event, Evicted | Aborted):
            migration.hear(event)
        return []
    rule = protocol.table.get((migration.phase, type(event)))
    if rule is None:
        story = [f"{line.phase}: {line.event}" for line in migration.story]
        raise UnknownEvent(migration.phase, type(event).__name__, story)
    phase, commands = rule(migration, event)
    _note(migration, _tell(event), now_us)
    migration.phase = phase
    return commands


def copied(migration: Migration) -> Migration:
    """A migration that can be told events without changing this one."""
    heard = {notice: Heard(one.parts, {*one.sent}) for notice, one in migration.heard.items()}
    return msgspec.structs.replace(migration, heard=heard, story=[*migration.story])


def become(migration: Migration, other: Migration) -> None:
    """Make a migration what another one is."""
    for name in migration.__struct_fields__:
        setattr(migration, name, getattr(other, name))


def resume(protocol: Protocol, migration: Migration) -> list[Command]:
    """What a restarted orchestrator says again, because it cannot know whether it was heard."""
    again = None if migration.ended_by else protocol.resume.get(migration.phase)
    return again(migration) if again else []


def end(migration: Migration, restoration: str, now_us: int = 0) -> None:
    """An instance that the migration needs is lost, and a restoration takes its keys: it is aborted in any phase."""
    if not migration.is_over:
        migration.reason = f"{restoration} restores its keys"
        _note(migration, f"Ended: {migration.reason}", now_us)
        migration.phase, migration.ended_by = ABORTED, restoration


def closing(preparing: str, committing: str) -> Table:
    """The end that all hand-overs share: Ready, CUTOVER, then the source is out and the destination owns the keys."""

    def ready(migration: Migration, event: Ready) -> Answer:
        return (committing, [Cutover(migration.move)]) if migration.hear(event) else (preparing, [])

    def settle(migration: Migration, event: Left | Opened) -> Answer:
        if not weigh(migration, event):
            return committing, []
        migration.reason = None  # whatever held it up
        return DONE, []

    return {(preparing, Ready): ready, (committing, Left): settle, (committing, Opened): settle}


def cut_over(migration: Migration) -> list[Command]:
    """What is said again while a hand-over closes."""
    return [Cutover(migration.move)]


def late(events: Mapping[str, Sequence[type]]) -> Table:
    """By phase: events that change nothing there, because they come twice or late."""
    return {(phase, event): stay for phase, kinds in events.items() for event in kinds}


def weigh(migration: Migration, event: Ready | Left | Opened) -> bool:
    """Note a notice, and what left with it; whether the source is done and the destination owns the keys."""
    if isinstance(event, Left) and not migration.has_heard_part(event):
        migration.keys += event.keys
        migration.state_bytes += event.state_bytes
        migration.sent_bytes += event.sent_bytes
    migration.hear(event)
    move = migration.move
    return migration.has_heard(Left, move.source) and migration.has_heard(Opened, move.destination)


def abandon_unbegun(migration: Migration, event: Abandoned) -> Answer:
    """Out before anything was said to anybody."""
    migration.reason = event.reason
    return ABORTED, []


def undone(migration: Migration, event: Aborted) -> Answer:
    """The source is plain owner again: that is all a user waits for. The destination may clean up later."""
    migration.hear(event)
    back = migration.has_heard(Aborted, migration.move.source)
    return (ABORTED if back else migration.phase), forget(migration)


def forget(migration: Migration) -> list[Command]:
    """When both sides are out: what the source had sent until then is in the destination's inbox already."""
    sides = (migration.move.source, migration.move.destination)
    return [Forget(migration.move)] if all(migration.has_heard(Aborted, side) for side in sides) else []


def hold_up(migration: Migration, event: Rejected) -> Answer:
    """Something was refused, and there is no way back: what has not arrived waits for somebody who can take it."""
    migration.reason = event.reason
    return migration.phase, []


def stay(migration: Migration, event: Any) -> Answer:
    """The rule for an event that changes nothing: it came twice, or late."""
    return migration.phase, []


def _note(migration: Migration, told: str, now_us: int) -> None:
    """Add a line to a story. What comes again and again, like a refusal at each start of a site, does not make it
    longer than `MOST_LINES`: then one goes out of the middle, but none that ends a phase."""
    story = migration.story
    story.append(StoryLine(migration.phase, told, now_us))
    if len(story) > MOST_LINES:
        later = range(MOST_LINES // 2, len(story) - 1)
        within = next((place for place in later if story[place].phase == story[place + 1].phase), None)
        if within is not None:
            del story[within]


def _tell(event: Event) -> str:
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
