"""Nearby: a folder in which the processes of one machine leave large blobs for each other.

Between Spark's Python workers, its JVM and the driver a byte is copied, converted and taken for text many times over. A
file is written once and read once, and what travels is its name. Whoever cannot leave one sends the blob itself.

    bundles, messages     for the rest of the batch: the sink sweeps them away when it has them all
    deltas             for as long as a worker may lack them, beside the state store, under names of their own
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from whimbrel.core.errors import Corrupt

LARGE = 256 << 10
"""A blob of this size is worth a file."""
BATCH = "batch-"


class Nearby:
    """The folder; nothing is left or found if it is not named, or not here but on another machine."""

    def __init__(self, folder: str = "") -> None:
        self._folder = Path(folder) if folder and Path(folder).is_dir() else None

    def leave(self, blob: bytes, name: str = "") -> str:
        """Write a blob, all of it or nothing, as on a full disk; return its name, "" if it must travel by itself.

        Without a name of its own it is there until the end of the batch.
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
        """What was left under a name."""
        if self._folder is not None:
            with suppress(FileNotFoundError):
                return (self._folder / name).read_bytes()
        return None

    def blob(self, body: bytes, name: str) -> bytes:
        """What came by itself, or was left in this batch. Raises `Corrupt` if it is gone: repeat the batch."""
        found = self.find(name) if name else body
        if found is None:
            raise Corrupt(f"{name}, which a worker has left for this batch, is gone")
        return found

    def remove(self, name: str) -> None:
        """Nobody will look for it any more."""
        if self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """The batch is over: nobody will look for what was left in it."""
        for path in self._folder.glob(f"{BATCH}*") if self._folder is not None else ():
            path.unlink(missing_ok=True)


NOWHERE = Nearby()
"""Everything travels by itself."""
