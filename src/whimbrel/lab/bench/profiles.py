"""A micro-batch under the tuned profile and under Spark's own: the same stage, the same small batches.

A profile belongs to a whole JVM, so each measurement is a separate process, and the profiles alternate
(`python -m whimbrel.lab.bench.profiles`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from whimbrel.core.errors import Unavailable

TUNED, STOCK = "tuned", "stock"
MARK = "batches: "
WARM_UP = 20


def latency(
    rounds: int, batches: int, rows: int, show: Callable[[str, list[float]], None] = lambda name, times: None
) -> dict[str, Any]:
    """The report of `whimbrel bench latency`; `show` receives the times of each process."""
    times: dict[str, list[float]] = {TUNED: [], STOCK: []}
    for turn in range(rounds):
        for name in (TUNED, STOCK) if turn % 2 == 0 else (STOCK, TUNED):
            found = _child(name, batches, rows)
            times[name] += found
            show(name, found)
    batch_ms = {name: round(median(series), 1) for name, series in times.items()}
    return {
        "batch_ms": batch_ms,
        "ratio": round(batch_ms[TUNED] / batch_ms[STOCK], 3),
        "parameters": {"rounds": rounds, "batches": batches, "rows": rows},
        "times_ms": times,
    }


def _child(name: str, batches: int, rows: int) -> list[float]:
    command = [sys.executable, "-m", __name__, name, str(batches), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found: list[float] = json.loads(line.removeprefix(MARK))
            return found
    raise Unavailable(f"the {name} profile could not be measured: {done.stderr.strip()[-500:]}")


def main(name: str, batches: int, rows: int) -> None:
    """Measure one profile, in a separate process."""
    from whimbrel.lab.bench.throughput import Candidate, entries, take_turns
    from whimbrel.spark.query import StageQuery
    from whimbrel.spark.session import brief_session

    with brief_session(f"whimbrel-{name}", tuned=name == TUNED) as (spark, folder):
        candidate = Candidate(spark, folder, name, 1, rows, StageQuery)
        times, _ = take_turns([candidate], entries(WARM_UP + batches, rows, rows), rows)
    print(MARK + json.dumps(times[name][WARM_UP:]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
