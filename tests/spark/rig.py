"""A stage in miniature around real hosts: a router in front, logs between, a gate behind. Driven by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from whimbrel.core.gate import Gate
from whimbrel.core.keys import bin_of
from whimbrel.core.operator import Emit, Operator, State
from whimbrel.core.record import Closed, Notice, Record, Result
from whimbrel.core.router import Command, Routed, Router, RouteTable
from whimbrel.host.contract import InstanceSpec
from whimbrel.host.threaded import ThreadedHost
from whimbrel.log import EmbeddedLog
from whimbrel.log.carrier import outgoing
from whimbrel.log.codec import encode, entry_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([("value", pa.int64()), ("word", pa.string())])


class Running(Operator):
    """Counts and sums; raises on the word `bad`."""

    class State(State):
        count: int = 0
        total: int = 0
        words: list[str] = []

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        state.count += 1
        state.total += event.value or 0
        state.words = [*state.words, event.word][-3:]
        if event.word == "bad":
            raise ValueError("a bad word")
        emit(count=state.count, total=state.total, value=event.value, words=state.words)


class Rig:
    """Instances `a`, `b`, ... of one stage; everything belongs to `a` at first."""

    def __init__(
        self,
        spark: SparkSession | None,
        folder: Path,
        *,
        instances: Sequence[str] = ("a",),
        operator: Operator | None = None,
        schema: pa.Schema = SCHEMA,
        **spec: Any,
    ) -> None:
        """`spark`: None for inline hosts."""
        self._spark, self.folder, self.schema = spark, folder, schema
        self.spec = InstanceSpec("", "stage", operator or Running(), schema, **spec)
        self.inboxes = {name: EmbeddedLog(folder / f"inbox-{name}") for name in instances}
        self.outboxes = {name: EmbeddedLog(folder / f"outbox-{name}") for name in instances}
        self.router = Router("router", RouteTable(instances[0]))
        self.sent: list[Record] = []
        self._seq = self._entry = -1
        # Names are unique, as a session runs no two queries of one name.
        self._suffix = f"-{folder.parent.name}-{folder.name}"
        self.queries: dict[str, Any] = {}

    @property
    def spark(self) -> SparkSession:
        assert self._spark is not None
        return self._spark

    def host(self, spec: InstanceSpec, **logs: Any) -> Any:
        if self._spark is None:
            return ThreadedHost(spec, **logs)
        from whimbrel.spark.query import StageQuery

        return StageQuery(self._spark, spec, **logs)

    def close(self) -> None:
        for query in self.queries.values():
            query.stop()

    def start(self, *names: str, checkpoint: Path | None = None, **changes: Any) -> None:
        """Start instances, each from its checkpoint if it has one; `checkpoint`: one that lies elsewhere."""
        for name in names or self.inboxes:
            self.queries[name] = self.host(
                replace(self.spec, name=name, **changes),
                inbox=self.folder / f"inbox-{name}",
                outbox=self.outboxes[name],
                inbox_of=self.inboxes.__getitem__,
                checkpoint=checkpoint or self.folder / f"checkpoint-{name}",
            )
            self.queries[name].start()

    # ── Input ────────────────────────────────────────────────────────────────────────────────────────────────────

    def feed(self, rows: Iterable[tuple[str, tuple[Any, ...]]]) -> None:
        """Send records: key and user columns. One entry of each inbox concerned."""
        records = []
        for key, values in rows:
            self._seq += 1
            records.append(Record(0, 0, bin_of(key), key, self._seq, 0, "router", self._seq, self._seq, values))
        self.sent += records
        self._append(self.router.route(records))

    def order(self, command: Command) -> None:
        """Give the router a command."""
        self._seq += 1
        self._append(self.router.apply(command, self._seq))

    def _append(self, routed: Routed) -> None:
        self._entry += 1
        schema = entry_schema(self.schema)
        for name, records in routed.items():
            blob = encode(records, schema)
            self.inboxes[name].append(blob, count=len(records), writer="router", counter=self._entry)

    # ── Output ───────────────────────────────────────────────────────────────────────────────────────────────────

    def said(self, name: str = "a") -> list[Result | Notice]:
        """What an instance's outbox holds, in order."""
        groups = [group for entry in self.outboxes[name].read(0) for group in outgoing(entry)]
        return [item for group in groups for item in (*group.results, *group.notices)]

    def results(self, name: str = "a") -> list[Result]:
        return [item for item in self.said(name) if isinstance(item, Result)]

    def notices(self, name: str = "a") -> list[Notice]:
        return [item for item in self.said(name) if not isinstance(item, Result)]

    def released(self) -> list[Result]:
        """What a gate lets out, one outbox after the other."""
        gate, released = Gate(), []
        for name in reversed(self.outboxes):
            for item in self.said(name):
                if isinstance(item, Result):
                    released += gate.offer([item])
                elif isinstance(item, Closed):
                    released += gate.close(item)
        assert not gate.held
        assert not gate.refused
        return released

    def expected(self) -> dict[str, list[dict[str, Any]]]:
        """By key: what `Running` says to all that was sent, in plain Python."""
        found: dict[str, list[dict[str, Any]]] = {}
        for record in self.sent:
            value, word = record.body
            if word == "bad":
                continue
            past = found.setdefault(record.key, [])
            count, total, words = (past[-1]["count"], past[-1]["total"], past[-1]["words"]) if past else (0, 0, [])
            told = {"count": count + 1, "total": total + (value or 0), "value": value, "words": [*words, word][-3:]}
            past.append(told)
        return found

    # ── Waiting ──────────────────────────────────────────────────────────────────────────────────────────────────

    def until(self, condition: Callable[[], bool], timeout: float = 90.0) -> None:
        """Wait for a condition; fail at once if a query has died."""
        deadline = time.monotonic() + timeout
        while not condition():
            for query in self.queries.values():
                assert query.exception is None, query.exception
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    def apply_some(self, count: int = 40, start: int = 0) -> None:
        """Apply some records with `a`, and stop."""
        self.feed(stream(count, 5, start))
        self.start()
        self.settle()
        self.queries.pop("a").stop()

    def settle(self) -> None:
        """Wait until everything that was sent has been applied and written."""
        self.until(lambda: all(query.is_drained for query in self.queries.values()))


def by_key(results: Iterable[Result]) -> dict[str, list[dict[str, Any]]]:
    """Each key's results in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault(result.key, []).append(result.values)
    return found


def stream(count: int, keys: int, start: int = 0) -> list[tuple[str, tuple[int, str]]]:
    """Some records over some keys, always the same."""
    return [(f"k{n * 7919 % keys}", (n * 31 % 100, f"w{n % 7}")) for n in range(start, start + count)]
