"""The average of the last ten values of each sensor, from CSV to CSV, while some sensors move to another site.

    .venv/bin/python examples/01_case1.py [--out FOLDER]

The job runs twice over the same rows: undisturbed, then with a live move in the middle. A sensor's averages must be
the same both times, one by one. Between two sensors there is no order to keep, so the lines of the two files may be
mixed differently; that is why they are compared sensor by sensor.
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import whimbrel as wb

SENSORS, ROWS, RATE = 20, 2_000, 200
MOVED = ["s01", "s02", "s03", "s04", "s05"]


class Average(wb.Operator):
    """The average of the last ten values of a sensor."""

    class State(wb.State):
        """The last ten values."""

        values: tuple[float, ...] = ()

    def process(self, key: str, event: Any, state: Any, emit: Any) -> None:
        """One value."""
        state.values = (*state.values, event.value)[-10:]
        emit(sensor=key, average=round(sum(state.values) / len(state.values), 3))


def job(values: Path, averages: Path, rate: float | None) -> wb.Pipeline:
    """The pipeline: rows without a value are dropped by plain PySpark before the operator sees them."""
    source = wb.Csv(values, schema="sensor string, value double", rate=rate)
    pipeline = wb.Pipeline("case1", source, key="sensor")
    pipeline.stage("average", Average(), prepare=lambda df: df.where("value is not null"))
    return pipeline.sink(wb.Csv(averages, overwrite=True))


def make_values(path: Path) -> None:
    """The same rows each time; one in twenty has no value."""
    rng = random.Random(1)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["sensor", "value"])
        for _ in range(ROWS):
            sensor = rng.randrange(SENSORS)
            value = round(rng.gauss(20 + sensor, 2), 2)
            writer.writerow([f"s{sensor:02}", "" if rng.random() < 0.05 else value])


def by_sensor(path: Path) -> dict[str, list[str]]:
    """Each sensor's averages, in the order of the file."""
    found: dict[str, list[str]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["sensor"]].append(row["average"])
    return found


def main(out: Path) -> bool:
    """Run both, compare, and say so."""
    out.mkdir(parents=True, exist_ok=True)
    make_values(out / "values.csv")

    with wb.run(job(out / "values.csv", out / "undisturbed.csv", None), sites=["cloud", "edge-1"]):
        pass  # leaving the block waits until everything is delivered

    with wb.run(job(out / "values.csv", out / "moved.csv", RATE), sites=["cloud", "edge-1"]) as app:
        while app.status()["records"]["delivered"] < ROWS // 4:
            time.sleep(0.05)
        move = app.migrate("average", keys=MOVED, to="edge-1").wait(120)
        halfway = app.status()["records"]["delivered"]

    undisturbed, moved = by_sensor(out / "undisturbed.csv"), by_sensor(out / "moved.csv")
    print(f"the move of {', '.join(MOVED)} to edge-1 is {move.outcome}, with {halfway:,} averages delivered so far:")
    for line in move.progress:
        print(f"  {line}")
    print("the first lines of moved.csv:")
    for line in (out / "moved.csv").read_text(encoding="utf-8").splitlines()[:4]:
        print(f"  {line}")
    same = undisturbed == moved
    total = sum(map(len, moved.values()))
    print(
        f"{total:,} averages of {len(moved)} sensors; with and without the move: {'identical' if same else 'DIFFERENT'}"
    )
    return same and move.outcome == "done"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the files go; a temporary folder if not given")
    given = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        raise SystemExit(0 if main(given or Path(folder)) else 1)
