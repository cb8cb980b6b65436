"""Logs as the simulator's actors meet them: they fail before and after they have done what they were asked to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from whimbrel.core.record import Record
from whimbrel.log.carrier import View
from whimbrel.log.codec import ROWS
from whimbrel.log.contract import Entry, Lane
from whimbrel.log.memory import MemoryLog

if TYPE_CHECKING:
    from whimbrel.lab.sim.actors import Actor
    from whimbrel.lab.sim.world import World


class PlainCodec:
    """Entries hold the records themselves: much faster than their bytes, and the bytes have tests of their own."""

    def encode(self, records: Sequence[Record]) -> Any:
        return tuple(records)

    def records(self, entry: Entry) -> Iterable[Record]:
        content: Any = entry.blob
        start = entry.position * ROWS
        return [Record(start + row, *record[1:]) for row, record in enumerate(content)]


PLAIN = PlainCodec()


def as_record(kind: int, bin: int, body: bytes) -> Record:
    """A message as it comes out of the control lane it was sent to."""
    return Record(0, kind, bin, "", -1, 0, "", 0, 0, body)


class SimLog(MemoryLog):
    """A log that outlives everybody. A writer may die, or meet an error that passes, before an append or after it; an
    append may come twice; a reader gets no more at once than chance gives it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.reader: Actor | None = None
        """The actor that waits for what is appended."""

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.DATA, replays: bool = False
    ) -> int | None:
        world = self._world
        world.maybe_stumble(0.005)
        position = super().append(blob, count=count, writer=writer, counter=counter, lane=lane, replays=replays)
        if world.chaos and world.random.random() < 0.05:
            again = super().append(blob, count=count, writer=writer, counter=counter, lane=lane, replays=replays)
            assert again is None, "a repetition changes nothing"
        self.appended(position, blob, writer)
        if self.reader is not None:
            world.wake(self.reader)
        world.maybe_stumble(0.005)
        return position

    def within(self, start: int, size: int, lane: Lane = Lane.DATA) -> int:
        furthest = super().within(start, size, lane)
        return self._world.random.randint(min(start + 1, furthest), furthest)

    def appended(self, position: int | None, blob: Any, writer: str) -> None:
        """Something was appended, or had been before: then `position` is None."""


class Inbox(SimLog):
    """Takes messages in as well; what they carry may have been damaged on the way."""

    def encode(self, messages: Sequence[View]) -> Any:
        """The entry that messages become."""
        return tuple(self._world.carried(as_record(kind, bin, bytes(body))) for kind, bin, body in messages)

    def appended(self, position: int | None, blob: Any, writer: str) -> None:
        if position is not None and writer.startswith("gateway") and "/" in writer:
            self._world.tally["records replayed"] += len(blob)


class Outbox(SimLog):
    """What an instance says."""


class Ingress(SimLog):
    """Remembers everything that ever came in, with its place: what is trimmed as well."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.history: list[tuple[int, Sequence[Record]]] = []

    def appended(self, position: int | None, blob: Any, writer: str) -> None:
        if position is not None:
            self.history.append((position, blob))
