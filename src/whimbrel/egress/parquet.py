"""The Parquet sink: a folder of files, one per non-empty commit.

A file has all columns of the results so far. A column has the type of its first value; it only widens, by Arrow's
rules: integers to floats, an empty list to a list of any type, a struct to one with more fields. The sink refuses a
result with a value that does not fit, and writes the others.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whimbrel.core.errors import Refused
from whimbrel.core.record import Result
from whimbrel.egress.sinks import Mark, Unfit, foreign, unfit
from whimbrel.log.durability import sync

Row = dict[str, Any]


class _NoType(Exception):
    """No type holds all values of a column: names the column, its type, and the value that does not fit."""


class ParquetSink:
    """A folder of Parquet files."""

    commit_interval = 2.0
    durable = False

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self._path, self._overwrite, self._number = path, overwrite, 0
        self._rows: list[Row] = []
        self._types: dict[str, pa.DataType] = {}

    def check(self, mark: Mark | None) -> None:
        """Raise if there are Parquet files that this run did not write."""
        if not self._overwrite and not self._knows(mark) and self._path.is_dir():
            found = sum(1 for file in self._path.iterdir() if file.suffix == ".parquet")
            if found:
                raise Refused(foreign(self._path, f"{found} Parquet files", "Parquet"))
        if self._path.exists() and not self._path.is_dir():
            raise Refused(f"{self._path} is a file; a Parquet sink needs a folder: choose another path")

    def _knows(self, mark: Mark | None) -> bool:
        return mark is not None and mark["path"] == str(self._path)

    def open(self, mark: Mark | None) -> None:
        self.check(mark)
        self._path.mkdir(parents=True, exist_ok=True)
        self._number, self._rows, self._types = 0, [], {}
        if mark is not None and self._knows(mark):
            schema = pa.ipc.read_schema(pa.py_buffer(mark["schema"]))
            self._number, self._types = mark["files"], {field.name: field.type for field in schema}
        for file in self._path.iterdir():
            ours = re.fullmatch(r"part-(\d{6,})\.parquet", file.name)
            if ours and int(ours[1]) >= self._number:
                file.unlink()

    def write(self, results: list[Result], now_us: int) -> list[Unfit]:
        rows = [result.values for result in results]
        try:
            self._types = self._widened(rows)
            self._rows += rows
            return []
        except _NoType:
            return [refused for result in results if (refused := self._write_one(result)) is not None]

    def _write_one(self, result: Result) -> Unfit | None:
        try:
            self._types = self._widened([result.values])
        except _NoType as error:
            return unfit(str(self._path), result, str(error))
        self._rows.append(result.values)
        return None

    def _widened(self, rows: list[Row]) -> dict[str, pa.DataType]:
        """The types of all columns, widened to hold these rows and the earlier ones."""
        types = dict(self._types)
        for name in dict.fromkeys(name for row in rows for name in row):
            values, known = [row.get(name) for row in rows], self._types.get(name)
            try:
                found = pa.array(values).type
                types[name] = _common(known, found)
                if types[name] != found:
                    pa.array(values, types[name])
                if types[name] != known:
                    _try(name, types[name])
                    pa.array([row.get(name) for row in self._rows], types[name])
            except (pa.ArrowException, OverflowError) as error:
                has = "has no type yet" if known is None else f"holds {known}"
                raise _NoType(f"column {name!r} {has}, which does not hold this value: {error}") from error
        return types

    def commit(self) -> Mark:
        schema = pa.schema(list(self._types.items()))
        if self._rows:
            columns = [pa.array([row.get(field.name) for row in self._rows], field.type) for field in schema]
            file = self._path / f"part-{self._number:06}.parquet"
            whole = file.with_suffix(".tmp")
            pq.write_table(pa.table(columns, schema=schema), whole)
            if self.durable:
                sync(whole)
            whole.rename(file)
            if self.durable:
                sync(self._path)
            self._number += 1
            self._rows = []
        return {"files": self._number, "path": str(self._path), "schema": schema.serialize().to_pybytes()}

    def committed(self) -> None:
        pass

    def close(self) -> None:
        pass


def _common(known: pa.DataType | None, found: pa.DataType) -> pa.DataType:
    """A type that holds the values of both."""
    if known is None or known == found:
        return found
    schemas = [pa.schema([("column", kind)]) for kind in (known, found)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def _try(name: str, kind: pa.DataType) -> None:
    """Raise if a Parquet file cannot hold this type."""
    pq.write_table(pa.table({name: pa.array([], kind)}), io.BytesIO())
