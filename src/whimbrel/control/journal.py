"""The journal: what the orchestrator has decided, and where everybody stands, in one SQLite file.

A decision is written here before it is acted on. After a crash the journal is all there is: migrations in the order in
which they were ordered, named snapshots (a router's, an outlet's), each replaced as a whole, and what was answered to
requests that may come again.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Full, NewerFormat, Unavailable
from whimbrel.core.protocols.machine import Migration
from whimbrel.log.embedded import is_full
from whimbrel.log.private import make_file, make_folder

FORMAT = 1
GROWTH, FLOOR = 4, 256 << 10
"""What was noted of keys is written anew when notes since the last time have so many times its size, and this size."""
Statement = tuple[str, tuple[object, ...]]
"""SQL, and the values in it."""
_NOTE = "INSERT INTO reached (name, blob) VALUES (?, ?)"


class Journal:
    """One data directory's journal. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        make_file(path)
        self._lock = threading.Lock()
        self._noted: dict[str, list[int]] = {}
        """By outlet: the sizes of all its notes, the oldest first."""
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
            CREATE TABLE IF NOT EXISTS requests (name TEXT PRIMARY KEY, blob BLOB);
            CREATE TABLE IF NOT EXISTS reached (number INTEGER PRIMARY KEY, name TEXT, blob BLOB);
        """)

    def write(self, *migrations: Migration, answer: tuple[str, bytes] | None = None) -> None:
        """Remember how far migrations are, and by its name what was answered to a request: all of it, or nothing."""
        statements: list[Statement] = [
            (
                "INSERT INTO migrations (id, blob) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET blob = excluded.blob",
                (migration.move.id, wire.pack(migration)),
            )
            for migration in migrations
        ]
        if answer is not None:
            statements.append(("INSERT OR REPLACE INTO requests VALUES (?, ?)", answer))
        self._execute(*statements)

    def answer(self, request: str) -> bytes | None:
        """What was answered to a request of that name."""
        return self._find("SELECT blob FROM requests WHERE name = ?", request)

    def migrations(self) -> list[Migration]:
        """All migrations, in the order in which they were ordered."""
        with self._lock:
            rows = self._db.execute("SELECT blob FROM migrations ORDER BY number").fetchall()
        return [wire.unpack(blob, Migration) for (blob,) in rows]

    def save(self, name: str, blob: bytes) -> None:
        """Replace a snapshot."""
        self._execute(("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (name, blob)))

    def keep(self, name: str, blob: bytes, reached: Mapping[str, int]) -> None:
        """Replace an outlet's snapshot, and note up to which `seq` results of keys are out: both, or neither."""
        statements: list[Statement] = [("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (name, blob))]
        if not reached:
            self._execute(*statements)
            return
        # One note for all keys: a row for each would cost more than all else that is done for their results.
        note = wire.pack(reached)
        self._execute(*statements, (_NOTE, (name, note)))
        sizes = self._noted.setdefault(name, [])
        sizes.append(len(note))
        if sum(sizes[1:]) > max(GROWTH * sizes[0], FLOOR):
            whole = wire.pack(self.reached(name))
            self._execute(("DELETE FROM reached WHERE name = ?", (name,)), (_NOTE, (name, whole)))
            self._noted[name] = [len(whole)]

    def reached(self, name: str) -> dict[str, int]:
        """All that an outlet has ever noted: by key, up to which `seq` its results are out."""
        with self._lock:
            rows = self._db.execute("SELECT blob FROM reached WHERE name = ? ORDER BY number", (name,)).fetchall()
        self._noted[name] = [len(blob) for (blob,) in rows]
        reached: dict[str, int] = {}
        for (blob,) in rows:
            reached |= wire.unpack(blob, dict[str, int])
        return reached

    def load(self, name: str) -> bytes | None:
        """The last snapshot of that name."""
        return self._find("SELECT blob FROM snapshots WHERE name = ?", name)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._db.close()

    def _find(self, statement: str, name: str) -> bytes | None:
        with self._lock:
            row = self._db.execute(statement, (name,)).fetchone()
        return None if row is None else row[0]

    def _execute(self, *statements: Statement) -> None:
        """Do all of these, or none."""
        try:
            with self._lock:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    for statement, values in statements:
                        self._db.execute(statement, values)
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
        except sqlite3.OperationalError as error:
            kind = Full if is_full(error) else Unavailable
            raise kind(f"the journal cannot be written: {error}") from error
