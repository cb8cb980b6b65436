"""The spool of an instance's increments: buffers what its parts send to the central store until it is uploaded.

    DATA lane       messages of a batch, written by the instance's sink; large entries are in a file each
    CONTROL lane    confirmations of increments, written by the site that receives them from the gate

The instance's site writes, the gateway uploads to the store (uploader.py): neither ever waits for the other. An
increment's messages precede its confirmation: an instance appends its messages before its outbox entry.

Files are fsynced before the entries that name them are appended (large.py).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Trimmed
from whimbrel.core.record import Checkpointed
from whimbrel.log.codec import Content
from whimbrel.log.contract import Lane, Log
from whimbrel.log.large import LargeEntries


class Spooled(msgspec.Struct, frozen=True, array_like=True):
    """The content of a data entry: messages as `wire.pack` encodes them, or their file with its checksum."""

    messages: bytes
    file: str = ""
    checksum: int = 0


class Confirmed(msgspec.Struct, frozen=True):
    """An increment is confirmed, since `at_us`."""

    saved: Checkpointed
    at_us: int


class IncrementSpool:
    """One instance's spool. `folder` is for large messages; without one they go to the log as well."""

    def __init__(self, log: Log, folder: Path | None = None) -> None:
        self._log, self._large = log, None if folder is None else LargeEntries(folder, durable=True)

    # ── Writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.CONTROL, replays: bool = False
    ) -> int | None:
        """Append messages. An entry's count is its size in bytes, so that the lag of a spool is in bytes."""
        spooled = Spooled(blob)
        if self._large is not None and (file := self._large.name(writer, counter, len(blob))) is not None:
            spooled = Spooled(b"", file, crc32(blob))
            if counter > self._log.counter(writer):  # otherwise its file may be removed, and must not return
                self._large.write(file, blob)
        return self._log.append(wire.pack(spooled), count=len(blob), writer=writer, counter=counter, replays=replays)

    def confirm(self, saved: Checkpointed, at_us: int) -> None:
        """Append that an increment is confirmed. Idempotent: a confirmation may arrive more than once."""
        writer = f"{saved.src}/{saved.part}"
        if saved.number > self._log.counter(writer, Lane.CONTROL):
            blob = wire.pack(Confirmed(saved, at_us))
            self._log.append(blob, count=1, writer=writer, counter=saved.number, lane=Lane.CONTROL)

    @property
    def log(self) -> Log:
        """The underlying log."""
        return self._log

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, lane: Lane = Lane.DATA) -> int:
        """The first position that can still be read."""
        return self._log.head(lane)

    def messages(self, position: int) -> list[Content] | None:
        """The messages at a position; None: there is no entry yet."""
        for entry in self._log.read(position, position + 1):
            spooled = wire.unpack(entry.blob, Spooled)
            return self._read(spooled) if spooled.file else wire.unpack(spooled.messages, list[Content])
        return None

    def confirmed(self, start: int) -> list[Confirmed]:
        """The confirmations from a position on."""
        return [wire.unpack(entry.blob, Confirmed) for entry in self._log.read(start, lane=Lane.CONTROL)]

    @property
    def under_way(self) -> int:
        """Bytes that have been appended and not been trimmed."""
        while True:
            with suppress(Trimmed):  # trimmed between the two calls: try again
                return self._log.backlog(self._log.head())

    def trim(self, position: int, confirmed: int) -> None:
        """Drop messages below `position`, and confirmations below `confirmed`."""
        # In this order: the increment of a confirmation must exist as long as the confirmation does.
        self._log.trim(confirmed, Lane.CONTROL)
        self._log.trim(position)
        if self._large is not None:
            self._large.sweep(self._files, self._log.counter)

    # ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, spooled: Spooled) -> list[Content]:
        assert self._large is not None
        try:
            return wire.unpack(self._large.read(spooled.file, spooled.checksum), list[Content])
        except Corrupt as error:
            raise Corrupt(f"increments that are not uploaded yet are missing or damaged: {error}") from error

    def _files(self) -> set[str]:
        """The files of the entries that exist."""
        return {wire.unpack(entry.blob, Spooled).file for entry in self._log.read(self._log.head())}
