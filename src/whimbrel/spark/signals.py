"""Signals from a query to its source while it runs.

Spark has no channel to a reader, and runs it in a process of its own. So both share a folder, which belongs to the
query and is removed with it:

    <folder>/halt        exists while nothing new may be read
    <folder>/urgent      exists while keys wait for messages of the control lane
"""

from __future__ import annotations

import os
from pathlib import Path

from whimbrel.log.private import make_file

HALT, URGENT = "halt", "urgent"


class Signals:
    """Both ends: the query sets signals, the source reads them. Without a folder no signal is ever set."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Clear all signals, before a reader starts."""
        self.halt(False)
        self.urge(False)

    def halt(self, halts: bool) -> None:
        """Stop the reader from reading, or let it continue."""
        self._set(HALT, halts)

    def urge(self, is_urgent: bool) -> None:
        """Set whether messages in the control lane begin a batch at once."""
        self._set(URGENT, is_urgent)

    @property
    def halts(self) -> bool:
        """Whether the reader must not read."""
        return self._is_set(HALT)

    @property
    def is_urgent(self) -> bool:
        """Whether messages in the control lane begin a batch at once."""
        return self._is_set(URGENT)

    def _set(self, name: str, is_set: bool) -> None:
        if is_set:
            make_file(Path(self._folder, name))
        else:
            Path(self._folder, name).unlink(missing_ok=True)

    def _is_set(self, name: str) -> bool:
        return bool(self._folder) and os.path.exists(os.path.join(self._folder, name))
