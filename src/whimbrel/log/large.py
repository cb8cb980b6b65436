"""Large entries of a spool, in a file each: a database writes a large blob twice, and once more when it drops it.

A file is written before the entry that names it is appended, and removed after that entry is trimmed. Its name is the
entry's writer and counter. So of a file that no entry names it is known whether its entry is still to be appended (its
counter is above the writer's last) or was trimmed: only then a new start removes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import quote, unquote
from zlib import crc32

from whimbrel.core.errors import Corrupt, Full, Unavailable
from whimbrel.log.disk import is_full
from whimbrel.log.durability import sync
from whimbrel.log.private import below, make_folder, opener

LARGE = 256 << 10
"""Bytes from which on an entry is a file."""
LONGEST = 200
"""Maximum characters of a file's name: the entries of a writer with a longer one stay in the log."""


class LargeEntries:
    """The files of one spool. `durable`: they survive a power failure."""

    def __init__(self, folder: Path, durable: bool = False, least: int = LARGE) -> None:
        self._folder, self._durable, self.least = folder, durable, least

    def name(self, writer: str, counter: int, size: int) -> str | None:
        """The file for an entry, None if it belongs into the log."""
        name = f"{quote(writer, safe='')}.{counter}"
        return name if size >= self.least and len(name) <= LONGEST else None

    def write(self, name: str, blob: bytes) -> None:
        """Write a file; a repetition writes the same."""
        path = below(self._folder, name)
        try:
            make_folder(self._folder)
            with open(path, "wb", opener=opener) as file:
                file.write(blob)
                if self._durable:
                    file.flush()
                    os.fsync(file.fileno())
            if self._durable:
                sync(self._folder)
        except OSError as error:
            raise (Full if is_full(error) else Unavailable)(f"{path}: {error}") from error

    def read(self, name: str, checksum: int) -> bytes:
        """The content of a file. Raises `Corrupt` if it is not what was written."""
        path = below(self._folder, name)
        try:
            blob = path.read_bytes()
        except OSError as error:
            raise Corrupt(f"{path}: an entry of the spool is missing: {error}") from error
        if crc32(blob) != checksum:
            raise Corrupt(f"{path}: an entry of the spool is damaged: the checksum does not fit")
        return blob

    def remove(self, name: str) -> None:
        """Remove a file whose entry is trimmed."""
        below(self._folder, name).unlink(missing_ok=True)

    def sweep(self, named: Callable[[], Collection[str]], last: Callable[[str], int]) -> None:
        """Remove files that a crash has left: of trimmed entries, not of those still to be appended.

        `named`: the files of all entries in the spool. `last`: a writer's last counter.
        """
        files = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        old = [name for name in files if _is_appended(name, last)]  # before `named` is asked
        if old:
            live = named()
            for name in old:
                if name not in live:
                    self.remove(name)


def _is_appended(name: str, last: Callable[[str], int]) -> bool:
    writer, _, counter = name.rpartition(".")
    return counter.isdecimal() and int(counter) <= last(unquote(writer))
