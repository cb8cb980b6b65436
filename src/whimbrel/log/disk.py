"""Disks: checks the free space, and recognizes errors of a full disk.

A writer checks ahead. Below a reserve it pauses its intake: pausing between two batches costs nothing, failing amid a
commit costs a restart. If a disk fills up faster than that, writes fail; the activities that fail are tried again,
after growing pauses, until there is space (log/backoff.py).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

from whimbrel.core.errors import Full

RESERVE = 64 << 20
"""Bytes that must be free, by default."""
RELIEF = 1.25
"""This multiple of the reserve must be free before intake resumes: a hysteresis, so that it does not flap."""

NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SIGNS = ("No space left on device", "Disk quota exceeded", "File too large", "database or disk is full", Full.SIGN)
"""Texts of such errors, for those that arrive only as text, through a JVM for instance."""


class Disk:
    """The folders that `owner` writes to, and whether all of their disks have enough free space."""

    def __init__(self, owner: str, folders: Sequence[Path], reserve: int = RESERVE) -> None:
        self.owner, self._folders, self.reserve = owner, folders, reserve
        self._low = False

    @property
    def full(self) -> str | None:
        """Why intake must pause, as a message; None if there is enough space."""
        wanted = round(self.reserve * (RELIEF if self._low else 1))
        short = [(free, folder) for folder in self._folders if (free := _free(folder)) < wanted]
        self._low = bool(short)
        if not short:
            return None
        free, folder = min(short)
        return self.message(f"{free / (1 << 20):,.0f} MiB free at {folder}, {wanted / (1 << 20):,.0f} needed")

    def message(self, why: object) -> str:
        """The message for the user."""
        return f"the disk of {self.owner} is full ({why}): its intake is paused; free space and it resumes by itself"


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that a disk is full."""
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
