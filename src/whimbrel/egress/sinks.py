"""Sinks for results: CSV, JSON lines, a Python function, the next stage. Parquet has a module of its own.

A sink and the outlet's position are committed together: `commit` returns what the sink needs to roll back to this
point (a file's length), the outlet stores it with the gate, and after a crash `open` rolls the sink back. So a file
holds every result exactly once. A function cannot be rolled back: its delivery is at-least-once. After a crash it may
be called again with the same results; their identity `(key, epoch, seq, n)` is the key for deduplication.

A result that a sink cannot write becomes a dead letter; the others are written. A file that the run did not write is
not changed, unless `overwrite` is set.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

import msgspec

from whimbrel.core.errors import Corrupt, Refused, Retry
from whimbrel.core.record import Result
from whimbrel.log.durability import sync

Mark = dict[str, Any]
"""What a sink needs to roll back to a commit."""


SNIPPET = 1_000
"""How many characters of a refused result are stored."""


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """A result that a sink cannot write."""

    sink: str
    key: str
    seq: int
    error: str
    values: str
    """The result as JSON, or its beginning."""


class Sink(Protocol):
    """A destination of results."""

    commit_interval: float
    """The preferred seconds between two commits."""

    def check(self, mark: Mark | None) -> None:
        """Raise `Refused` if `open` with this mark would destroy data that the run did not write. Changes nothing."""

    durable: bool
    """Whether a commit must survive a power failure."""

    def open(self, mark: Mark | None) -> None:
        """Begin, or roll back to the commit that returned this mark."""

    def write(self, results: list[Result], now_us: int) -> list[Unfit]:
        """Write results, in order; return those that cannot be written. `now_us`: when the gate released them."""

    def commit(self) -> Mark:
        """Make everything written so far durable; return a mark to roll back to."""

    def committed(self) -> None:
        """The mark is durable."""

    def close(self) -> None:
        """Release all resources."""


class _Plain:
    """Defaults of most sinks: commit at once, nothing to destroy, nothing to do once a commit is durable."""

    commit_interval = 0.0
    durable = False

    def check(self, mark: Mark | None) -> None:
        pass

    def committed(self) -> None:
        pass


class _File:
    """A file that can be rolled back to a length."""

    def __init__(self, path: Path, kind: str, overwrite: bool) -> None:
        self.path, self._kind, self._overwrite = path, kind, overwrite
        self.file: BinaryIO | None = None

    def check(self, mark: Mark | None) -> None:
        if self.path.is_dir():
            raise Refused(f"{self.path} is a folder; a {self._kind} sink needs a file: choose another path")
        if not self._overwrite and not self.knows(mark) and self.path.is_file() and self.path.stat().st_size:
            raise Refused(foreign(self.path, f"{self.path.stat().st_size:,} bytes", self._kind))

    def knows(self, mark: Mark | None) -> bool:
        """Whether a mark belongs to this file."""
        return mark is not None and mark["path"] == str(self.path)

    def open(self, mark: Mark | None) -> None:
        self.check(mark)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = mark["bytes"] if mark is not None and self.knows(mark) else 0
        found = self.path.stat().st_size if self.path.exists() else 0
        if found < written:  # truncating it to that length would pad it with zeros
            raise Corrupt(
                f"{self.path} has {found} of the {written} bytes of results that this run wrote to it: "
                "restore the file, or start with another data directory"
            )
        self.file = self.path.open("r+b" if written else "wb")
        self.file.truncate(written)
        self.file.seek(0, io.SEEK_END)

    def append(self, data: bytes) -> None:
        assert self.file is not None, "write before open"
        self.file.write(data)

    def commit(self, durable: bool) -> Mark:
        assert self.file is not None, "commit before open"
        self.file.flush()
        if durable:
            os.fsync(self.file.fileno())
            sync(self.path.parent)
        return {"bytes": self.file.tell(), "path": str(self.path)}

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class CsvSink(_Plain):
    """A CSV file; its columns are those of the first result, unless given."""

    def __init__(self, path: Path, columns: list[str] | None = None, overwrite: bool = False) -> None:
        self._file, self._columns, self._given = _File(path, "Csv", overwrite), columns, columns

    def check(self, mark: Mark | None) -> None:
        self._file.check(mark)

    def open(self, mark: Mark | None) -> None:
        self._file.open(mark)
        self._columns = mark["columns"] if mark is not None and self._file.knows(mark) else None

    def write(self, results: list[Result], now_us: int) -> list[Unfit]:
        text = io.StringIO(newline="")
        writer, refused = csv.writer(text, lineterminator="\n"), []
        for result in results:
            if self._columns is None:
                self._columns = self._given or list(result.values)
                writer.writerow(self._columns)
            extra = result.values.keys() - set(self._columns)
            if extra:
                why = f"the file has no column {sorted(extra)}; name all columns: Csv(path, columns=[...])"
                refused.append(unfit(str(self._file.path), result, why))
            else:
                writer.writerow([result.values.get(column) for column in self._columns])
        self._file.append(text.getvalue().encode())
        return refused

    def commit(self) -> Mark:
        return {**self._file.commit(self.durable), "columns": self._columns}

    def close(self) -> None:
        self._file.close()


class JsonLinesSink(_Plain):
    """One JSON object per line; with `identity` also the result's identity and times."""

    def __init__(self, path: Path, identity: bool = False, overwrite: bool = False) -> None:
        self._file, self._identity = _File(path, "JsonLines", overwrite), identity
        self._encode = msgspec.json.Encoder(enc_hook=str).encode

    def check(self, mark: Mark | None) -> None:
        self._file.check(mark)

    def open(self, mark: Mark | None) -> None:
        self._file.open(mark)

    def write(self, results: list[Result], now_us: int) -> list[Unfit]:
        try:
            lines = b"".join(self._encode(self._line(result, now_us)) + b"\n" for result in results)
        except UNENCODABLE:
            return [refused for result in results if (refused := self._write_one(result, now_us)) is not None]
        self._file.append(lines)
        return []

    def _write_one(self, result: Result, now_us: int) -> Unfit | None:
        for name, value in result.values.items():
            try:
                self._encode({name: value})
            except UNENCODABLE as error:
                return unfit(str(self._file.path), result, f"column {name!r} cannot be encoded as JSON: {error}")
        self._file.append(self._encode(self._line(result, now_us)) + b"\n")
        return None

    def _line(self, result: Result, now_us: int) -> dict[str, Any]:
        if not self._identity:
            return result.values
        return {**result.values, **identity(result, now_us)}

    def commit(self) -> Mark:
        return self._file.commit(self.durable)

    def close(self) -> None:
        self._file.close()


