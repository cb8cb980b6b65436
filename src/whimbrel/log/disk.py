"""Disks: how much room there is, and how it shows that there is none.

Whoever writes looks ahead. Below a reserve it takes nothing in: to stand still between two batches costs nothing, to
fail amid a commit costs a restart. A disk that fills up faster than that is found out by the errors it gives; what they
hit is tried again, after pauses that grow, until there is room (log/backoff.py).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

from whimbrel.core.errors import Full

RESERVE = 64 << 20
"""Bytes that must be free, unless told otherwise."""
RELIEF = 1.25
"""So many times the reserve must be free again before it goes on: a disk at its limit would make it stutter."""

NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SIGNS = ("No space left on device", "Disk quota exceeded", "File too large", "database or disk is full", Full.SIGN)
"""What errors say that have come a long way, through a JVM for instance."""


class Disk:
    """The folders that somebody writes to, and whether all of them have room."""

    def __init__(self, owner: str, folders: Sequence[Path], reserve: int = RESERVE) -> None:
        self.owner, self._folders, self.reserve = owner, folders, reserve
        self._low = False

    @property
    def full(self) -> str | None:
        """Why nothing may be taken in, in full; None if there is room."""
        wanted = round(self.reserve * (RELIEF if self._low else 1))
        short = [(free, folder) for folder in self._folders if (free := _free(folder)) < wanted]
        self._low = bool(short)
        if not short:
            return None
        free, folder = min(short)
        return self.told(f"{free / (1 << 20):,.0f} MiB free at {folder}, {wanted / (1 << 20):,.0f} needed")

    def told(self, why: object) -> str:
        """What a user reads."""
        return f"the disk of {self.owner} is full ({why}): its intake stands still; make room and it goes on by itself"


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that a disk has no room."""
    while error is not None:
        if isinstance(error, Full) or (isinstance(error, OSError) and error.errno in NUMBERS):
            return True
        if any(sign in str(error) for sign in SIGNS):
            return True
        error = error.__cause__
    return False


def _free(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
