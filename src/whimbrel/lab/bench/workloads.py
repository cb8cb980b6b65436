"""The jobs that Whimbrel is measured with. Each comes with its records, generated from a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from whimbrel.core import operator
from whimbrel.core.operator import Emit
from whimbrel.gateway.intake import parse_schema
from whimbrel.gateway.sources import Numbered

# ── A fleet ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class AverageSpeed(operator.Operator):
    """The running average speed of each vehicle."""

    class State(operator.State):
        """The state of one vehicle."""

        average: float = 0.0
        count: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """Process one reading."""
        state.count += 1
        state.average += (event.speed - state.average) / state.count
        emit(vehicle=key, average=state.average, count=state.count)


VEHICLE_SCHEMA = "vehicle string, speed double"


def vehicles(keys: int, rows: int, seed: int) -> Callable[[], Iterator[dict[str, Any]]]:
    """Readings of a fleet, each vehicle with its own usual speed."""

    def readings() -> Iterator[dict[str, Any]]:
        rng = random.Random(seed)
        usual = [rng.uniform(20, 120) for _ in range(keys)]
        for _ in range(rows):
            vehicle = rng.randrange(keys)
            yield {"vehicle": f"vehicle-{vehicle:05}", "speed": round(rng.gauss(usual[vehicle], 8), 2)}

    return readings


# ── Key-count ────────────────────────────────────────────────────────────────────────────────────────────────────────


class KeyCount(operator.Operator):
    """Counts the records of each key, with a state of any size.

    Each result contains one byte of the ballast, a different one each time: damage in transit is detected.
    """

    class State(operator.State):
        """The count, and ballast to make the state large."""

        count: int = 0
        ballast: bytes = b""

    def __init__(self, state_bytes: int = 0, churn: bool = False) -> None:
        """`churn`: each record changes the ballast."""
        self.state_bytes, self.churn = state_bytes, churn

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """Process one record."""
        state.count += 1
        if len(state.ballast) != self.state_bytes:
            state.ballast = random.Random(key).randbytes(self.state_bytes)
        elif self.churn:
            state.ballast = state.ballast[1:] + bytes([state.count % 256])
        emit(count=state.count, probe=state.ballast[state.count % self.state_bytes] if self.state_bytes else 0)


class Load:
    """The records of a key-count: first one of each key, then random keys at a rate, until `end` is called.

    A pipeline's source. The sequence of keys is a function of the seed alone, their times are not: the rate may be
    multiplied for some seconds. Random numbers are drawn thousands at a time: on the machine that is measured,
    generating records must cost next to nothing.
    """

    lenient = False
    name = "load"
    CHUNK = 4096
    FILL_ROWS, FILL_BYTES = 5_000, 16 << 20
    """The rate at which the state of all keys is created: keys or bytes per second, whichever is slower."""

    def __init__(
        self, keys: int, rate: float, *, skew: float = 0.0, active: float = 1.0, seed: int = 1, state_bytes: int = 0
    ) -> None:
        """`skew`: the exponent of a Zipf distribution over the keys; 0: uniform. `active`: the share of the keys that
        receive more than their first record."""
        self.keys, self.skew, self.active, self.seed = keys, skew, active, seed
        self.names = [f"key-{number:06}" for number in range(keys)]
        self.filled = False
        """Whether every key has received its first record."""
        self._usual, self._fill = rate, min(self.FILL_ROWS, self.FILL_BYTES / max(1, state_bytes))
        self._factor, self._until, self._ended = 1.0, 0.0, False
        self._emitted = 0

    @property
    def rate(self) -> float:
        """The current rate, in rows per second."""
        if not self.filled:
            return max(self._fill, 1.0)
        return self._usual * (self._factor if time.monotonic() < self._until else 1.0)

    def spike(self, factor: float, seconds: float) -> None:
        """Multiply the usual rate by a factor, from now on, for some seconds."""
        self._factor, self._until = factor, time.monotonic() + seconds

    def end(self) -> None:
        """Emit no more records."""
        self._ended = True

    def source(self) -> Load:
        """Return itself, to read from."""
        return self

    def schema(self) -> pa.Schema:
        return parse_schema("key string")

    def rows(self, start: int) -> Iterator[Numbered]:
        for number, key in islice(enumerate(self._keys()), start, None):
            if number >= self.keys:
                self.filled = True
                if self._ended:
                    return
            self._emitted = number + 1
            yield number, {"key": key}

    def emitted_keys(self) -> Iterator[str]:
        """The keys of all emitted records, in their order."""
        return islice(self._keys(), self._emitted)

    def _keys(self) -> Iterator[str]:
        """The infinite sequence of keys: a function of the seed alone."""
        yield from self.names
        rng = np.random.default_rng(self.seed)
        names = self.names
        if self.active < 1:
            names = [names[number] for number in rng.permutation(self.keys)[: max(1, round(self.keys * self.active))]]
        weights = np.arange(1, len(names) + 1) ** -self.skew
        ranks = np.cumsum(weights) / weights.sum()
        while True:
            for number in np.searchsorted(ranks, rng.random(self.CHUNK)).tolist():
                yield names[min(number, len(names) - 1)]
