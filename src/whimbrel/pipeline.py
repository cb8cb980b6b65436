"""The description of a job by its user: a pipeline of stages, its source, its sinks.

Nothing here runs anything: `whimbrel.run` does (deploy/embedded.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from whimbrel.core.errors import Refused
from whimbrel.core.names import check_name
from whimbrel.core.operator import Operator, takes_context
from whimbrel.egress import sinks
from whimbrel.egress.parquet import ParquetSink
from whimbrel.egress.sinks import Sink
from whimbrel.gateway import sources
from whimbrel.gateway.intake import Row, parse_schema

if TYPE_CHECKING:
    from whimbrel.host.contract import Prepare


@dataclass(frozen=True)
class Csv:
    """A CSV file with a header: as a source, read at `rate` rows per second; as a sink, written as results arrive."""

    path: str | Path
    schema: str | pa.Schema | None = None
    rate: float | None = None
    limit: int = sources.LIMIT
    """Longer rows go to the dead letters."""
    columns: list[str] | None = None
    """As a sink: the columns, if not those of the first result."""
    overwrite: bool = False
    """As a sink: replace a file that another run wrote."""
    at: str | None = None
    """As a source: the place where it is read; the first one, if not given."""
    home: str | None = None
    """As a source: the home of the first stage's keys; the first place, if not given."""

    def source(self) -> sources.Source:
        """The source that reads it."""
        return sources.CsvSource(Path(self.path), _schema(self.schema), self.rate, self.limit)

    def sink(self) -> Sink:
        """The sink that writes it."""
        return sinks.CsvSink(Path(self.path), self.columns, self.overwrite)


@dataclass(frozen=True)
class JsonLines:
    """A file with one JSON object per line."""

    path: str | Path
    schema: str | pa.Schema | None = None
    rate: float | None = None
    limit: int = sources.LIMIT
    """Longer lines go to the dead letters."""
    identity: bool = False
    """As a sink: also write `_key, _epoch, _seq, _n, _ingress_us, _released_us`."""
    overwrite: bool = False
    """As a sink: replace a file that another run wrote."""
    at: str | None = None
    """As a source: the place where it is read; the first one, if not given."""
    home: str | None = None
    """As a source: the home of the first stage's keys; the first place, if not given."""

    def source(self) -> sources.Source:
        """The source that reads it."""
        return sources.JsonLinesSource(Path(self.path), _schema(self.schema), self.rate, self.limit)

    def sink(self) -> Sink:
        """The sink that writes it."""
        return sinks.JsonLinesSink(Path(self.path), self.identity, self.overwrite)


@dataclass(frozen=True)
class Parquet:
    """A folder of Parquet files, to write to."""

    path: str | Path
    overwrite: bool = False
    """Replace the files that another run wrote."""

    def sink(self) -> Sink:
        """The sink that writes it."""
        return ParquetSink(Path(self.path), self.overwrite)


@dataclass(frozen=True)
class Items:
    """Rows from Python: an iterable of dictionaries, or a function that returns one.

    To continue after a restart it must give the same rows again: then pass a function, or a list.
    """

    items: Iterable[Row] | Callable[[], Iterable[Row]]
    schema: str | pa.Schema | None = None
    rate: float | None = None
    at: str | None = None
    """The place where it is read; the first one, if not given."""
    home: str | None = None
    """The home of the first stage's keys; the first place, if not given."""

    def source(self) -> sources.Source:
        """The source that reads it."""
        return sources.Items(self.items, _schema(self.schema), self.rate)


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline: stateless PySpark (`prepare`), then one keyed operator."""

    name: str
    operator: Operator
    prepare: Prepare | None
    key: str
    schema: pa.Schema | None
    """The schema of the stage's input; None for the first stage, whose source has it."""
    groups: int
    partitions: int


class PlacedSource(NamedTuple):
    """A source, and the place where it is read; None: the first one."""

    make: Callable[[], sources.Source]
    at: str | None


class PlacedSink(NamedTuple):
    """A sink, and the place where it is written: one, `EACH`, or None: the first one."""

    make: Callable[[], Sink]
    at: str | None


