"""Every error that Whimbrel raises deliberately. The first level tells the caller how to react.

    WhimbrelError
    ├── Refused            the request is wrong: change it; it had no effect
    │   ├── UnknownName        no such site, stage, key, protocol ...
    │   ├── Conflict           it conflicts with an operation in progress
    │   └── BadRecord          this input cannot be accepted (dead-lettered with its reason)
    ├── Retry              the same call may succeed later; it had no effect
    │   └── Unavailable        a required resource is currently unavailable
    │       ├── Full               for instance, disk space
    │       ├── Overloaded         for instance, a process that did not start in time
    │       ├── SpoolFull          or a spool's bytes: its destination does not take them fast enough
    │       └── Unstarted          an instance does not start, and has run no batch since it was copied there
    ├── Stop               data on disk is inconsistent: do not continue, investigate
    │   ├── Trimmed            a read of trimmed log entries
    │   ├── Diverged           a repeated append that differs from the first one
    │   ├── Stale              a log, checkpoint or snapshot that is older than data derived from it
    │   ├── Corrupt            bytes that do not decode, or whose checksum is wrong
    │   └── NewerFormat        written by a newer version of Whimbrel
    └── Bug                an internal inconsistency: please report it, with the story it contains
        └── UnknownEvent       a protocol received an event that its table does not have

Errors of other libraries are translated where they enter; attributes contain the details for a caller.
"""

from __future__ import annotations


class WhimbrelError(Exception):
    """The root: catch this to catch everything that Whimbrel raises deliberately."""


class Refused(WhimbrelError):
    """The request is wrong and had no effect."""


class UnknownName(Refused):
    """A name that does not exist: `kind` is what it should name, `known` are the existing names."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        listed = ", ".join(self.known[:10]) + (", ..." if len(self.known) > 10 else "")
        super().__init__(f"unknown {kind} {name!r}" + (f"; there is: {listed}" if listed else ""))


class Conflict(Refused):
    """The request conflicts with an operation in progress."""


class BadRecord(Refused):
    """One input record that cannot be accepted; `reason` is a short code, the message is the full explanation.

    `record` is the beginning of the record, if only the source has read it.
    """

    def __init__(self, reason: str, message: str, record: str = "") -> None:
        self.reason, self.record = reason, record
        super().__init__(message)


class Retry(WhimbrelError):
    """The same call may succeed later; it had no effect."""


class Unavailable(Retry):
    """A resource that the call needs is currently unavailable."""


class Full(Unavailable):
    """A disk is full: free some space, and the same call succeeds."""

    SIGN = "no room on the disk"
    """In every message, so that the error can be recognized where only its text arrives."""

    def __init__(self, why: object) -> None:
        super().__init__(f"{self.SIGN}: {why}")


class Overloaded(Unavailable):
    """An instance did not start, as is typical of an overloaded machine: the same start may succeed at once."""


class SpoolFull(Unavailable):
    """A spool holds as many bytes as it may: its destination is slow or out of reach. Append again later."""


class Unstarted(Unavailable):
    """An instance does not start at a site, and has run no batch there since its checkpoint was copied to it.

    Only the site itself can report this. An unreachable site does not prove that the instance has not run there.
    """


class Stop(WhimbrelError):
    """Data on disk is inconsistent."""


class Trimmed(Stop):
    """A read below a log's head."""

    def __init__(self, start: int, head: int) -> None:
        self.start, self.head = start, head
        super().__init__(f"position {start} was trimmed; the log now starts at {head}")


class Diverged(Stop):
    """A writer repeats an append with content that differs from what the log has under that number.

    The writer's state has diverged: an older checkpoint, changed code, an operator that is not deterministic.
    """


class Stale(Stop):
    """A log, a checkpoint or a snapshot is older than data derived from it: its last part is missing.

    Causes: a power failure, a restored backup, an empty volume. Continuing would silently lose or duplicate records.
    """


class Corrupt(Stop):
    """Bytes that do not decode, or whose checksum is wrong."""


class NewerFormat(Stop):
    """Written by a newer version of Whimbrel than this one."""


class Bug(WhimbrelError):
    """An internal inconsistency of Whimbrel."""


class UnknownEvent(Bug):
    """A protocol received an event that its table does not have; `story` is the migration's history so far."""

    def __init__(self, phase: str, event: str, story: list[str]) -> None:
        self.phase, self.event, self.story = phase, event, story
        super().__init__(f"event {event} in phase {phase} is not in the table; story: " + " → ".join(story))
