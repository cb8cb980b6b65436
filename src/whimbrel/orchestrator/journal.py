"""The journals: the orchestrator's decisions, and the gateway's positions. One SQLite file each, with one writer.

    journal.db    orchestrator   migrations in the order of their orders, answered requests, instances, deployment
    gateway.db    gateway        snapshots of routers and outlets, up to where the results of each key are out, run name

A decision is written before it is acted on; a snapshot is replaced as a whole. Recovery after a crash uses these files.

Two files, because SQLite has one write lock per file: a process that is stopped (SIGSTOP) inside a write keeps the
lock, and must not block a writer in another process. A process that needs data from the other's file only reads it
(`JournalReader`), and with write-ahead logging a reader never waits for a writer.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol, TypeVar

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Full, NewerFormat, Stop, Unavailable
from whimbrel.core.protocols.machine import Migration
from whimbrel.log.embedded import is_full
from whimbrel.log.private import make_file, make_folder

JOURNAL, GATEWAY_JOURNAL = "journal.db", "gateway.db"
"""The names of the files in a data directory."""
FORMAT = 4
ANSWERS = 10_000
"""How many answered requests are retained: the last ones."""
GROWTH, FLOOR = 4, 256 << 10
"""Notes of keys are compacted when those since the last compaction exceed GROWTH times its size, and FLOOR bytes."""
WAIT = 10.0
"""Seconds until a file locked by another writer is `Unavailable`: another program has it open."""
Statement = tuple[str, tuple[object, ...]]
"""SQL, and its parameters."""
T = TypeVar("T")
_NOTE = "INSERT INTO reached (name, blob) VALUES (?, ?)"
_SNAPSHOT = "INSERT OR REPLACE INTO snapshots VALUES (?, ?)"


class _File:
    """A file of named snapshots. Thread-safe."""

    tables = "CREATE TABLE IF NOT EXISTS snapshots (name TEXT PRIMARY KEY, blob BLOB);"

    def __init__(self, path: Path, durable: bool = True) -> None:
        """`durable`: writes survive a power failure."""
        make_folder(path.parent)
        make_file(path)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=WAIT)
        try:
            _check_format(self._db, path)
            self._db.executescript(
                f"PRAGMA journal_mode=WAL; PRAGMA synchronous={'FULL' if durable else 'NORMAL'};"
                f"{self.tables} PRAGMA user_version={FORMAT};"
            )
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.OperationalError):
                raise Unavailable(f"{path} cannot be opened: {error}") from error
            if isinstance(error, sqlite3.Error):
                raise Corrupt(f"{path} is not a journal: {error}") from error
            raise

    def save(self, name: str, blob: bytes) -> None:
        """Replace a snapshot."""
        self._execute((_SNAPSHOT, (name, blob)))

    def load(self, name: str) -> bytes | None:
        """The last snapshot of that name."""
        return self._find("SELECT blob FROM snapshots WHERE name = ?", name)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _find(self, statement: str, name: str) -> bytes | None:
        with self._lock:
            row = self._db.execute(statement, (name,)).fetchone()
        return None if row is None else row[0]

    def _execute(self, *statements: Statement) -> None:
        """Execute all of these in one transaction."""
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


class MigrationJournal(Protocol):
    """The journal of decisions. A write is atomic: if it raises, it has not happened."""

    def write(self, *migrations: Migration, answer: tuple[str, bytes] | None = None) -> None:
        """Write the state of migrations, and the answer to a request under the request's name."""

    def retire(self, gone: Sequence[Migration], name: str, blob: bytes) -> None:
        """Delete migrations, and replace a snapshot with their summary."""

    def load(self, name: str) -> bytes | None:
        """The last snapshot of that name."""

    def migrations(self) -> list[Migration]:
        """All migrations, in the order in which they were ordered."""


