"""The job that chaos runs: two stages over rows of known content, whose results show every record and its order.

    rows ──▶ prepare (drops some, doubles some) ──▶ ledger, by account, with timers ──▶ shops, by shop ──▶ out.jsonl

The job file that all processes import is written into the run's folder and calls `job` here. The expected results
are computed by oracle.py, which shares nothing with this file but the rows.
"""

from __future__ import annotations

import os
import random
import struct
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pyarrow as pa

from whimbrel.core import operator
from whimbrel.core.operator import Context, Emit
from whimbrel.gateway.intake import parse_schema
from whimbrel.gateway.sources import Numbered
from whimbrel.lab.chaos import disturbance, oracle, rows
from whimbrel.lab.chaos.oracle import ENTRY, INTAKE, LEDGER, SHOPS, TIMER
from whimbrel.lab.chaos.rows import Load
from whimbrel.pipeline import JsonLines, Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STAGES = (LEDGER, SHOPS)
ENDING, EMITTED, TIMES = "ending", "emitted", "times"
"""Files of a run: its presence ends the source; the number of rows emitted until then; the times of emission."""
EVERY = 20
"""The time of emission is recorded for one row of this many."""
MOMENT = struct.Struct("<qq")
START, STEP, DELAY = (
    datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=rows.START_US),
    timedelta(microseconds=rows.STEP_US),
    timedelta(microseconds=rows.DELAY_US),
)

MADE = "row long, part long, kind string, account string, shop string, amount long, count long, digest long"
"""The schema of the first stage's results."""


class Ledger(operator.Operator):
    """The first stage. Each result is a digest of all records of its account, in their order; and of a byte of the
    ballast, a different one each time, so that ballast damaged in transit is detected."""

    class State(operator.State):
        """The digest so far, and ballast to make the state large."""

        count: int = 0
        digest: int = 0
        ballast: bytes = b""

    def __init__(self, load: Load) -> None:
        self.load = load

    def process(self, key: str, event: Any, state: Any, emit: Emit, ctx: Context) -> None:
        """Process one record. If it raises, all its changes must be undone."""
        if not state.ballast:
            state.ballast = random.Random(key).randbytes(self.load.weight(key))
        state.count += 1
        probe = state.ballast[state.count % len(state.ballast)]
        state.digest = crc32(f"{state.digest} {event.row} {event.part} {event.amount} {probe}".encode())
        if rows.sets_timer(event.amount):
            ctx.timer(DELAY)
        self._emit_entry(emit, event.row, event.part, ENTRY, key, event.shop, event.amount, state)
        if rows.ledger_raises(event.amount, event.part):
            raise ValueError(f"the ledger raises on row {event.row}")

    def on_timer(self, key: str, state: Any, emit: Emit, ctx: Context) -> None:
        """The time of the timer identifies the row that has set it."""
        n = (ctx.now - DELAY - START) // STEP
        self._emit_entry(emit, n, 0, TIMER, key, oracle.home(self.load, key), 0, state)

    def _emit_entry(
        self, emit: Emit, row: int, part: int, kind: str, key: str, shop: str, amount: int, state: Any
    ) -> None:
        more = {"count": state.count, "digest": state.digest}
        emit(row=row, part=part, kind=kind, account=key, shop=shop, amount=amount, **more)


class Shops(operator.Operator):
    """The second stage. Each result contains its place in the shop, and a digest of all of its account's results."""

    class State(operator.State):
        """The number of results, and a digest for each account."""

        place: int = 0
        pairs: dict[str, int] = {}

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """Process one result of the first stage."""
        if event.kind == ENTRY and rows.shop_raises(event.amount, event.part):
            state.place = -1
            raise ValueError(f"the shop raises on row {event.row}")
        state.place += 1
        past = state.pairs.get(event.account, 0)
        state.pairs[event.account] = crc32(f"{past} {event.kind} {event.row} {event.part}".encode())
        emit(
            row=event.row,
            part=event.part,
            kind=event.kind,
            account=event.account,
            shop=key,
            count=event.count,
            digest=event.digest,
            pair=state.pairs[event.account],
            place=state.place,
        )


def prepare(df: DataFrame) -> DataFrame:
    """Drop some rows and double others, as `rows.is_dropped` and `rows.parts` say."""
    kept = df.where("amount % 97 <> 11")
    return kept.selectExpr("*", "explode(sequence(0, if(amount % 13 = 5, 1, 0))) as part")


class Rows:
    """The source: emits rows until a file `ending` exists, then persists how many there were.

    A gateway that was restarted may read rows again, from any number on.
    """

    lenient, name = False, INTAKE

    def __init__(self, load: Load, folder: Path) -> None:
        self._load, self._folder, self.rate = load, folder, load.rate

    def source(self) -> Rows:
        """Return itself, to read from."""
        return self

    def schema(self) -> pa.Schema:
        return parse_schema(rows.SCHEMA)

    def rows(self, start: int) -> Iterator[Numbered]:
        count, ending = emitted(self._folder), self._folder / ENDING
        with (self._folder / TIMES).open("ab") as times:
            n = start
            while count is None or n < count:
                if count is None and ending.exists():
                    count = self._end(n)
                    continue
                if n % EVERY == 0:
                    times.write(MOMENT.pack(n, disturbance.true_us()))
                    times.flush()
                yield n, rows.row(self._load, n)
                n += 1

    def _end(self, count: int) -> int:
        draft = self._folder / f"{EMITTED}.draft"
        with draft.open("w", encoding="ascii") as file:
            file.write(str(count))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._folder / EMITTED)
        return count


def emitted(folder: Path) -> int | None:
    """How many rows a run's source has emitted; None if it has not ended."""
    file = folder / EMITTED
    return int(file.read_text(encoding="ascii")) if file.exists() else None


def moments(folder: Path) -> list[tuple[int, int]]:
    """Rows with their times of emission, in this order; a row that was emitted again has its last time."""
    file = folder / TIMES
    blob = file.read_bytes() if file.exists() else b""
    whole = blob[: len(blob) - len(blob) % MOMENT.size]
    return sorted(dict(MOMENT.iter_unpack(whole)).items())


def write_job(folder: Path, load: Load) -> Path:
    """Write the job file of a run to this folder."""
    path = folder / "chaos_job.py"
    lines = [
        '"""Made by `whimbrel chaos`."""',
        "from whimbrel.lab.chaos.load import job",
        "from whimbrel.lab.chaos.rows import Load",
        f"job = job(__file__, {load!r})",
    ]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


def job(file: str, load: Load) -> Pipeline:
    """The pipeline of a run. Called in each of its processes, whose clock and calls can be disturbed from then on."""
    folder = Path(file).resolve().parent
    disturbance.install(folder, role_of(sys.argv))
    pipeline = Pipeline("chaos", Rows(load, folder), key="account", event_time="at")  # type: ignore[arg-type]
    pipeline.stage(LEDGER, Ledger(load), prepare=prepare, groups=2)
    pipeline.stage(SHOPS, Shops(), key="shop", schema=MADE, groups=2)
    return pipeline.sink(JsonLines(folder / "out.jsonl", identity=True))


def role_of(command: list[str]) -> str:
    """The role that a command line starts: `gateway`, `orchestrator`, or the name of a site."""
    role, name = (*command[1:3], "", "")[:2]
    return name if role == "site" else role
