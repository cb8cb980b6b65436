"""The spool of an instance's increments: what its parts have sent to the central store, until it is there.

    DATA lane       messages, one entry a batch, written by the instance's sink; large ones lie in a file each
    CONTROL lane    which increments count, written by whoever hears it from the gate

The instance's site writes, the gateway carries it to the store (uploader.py): neither ever waits for the other.
What counts stands behind what was sent: an instance messages before it speaks.

A file is there, and on the disk, before the entry that names it. It has the entry's writer and counter for a name, so
that a batch that is repeated writes the same one, and that it is known of any file whether it is still to be named.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote
from zlib import crc32

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Full, Trimmed, Unavailable
from whimbrel.core.record import Checkpointed
from whimbrel.log.codec import Content
from whimbrel.log.contract import Lane, Log
from whimbrel.log.disk import is_full
from whimbrel.log.durability import sync
from whimbrel.log.private import make_folder, opener

LARGE = 256 << 10
"""Messages of this size lie in a file: a database would write them twice."""


class Spooled(msgspec.Struct, frozen=True, array_like=True):
    """What a data entry says: messages as `wire.pack` makes them, or in which file they are, with its checksum."""

    messages: bytes
    file: str = ""
    checksum: int = 0


class Confirmed(msgspec.Struct, frozen=True):
    """An increment counts, since then."""

    saved: Checkpointed
    at_us: int


class IncrementSpool:
    """One instance's spool. `folder` is for what is large; without one nothing is."""

    def __init__(self, log: Log, folder: Path | None = None) -> None:
        self._log, self._folder = log, folder

    # ── In ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.CONTROL, replays: bool = False
    ) -> int | None:
        """Take messages over. An entry counts as many as it has bytes: how far behind a spool is, is told in bytes."""
        spooled = Spooled(blob)
        if self._folder is not None and len(blob) >= LARGE:
            spooled = Spooled(b"", f"{quote(writer, safe='@')}.{counter}", crc32(blob))
            if counter > self._log.counter(writer):  # or its file may be gone, and must not be there again
                _write(self._folder / spooled.file, blob)
        return self._log.append(wire.pack(spooled), count=len(blob), writer=writer, counter=counter)

    def confirm(self, saved: Checkpointed, at_us: int) -> None:
        """An increment counts. It may be heard more than once."""
        writer = f"{saved.src}/{saved.part}"
        if saved.number > self._log.counter(writer, Lane.CONTROL):
            blob = wire.pack(Confirmed(saved, at_us))
            self._log.append(blob, count=1, writer=writer, counter=saved.number, lane=Lane.CONTROL)

    @property
    def log(self) -> Log:
        """What it lies in."""
        return self._log

    # ── Out ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, lane: Lane = Lane.DATA) -> int:
        """The first position that can still be read."""
        return self._log.head(lane)

    def messages(self, position: int) -> list[Content] | None:
        """What a batch has sent; None: there is nothing yet."""
        for entry in self._log.read(position, position + 1):
            spooled = wire.unpack(entry.blob, Spooled)
            return self._read(spooled.file) if spooled.file else wire.unpack(spooled.messages, list[Content])
        return None

    def confirmed(self, start: int) -> list[Confirmed]:
        """Which increments count, from a position on."""
        return [wire.unpack(entry.blob, Confirmed) for entry in self._log.read(start, lane=Lane.CONTROL)]

    @property
    def under_way(self) -> int:
        """Bytes that have been taken over and not been given up."""
        while True:
            with suppress(Trimmed):  # in this very moment: look again
                return self._log.backlog(self._log.head())

    def trim(self, position: int, heard: int) -> None:
        """Give up messages below one position, and what is said of increments below another."""
        # In this order: what counts must find its increment, as long as it is there.
        self._log.trim(heard, Lane.CONTROL)
        self._log.trim(position)
        self._sweep()

    # ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, file: str) -> list[Content]:
        assert self._folder is not None
        path = self._folder / file
        try:
            return wire.unpack(path.read_bytes(), list[Content])
        except (OSError, Corrupt) as error:
            raise Corrupt(f"{path}: increments under way are missing or damaged: {error}") from error

    def _sweep(self) -> None:
        """Remove the files of entries that have been given up: not of those that are there, or still to come."""
        if self._folder is None or not self._folder.is_dir():
            return
        old = [path for path in self._folder.iterdir() if self._is_named(path.name)]  # now or before: then look where
        named = {wire.unpack(entry.blob, Spooled).file for entry in self._log.read(self._log.head())} if old else ()
        for path in old:
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _is_named(self, file: str) -> bool:
        writer, _, counter = file.rpartition(".")
        return counter.isdecimal() and int(counter) <= self._log.counter(unquote(writer))


def _write(path: Path, blob: bytes) -> None:
    try:
        make_folder(path.parent)
        with open(path, "wb", opener=opener) as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)
    except OSError as error:
        kind = Full if is_full(error) else Unavailable
        raise kind(f"{path}: {error}") from error
