"""A disk without room, as SQLite meets one: no file of a folder may grow, until there is room again."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from whimbrel.log import embedded


class FullDisk:
    """Lets no log below a folder grow: SQLite itself says that the disk is full, amid the transaction."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self._folder = folder
        self.has_room = True
        self._logs: tuple[embedded.EmbeddedLog, ...] = ()
        connect = embedded._connect
        patch.setattr(embedded, "_connect", self._limited(connect))

    def _limited(self, connect: Callable[[Path, str, float], sqlite3.Connection]) -> Callable[..., sqlite3.Connection]:
        def connected(path: Path, synchronous: str, timeout: float) -> sqlite3.Connection:
            db = connect(path, synchronous, timeout)
            if not self.has_room and self._folder in path.parents:
                db.execute("PRAGMA max_page_count = 1")  # which is: no more than it has
            return db

        return connected

    def fill(self, *logs: embedded.EmbeddedLog) -> None:
        """No room any more, for these logs and all that are opened from now on."""
        self.has_room, self._logs = False, logs
        self._reconnect()

    def make_room(self) -> None:
        """There is room again."""
        self.has_room = True
        self._reconnect()

    def _reconnect(self) -> None:
        for log in self._logs:
            log.close()
