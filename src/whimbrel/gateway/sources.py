"""Where rows come from: CSV, JSON lines, any Python iterable. A source numbers its rows, so that it can go on.

A source is read from a row number on and yields (row number, row or `BadRecord`). After a restart it is asked to go on
behind the last row that the ingress log has; so it must give the same rows again in the same order.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from whimbrel.core.errors import BadRecord, Refused, Unavailable
from whimbrel.gateway.intake import Row, infer_schema

LIMIT = 1 << 20
SAMPLE = 100

Numbered = tuple[int, Row | BadRecord]


class Source(Protocol):
    """Somewhere rows come from."""

    rate: float | None
    """Rows per second; None is as fast as the stage can take them."""
    lenient: bool
    """Whether values come as text and are converted to the schema's types."""
    name: str

    def schema(self) -> pa.Schema:
        """The columns: as given, or as the first rows show."""

    def rows(self, start: int) -> Iterator[Numbered]:
        """The rows from this number on."""


class Items:
    """A Python iterable of dictionaries, or a function that makes one (needed to go on after a restart)."""

    lenient = False

    def __init__(
        self, items: Iterable[Row] | Callable[[], Iterable[Row]], schema: pa.Schema | None, rate: float | None
    ) -> None:
        self._items, self._schema, self.rate, self.name = items, schema, rate, "items"
        self._sample: list[Row] | None = None
        self._rest: Iterator[Row] | None = None

    def _fresh(self) -> Iterator[Row]:
        """The items, from the first on; what `schema` looked at comes again."""
        if callable(self._items):
            return iter(self._items())
        if self._rest is None:
            self._rest = iter(self._items)
        return self._rest

    def schema(self) -> pa.Schema:
        if self._schema is None:
            self._sample = list(islice(self._fresh(), SAMPLE))
            self._schema = infer_schema([row for row in self._sample if isinstance(row, dict)])
        return self._schema

    def rows(self, start: int) -> Iterator[Numbered]:
        seen = [] if callable(self._items) else self._sample or []
        yield from islice(enumerate(_chain(seen, self._fresh())), start, None)


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
        with _opened(self.path) as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if header is None:
                raise Refused(f"{self.path} is empty; a CSV source needs a header line")
            for number, values in islice(enumerate(reader), start, None):
                if sum(map(len, values)) > self.limit:
                    yield number, BadRecord("too large", f"the row is longer than {self.limit} bytes")
                elif len(values) != len(header):
                    yield number, BadRecord("wrong type", f"{len(values)} values for {len(header)} columns")
                else:
                    yield number, {name: value or None for name, value in zip(header, values, strict=True)}


class JsonLinesSource:
    """A file with one JSON object a line."""

    lenient = False

    def __init__(self, path: Path, schema: pa.Schema | None, rate: float | None, limit: int = LIMIT) -> None:
        self.path, self._schema, self.rate, self.limit, self.name = path, schema, rate, limit, str(path)

    def schema(self) -> pa.Schema:
        if self._schema is None:
            rows = [row for _, row in islice(self.rows(0), SAMPLE) if isinstance(row, dict)]
            self._schema = infer_schema(rows)
        return self._schema

    def rows(self, start: int) -> Iterator[Numbered]:
        with _opened(self.path) as file:
            for number, line in islice(enumerate(file), start, None):
                if len(line) > self.limit:
                    yield number, BadRecord("too large", f"the line is longer than {self.limit} bytes")
                    continue
                try:
                    yield number, msgspec.json.decode(line)
                except msgspec.DecodeError as error:
                    yield number, BadRecord("not JSON", str(error))


def _chain(first: Iterable[Row], second: Iterable[Row]) -> Iterator[Row]:
    yield from first
    yield from second


def _opened(path: Path) -> Any:
    try:
        return path.open(newline="", encoding="utf-8", errors="replace")
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error.strerror}") from error


def _guess(text: str | None) -> Any:
    if text is None:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text == "true" if text in ("true", "false") else text
