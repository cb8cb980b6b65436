"""The logs of the simulator's actors: an operation may fail before and after it has taken effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from whimbrel.core import wire
from whimbrel.core.record import Record
from whimbrel.log import codec
from whimbrel.log.carrier import View
from whimbrel.log.codec import ROWS
from whimbrel.log.contract import Entry, Lane
from whimbrel.log.memory import MemoryLog

if TYPE_CHECKING:
    from whimbrel.lab.sim.actors import Actor
    from whimbrel.lab.sim.world import World


_make = partial(tuple.__new__, Record)
"""What `Record._make` does, without a Python call."""


class PlainCodec:
    """Entries hold the records themselves: much faster than their bytes, and the byte format has its own tests."""

    def encode(self, records: Sequence[Record]) -> Any:
        return tuple(records)

    def records(self, entry: Entry) -> Iterable[Record]:
        content: Any = entry.blob
        if isinstance(content, bytes):  # of messages only
            content = [as_record(*message) for message in codec.messages(content)]
        start = entry.position * ROWS
        return [_make((start + row, *record[1:])) for row, record in enumerate(content)]


PLAIN = PlainCodec()


class PackedCodec:
    """Entries of bytes, for records that a spool carries."""

    def encode(self, records: Sequence[Record]) -> bytes:
        return wire.pack([*map(tuple, records)])

    def records(self, entry: Entry) -> Iterable[Record]:
        return [Record(*record) for record in wire.unpack(entry.blob, list[tuple[Any, ...]])]


PACKED = PackedCodec()


def as_record(kind: int, bin: int, body: bytes) -> Record:
    """A message as it is read from the control lane it was sent to."""
    return Record(0, kind, bin, "", -1, 0, "", 0, 0, body)


class SimLog(MemoryLog):
    """A durable log. A writer may die, or get a transient error, before or after an append; an append may happen twice;
    a read returns a random number of entries."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.reader: Actor | None = None
        """The actor that is woken by an append."""

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.DATA, replays: bool = False
    ) -> int | None:
        world, append = self._world, super().append
        if counter <= self.counter(writer, lane):  # without a fault, or a batch of many entries would hardly ever end
            return append(blob, count=count, writer=writer, counter=counter, lane=lane, replays=replays)
        world.maybe_stumble(world.append_odds)
        position = append(blob, count=count, writer=writer, counter=counter, lane=lane, replays=replays)
        if world.chaos and world.random.random() < 0.05:
            again = append(blob, count=count, writer=writer, counter=counter, lane=lane, replays=replays)
            assert again is None, "a repeated append must have no effect"
        self.appended(position, blob, writer)
        if self.reader is not None:
            world.wake(self.reader)
        world.maybe_stumble(0.005)
        return position

    def within(self, start: int, size: int, lane: Lane = Lane.DATA) -> int:
        furthest = super().within(start, size, lane)
        return self._world.random.randint(min(start + 1, furthest), furthest)

    def appended(self, position: int | None, blob: Any, writer: str) -> None:
        """Called after an append; `position` is None if it was a repetition."""


class Inbox(SimLog):
    """Receives messages as well; their bodies may have been damaged in transit."""

    def encode(self, messages: Sequence[View]) -> Any:
        """Encode messages as one entry: in bytes where links cut it into pieces."""
        content = tuple(self._world.carried(as_record(kind, bin, bytes(body))) for kind, bin, body in messages)
        if self._world.network is None:
            return content
        return codec.encode_messages((record.kind, record.bin, record.body) for record in content)

    def appended(self, position: int | None, blob: Any, writer: str) -> None:
        if position is not None and writer.startswith("gateway") and "/" in writer:
            self._world.tally["records replayed"] += len(blob)

    def advance(self, start: int, records: int, lane: Lane = Lane.DATA) -> int:
        return self._some(start, lane)

    def within(self, start: int, size: int, lane: Lane = Lane.DATA) -> int:
        return self._some(start, lane)

    def _some(self, start: int, lane: Lane) -> int:
        """A batch may end anywhere, and before the first entry: then the other lane goes ahead."""
        return self._world.random.randint(start, self.tail(lane))

    def commit(self, reader: str, positions: Mapping[Lane, int], *, resets: bool = False) -> None:
        super().commit(reader, positions, resets=resets)
        if not resets:
            self._world.maybe_stumble(0.005)


class CheckpointLog(SimLog):
    """The checkpoint of an instance at one site."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._began = 0

    @property
    def has_begun(self) -> bool:
        """Whether a batch was planned since the checkpoint was copied here."""
        return self.tail() > self._began

    def copied(self) -> CheckpointLog:
        """A copy for another site."""
        copy = CheckpointLog(self._world)
        copy._rulers, copy._began = deepcopy(self._rulers), self.tail()
        return copy


class Outbox(SimLog):
    """The output of an instance, which often dies between two pieces of a batch."""

    def appended(self, position: int | None, blob: Any, writer: str) -> None:
        if self._world.splits and position is not None:
            self._world.maybe_die(0.1)


class Spool(SimLog):
    """The spool of an instance's increments: its instance and the outlet may append between two reads."""

    def read(self, start: int, end: int | None = None, lane: Lane = Lane.DATA) -> list[Entry]:
        self._world.store.pause(0.3)
        return super().read(start, end, lane)


class Ingress(SimLog):
    """Retains all entries ever appended, with their positions, including the trimmed ones."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.history: list[tuple[int, Sequence[Record]]] = []
        self.by_writer: dict[str, list[Sequence[Record]]] = defaultdict(list)

    def appended(self, position: int | None, blob: Any, writer: str) -> None:
        if position is not None:
            self.history.append((position, blob))
            self.by_writer[writer].append(blob)
