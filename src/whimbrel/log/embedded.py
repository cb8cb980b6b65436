"""The embedded log: one SQLite file, the default backend. No server, and several processes may open it at once.

Every operation is one transaction: a writer holds the file's only write lock for the duration of one call, and
readers never wait for it (write-ahead logging). What an acknowledged append survives:

- the death of any process, always;
- a power failure only with `durable=True`, which waits for the disk at each append. Without it the log is still
  consistent afterwards, but may lack its last entries.

Space: `trim` only moves the head; each later append deletes a few of the lane's trimmed entries and reuses their
pages, so that trimming a million entries blocks no operation. The file does not shrink.
It must be on a local disk: SQLite's locks do not work across network file systems.

Each blob has a checksum, verified at every read: SQLite detects damage to its own structures, not to contents.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from zlib import crc32

from whimbrel.core.errors import Bug, Corrupt, Diverged, Full, NewerFormat, Refused, Trimmed, Unavailable, WhimbrelError
from whimbrel.log.contract import Append, Entry, Lane, check_position, diverged, fitting
from whimbrel.log.durability import sync
from whimbrel.log.forks import FORKS
from whimbrel.log.private import make_file, make_folder

FORMAT = 4
APPLICATION = 0x57484D42  # "WHMB", so that another program's database is not mistaken for an old log

SWEEP = 2  # trimmed entries that an append deletes: more than one, so that deleting catches up with writing

# `before` is the number of records ever written to the lane ahead of the entry. It only grows along the lane, so that
# one index lookup finds how far a number of records reaches, without reading a blob.
SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
BEGIN;
CREATE TABLE lanes (lane INTEGER PRIMARY KEY, head INTEGER NOT NULL, tail INTEGER NOT NULL, records INTEGER NOT NULL);
CREATE TABLE entries (lane INTEGER NOT NULL, position INTEGER NOT NULL, before INTEGER NOT NULL,
                      count INTEGER NOT NULL, checksum INTEGER NOT NULL,
                      writer TEXT NOT NULL, counter INTEGER NOT NULL, blob BLOB NOT NULL,
                      PRIMARY KEY (lane, position));
CREATE INDEX reach ON entries (lane, before, position);
CREATE INDEX taken ON entries (lane, writer, counter);
CREATE TABLE writers (lane INTEGER NOT NULL, writer TEXT NOT NULL, counter INTEGER NOT NULL,
                      count INTEGER NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (lane, writer)) WITHOUT ROWID;
CREATE TABLE readers (lane INTEGER NOT NULL, reader TEXT NOT NULL, position INTEGER NOT NULL,
                      PRIMARY KEY (lane, reader)) WITHOUT ROWID;
INSERT INTO lanes VALUES {", ".join(f"({lane.value}, 0, 0, 0)" for lane in Lane)};
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class EmbeddedLog:
    """A log in one file. `close` releases the connection; using the log again reopens it.

    `create=False` is for readers: a log that does not exist yet raises `Unavailable` and is not created.
    `timeout`: seconds that an operation waits for another process's append before it raises `Unavailable`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, durable: bool = False, create: bool = True, timeout: float = 10.0
    ) -> None:
        self.path = Path(path).resolve()
        self._synchronous = "FULL" if durable else "NORMAL"
        self._timeout = timeout
        self._lock = threading.Lock()  # one connection, one thread at a time
        self._db: sqlite3.Connection | None = None
        FORKS.watch(self)
        if create:
            _create(self.path)
        with self._transaction("BEGIN"):
            pass  # a file that is not a log fails here, not at the first append

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.DATA, replays: bool = False
    ) -> int | None:
        return self.append_all([Append(blob, count, writer, counter, lane, replays)])[0]

    def append_all(self, appends: Sequence[Append]) -> list[int | None]:
        """As `append` for each, in one transaction: one wait for the disk, if it is durable."""
        positions: list[int | None] = []
        difference: Diverged | None = None
        with self._transaction("BEGIN IMMEDIATE") as db:
            for one in appends:
                try:
                    positions.append(self._append(db, one))
                except Diverged as error:  # those before it are committed
                    difference = error
                    break
        if difference is not None:
            raise difference
        return positions

    def _append(self, db: sqlite3.Connection, one: Append) -> int | None:
        blob, count, writer, counter, lane = one.blob, one.count, one.writer, one.counter, one.lane
        if count < 0:
            raise Refused(f"an entry cannot hold {count} records")
        given = (count, crc32(blob))
        head, tail, records = _ruler(db, lane)
        last = _counter(db, writer, lane)
        if counter <= last:
            taken = _taken(db, writer, counter, lane, head)
            if taken != given and not (taken is None and one.replays):
                raise diverged(str(self.path), writer, counter, last, _described(taken), _described(given))
            return None
        db.execute(
            "DELETE FROM entries WHERE rowid IN"
            " (SELECT rowid FROM entries WHERE lane = ? AND position < ? ORDER BY position LIMIT ?)",
            (lane, head, SWEEP),
        )
        entry = (lane, tail, records, *given, writer, counter, blob)
        db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)", entry)
        db.execute("UPDATE lanes SET tail = ?, records = ? WHERE lane = ?", (tail + 1, records + count, lane))
        db.execute("INSERT OR REPLACE INTO writers VALUES (?, ?, ?, ?, ?)", (lane, writer, counter, *given))
        return tail

    def read(self, start: int, end: int | None = None, lane: Lane = Lane.DATA) -> list[Entry]:
        with self._transaction("BEGIN") as db:
            tail, _ = _readable(db, start, lane)
            end = tail if end is None else min(end, tail)
            rows = db.execute(
                "SELECT position, count, blob, checksum FROM entries WHERE lane = ? AND position >= ? AND position < ?"
                " ORDER BY position",
                (lane, start, end),
            ).fetchall()
        entries = [Entry(position, count, blob) for position, count, blob, checksum in rows if crc32(blob) == checksum]
        if len(entries) != max(end - start, 0):
            raise Corrupt(f"{self.path}: entries are missing or damaged between {start} and {end} of {lane.name}")
        return entries

    def advance(self, start: int, records: int, lane: Lane = Lane.DATA) -> int:
        with self._transaction("BEGIN") as db:
            tail, total = _readable(db, start, lane)
            if start >= tail:
                return start
            limit = _before(db, start, lane) + max(records, 0)
            if total <= limit:
                return tail
            return max(_furthest(db, limit, lane), start + 1)

    def within(self, start: int, size: int, lane: Lane = Lane.DATA) -> int:
        with self._transaction("BEGIN") as db:
            tail, _ = _readable(db, start, lane)
            rows = db.execute(
                "SELECT length(blob) FROM entries WHERE lane = ? AND position >= ? ORDER BY position", (lane, start)
            )
            return min(start + fitting((row[0] for row in rows), size), max(tail, start))

    def backlog(self, start: int, lane: Lane = Lane.DATA) -> int:
        with self._transaction("BEGIN") as db:
            tail, total = _readable(db, start, lane)
            return total - _before(db, start, lane) if start < tail else 0

    def head(self, lane: Lane = Lane.DATA) -> int:
        with self._transaction("BEGIN") as db:
            return _ruler(db, lane)[0]

    def tail(self, lane: Lane = Lane.DATA) -> int:
        with self._transaction("BEGIN") as db:
            return _ruler(db, lane)[1]

    def counter(self, writer: str, lane: Lane = Lane.DATA) -> int:
        with self._transaction("BEGIN") as db:
            return _counter(db, writer, lane)

    def writers(self, lane: Lane = Lane.DATA) -> dict[str, int]:
        with self._transaction("BEGIN") as db:
            return dict(db.execute("SELECT writer, counter FROM writers WHERE lane = ?", (lane,)).fetchall())

    def trim(self, position: int, lane: Lane = Lane.DATA) -> None:
        with self._transaction("BEGIN IMMEDIATE") as db:
            db.execute("UPDATE lanes SET head = max(head, min(?, tail)) WHERE lane = ?", (position, lane))

    def commit(self, reader: str, positions: Mapping[Lane, int], *, resets: bool = False) -> None:
        with self._transaction("BEGIN IMMEDIATE") as db:
            for lane, position in positions.items():
                check_position(str(self.path), reader, lane, position, _ruler(db, lane)[1])
                last = None if resets else _committed(db, reader, lane)
                if last is None or position > last:
                    db.execute("INSERT OR REPLACE INTO readers VALUES (?, ?, ?)", (lane, reader, position))

    def committed(self, reader: str, lane: Lane = Lane.DATA) -> int | None:
        with self._transaction("BEGIN") as db:
            return _committed(db, reader, lane)

    def readers(self, lane: Lane = Lane.DATA) -> dict[str, int]:
        with self._transaction("BEGIN") as db:
            return dict(db.execute("SELECT reader, position FROM readers WHERE lane = ?", (lane,)).fetchall())

    def lag(self, reader: str, lane: Lane = Lane.DATA) -> int:
        with self._transaction("BEGIN") as db:
            head, tail, total = _ruler(db, lane)
            start = max(_committed(db, reader, lane) or 0, head)
            return total - _before(db, start, lane) if start < tail else 0

    def close(self) -> None:
        with FORKS, self._lock:
            self._disconnect()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        """A transaction, with snapshot isolation; SQLite's errors are raised as Whimbrel's."""
        with FORKS, self._lock:
            try:
                db = self._db = self._db or _connect(self.path, self._synchronous, self._timeout)
                with db:  # commits, or rolls back
                    db.execute(begin)
                    yield db
            except sqlite3.Error as error:
                self._disconnect()  # after a disk error, only a new connection is reliable
                raise _translated(error, self.path) from error

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def _create(path: Path) -> None:
    """Unless the log exists, create it beside its path and link it in: a log that exists is complete.

    If several processes create it at once, one wins, and all use the winner's.
    """
    try:
        if path.exists():
            return
        make_folder(path.parent)
        with FORKS, tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            draft = Path(folder, "draft")
            make_file(draft)  # -journal, -wal and -shm will have the same mode
            with closing(sqlite3.connect(draft, isolation_level=None)) as db:
                db.executescript(SCHEMA)
            with suppress(FileExistsError):
                os.link(draft, path)
        sync(path.parent)  # otherwise a power failure could lose the log: its name is not on the disk yet
    except sqlite3.Error as error:
        raise _translated(error, path) from error
    except OSError as error:
        kind = Full if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else Unavailable
        raise kind(f"{path}: cannot be created: {error}") from error


