"""The checkpoint of an inline host: a log of batches, each planned and then committed with its changes.

    planned 0   committed 0   planned 1   committed 1   ...   planned n      ◀── n is repeated after a crash
                └ deltas of the parts that the batch called, or, now and then, the whole state: a base

A log is append-only and its entries are atomic (log/contract.py): so state and position are durable together, and a
crash leaves a batch that is not begun, begun, or committed. Entries before the last base are trimmed.

On disk it is one file in the instance's folder; the simulator uses a log in memory, which fails. All parts of a batch
are in one entry: with SQLite at most 1 GB.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Refused, Unavailable
from whimbrel.log import EmbeddedLog, Log
from whimbrel.log.readers import Offset

FILE = "checkpoint.db"
WRITER = "host"

GROWTH = 5
"""The state is compacted when the stored bytes exceed this multiple of its size: that bounds what loading reads."""
FLOOR = 64 << 10
"""Bytes: a smaller state counts as this large."""
MOST = 512
"""It is compacted when there are this many entries, however small."""


def new_id() -> str:
    """A unique name for a checkpoint."""
    return secrets.token_hex(8)


class Batch(msgspec.Struct, array_like=True):
    """An entry: a batch that is planned, or, with changes, committed."""

    id: str
    """The checkpoint's name."""
    parts: int
    number: int
    start: Offset
    end: Offset
    deltas: dict[int, list[bytes]] | None = None
    """By part: its changes. None: the batch is only planned."""
    is_base: bool = False
    """Whether the changes are the whole state."""


class Checkpoint:
    """The checkpoint of one instance, with `parts` parts. `start`: where in the inbox its first batch begins."""

    def __init__(
        self,
        log: Log,
        parts: int,
        start: Offset,
        *,
        most: int = MOST,
        new_id: Callable[[], str] = new_id,
    ) -> None:
        self._log, self.parts, self._most = log, parts, most
        self._first = Batch(new_id(), parts, -1, start, start, {})
        self.last = self._first
        """The last entry, without its changes."""
        self._entries = self._base_bytes = self._delta_bytes = 0
        self._unused: dict[int, list[bytes]] | None = self._read()
        """The deltas as read at first: they are usually needed next."""

    def read(self) -> dict[int, list[bytes]]:
        """Read everything; return the deltas of each part, oldest first."""
        deltas, self._unused = self._unused, None
        return self._read() if deltas is None else deltas

    def _read(self) -> dict[int, list[bytes]]:
        """Raises `Refused` if the number of parts has changed."""
        self.last, self._entries, self._base_bytes, self._delta_bytes = self._first, 0, 0, 0
        deltas: dict[int, list[bytes]] = {part: [] for part in range(self.parts)}
        for entry in self._log.read(self._log.head()):
            batch = wire.unpack(entry.blob, Batch)
            if batch.parts != self.parts:
                raise Refused(
                    f"this checkpoint was made with {batch.parts} groups, not {self.parts}: the number cannot change; "
                    f"start with groups={batch.parts}, or from an empty checkpoint"
                )
            if batch.deltas is not None:
                if batch.is_base:
                    deltas = {part: [] for part in range(self.parts)}
                for part, blobs in batch.deltas.items():
                    deltas[part] += blobs
                self._count(len(entry.blob), batch.is_base)
            self.last = msgspec.structs.replace(batch, deltas=None if batch.deltas is None else {})
        return deltas

    def _count(self, size: int, is_base: bool) -> None:
        if is_base:
            self._entries, self._base_bytes, self._delta_bytes = 1, size, 0
        else:
            self._entries, self._delta_bytes = self._entries + 1, self._delta_bytes + size

    @property
    def id(self) -> str:
        """Its name; a new one until the first batch is planned."""
        return self.last.id

    @property
    def plan(self) -> Batch | None:
        """The batch that is planned and not committed."""
        return self.last if self.last.deltas is None else None

    @property
    def at(self) -> Offset:
        """The position in the inbox up to which everything is applied."""
        return self.last.start if self.last.deltas is None else self.last.end

    def begin(self, end: Offset) -> Batch:
        """Plan the next batch: up to `end`. It has the same records whenever it is repeated."""
        batch = Batch(self.id, self.parts, self.last.number + 1, self.at, end)
        self._append(batch)
        self.last = batch
        return batch

    def commit(self, batch: Batch, deltas: Mapping[int, Sequence[bytes]]) -> None:
        """Make the changes of a batch and its end durable, together."""
        self._store(batch, deltas, is_base=False)

    def compact(self, batch: Batch, whole: Mapping[int, Sequence[bytes]]) -> None:
        """Commit a batch with the whole state in place of its changes. All earlier entries become needless."""
        position = self._store(batch, whole, is_base=True)
        self._log.trim(position)

    def is_outgrown(self, size: int, whole: Callable[[], int]) -> bool:
        """Whether to commit changes of this size by compacting a state of `whole` bytes."""
        stored = self._base_bytes + self._delta_bytes + size
        grown = stored > GROWTH * max(self._base_bytes, FLOOR) and stored > GROWTH * whole()
        return grown or self._entries >= self._most

    def _store(self, batch: Batch, deltas: Mapping[int, Sequence[bytes]], is_base: bool) -> int:
        blobs = {part: list(some) for part, some in deltas.items()}
        self._unused = None
        size = self._append(msgspec.structs.replace(batch, deltas=blobs, is_base=is_base))
        self._count(size, is_base)
        self.last = msgspec.structs.replace(batch, deltas={})
        return self._log.tail() - 1

    def _append(self, batch: Batch) -> int:
        """Plan and commit of a batch have consecutive numbers."""
        blob = wire.pack(batch)
        self._log.append(blob, count=0, writer=WRITER, counter=2 * batch.number + (batch.deltas is not None))
        return len(blob)


class SavedLog:
    """The checkpoint of an inline host in a folder, which may not exist: for a start, and for a copy to another site
    (host/contract.py)."""

    def __init__(self, folder: Path, log: Log | None = None) -> None:
        """`log`: if it is not in this folder."""
        self.folder = folder
        self._ends: dict[int, Offset] = {}
        self.id: str | None = None
        self.planned = self.committed = -1
        for batch in self._batches(log):
            self.id, self.planned = batch.id, batch.number
            self._ends[batch.number] = batch.end
            if batch.deltas is not None:
                self.committed = batch.number

    def _batches(self, log: Log | None) -> list[Batch]:
        """The last entries, oldest first: a planned batch needs the one before it."""
        path = self.folder / FILE
        if log is None and not path.exists():
            return []
        opened = log or EmbeddedLog(path, create=False)
        try:
            entries = opened.read(max(opened.head(), opened.tail() - 2))
        except Unavailable:
            if path.exists():
                raise
            return []
        finally:
            if log is None:
                opened.close()
        return [wire.unpack(entry.blob, Batch) for entry in entries]

    def end(self, batch: int) -> Offset:
        """The end of the last planned or of the last finished batch."""
        return self._ends.get(batch, {})

    def needless(self, folder: str, names: Iterable[str]) -> set[str]:
        """SQLite's shared memory, which each process makes anew."""
        return {name for name in names if name.endswith("-shm")}
