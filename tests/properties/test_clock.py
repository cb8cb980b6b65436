"""Event time keeps near to elapsed time, whatever the wall clock does."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from whimbrel.gateway.clock import STEP, EventClock

SECOND, NS = 1_000_000, 1000
STEP_US = round(STEP * SECOND)
YEARS = 100 * 365 * 86_400 * SECOND
START = 1_700_000_000 * SECOND

elapsed = st.integers(0, 7200 * SECOND)
walls = st.integers(-YEARS, YEARS)
"""How far the wall clock is off."""
looks = st.lists(st.tuples(elapsed, walls), min_size=1, max_size=50)


def run(looks: list[tuple[int, int]], least_us: int | None = None) -> list[tuple[int, int]]:
    """(elapsed since the first look, event time) at each look; the first one with a right clock."""
    clock, at = EventClock(least_us), 0
    seen = [(0, clock.look(START, 0))]
    for step, off in looks:
        at += step
        seen.append((at, clock.look(START + at + off, at * NS)))
    return seen


@given(looks)
def test_whatever_the_wall_clock_does_time_runs_at_half_to_twice_the_real_rate(looks: list[tuple[int, int]]) -> None:
    seen = run(looks)
    for number, (start, before) in enumerate(seen):
        for end, after in seen[number:]:
            assert after - before >= (end - start) // 2 - len(looks), "less a rounding a look"
            assert after - before <= 2 * (end - start) + STEP_US + 1
    assert [now for _, now in seen] == sorted(now for _, now in seen)


@given(st.lists(st.tuples(elapsed, st.integers(-STEP_US // 4, STEP_US // 4)), min_size=1, max_size=50))
def test_small_offsets_are_followed_at_once_forward_and_in_a_while_back(looks: list[tuple[int, int]]) -> None:
    for at, now in run(looks):
        assert abs(now - START - at) <= STEP_US // 4
    clock = EventClock()
    clock.look(START, 0)
    assert clock.look(START + STEP_US, 0) == START + STEP_US


@given(st.integers(0, YEARS), st.lists(elapsed, min_size=1, max_size=20))
def test_a_log_that_is_ahead_of_the_wall_clock_is_where_time_goes_on(ahead: int, steps: list[int]) -> None:
    seen = run([(step, 0) for step in steps], START + ahead)
    assert seen[0] == (0, START + ahead)
    for at, now in seen:
        assert now >= max(START + at, START + ahead + at // 2 - len(steps))
        assert now <= max(START + at, START + ahead + at // 2)


def test_an_hour_ahead_for_a_moment_does_not_stop_time() -> None:
    clock, hour = EventClock(), 3600 * SECOND
    clock.look(START, 0)
    jumped = clock.look(START + 1 * SECOND + hour, 1 * SECOND * NS)
    assert jumped == START + SECOND + STEP_US
    times = [clock.look(START + at * SECOND, at * SECOND * NS) for at in range(2, 12)]
    assert times[0] > jumped
    assert all(after - before >= SECOND // 2 for before, after in pairwise(times))
    assert times[-1] == START + 11 * SECOND, "and soon it is right again"