def _connect(path: Path, synchronous: str, timeout: float) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.as_uri()}?mode=rw", uri=True, timeout=timeout, isolation_level=None, check_same_thread=False
    )
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            raise Corrupt(f"{path}: not a log of Whimbrel")
        if version > FORMAT:
            raise NewerFormat(f"{path}: format {version}, this version reads up to {FORMAT}")
        if version < FORMAT:
            raise Corrupt(
                f"{path}: format {version} of an older version, this one reads {FORMAT}; use a new data directory"
            )
        db.execute(f"PRAGMA synchronous = {synchronous}")
    except BaseException:
        db.close()
        raise
    return db


def _row(db: sqlite3.Connection, select: str, values: tuple[int, ...]) -> tuple[int, ...]:
    """The one row of a query. Raises `Corrupt` if it is missing."""
    row: tuple[int, ...] | None = db.execute(select, values).fetchone()
    if row is None:
        raise Corrupt(f"a row is missing: {select} {values}")
    return row


def _ruler(db: sqlite3.Connection, lane: Lane) -> tuple[int, int, int]:
    """Head, tail, and the number of records ever written."""
    head, tail, records = _row(db, "SELECT head, tail, records FROM lanes WHERE lane = ?", (lane,))
    return head, tail, records


def _readable(db: sqlite3.Connection, start: int, lane: Lane) -> tuple[int, int]:
    """Tail, and the number of records ever written. Raises `Trimmed` if `start` is below the head."""
    head, tail, records = _ruler(db, lane)
    if start < head:
        raise Trimmed(start, head)
    return tail, records


