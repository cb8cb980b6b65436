"""The receiver: appends what other places send to the logs of this one. It has no network and no thread.

For each connection the network side (server.py) asks for a `Session` in the name of an authenticated place, passes it
one frame after the other, and sends back each answer. A session takes batches in order until the first failure; then
it is over, and the sender begins a new one at the first entry that was not acknowledged.

Exactly once, in order. An answer acknowledges entries that are durable. A sender sends again whatever was not
acknowledged, from the lowest such position on, so every session appends a consecutive range that begins at or below
what is missing. Whichever session appends an entry first has appended, or found, all entries before it; a second
append of it is a repetition by writer and counter, which the log drops. That also holds for a session whose sender
has given it up and that still has a batch in its hands.

Bounded. A session holds one batch, or the pieces of one. It answers when the batch is appended, so that a slow disk
slows the sender down, whose spool grows at the other place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, NewerFormat, Refused, Retry, Unavailable
from whimbrel.log.contract import Append, Appendable, Lane, append_all
from whimbrel.transport.protocol import (
    FRAME,
    VERSION,
    Ack,
    Batch,
    Failed,
    Frame,
    Hello,
    Piece,
    Taken,
    Welcome,
    decode,
    encode,
)
from whimbrel.transport.spool import KINDS, Outgoing

LOGGER = logging.getLogger("whimbrel.transport")

MayAppend = Callable[[str, str, Lane, str], bool]
"""The policy: whether a place may append to a log and lane in a writer's name."""


class Receiver:
    """What a place accepts from others: `log_of` opens a log by its name and raises `Refused` if there is none."""

    def __init__(self, place: str, deployment: str, log_of: Callable[[str], Appendable], may_append: MayAppend) -> None:
        self.place, self.deployment = place, deployment
        self._log_of, self._may_append = log_of, may_append

    def session(self, caller: str) -> Session:
        """A new connection of the place `caller`: the name that its certificate proves."""
        return Session(self, caller)

    def check(self, hello: Hello, caller: str) -> Welcome:
        """Raise unless the caller may send here at all."""
        if hello.version != VERSION:
            raise Unavailable(
                f"{hello.place} speaks version {hello.version} of the transport, {self.place} speaks {VERSION}: "
                "install the same release at both; until then the spool waits"
            )
        if hello.place != caller:
            raise Refused(f"{caller}, as its certificate says, calls itself {hello.place}: a place has one name")
        if hello.to != self.place:
            raise Refused(f"this is {self.place}, not {hello.to}: {caller} has a wrong address")
        if hello.deployment != self.deployment:
            raise Refused(
                f"{caller} sends a spool of deployment {hello.deployment!r}, {self.place} belongs to "
                f"{self.deployment!r}: nothing of it is taken"
            )
        if hello.kind not in KINDS:
            raise Refused(f"{caller} sends a spool of the unknown class {hello.kind!r}")
        return Welcome(VERSION, self.place)

    def append_all(self, caller: str, first: int, blobs: Sequence[bytes]) -> None:
        """Append consecutive entries of a caller's spool, those before the first that cannot be in any case.

        Runs of entries for the same log are appended together.
        """
        good: list[Outgoing] = []
        refused: Refused | Retry | None = None
        for position, blob in enumerate(blobs, first):
            try:
                good.append(self._checked(caller, position, blob))
            except (Refused, Retry) as error:
                refused = error
                break
        for name, run in groupby(good, lambda one: one.log):
            appends = [Append(one.blob, one.count, one.writer, one.counter, one.lane, one.replays) for one in run]
            append_all(self._log_of(name), appends)
        if refused is not None:
            raise refused

    def _checked(self, caller: str, position: int, blob: bytes) -> Outgoing:
        """One entry. Raises `Refused` unless it can be read and the caller may append it."""
        try:
            one = wire.unpack(blob, Outgoing)
        except (Corrupt, NewerFormat) as error:
            raise Refused(f"entry {position} of the spool of {caller} cannot be read: {error}") from error
        if not self._may_append(caller, one.log, one.lane, one.writer):
            raise Refused(
                f"{caller} may not append to {one.log} ({one.lane.name}) as {one.writer!r}, "
                f"as entry {position} of its spool would"
            )
        return one


class Session:
    """One connection of one place. Not for several threads at once."""

    def __init__(self, receiver: Receiver, caller: str) -> None:
        self._receiver, self.caller = receiver, caller
        self.is_over = False
        """Whether it takes no more frames: the network side closes the connection."""
        self.kind: str | None = None
        """The class of the spool that it carries; None: not greeted yet."""
        self._pieces = bytearray()
        self._next: int | None = None

    def answer(self, frame: bytes) -> bytes:
        """Take a frame; return the answer, when everything that it acknowledges is durable."""
        try:
            if self.is_over:
                raise Unavailable("this session is over")
            return encode(self._take(decode(frame)))
        except Exception as error:
            if not self.is_over:
                level = logging.INFO if isinstance(error, Retry) else logging.ERROR
                LOGGER.log(level, "%s takes nothing more from %s for now: %s", self._receiver.place, self.caller, error)
            self.is_over = True
            return encode(Failed.of(error))

    def _take(self, frame: Frame) -> Frame:
        if isinstance(frame, Hello) and self.kind is None:
            welcome = self._receiver.check(frame, self.caller)
            self.kind = frame.kind
            return welcome
        if isinstance(frame, Piece) and self.kind is not None:
            return self._assemble(frame)
        if not isinstance(frame, Batch) or self.kind is None or self._pieces:
            raise Unavailable(f"{type(frame).__name__} from {self.caller} is not expected here")
        if self._next not in (None, frame.first):
            raise Unavailable(f"{self.caller} sent entry {frame.first} of its spool, expected {self._next}")
        self._receiver.append_all(self.caller, frame.first, frame.entries)
        self._next = frame.first + len(frame.entries)
        return Ack(self._next)

    def _assemble(self, piece: Piece) -> Frame:
        if len(self._pieces) + len(piece.part) > FRAME + 64:
            raise Unavailable(f"{self.caller} sent pieces of more than {FRAME:,} bytes")
        self._pieces += piece.part
        if piece.more:
            return Taken()
        whole, self._pieces = bytes(self._pieces), bytearray()
        frame = decode(whole)
        if not isinstance(frame, Batch):
            raise Unavailable(f"{type(frame).__name__} from {self.caller} is not expected in pieces")
        return self._take(frame)