class FunctionSink(_Plain):
    """Calls a Python function with each result's values, or with the whole `Result`.

    If it raises `Retry`, it is called again with all results since the last commit; any other error ends the delivery.
    """

    def __init__(self, function: Callable[[Any], object], whole: bool = False) -> None:
        self._function, self._whole = function, whole

    def open(self, mark: Mark | None) -> None:
        pass

    def write(self, results: list[Result], now_us: int) -> list[Unfit]:
        for result in results:
            try:
                self._function(result if self._whole else result.values)
            except Retry:
                raise
            except Exception as error:
                raise Refused(
                    f"the sink function {getattr(self._function, '__qualname__', repr(self._function))} raised "
                    f"{type(error).__name__}: {error}, for key {result.key!r}, seq {result.seq}; raise whimbrel.Retry "
                    "for transient errors; fix the function, and start again"
                ) from error
        return []

    def commit(self) -> Mark:
        return {}

    def close(self) -> None:
        pass


class StageSink(_Plain):
    """The next stage: results become its records.

    Pending results are part of the mark, and are passed on once the mark is durable; after a crash they are passed on
    again, under the same numbers, which the next stage's ingress log deduplicates. A number covers at most `MOST`.
    """

    MOST: ClassVar[int] = 50_000

    def __init__(self, ingest: Callable[[list[Result], int], bool]) -> None:
        """`ingest` returns whether there was a record among the results."""
        self._ingest, self._number, self._taken = ingest, 0, -1
        self._pending: list[Result] = []

    def open(self, mark: Mark | None) -> None:
        self._number, self._taken, self._pending = 0, -1, []
        if mark:
            self._number, self._taken = mark["number"], mark["taken"]
            self._pending = msgspec.convert(mark["pending"], list[Result])
            self.committed()

    def write(self, results: list[Result], now_us: int) -> list[Unfit]:
        self._pending += results
        return []

    def commit(self) -> Mark:
        return {"number": self._number, "taken": self._taken, "pending": self._pending}

    def committed(self) -> None:
        while self._pending:
            if self._ingest(self._pending[: self.MOST], self._number):
                self._taken = self._number
            self._number += 1
            self._pending = self._pending[self.MOST :]

    def close(self) -> None:
        pass


UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors of encoders for a value that they cannot encode."""


def unfit(sink: str, result: Result, why: str) -> Unfit:
    """A refused result, with the reason."""
    try:
        values = msgspec.json.encode(result.values, enc_hook=repr).decode()
    except UNENCODABLE:
        values = repr(result.values)
    return Unfit(sink, result.key, result.seq, why, values[:SNIPPET])


def foreign(path: Path, what: str, kind: str) -> str:
    """The message if a sink must not overwrite a path, with the ways out."""
    return (
        f"{path} holds {what} that this run did not write; to replace them, use {kind}({str(path)!r}, overwrite=True); "
        "to continue the run that wrote them, start it with its own directory: run(data=...); or choose another path"
    )


def identity(result: Result, now_us: int) -> dict[str, Any]:
    """The identity of a result, its ingress time and its release time."""
    return {
        "_key": result.key,
        "_epoch": result.epoch,
        "_seq": result.seq,
        "_n": result.n,
        "_ingress_us": result.ingress_us,
        "_released_us": now_us,
    }
