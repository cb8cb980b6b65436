"""How the duration of a move grows: with the bytes that move, and with nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whimbrel.lab.bench.summary import Run, fit, grouped, medians
from whimbrel.log import EmbeddedLog

BLOB = 1 << 20


def copy_ms(folder: Path, size: int) -> float:
    """Milliseconds to write `size` bytes to a log of the kind that state is sent through, and to read them back."""
    path = folder / f"copy-{size}.db"
    log = EmbeddedLog(path)
    blob = os.urandom(min(size, BLOB))
    start = time.perf_counter()
    for number in range(-(-size // BLOB) if size else 0):
        log.append(blob, count=1, writer="copy", counter=number)
    total = sum(len(entry.blob) for entry in log.read(0))
    took = (time.perf_counter() - start) * 1000
    log.close()
    for file in folder.glob(f"{path.name}*"):
        file.unlink()
    assert total >= size
    return round(took, 1)


def growth(runs: Sequence[Run], folder: Path) -> dict[str, Any]:
    """Of a sweep: the line fitted to its durations, the effect of keys that stay, and a bare copy of the same bytes."""
    sizes = sorted({round(run["figures"]["state_bytes"]) for run in runs})
    return {
        "fit": {label: _line(mine) for label, mine in _by_label(runs)},
        "staying": {label: _staying(mine) for label, mine in _by_label(runs)},
        "copy_ms": {str(size): copy_ms(folder, size) for size in sizes},
    }


def _by_label(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    return [(group[0]["label"], group) for group in grouped(runs, lambda run: run["label"])]


def _line(runs: Sequence[Run]) -> dict[str, float] | None:
    """Milliseconds over MiB."""
    x = [run["figures"]["state_bytes"] / 2**20 for run in runs]
    return fit(x, [run["figures"]["duration_ms"] for run in runs])


def _staying(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Where the same keys moved with different numbers of keys that stayed: the longest move / the shortest."""

    def load(run: Run) -> tuple[int, int]:
        return run["parameters"]["moved"], run["parameters"]["state_bytes"]

    found = []
    for group in grouped(runs, load):
        by_keys = {
            part[0]["parameters"]["keys"]: part for part in grouped(group, lambda run: run["parameters"]["keys"])
        }
        if len(by_keys) > 1:
            durations = {keys: medians(part)["duration_ms"] or 0.0 for keys, part in by_keys.items()}
            found.append(
                {
                    "moved": load(group[0])[0],
                    "duration_ms": {str(keys - load(group[0])[0]): ms for keys, ms in durations.items()},
                    "ratio": round(max(durations.values()) / min(durations.values()), 3),
                }
            )
    return found
