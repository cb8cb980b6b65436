"""The cost of level-2 checkpoints: the same stage with a central store and without, in one session, alternating.

Two applications run side by side and receive records one at a time, so that both are warm and other load on the machine
affects both alike. Of each turn a window of whole save periods is measured, amid the flow: so it includes exactly as
many increments as fall due. Then no records come until all work is done, and the other application has its turn.

    steady     records at a fixed rate: delivered per second; and the time of micro-batches and the CPU time, per record
    flood      the maximum load: records delivered per second

Each key's results must count up one by one, and the store must have each key's last state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from whimbrel.checkpoints.central import CentralStore
from whimbrel.core.errors import Unavailable
from whimbrel.core.record import Result
from whimbrel.deploy import embedded as application
from whimbrel.lab.bench.workloads import KeyCount, Load
from whimbrel.pipeline import Pipeline

WITH, WITHOUT = "with", "without"
REMEMBER = {"spark.sql.streaming.numRecentProgressUpdates": "100000"}
"""So that Spark keeps the progress of all micro-batches."""
TIMEOUT = 300.0
"""Seconds until all records of a turn must be delivered and saved."""
BACKLOG = 20_000
"""The source waits while more records than this wait."""

Show = Callable[[str], None]


class Tap(Load):
    """A load that emits nothing more, once filled, until `flow` is set."""

    flow: float | None = 0.0

    @property
    def rate(self) -> float | None:  # type: ignore[override]
        """The current rate, in rows per second; None: unlimited."""
        return self.flow if self.filled else super().rate


class Candidate:
    """One of the two applications."""

    def __init__(self, name: str, spark: SparkSession, keys: int, state_bytes: int, seed: int, **store: Any) -> None:
        self.name, self.counts, self.wrong = name, dict[str, int](), 0
        self.tap = Tap(keys, 0.0, seed=seed, state_bytes=state_bytes)
        pipeline = Pipeline(name, self.tap, key="key").stage(name, KeyCount(state_bytes))  # type: ignore[arg-type]
        options: dict[str, Any] = {"spark": spark, "watch": self._watch, "max_backlog": BACKLOG}
        self.app = application.run(pipeline, ["cloud"], **options, **store)

    def _watch(self, results: list[Result], now_us: int) -> None:
        for result in results:
            count = self.counts.get(result.key, 0) + 1
            self.wrong += result.values["count"] != count
            self.counts[result.key] = count

    def feed(self, rate: float | None, lead: float, seconds: float) -> dict[str, float]:
        """One turn: records flow for `lead` seconds and then for `seconds`, which are measured."""
        self.tap.flow = rate
        time.sleep(lead)
        begun = self._reading()
        time.sleep(seconds)
        records, took, batches, cpu = (end - start for start, end in zip(begun, self._reading(), strict=True))
        self.tap.flow = 0.0
        self.settle()
        return {
            "batch_ms_per_record": batches / max(records, 1),
            "cpu_ms_per_record": cpu / max(records, 1),
            "records_per_s": records / took,
        }

    def _reading(self) -> tuple[float, float, float, float]:
        """Records delivered, the time, and the time of micro-batches and the CPU time, in milliseconds, so far: read
        when a batch's results have arrived, because they arrive all at once."""
        outlet = self.app.gateway.first.outlet
        delivered, deadline = outlet.delivered, time.monotonic() + TIMEOUT
        while outlet.delivered == delivered and time.monotonic() < deadline:
            time.sleep(0.001)
        return outlet.delivered, time.monotonic(), sum(self.app.batches()), cpu_ms()

    def settle(self) -> None:
        """Wait until all ingested records are delivered and, with a store, saved."""
        deadline, flow = time.monotonic() + TIMEOUT, self.app.gateway.first
        while not (
            self.tap.filled
            and flow.outlet.delivered >= flow.gateway.sent
            and self.app.control.is_settled()
            and (flow.checkpointer is None or flow.gateway.has_saved)
        ):
            for error in self.app.gateway.errors():
                raise error
            if time.monotonic() > deadline:
                raise Unavailable(f"{self.name}: not everything is delivered and saved after {TIMEOUT:.0f} s")
            time.sleep(0.02)


def measure(
    spark: SparkSession,
    folder: Path,
    *,
    rounds: int,
    seconds: float,
    rate: float,
    keys: int,
    state_bytes: int,
    save_every: float,
    seed: int,
    show: Show = lambda what: None,
) -> dict[str, Any]:
    """Measure the figures. `spark` must keep the progress of its micro-batches (`REMEMBER`)."""
    url, window = str(folder / "store"), ceil(seconds / save_every) * save_every
    both: list[Candidate] = []
    try:
        for name, options in ((WITHOUT, {}), (WITH, {"store": url, "save_every": save_every})):
            show(f"starting {name}")
            data = folder / name
            both.append(Candidate(name, spark, keys, state_bytes, seed, data=data, **options))
        for one in both:
            one.settle()
        turns: dict[str, list[dict[str, float]]] = {WITH: [], WITHOUT: []}
        for number in range(rounds + 1):  # the first one warms up
            for one in both if number % 2 else reversed(both):
                show(f"round {number} of {rounds}: {one.name}")
                steady = one.feed(rate, save_every, window)
                flood = one.feed(None, save_every, window)
                if number:
                    turns[one.name].append({**steady, "most_records_per_s": flood["records_per_s"]})
        made = both[1].app.status()["stages"][WITH]["store"]["checkpoint"]
    finally:
        for one in both:
            one.tap.end()
            one.app.stop()
    right = not any(one.wrong for one in both) and both[1].counts == stored(url)
    return {**compared(turns), "checkpoints": made, "turns": turns, "results_right": right}


def compared(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, and the median ratio of neighbouring turns: with a store / without."""
    figures: dict[str, Any] = {"ratio": {}}
    for what in turns[WITH][0]:
        values = {name: [turn[what] for turn in series] for name, series in turns.items()}
        pairs = zip(values[WITH], values[WITHOUT], strict=True)
        figures["ratio"][what] = round(median(one / other for one, other in pairs), 4)
        figures[what] = {name: round(median(series), 4) for name, series in values.items()}
    return figures


def stored(url: str) -> dict[str, int]:
    """The counts in the store, by key."""
    bags = {one.key: one.unpacked() for one in CentralStore(url).load(WITH)}
    return {key: msgspec.msgpack.decode(bag.state)["count"] for key, bag in bags.items()}


def cpu_ms() -> float:
    """The CPU time of this process and all its descendants so far, in milliseconds."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(folder.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))  # with its ended children
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks.get(pid, 0) for pid in ours) * 1000 / os.sysconf("SC_CLK_TCK")
