"""The journal: what the orchestrator has decided, and where everybody stands, in one SQLite file.

A decision is written here before it is acted on. After a crash the journal is all there is: migrations in the order in
which they were ordered, and named snapshots (a router's, an outlet's), each replaced as a whole.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, NewerFormat, Unavailable
from whimbrel.core.protocols.machine import Migration

FORMAT = 1


class Journal:
    """One data directory's journal. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
        try:
            self._prepare(path)
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.OperationalError):
                raise Unavailable(f"{path} cannot be opened: {error}") from error
            if isinstance(error, sqlite3.Error):
                raise Corrupt(f"{path} is no journal: {error}") from error
            raise

    def _prepare(self, path: Path) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found > FORMAT:
            raise NewerFormat(f"{path} has format {found}, this version reads up to {FORMAT}")
        self._db.executescript(f"""
            PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA user_version={FORMAT};
            CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY, id TEXT UNIQUE, blob BLOB);
            CREATE TABLE IF NOT EXISTS snapshots (name TEXT PRIMARY KEY, blob BLOB);
        """)

    def write(self, *migrations: Migration) -> None:
        """Remember how far migrations are: all of them, or none."""
        values = [value for migration in migrations for value in (migration.move.id, wire.pack(migration))]
        self._execute(
            f"INSERT INTO migrations (id, blob) VALUES {', '.join(['(?, ?)'] * len(migrations))}"
            " ON CONFLICT (id) DO UPDATE SET blob = excluded.blob",
            *values,
        )

    def migrations(self) -> list[Migration]:
        """All migrations, in the order in which they were ordered."""
        with self._lock:
            rows = self._db.execute("SELECT blob FROM migrations ORDER BY number").fetchall()
        return [wire.unpack(blob, Migration) for (blob,) in rows]

    def save(self, name: str, blob: bytes) -> None:
        """Replace a snapshot."""
        self._execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", name, blob)

    def load(self, name: str) -> bytes | None:
        """The last snapshot of that name."""
        with self._lock:
            row = self._db.execute("SELECT blob FROM snapshots WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._db.close()

    def _execute(self, statement: str, *values: object) -> None:
        try:
            with self._lock:
                self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise Unavailable(f"the journal cannot be written: {error}") from error
