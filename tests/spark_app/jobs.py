"""The job that the tests run: a result depends on every record of its key, and on their order."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

import whimbrel as wb
from tests.app.waiting import until
from whimbrel.core.operator import Emit
from whimbrel.log import EmbeddedLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = "key string, n long"


class Chain(wb.Operator):
    """Chains the records of a key: each result tells how many there were, and a digest of all of them in order."""

    tries = 2

    class State(wb.State):
        """The chain so far; `ballast` makes the state heavy, if a test wants to move something large."""

        count: int = 0
        digest: int = 0
        ballast: bytes = b""

    def __init__(self, ballast: int = 0) -> None:
        self.ballast = ballast

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One record more. A negative number is an error of the operator's own."""
        if event.n < 0:
            emit(lost="this result must never get out")
            raise ValueError(f"cannot take {event.n}")
        if self.ballast and not state.ballast:
            state.ballast = bytes(self.ballast)
        state.count += 1
        state.digest = crc32(f"{state.digest} {event.n}".encode())
        emit(key=key, count=state.count, digest=state.digest)


def rows(count: int, keys: int = 12, seed: int = 0) -> Callable[[], Iterator[dict[str, Any]]]:
    """The same rows each time, some keys far more often than others."""

    def source() -> Iterator[dict[str, Any]]:
        state = seed + 1
        for n in range(count):
            state = crc32(f"{state}".encode())
            yield {"key": f"k{min(state % keys, state // keys % keys):02}", "n": n}

    return source


def sequential(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What a run without Spark, sites or moves gives: by key, its results in order."""
    expected: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        past = expected.setdefault(row["key"], [])
        digest = crc32(f"{past[-1]['digest'] if past else 0} {row['n']}".encode())
        past.append({"key": row["key"], "count": len(past) + 1, "digest": digest})
    return expected


EXACT = {"lost": 0, "duplicated": 0, "out_of_order": 0, "wrong": 0}


def compare(expected: dict[str, list[dict[str, Any]]], results: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Counts what differs from the sequential run. A result's place in its key's chain is its `count`."""
    counts = dict(EXACT)
    seen: dict[str, list[int]] = {key: [] for key in expected}
    for result in results:
        wanted, place = expected.get(result["key"], []), result["count"]
        before = seen.setdefault(result["key"], [])
        if place in before:
            counts["duplicated"] += 1
            continue
        if before and place < before[-1]:
            counts["out_of_order"] += 1
        if place > len(wanted) or wanted[place - 1]["digest"] != result["digest"]:
            counts["wrong"] += 1
        before.append(place)
    counts["lost"] = sum(len(wanted) - len(set(seen[key])) for key, wanted in expected.items())
    return counts


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON lines sink."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ── A job without an end ─────────────────────────────────────────────────────────────────────────────────────────────

KEYS, RATE = 12, 300


@dataclass
class Job:
    """A running application whose source goes on until it is told to end."""

    app: wb.App
    out: Path
    data: Path
    ending: list[bool] = field(default_factory=list)

    @property
    def sent(self) -> int:
        """How many records have come in."""
        return EmbeddedLog(self.data / "logs" / "ingress-chain.db").counter("source") + 1

    def unchanged(self) -> dict[str, Any]:
        """What a refused order must leave as it is; how far the records are is none of it."""
        stage = copy.deepcopy(self.app.status()["stages"]["chain"])
        for instance in stage["instances"].values():
            del instance["batch_ms"], instance["keys"], instance["state_bytes"]
        return {**stage, "owners": self.app.control.stages["chain"].coordinator.table.owners.dump()}

    def refuses(self, order: Callable[[wb.App], object], error: type[Exception], told: str) -> dict[str, Any]:
        """Check that an order is refused for this reason and changes nothing; return what it has left as it was."""
        before = self.unchanged()
        with pytest.raises(error) as raised:
            order(self.app)
        assert told in str(raised.value)
        assert isinstance(raised.value, wb.Refused)
        assert self.unchanged() == before
        return before

    def settle(self) -> None:
        """Until the destination of an aborted move has cleaned up: before that its keys cannot be moved there again."""
        coordinator = self.app.control.stages["chain"].coordinator
        until(lambda: not list(coordinator.open.values()), "the destination has cleaned up behind the aborted move")

    def finish(self) -> dict[str, int]:
        """Let the source end, wait until everything is delivered, and count what is not as it must be."""
        self.ending.append(True)
        self.app.wait(120)
        return compare(sequential(rows(self.sent)()), read(self.out))


@contextmanager
def running(
    folder: Path, spark: SparkSession | None = None, ballast: int = 20_000, *, keep: bool = True, **options: Any
) -> Iterator[Job]:
    """Such an application, at two sites; all its keys have come."""
    ending: list[bool] = []

    def source() -> Iterator[dict[str, Any]]:
        for row in rows(10**9)():
            if ending:
                return
            yield row

    out, data = folder / "out.jsonl", folder / "data"
    pipeline = wb.Pipeline("orders", source=wb.Items(source, schema=SCHEMA, rate=RATE), key="key")
    pipeline.stage("chain", Chain(ballast)).sink(wb.JsonLines(out))
    app = wb.run(pipeline, sites=["cloud", "edge-1"], data=data, keep=keep, spark=spark, **options)
    try:
        until(lambda: len(app.control.stages["chain"].keys.now()) == KEYS, "all keys have come")
        yield Job(app, out, data, ending)
    finally:
        ending.append(True)
        app.stop()
