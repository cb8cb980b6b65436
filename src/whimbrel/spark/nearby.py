"""Nearby: a folder through which the processes of one machine pass large blobs to each other.

Between Spark's Python workers, its JVM and the driver a byte is copied, converted and handled as text many times. A
file is written once and read once, and only its name goes through Spark. If a file cannot be written, the blob does.

    bundles, messages  until the end of the batch: the sink removes them when it has read them all
    deltas             as long as a worker may lack them, in addition to the state store, under names of their own
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from whimbrel.core.errors import Corrupt

LARGE = 256 << 10
"""Bytes from which on a blob goes to a file."""
BATCH = "batch-"


class Nearby:
    """The folder. Without a name, or on another machine, where it does not exist, nothing is written or found."""

    def __init__(self, folder: str = "") -> None:
        self._folder = Path(folder) if folder and Path(folder).is_dir() else None

    def leave(self, blob: bytes, name: str = "") -> str:
        """Write a blob atomically; return its name, "" if it was not written, e.g. on a full disk: then send the blob.

        Without a name of its own it exists until the end of the batch.
        """
        if self._folder is None or len(blob) < LARGE:
            return ""
        path = self._folder / (name or BATCH + secrets.token_hex(12))
        draft = path.with_suffix(".draft")
        try:
            draft.write_bytes(blob)
            draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            return ""
        return path.name

    def find(self, name: str) -> bytes | None:
        """The blob of a name, if there is one."""
        if self._folder is not None:
            with suppress(FileNotFoundError):
                return (self._folder / name).read_bytes()
        return None

    def blob(self, body: bytes, name: str) -> bytes:
        """The blob itself, or that of a name in this batch. Raises `Corrupt` if it is gone: repeat the batch."""
        found = self.find(name) if name else body
        if found is None:
            raise Corrupt(f"{name}, which a worker has written for this batch, is gone")
        return found

    def remove(self, name: str) -> None:
        """Remove a blob that is no longer needed."""
        if self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove the blobs of the batch: it is over."""
        for path in self._folder.glob(f"{BATCH}*") if self._folder is not None else ():
            path.unlink(missing_ok=True)


NOWHERE = Nearby()
"""No folder: all blobs go through Spark."""
