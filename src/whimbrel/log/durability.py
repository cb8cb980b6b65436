"""What an acknowledged write survives: the death of every process, or also a power failure.

process   writes reach the operating system's cache; after a power failure the files are consistent, but may lack
          their last writes, each file a different amount: the next start detects that (roles/ages.py) and refuses
power     writes are on the disk before anything depends on them: logs, journals, sinks, Spark's checkpoint
"""

from __future__ import annotations

import os
from pathlib import Path

from whimbrel.core.errors import Refused

PROCESS, POWER = "process", "power"


def is_power(durability: str) -> bool:
    """Whether writes must survive a power failure. Raises `Refused` for an unknown durability."""
    if durability not in (PROCESS, POWER):
        raise Refused(f"durability must be {PROCESS!r} or {POWER!r}, got {durability!r}")
    return durability == POWER


def sync(path: Path) -> None:
    """fsync a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """fsync all files below a folder, and all names."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        sync(path)
