"""Sources of rows: CSV, JSON lines, any Python iterable. A source numbers its rows, so that it can be replayed.

A source is read from a row number on and yields (row number, row or `BadRecord`). After a restart it is read from
the row after the last one in the ingress log; so it must yield the same rows in the same order.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import pyarrow as pa

from whimbrel.core.errors import BadRecord, Refused, Unavailable
from whimbrel.gateway.intake import Row, infer_schema

LIMIT = 1 << 20
SAMPLE = 100
SNIPPET = 1_000
"""How many characters of an unreadable row are stored."""

Numbered = tuple[int, Row | BadRecord]


class Source(Protocol):
    """A replayable source of rows."""

    rate: float | None
    """Rows per second, now: it may change; None: as fast as the stage accepts them."""
    lenient: bool
    """Whether values are text and are converted to the schema's types."""
    name: str

    def schema(self) -> pa.Schema:
        """The columns: as given, or inferred from the first rows."""

    def rows(self, start: int) -> Iterator[Numbered]:
        """The rows from this number on."""


class Items:
    """A Python iterable of dictionaries, or a function that returns one (needed for a restart)."""

    lenient = False

    def __init__(
        self, items: Iterable[Row] | Callable[[], Iterable[Row]], schema: pa.Schema | None, rate: float | None
    ) -> None:
        self._items, self._schema, self.rate, self.name = items, schema, rate, "items"
        self._sample: list[Row] = []
        """The rows that `schema` has read."""
        self._is_spent = False

    def _fresh(self) -> Iterator[Row]:
        """The items, from the first on; of an iterator, which yields them once, those after the sample."""
        return iter(self._items() if callable(self._items) else self._items)

    def schema(self) -> pa.Schema:
        if self._schema is None:
            self._sample = list(islice(self._fresh(), SAMPLE))
            self._schema = infer_schema([row for row in self._sample if isinstance(row, dict)])
        return self._schema

    def rows(self, start: int) -> Iterator[Numbered]:
        fresh = self._fresh()
        is_iterator = fresh is self._items
        if is_iterator and self._is_spent:
            raise Refused("the source is an iterator and cannot be read again; pass a function or a list instead")
        self._is_spent = True
        return islice(enumerate(_chain(self._sample if is_iterator else [], fresh)), start, None)


class CsvSource:
    """A CSV file with a header."""

    lenient = True

    def __init__(self, path: Path, schema: pa.Schema | None, rate: float | None, limit: int = LIMIT) -> None:
        self.path, self._schema, self.rate, self.limit, self.name = path, schema, rate, limit, str(path)

    def schema(self) -> pa.Schema:
        if self._schema is None:
            rows = [row for _, row in islice(self.rows(0), SAMPLE) if isinstance(row, dict)]
            self._schema = infer_schema([{name: _guess(value) for name, value in row.items()} for row in rows])
        return self._schema

    def rows(self, start: int) -> Iterator[Numbered]:
        # The limit of the csv module is global, and must not be below this one.
        csv.field_size_limit(max(csv.field_size_limit(), self.limit))
        with _opened(self.path) as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if header is None:
                raise Refused(f"{self.path} is empty; a CSV source needs a header line")
            yield from islice(enumerate(self._each(reader, header)), start, None)

    def _each(self, reader: Iterator[list[str]], header: list[str]) -> Iterator[Row | BadRecord]:
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRecord("too large" if "limit" in str(error) else "wrong type", str(error))
                continue
            if sum(map(len, values)) > self.limit:
                message = f"the row is longer than {self.limit} characters"
                yield BadRecord("too large", message, ",".join(values)[:SNIPPET])
            elif len(values) != len(header):
                yield BadRecord("wrong type", f"{len(values)} values for {len(header)} columns", ",".join(values))
            else:
                yield {name: value or None for name, value in zip(header, values, strict=True)}


class JsonLinesSource:
    """A file with one JSON object per line."""

    lenient = False

    def __init__(self, path: Path, schema: pa.Schema | None, rate: float | None, limit: int = LIMIT) -> None:
        self.path, self._schema, self.rate, self.limit, self.name = path, schema, rate, limit, str(path)

    def schema(self) -> pa.Schema:
        if self._schema is None:
            rows = [row for _, row in islice(self.rows(0), SAMPLE) if isinstance(row, dict)]
            self._schema = infer_schema(rows)
        return self._schema

    def rows(self, start: int) -> Iterator[Numbered]:
        with _opened(self.path, binary=True) as file:
            yield from islice(enumerate(map(self._row, self._lines(file))), start, None)

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Each line, without its end; of one that is too long only enough to detect that."""
        most = self.limit + 2
        while line := file.readline(most):
            rest = line
            while len(rest) == most and not rest.endswith(b"\n"):
                rest = file.readline(most)
            yield line.removesuffix(b"\n").removesuffix(b"\r")

    def _row(self, line: bytes) -> Row | BadRecord:
        if len(line) > self.limit:
            return BadRecord("too large", f"the line is longer than {self.limit} bytes", _beginning(line[: self.limit]))
        try:
            row: Row = msgspec.json.decode(line)
            return row
        except ValueError as error:  # msgspec's own, or the codec's for invalid UTF-8
            return BadRecord("not JSON", str(error), _beginning(line))


def _beginning(line: bytes) -> str:
    return line[:SNIPPET].decode(errors="replace")


def _chain(first: Iterable[Row], second: Iterable[Row]) -> Iterator[Row]:
    yield from first
    yield from second


@contextmanager
def _opened(path: Path, binary: bool = False) -> Iterator[Any]:
    """A file to read. `Refused` if it can never be opened like that; `Unavailable` if the error may be transient."""
    try:
        with path.open("rb") if binary else path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            yield file
    except OSError as error:
        wrong = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError))
        raise (Refused if wrong else Unavailable)(f"cannot read {path}: {error.strerror}") from error


def _guess(text: str | None) -> Any:
    """The value that a text seems to be: a number or a boolean only if the intake will parse it as one."""
    if text is None or text != text.strip():
        return text
    try:
        value = msgspec.json.decode(text)
    except ValueError:
        return text
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return text
    return value if isinstance(value, (bool, int, float)) else text