def _before(db: sqlite3.Connection, position: int, lane: Lane) -> int:
    return _row(db, "SELECT before FROM entries WHERE lane = ? AND position = ?", (lane, position))[0]


def _furthest(db: sqlite3.Connection, limit: int, lane: Lane) -> int:
    return _row(
        db,
        "SELECT position FROM entries WHERE lane = ? AND before <= ? ORDER BY before DESC, position DESC LIMIT 1",
        (lane, limit),
    )[0]


def _counter(db: sqlite3.Connection, writer: str, lane: Lane) -> int:
    row = db.execute("SELECT counter FROM writers WHERE lane = ? AND writer = ?", (lane, writer)).fetchone()
    return -1 if row is None else int(row[0])


def _committed(db: sqlite3.Connection, reader: str, lane: Lane) -> int | None:
    row = db.execute("SELECT position FROM readers WHERE lane = ? AND reader = ?", (lane, reader)).fetchone()
    return None if row is None else int(row[0])


def _taken(db: sqlite3.Connection, writer: str, counter: int, lane: Lane, head: int) -> tuple[int, int] | None:
    """Count and checksum of what a writer appended under this counter, if they are still stored."""
    found: tuple[int, int] | None = db.execute(
        "SELECT count, checksum FROM writers WHERE lane = ?1 AND writer = ?2 AND counter = ?3"
        " UNION ALL SELECT count, checksum FROM entries"
        " WHERE lane = ?1 AND writer = ?2 AND counter = ?3 AND position >= ?4",
        (lane, writer, counter, head),
    ).fetchone()
    return found


def _described(taken: tuple[int, int] | None) -> str:
    return "trimmed that entry" if taken is None else f"{taken[0]} records with checksum {taken[1]:08x}"


def _translated(error: sqlite3.Error, path: Path) -> WhimbrelError:
    if is_full(error):
        return Full(f"{path}: {error}")
    # The low byte is the kind of error, the rest its circumstances.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF
    return _ERRORS.get(code, Bug)(f"{path}: {error}")


def is_full(error: sqlite3.Error) -> bool:
    """Whether SQLite could not write because the disk is full: the database file, or the shared memory file."""
    return getattr(error, "sqlite_errorcode", None) in _FULL


_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)


_ERRORS: dict[int, type[WhimbrelError]] = {
    sqlite3.SQLITE_BUSY: Unavailable,
    sqlite3.SQLITE_LOCKED: Unavailable,
    sqlite3.SQLITE_PROTOCOL: Unavailable,  # lost too many races while connecting
    sqlite3.SQLITE_IOERR: Unavailable,
    sqlite3.SQLITE_CANTOPEN: Unavailable,
    sqlite3.SQLITE_READONLY: Unavailable,
    sqlite3.SQLITE_PERM: Unavailable,
    sqlite3.SQLITE_NOMEM: Unavailable,
    sqlite3.SQLITE_CORRUPT: Corrupt,
    sqlite3.SQLITE_NOTADB: Corrupt,
    sqlite3.SQLITE_CONSTRAINT: Corrupt,  # a duplicate position or lane
    sqlite3.SQLITE_ERROR: Corrupt,  # a missing table
    sqlite3.SQLITE_TOOBIG: Refused,
}
