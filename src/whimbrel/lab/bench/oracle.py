"""The expected results of a benchmark job: plain Python over its rows, without any code of the product.

Nothing here uses logs, positions or epochs. A result is identified by its own content (its key and how many records of
the key came before it), so a record that the product loses at its intake, or ingests twice, is detected as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

Delivered = tuple[Hashable, Hashable, Any]
"""A result: the group within which the order matters (mostly its key), its identity there, and its values."""
Expected = Mapping[Hashable, Sequence[tuple[Hashable, Any]]]
"""By group, in order: the identity of each result, and its values."""

FAULTS = ("lost", "duplicated", "out_of_order", "wrong")
"""The counts that must be 0 in every run."""


def compare(expected: Expected, delivered: Iterable[Delivered]) -> dict[str, int]:
    """Count results that are lost, duplicated, out of order or wrong (docs/operations/figures.md)."""
    counts = dict.fromkeys(FAULTS, 0)
    wanted = {
        group: {name: (place, values) for place, (name, values) in enumerate(results)}
        for group, results in expected.items()
    }
    seen: dict[Hashable, set[Hashable]] = {group: set() for group in wanted}
    last: dict[Hashable, int] = {}
    for group, name, values in delivered:
        before = seen.setdefault(group, set())
        if name in before:
            counts["duplicated"] += 1
            continue
        before.add(name)
        place, right = wanted.get(group, {}).get(name, (None, None))
        if place is None or right != values:
            counts["wrong"] += 1
        if place is not None:
            counts["out_of_order"] += place < last.get(group, -1)
            last[group] = max(place, last.get(group, -1))
    counts["lost"] = sum(len(names.keys() - seen[group]) for group, names in wanted.items())
    return counts


def key_counts(keys: Iterable[str], state_bytes: int, churn: bool) -> Expected:
    """The results of `KeyCount` over records with these keys."""
    counts: Counter[str] = Counter()
    ballasts: dict[str, bytes] = {}
    expected: dict[Hashable, list[tuple[Hashable, Any]]] = {}
    for key in keys:
        counts[key] += 1
        count, probe = counts[key], 0
        if state_bytes:
            if key not in ballasts:
                ballasts[key] = Random(key).randbytes(state_bytes)
            # Each record after the first removes the first byte and appends its number: 2, 3, ...
            place = count % state_bytes + (count - 1 if churn else 0)
            probe = ballasts[key][place] if place < state_bytes else (place - state_bytes + 2) % 256
        expected.setdefault(key, []).append((count, {"count": count, "probe": probe}))
    return expected


def averages(readings: Iterable[Mapping[str, Any]]) -> Expected:
    """The results of `AverageSpeed` over these readings."""
    known: dict[str, tuple[float, int]] = {}
    expected: dict[Hashable, list[tuple[Hashable, Any]]] = {}
    for reading in readings:
        vehicle = reading["vehicle"]
        average, count = known.get(vehicle, (0.0, 0))
        count += 1
        average += (reading["speed"] - average) / count
        known[vehicle] = average, count
        values = {"vehicle": vehicle, "average": average, "count": count}
        expected.setdefault(vehicle, []).append((count, values))
    return expected
