"""What a user writes: refused early if it cannot work, and the same each time it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.unit.records import Tape, part
from whimbrel.core import operator
from whimbrel.core.errors import Refused
from whimbrel.core.operator import Context, Emit, shape_of, takes_context, uses_timers


class Plain(operator.Operator):
    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        emit(event=event)


def test_the_context_is_for_those_who_ask_for_it() -> None:
    assert not takes_context(Plain())
    assert takes_context(Tape())


def test_only_an_operator_with_on_timer_has_timers() -> None:
    assert not uses_timers(Plain())
    assert uses_timers(Tape())


class Needy(operator.State):
    required: int


class Stateful(Plain):
    State = Needy


class Short(operator.Operator):
    def process(self, key: str) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (operator.Operator(), "Operator has no process"),
        (Stateful(), "each field of Stateful.State needs a default.*required"),
        (Short(), r"process takes \(key, event, state, emit\) and maybe ctx, not 1 parameters"),
    ],
)
def test_an_operator_that_cannot_work_is_refused_before_anything_runs(wrong: operator.Operator, message: str) -> None:
    with pytest.raises(Refused, match=message):
        part(tape=wrong)


@pytest.fixture
def context() -> Context:
    """A context at event time 1 s."""
    context = Context()
    context.key, context.now_us, context.seq = "k", 1_000_000, 7
    return context


def test_time_is_the_records_time(context: Context) -> None:
    assert context.now == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)


def test_timers_are_sorted_and_the_same_moment_is_one_timer(context: Context) -> None:
    context.timer(timedelta(seconds=2))
    context.timer(timedelta(seconds=1))
    context.timer(context.now + timedelta(seconds=2))
    assert context.timers == [2_000_000, 3_000_000]


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A site where it is always later."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("tokyo")
def test_a_timer_means_the_same_moment_at_every_site(context: Context) -> None:
    context.timer(datetime(1970, 1, 1, 0, 0, 9))  # what a user may well write
    context.timer(datetime(1970, 1, 1, 0, 0, 9, tzinfo=UTC))
    assert context.timers == [9_000_000]


def test_a_shape_is_the_same_whether_its_job_is_run_or_imported() -> None:
    text = """
from whimbrel.core.operator import State

class Tape(State):
    count: int = 0
    words: tuple[str, ...] = ()
    known: dict[str, float | None] = {}
"""
    imported: dict[str, Any] = {"__name__": "job"}
    run: dict[str, Any] = {"__name__": "__main__"}
    exec(text, imported)
    exec("from __future__ import annotations\n" + text, run)
    assert shape_of(imported["Tape"]) == shape_of(run["Tape"])
    exec(text.replace("int = 0", "float = 0.0"), imported)
    assert shape_of(imported["Tape"]) != shape_of(run["Tape"])
