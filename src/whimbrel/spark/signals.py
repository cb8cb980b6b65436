"""What a query tells its source while it runs.

Spark has no way to tell a reader anything, and runs it in a process of its own. So both know a folder, which is the
query's own and goes with it:

    <folder>/halt        there while nothing new may be read
    <folder>/hurry       there while keys stand still for what comes through the control lane
"""

from __future__ import annotations

import os
from pathlib import Path

from whimbrel.log.private import make_file

HALT, URGENT = "halt", "urgent"


class Signals:
    """Both ends of it: the query sets, the source looks. Without a folder nothing is ever set."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Set nothing: a reader is about to start."""
        self.halt(False)
        self.urge(False)

    def halt(self, halts: bool) -> None:
        """Let the reader read nothing more, or read on."""
        self._set(HALT, halts)

    def urge(self, is_urgent: bool) -> None:
        """Let what comes through the control lane begin a batch at once, or no more."""
        self._set(URGENT, is_urgent)

    @property
    def halts(self) -> bool:
        """Whether nothing more may be read."""
        return self._is_set(HALT)

    @property
    def is_urgent(self) -> bool:
        """Whether what comes through the control lane begins a batch at once."""
        return self._is_set(URGENT)

    def _set(self, name: str, is_set: bool) -> None:
        if is_set:
            make_file(Path(self._folder, name))
        else:
            Path(self._folder, name).unlink(missing_ok=True)

    def _is_set(self, name: str) -> bool:
        return bool(self._folder) and os.path.exists(os.path.join(self._folder, name))
