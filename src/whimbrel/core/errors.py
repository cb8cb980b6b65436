"""Every error Whimbrel raises on purpose. The first level says what to do about it.

    WhimbrelError
    ├── Refused            the request is wrong: change it; nothing has happened
    │   ├── UnknownName        no such site, stage, key, protocol ...
    │   ├── Conflict           it collides with something under way
    │   └── BadRecord          this input cannot be taken in (dead-lettered with its reason)
    ├── Retry              the same call may succeed later; nothing has happened
    │   └── Unavailable        something it needs is not there right now
    │       ├── Full               room on a disk, for instance
    │       └── Unstarted          an instance does not start, and has done nothing since it was brought there
    ├── Stop               data on disk is not what it must be: do not go on, look
    │   ├── Trimmed            a read of what was given up
    │   ├── Diverged           a repetition that differs from the first time
    │   ├── Stale              a log, checkpoint or snapshot that is older than what was made from it
    │   ├── Corrupt            bytes that do not decode, or whose checksum is wrong
    │   └── NewerFormat        written by a newer version of Whimbrel
    └── Bug                Whimbrel contradicts itself: please report it, with the story it carries
        └── UnknownEvent       a protocol met an event that its table does not have

Errors of other libraries are translated where they enter; attributes carry what a caller may want to look at.
"""

from __future__ import annotations


class WhimbrelError(Exception):
    """The root: catch this to catch everything raised on purpose."""


class Refused(WhimbrelError):
    """The request is wrong and nothing has happened."""


class UnknownName(Refused):
    """A name that nobody has: `kind` says of what, `known` what there is instead."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        listed = ", ".join(self.known[:10]) + (", ..." if len(self.known) > 10 else "")
        super().__init__(f"unknown {kind} {name!r}" + (f"; there is: {listed}" if listed else ""))


class Conflict(Refused):
    """The request collides with something under way."""


class BadRecord(Refused):
    """One input record that cannot be taken in; `reason` is a short word, the message says it in full.

    `record` is the beginning of the record, where only the source has seen it.
    """

    def __init__(self, reason: str, message: str, record: str = "") -> None:
        self.reason, self.record = reason, record
        super().__init__(message)


class Retry(WhimbrelError):
    """The same call may succeed later; nothing has happened."""


class Unavailable(Retry):
    """Something the call needs is not there right now."""


class Full(Unavailable):
    """A disk has no room: make some, and the same call succeeds."""

    SIGN = "no room on the disk"
    """In every message, so that it is known again wherever only words arrive."""

    def __init__(self, why: object) -> None:
        super().__init__(f"{self.SIGN}: {why}")


class Unstarted(Unavailable):
    """An instance does not start at a site, and has done no batch there since its checkpoint was copied to it.

    Only the site itself can say so. That a site cannot be reached says nothing about what ran there before.
    """


class Stop(WhimbrelError):
    """Data on disk is not what it must be."""


class Trimmed(Stop):
    """A read below a log's head."""

    def __init__(self, start: int, head: int) -> None:
        self.start, self.head = start, head
        super().__init__(f"position {start} was trimmed; the log now starts at {head}")


class Diverged(Stop):
    """A writer repeats an append with other content than the log took the first time under that number.

    Whoever wrote it is not where it was: an older checkpoint, changed code, an operator that is not deterministic.
    """


class Stale(Stop):
    """A log, a checkpoint or a snapshot is older than what was made from it: its last part is missing.

    A power failure, a restored backup, an empty volume. Going on would lose or double records without a word.
    """


class Corrupt(Stop):
    """Bytes that do not decode, or whose checksum does not fit."""


class NewerFormat(Stop):
    """Written by a newer version of Whimbrel than this one."""


class Bug(WhimbrelError):
    """Whimbrel contradicts itself."""


class UnknownEvent(Bug):
    """A protocol met an event that its table does not have; `story` is the migration's life so far."""

    def __init__(self, phase: str, event: str, story: list[str]) -> None:
        self.phase, self.event, self.story = phase, event, story
        super().__init__(f"event {event} in phase {phase} is not in the table; story: " + " → ".join(story))
