"""Measure the cost of `StageControl.counts`, which every `status()` calls for each stage, by the number of keys.

    python scripts/status_cost.py

Prints milliseconds: of the first call after a start, which reads all keys from the log; of the next ones (median); of
one after new keys; and of one after a move. Half of the bins are at another instance, and 100 keys have single routes.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from types import SimpleNamespace

from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.keys import KeyMap, selection_of
from whimbrel.core.router import RouteTable
from whimbrel.log.memory import MemoryLog
from whimbrel.orchestrator.known_keys import KnownKeys, seen
from whimbrel.orchestrator.stage import Shape, StageControl

SIZES = (10, 10_000, 1_000_000)
ENTRY = 5_000
"""Keys in an entry of the log."""


def made(count: int) -> tuple[StageControl, MemoryLog]:
    """A stage with `count` keys."""
    log, table = MemoryLog(), RouteTable("s-1")
    table.owners.put(selection_of(bins=range(512)), "s-2")
    table.owners.put(selection_of([f"key-{number}" for number in range(100)]), "s-3")
    for first in range(0, count, ENTRY):
        write(log, [f"key-{number}" for number in range(first, min(first + ENTRY, count))])
    coordinator = Coordinator("s", table, {"s-1": "a", "s-2": "b", "s-3": "c"}, KeyMap("r"))
    keys, nothing = KnownKeys([partial(seen, log)]), SimpleNamespace()
    return StageControl(coordinator, nothing, Shape(4), nothing, keys), log  # type: ignore[arg-type]


def write(log: MemoryLog, keys: list[str]) -> None:
    """Append new keys to the log."""
    log.append(wire.pack(keys), count=len(keys), writer="gateway", counter=log.tail())


def timed(stage: StageControl) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    stage.counts()
    return (time.perf_counter() - start) * 1000


def main() -> None:
    """Print a table."""
    print(f"{'keys':>9}  {'first':>9}  {'next':>9}  {'new keys':>9}  {'a move':>9}   ms")
    for count in SIZES:
        stage, log = made(count)
        first, later = timed(stage), median(timed(stage) for _ in range(5))
        write(log, ["new-1", "new-2"])
        fresh = timed(stage)
        stage.coordinator.table.owners.put(selection_of(bins=[3]), "s-1")
        print(f"{count:>9,}  {first:>9.3f}  {later:>9.3f}  {fresh:>9.3f}  {timed(stage):>9.3f}")


if __name__ == "__main__":
    main()
