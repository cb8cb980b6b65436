"""The job that chaos runs: records of known content, and an operator whose results show every record and its order.

The job file that all processes import is written into the run's folder and calls `job` here. It also brings a wall
clock that can be set: `clock-gateway` in that folder says by how many microseconds the gateway's is off.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from whimbrel.app import App
from whimbrel.core import operator
from whimbrel.core.operator import Emit
from whimbrel.pipeline import Items, JsonLines, Pipeline

STAGE = "ledger"
HOUR_US = 3_600_000_000
"""Clocks are off by whole hours, so that what they say is known but for hours (`verdict.py`)."""


class Load(msgspec.Struct, frozen=True):
    """How much there is to do."""

    seed: int = 1
    keys: int = 80
    rate: float = 120.0
    state_bytes: int = 6_000
    """Of each key."""

    @property
    def names(self) -> list[str]:
        """The keys."""
        return [f"account-{number:03}" for number in range(self.keys)]

    def operator(self) -> Ledger:
        """What is done with each record."""
        return Ledger(self.state_bytes)


class Ledger(operator.Operator):
    """Each result is a digest of all records of its key, in their order; and of a byte of the ballast, another one each
    time, so that ballast damaged on its way shows."""

    class State(operator.State):
        """The digest so far, and what makes it heavy."""

        count: int = 0
        digest: int = 0
        ballast: bytes = b""

    def __init__(self, state_bytes: int = 0) -> None:
        self.state_bytes = state_bytes

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One record."""
        if len(state.ballast) != self.state_bytes:
            state.ballast = random.Random(key).randbytes(self.state_bytes)
        state.count += 1
        probe = state.ballast[state.count % self.state_bytes] if self.state_bytes else 0
        state.digest = crc32(f"{state.digest} {event.amount} {probe}".encode())
        emit(count=state.count, digest=state.digest)


def write_job(folder: Path, load: Load) -> Path:
    """The job file of a run in this folder."""
    path = folder / "chaos_job.py"
    lines = [
        '"""Made by `whimbrel chaos`."""',
        "from whimbrel.chaos.load import Load, job",
        f"job = job(__file__, {load!r})",
    ]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


def job(file: str, load: Load) -> Pipeline:
    """The pipeline of a run, whose source ends when a file `ending` is there. Called in each of its processes."""
    folder = Path(file).resolve().parent
    role = sys.argv[1] if len(sys.argv) > 1 else ""  # of `whimbrel gateway ...`, for instance
    App.clock_us = staticmethod(_clock(clock_of(folder, role)))  # type: ignore[method-assign]
    source = Items(lambda: _rows(load, folder / "ending"), "account string, amount long", load.rate)
    pipeline = Pipeline("chaos", source, key="account").stage(STAGE, load.operator(), groups=2)
    return pipeline.sink(JsonLines(folder / "out.jsonl", identity=True))


def clock_of(folder: Path, role: str) -> Path:
    """The file that says how far the clock of a role is off."""
    return folder / f"clock-{role}"


def _rows(load: Load, ending: Path) -> Iterator[dict[str, Any]]:
    rng, names = random.Random(load.seed), load.names
    while not ending.exists():
        yield {"account": rng.choice(names), "amount": rng.randrange(1_000_000)}


def _clock(off: Path) -> Callable[[], int]:
    """A wall clock that is as far off as a file says."""

    def now_us() -> int:
        try:
            shift = int(off.read_text(encoding="ascii") or 0)
        except (FileNotFoundError, ValueError):
            shift = 0
        return time.time_ns() // 1000 + shift

    return now_us
