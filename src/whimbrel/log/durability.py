"""What an acknowledgement survives: the death of every process, or also a power failure.

process   what was written is in the operating system's hands; after a power failure the files are sound, but may
          lack their last moments, each a little differently: the next start notices (roles/ages.py) and refuses
power     what was written is on the disk before anybody relies on it: logs, journals, sinks, Spark's checkpoint
"""

from __future__ import annotations

import os
from pathlib import Path

from whimbrel.core.errors import Refused

PROCESS, POWER = "process", "power"


def is_power(durability: str) -> bool:
    """Whether a power failure must be survived. Raises `Refused` if that is no durability."""
    if durability not in (PROCESS, POWER):
        raise Refused(f"durability must be {PROCESS!r} or {POWER!r}, got {durability!r}")
    return durability == POWER


def sync(path: Path) -> None:
    """Have a file's content on the disk, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Have all files below a folder on the disk, and all names."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        sync(path)
