"""Values that cannot be stored: the record that made them is parked, and everything else goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from whimbrel.core import operator
from whimbrel.core.instance import Instance
from whimbrel.core.keys import bin_of
from whimbrel.core.operator import Emit
from whimbrel.core.record import Emissions, Kind, Parked, Record


class Keep(operator.Operator):
    """Keeps all events and emits how many there were."""

    tries = 2

    class State(operator.State):
        kept: tuple[Any, ...] = ()
        seen: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        state.kept = (*state.kept, event)
        state.seen += 1
        emit(seen=state.seen, value=event if key == "loud" else None)


def applied(key: str, *events: Any) -> tuple[Emissions, Instance]:
    instance = Instance("i", Keep())
    records = [Record(n, Kind.DATA, bin_of(key), key, n, 0, "r", n, n, event) for n, event in enumerate(events)]
    return instance.apply(records), instance


@pytest.mark.parametrize("bad", [object(), 1 << 70, {"a": [object()]}])
@pytest.mark.parametrize("key", ["quiet", "loud"])
def test_a_value_that_cannot_be_stored_or_sent_parks_its_record_alone(key: str, bad: object) -> None:
    out, instance = applied(key, 1, bad, 3)
    assert [(result.seq, result.values["seen"]) for result in out.results] == [(0, 1), (2, 2)]
    assert [(n.key, n.seq) for n in out.notices if isinstance(n, Parked)] == [(key, 1)]
    again = Instance("i", Keep())
    again.load(instance.deltas())
    after = again.apply([Record(9, Kind.DATA, bin_of(key), key, 9, 0, "r", 9, 9, 4)])
    assert after.results[0].values["seen"] == 3


@pytest.mark.parametrize(
    "large", ["x" * 1000, "\N{SNOWMAN}" * 400, b"x" * 1000, ["x" * 500, "y" * 500], {"a": "x" * 1000}]
)
def test_a_result_that_fits_into_no_entry_of_a_log_parks_its_record_alone(
    monkeypatch: pytest.MonkeyPatch, large: object
) -> None:
    monkeypatch.setattr("whimbrel.core.serving.LARGEST", 1000)
    out, _ = applied("loud", 1, large, "x" * 900)
    assert [(result.seq, result.values["seen"]) for result in out.results] == [(0, 1), (2, 2)]
    (parked,) = (notice for notice in out.notices if isinstance(notice, Parked))
    assert (parked.seq, "is too large: emit several, of at most 1000 bytes each" in parked.error) == (1, True)


def test_a_state_of_any_size_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stored, and moved, in pieces."""
    monkeypatch.setattr("whimbrel.core.serving.LARGEST", 1000)
    out, instance = applied("quiet", "x" * 5000)
    assert (len(out.results), out.notices) == (1, [])
    deltas = instance.deltas(1000)
    assert len(deltas) > 5
    assert max(map(len, deltas)) < 2000


@pytest.mark.parametrize("number", [np.float64(1.5), np.int64(7), np.bool_(True)])
def test_numbers_of_numpy_are_plain_numbers(number: Any) -> None:
    out, instance = applied("loud", number)
    assert not out.notices
    again = Instance("i", Keep())
    again.load(instance.deltas())
    assert again.table.decode(again.table.entries["loud"].saved).kept == (number.item(),)  # type: ignore[arg-type]


def test_a_state_that_is_not_what_its_class_says_is_taken_as_it_is() -> None:
    class Drift(Keep):
        def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
            state.seen += 0.5
            emit(seen=state.seen)

    first = Instance("i", Drift())
    first.apply([Record(0, Kind.DATA, bin_of("k"), "k", 0, 0, "r", 0, 0, 1)])
    again = Instance("i", Drift())
    again.load(first.deltas())
    out = again.apply([Record(1, Kind.DATA, bin_of("k"), "k", 1, 0, "r", 1, 1, 1)])
    assert out.results[0].values == {"seen": 1.0}
