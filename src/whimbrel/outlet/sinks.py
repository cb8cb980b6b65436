"""Where results go: CSV, JSON lines, Parquet, a Python function.

A sink and the outlet's position are committed together: `commit` returns what the sink must know to find its way back
(a file's length), the outlet stores it beside the gate, and after a crash `open` takes the sink back to that point. So
a file holds every result exactly once. A function cannot be taken back: after a crash it may be called again with
results that it has had; their identity `(key, epoch, seq, n)` tells.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from whimbrel.core.errors import Corrupt, Refused
from whimbrel.core.record import Result

Mark = dict[str, Any]
"""What a sink must know to go back to a commit."""


class Sink(Protocol):
    """Somewhere results go."""

    patience: float
    """Seconds it would rather have between two commits."""

    def open(self, mark: Mark | None) -> None:
        """Begin, or go back to the commit that returned this mark."""

    def write(self, results: list[Result], now_us: int) -> None:
        """Take results, in order. `now_us`: when the gate released them."""

    def commit(self) -> Mark:
        """Make what was written last, and say how to come back to here."""

    def committed(self) -> None:
        """The mark is safe."""

    def close(self) -> None:
        """Let go."""


class _Plain:
    """What most sinks have in common: no wish to wait, nothing to do once a commit is safe."""

    patience = 0.0

    def committed(self) -> None:
        pass


class _File:
    """A file that can be taken back to a length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None

    def open(self, mark: Mark | None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = mark["bytes"] if mark else 0
        found = self.path.stat().st_size if self.path.exists() else 0
        if found < written:  # cutting it to that length would fill it up with zeros
            raise Corrupt(
                f"{self.path} has {found} of the {written} bytes of results that this run wrote to it: "
                "put it back, or start anew with another data directory"
            )
        self.file = self.path.open("r+b" if written else "wb")
        self.file.truncate(written)
        self.file.seek(0, io.SEEK_END)

    def append(self, data: bytes) -> None:
        assert self.file is not None, "write before open"
        self.file.write(data)

    def commit(self) -> Mark:
        assert self.file is not None, "commit before open"
        self.file.flush()
        return {"bytes": self.file.tell()}

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class CsvSink(_Plain):
    """A CSV file; its columns are those of the first result unless given."""

    def __init__(self, path: Path, columns: list[str] | None = None) -> None:
        self._file, self._columns, self._given = _File(path), columns, columns

    def open(self, mark: Mark | None) -> None:
        self._file.open(mark)
        self._columns = mark["columns"] if mark else None

    def write(self, results: list[Result], now_us: int) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        for result in results:
            if self._columns is None:
                self._columns = self._given or list(result.values)
                writer.writerow(self._columns)
            extra = result.values.keys() - set(self._columns)
            if extra:
                raise Refused(f"the CSV file has no column {sorted(extra)}; name them all: Csv(path, columns=[...])")
            writer.writerow([result.values.get(column) for column in self._columns])
        self._file.append(text.getvalue().encode())

    def commit(self) -> Mark:
        return {**self._file.commit(), "columns": self._columns}

    def close(self) -> None:
        self._file.close()


class JsonLinesSink(_Plain):
    """One JSON object a line; with `identity` also who made it, out of what, and when."""

    def __init__(self, path: Path, identity: bool = False) -> None:
        self._file, self._identity = _File(path), identity
        self._encode = msgspec.json.Encoder(enc_hook=str).encode

    def open(self, mark: Mark | None) -> None:
        self._file.open(mark)

    def write(self, results: list[Result], now_us: int) -> None:
        self._file.append(b"".join(self._encode(self._line(result, now_us)) + b"\n" for result in results))

    def _line(self, result: Result, now_us: int) -> dict[str, Any]:
        if not self._identity:
            return result.values
        return {**result.values, **identity(result, now_us)}

    def commit(self) -> Mark:
        return self._file.commit()

    def close(self) -> None:
        self._file.close()


class ParquetSink(_Plain):
    """A folder of Parquet files, one a commit that has something."""

    patience = 2.0

    def __init__(self, path: Path) -> None:
        self._path, self._number = path, 0
        self._rows: list[dict[str, Any]] = []

    def open(self, mark: Mark | None) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        self._number, self._rows = mark["files"] if mark else 0, []
        for file in self._path.iterdir():
            ours = re.fullmatch(r"part-(\d{6,})\.parquet", file.name)
            if ours and int(ours[1]) >= self._number:
                file.unlink()

    def write(self, results: list[Result], now_us: int) -> None:
        self._rows += [result.values for result in results]

    def commit(self) -> Mark:
        if self._rows:
            file = self._path / f"part-{self._number:06}.parquet"
            whole = file.with_suffix(".tmp")
            pq.write_table(_table(self._rows), whole)
            whole.rename(file)
            self._number += 1
            self._rows = []
        return {"files": self._number}

    def close(self) -> None:
        pass


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as a table with every column that one of them has."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError) as error:
            raise Refused(f"the values of {name!r} have no type in common for a Parquet column: {error}") from error
    return pa.table(columns)


class FunctionSink(_Plain):
    """Calls a Python function with each result's values, or with the whole `Result`."""

    def __init__(self, function: Callable[[Any], object], whole: bool = False) -> None:
        self._function, self._whole = function, whole

    def open(self, mark: Mark | None) -> None:
        pass

    def write(self, results: list[Result], now_us: int) -> None:
        for result in results:
            self._function(result if self._whole else result.values)

    def commit(self) -> Mark:
        return {}

    def close(self) -> None:
        pass


class StageSink(_Plain):
    """The next stage: results become its records.

    What is to be handed on is part of the mark, and is handed on once the mark is safe; after a crash it is handed on
    again, under the same numbers, which the next stage's ingress log recognises. A number stands for `MOST` results.
    """

    MOST: ClassVar[int] = 50_000

    def __init__(self, ingest: Callable[[list[Result], int], None]) -> None:
        self._ingest, self._number = ingest, 0
        self._pending: list[Result] = []

    def open(self, mark: Mark | None) -> None:
        self._number, self._pending = 0, []
        if mark:
            self._number = mark["number"]
            self._pending = msgspec.convert(mark["pending"], list[Result])
            self.committed()

    def write(self, results: list[Result], now_us: int) -> None:
        self._pending += results

    def commit(self) -> Mark:
        return {"number": self._number, "pending": self._pending}

    def committed(self) -> None:
        while self._pending:
            self._ingest(self._pending[: self.MOST], self._number)
            self._number += 1
            self._pending = self._pending[self.MOST :]

    def close(self) -> None:
        pass


def identity(result: Result, now_us: int) -> dict[str, Any]:
    """Who made a result, out of what, and when it was released."""
    return {
        "_key": result.key,
        "_epoch": result.epoch,
        "_seq": result.seq,
        "_n": result.n,
        "_ingress_us": result.ingress_us,
        "_released_us": now_us,
    }