class Journal(_File):
    """The orchestrator's journal: its decisions."""

    tables = f"""{_File.tables}
        CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY, id TEXT UNIQUE, blob BLOB);
        CREATE TABLE IF NOT EXISTS requests (name TEXT PRIMARY KEY, blob BLOB);"""

    def write(self, *migrations: Migration, answer: tuple[str, bytes] | None = None) -> None:
        """Write the state of migrations, and the answer to a request under the request's name: all, or nothing."""
        statements: list[Statement] = [
            (
                "INSERT INTO migrations (id, blob) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET blob = excluded.blob",
                (migration.move.id, wire.pack(migration)),
            )
            for migration in migrations
        ]
        if answer is not None:
            statements.append(("INSERT OR REPLACE INTO requests VALUES (?, ?)", answer))
            oldest = "(SELECT max(rowid) FROM requests) - ?"
            statements.append((f"DELETE FROM requests WHERE rowid <= {oldest}", (ANSWERS,)))
        self._execute(*statements)

    def retire(self, gone: Sequence[Migration], name: str, blob: bytes) -> None:
        """Delete migrations, and replace a snapshot with their summary: both, or neither."""
        statements: list[Statement] = [("DELETE FROM migrations WHERE id = ?", (one.move.id,)) for one in gone]
        self._execute(*statements, (_SNAPSHOT, (name, blob)))

    def answer(self, request: str) -> bytes | None:
        """The answer to a request of that name."""
        return self._find("SELECT blob FROM requests WHERE name = ?", request)

    def migrations(self) -> list[Migration]:
        """All migrations, in the order in which they were ordered."""
        with self._lock:
            return _migrations(self._db)


class GatewayJournal(_File):
    """The gateway's journal: positions of routers and outlets."""

    tables = f"""{_File.tables}
        CREATE TABLE IF NOT EXISTS reached (number INTEGER PRIMARY KEY, name TEXT, blob BLOB);"""

    def __init__(self, path: Path, durable: bool = False) -> None:
        super().__init__(path, durable)
        self._noted: dict[str, list[int]] = {}
        """By outlet: the sizes of all its notes, the oldest first."""

    def keep(self, name: str, blob: bytes, reached: Mapping[str, int]) -> None:
        """Replace an outlet's snapshot, and note up to which `seq` results of keys are delivered: both, or neither."""
        statements: list[Statement] = [(_SNAPSHOT, (name, blob))]
        if not reached:
            self._execute(*statements)
            return
        # One note for all keys: a row per key would cost more than all other work for their results.
        note = wire.pack(reached)
        sizes = [*self._noted.get(name, []), len(note)]
        if sum(sizes[1:]) > max(GROWTH * sizes[0], FLOOR):
            note = wire.pack({**self.reached(name), **reached})
            statements.append(("DELETE FROM reached WHERE name = ?", (name,)))
            sizes = [len(note)]
        # In one transaction: an outlet whose commit fails returns to the previous one, so nothing of it may remain.
        self._execute(*statements, (_NOTE, (name, note)))
        self._noted[name] = sizes

    def reached(self, name: str) -> dict[str, int]:
        """All notes of an outlet: by key, up to which `seq` its results are delivered."""
        with self._lock:
            rows = self._db.execute("SELECT blob FROM reached WHERE name = ? ORDER BY number", (name,)).fetchall()
        self._noted[name] = [len(blob) for (blob,) in rows]
        reached: dict[str, int] = {}
        for (blob,) in rows:
            reached |= wire.unpack(blob, dict[str, int])
        return reached


class JournalReader:
    """The orchestrator's journal, read-only for the other processes: never waits for its writer, and never blocks it.

    A file that does not exist, or is being created, counts as empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, name: str) -> bytes | None:
        """The last snapshot of that name."""
        rows = self._read(lambda db: db.execute("SELECT blob FROM snapshots WHERE name = ?", (name,)).fetchall())
        return rows[0][0] if rows else None

    def migrations(self) -> list[Migration]:
        """All migrations, in the order in which they were ordered."""
        return self._read(_migrations) or []

    def _read(self, read: Callable[[sqlite3.Connection], T]) -> T | None:
        if not self._path.exists():
            return None
        try:
            with closing(sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True, timeout=WAIT)) as db:
                return read(db) if _check_format(db, self._path) else None
        except sqlite3.OperationalError as error:
            raise Unavailable(f"{self._path} cannot be read: {error}") from error
        except sqlite3.Error as error:
            raise Corrupt(f"{self._path} is not a journal: {error}") from error


def _check_format(db: sqlite3.Connection, path: Path) -> int:
    """The format of a file; 0: it is being created. Raises if this version writes a different format."""
    found: int = db.execute("PRAGMA user_version").fetchone()[0]
    if found > FORMAT:
        raise NewerFormat(f"{path} has format {found}, this version reads format {FORMAT}")
    if 0 < found < FORMAT:
        raise Stop(f"{path} has format {found}, this version reads format {FORMAT}: start in a new data directory")
    return found


def _migrations(db: sqlite3.Connection) -> list[Migration]:
    rows = db.execute("SELECT blob FROM migrations ORDER BY number").fetchall()
    return [wire.unpack(blob, Migration) for (blob,) in rows]
