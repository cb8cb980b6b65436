"""The jobs that Whimbrel is measured with. Each comes with its records, made from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from whimbrel.core import operator
from whimbrel.core.operator import Emit


class AverageSpeed(operator.Operator):
    """The running average speed of each vehicle."""

    class State(operator.State):
        """What is known of one vehicle."""

        average: float = 0.0
        count: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One reading."""
        state.count += 1
        state.average += (event.speed - state.average) / state.count
        emit(vehicle=key, average=state.average, count=state.count)


VEHICLE_SCHEMA = "vehicle string, speed double"


def vehicles(keys: int, rows: int, seed: int) -> Callable[[], Iterator[dict[str, Any]]]:
    """Readings of a fleet, each vehicle with a usual speed of its own."""

    def readings() -> Iterator[dict[str, Any]]:
        rng = random.Random(seed)
        usual = [rng.uniform(20, 120) for _ in range(keys)]
        for _ in range(rows):
            vehicle = rng.randrange(keys)
            yield {"vehicle": f"vehicle-{vehicle:05}", "speed": round(rng.gauss(usual[vehicle], 8), 2)}

    return readings