@dataclass
class Pipeline:
    """A job: records from sources, keyed by a column, through stages, to sinks."""

    name: str
    source: Csv | JsonLines | Items | Iterable[Row] | Sequence[Csv | JsonLines | Items]
    """One source, or several: of the same columns, each read at its place."""
    key: str
    event_time: str | None = None
    """The column with the event time; if not given, the time of arrival."""
    max_ahead: float | None = 3600.0
    """Seconds by which an event's time may be ahead of the gateway's clock. A record further ahead goes to the dead
    letters: it would advance event time, and fire every timer until then. None: any time is accepted."""
    stages: list[Stage] = field(default_factory=list)
    sinks: list[tuple[Any, str | None]] = field(default_factory=list)
    """Each with the place where it is written."""

    def __post_init__(self) -> None:
        ahead = self.max_ahead
        if ahead is not None and not (isinstance(ahead, int | float) and 0 <= ahead < math.inf):
            raise Refused(f"max_ahead must be a number of seconds >= 0, or None for no bound; got {ahead!r}")

    def stage(
        self,
        name: str,
        operator: Operator,
        *,
        prepare: Prepare | None = None,
        key: str | None = None,
        schema: str | pa.Schema | None = None,
        groups: int = 4,
        partitions: int = 1,
    ) -> Pipeline:
        """Add a stage. A stage after another one reads its results: it needs its own `key` and `schema`.

        `prepare` is any function of PySpark DataFrames that keeps the columns whose names begin with `_`.
        """
        takes_context(operator)
        if any(stage.name == name for stage in self.stages) or not name.isidentifier():
            raise Refused(f"a stage needs a unique name made of letters, digits and _, got {name!r}")
        check_name("stage", name)
        if self.stages and (key is None or schema is None):
            raise Refused(
                f"stage {name!r} reads another stage's results: give it key='...' and schema='name type, ...'"
            )
        self.stages.append(Stage(name, operator, prepare, key or self.key, _schema(schema), groups, partitions))
        return self

    def sink(
        self, sink: Csv | JsonLines | Parquet | Callable[[dict[str, Any]], object], *, at: str | None = None
    ) -> Pipeline:
        """Add a sink after the last stage: a file, or a function called with each result.

        `at`: the place where it is written, the first one if not given; `"each"`: every place writes one, with the
        results that are made there.
        """
        if not callable(sink) and not hasattr(sink, "sink"):
            raise Refused(f"{type(sink).__name__} is not a sink: use Csv, JsonLines, Parquet or a function")
        self.sinks.append((sink, at))
        return self

    def placed_sources(self) -> list[PlacedSource]:
        """The sources, each with its place."""
        return [
            PlacedSource(one.source if hasattr(one, "source") else Items(one).source, getattr(one, "at", None))
            for one in self._sources()
        ]

    def placed_sinks(self) -> list[PlacedSink]:
        """The sinks, each with its place."""
        return [
            PlacedSink(one.sink if hasattr(one, "sink") else partial(sinks.FunctionSink, one), at)
            for one, at in self.sinks
        ]

    @property
    def home(self) -> str | None:
        """The home of the first stage's keys, if a source sets it."""
        homes = sorted({home for one in self._sources() if (home := getattr(one, "home", None)) is not None})
        if len(homes) > 1:
            raise Refused(
                f"the sources of {self.name} have the homes {', '.join(homes)}, and a key may come from any of them: "
                "say which keys are at home where, by bin or key (homes=)"
            )
        return homes[0] if homes else None

    def _sources(self) -> list[Any]:
        """One source, or several: a list of rows is one."""
        if isinstance(self.source, list | tuple) and self.source and all(hasattr(one, "source") for one in self.source):
            return list(self.source)
        return [self.source]


def common_schema(made: Sequence[sources.Source]) -> pa.Schema:
    """The columns that all sources of a pipeline have. Raises `Refused` if they differ."""
    schemas = [source.schema() for source in made]
    for source, schema in zip(made[1:], schemas[1:], strict=True):
        if schema != schemas[0]:
            raise Refused(
                f"the sources {made[0].name} and {source.name} have different columns: {schemas[0].names} with "
                f"{schemas[0].types}, and {schema.names} with {schema.types}; give both the same schema="
            )
    return schemas[0]


def _schema(given: str | pa.Schema | None) -> pa.Schema | None:
    return parse_schema(given) if isinstance(given, str) else given
