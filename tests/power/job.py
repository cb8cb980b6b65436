"""The job of the power failures: counts and sums by key, and moves half of its keys to and fro all the time.

python -m tests.power.job ROOT DURABILITY ROWS HOST    runs it until its source has ended
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import whimbrel as wb
from whimbrel.core.operator import Emit

KEYS = 40
RATE = 250.0


class Ledger(wb.Operator):
    """A result for each record: how many its key has had, and their sum."""

    class State(wb.State):
        """So far."""

        count: int = 0
        total: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One more."""
        state.count += 1
        state.total += event.row
        emit(key=key, row=event.row, count=state.count, total=state.total)


def rows(number: int) -> Iterator[dict[str, Any]]:
    """Each is a function of its number."""
    return ({"key": f"k{row * 7919 % KEYS}", "row": row} for row in range(number))


def expected(number: int) -> dict[str, list[tuple[int, int, int]]]:
    """By key, in plain Python: row, count and sum."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for one in rows(number):
        mine = found.setdefault(one["key"], [])
        mine.append((one["row"], len(mine) + 1, one["row"] + (mine[-1][2] if mine else 0)))
    return found


def job(root: Path, number: int, rate: float | None) -> wb.Pipeline:
    """The pipeline, whose results lie beside its data directory."""
    source = wb.Items(lambda: rows(number), "key string, row long", rate)
    pipeline = wb.Pipeline("power", source, key="key").stage("ledger", Ledger(), groups=2, partitions=1)
    return pipeline.sink(wb.JsonLines(root / "out.jsonl"))


def main(root: Path, durability: str, number: int, host: str) -> None:
    """Run, and move."""
    pipeline, data = job(root, number, RATE), root / "data"
    with wb.run(pipeline, data=data, durability=durability, trigger="100 milliseconds", host=host) as app:
        protocols = cycle(["live", "push", "pause", "fetch", "fluid"])
        print("runs", flush=True)
        for move in count():
            if app.gateway.has_ended:
                break
            to = "edge-1" if move % 2 == 0 else "cloud"
            app.migrate("ledger", bins=range(512), to=to, protocol=next(protocols)).wait(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
