"""A story: each line has its time, and the line that ends a phase says how long the phase took."""

from __future__ import annotations

from whimbrel.core.keys import EVERYTHING
from whimbrel.core.protocols.machine import Migration, StoryLine
from whimbrel.core.record import Move
from whimbrel.orchestrator.orders import story_of

NEW_YEAR = 1_767_225_600_000_000
SECOND = 1_000_000
MOVE = Move(
    id="m1",
    stage="s",
    protocol="live",
    source="s-1",
    destination="s-2",
    selection=EVERYTHING,
    epoch=1,
    routers=frozenset({"gateway"}),
)


def migration(phase: str, *story: tuple[str, str, float]) -> Migration:
    lines = [StoryLine(phase, event, NEW_YEAR + round(at * SECOND)) for phase, event, at in story]
    return Migration(MOVE, "cloud", "edge", phase, story=lines, ordered_by="ops", ordered_us=NEW_YEAR)


def test_the_line_that_ends_a_phase_says_how_long_it_took() -> None:
    one = migration(
        "done", ("ordered", "why", 0), ("ordered", "Ordered", 0.5), ("copying", "Ready", 1), ("copying", "Ready", 3.25)
    )
    assert story_of([one]) == [
        "2026-01-01T00:00:00.000Z m1 ordered: ordered by ops",
        "2026-01-01T00:00:00.000Z m1 ordered: why",
        "2026-01-01T00:00:00.500Z m1 ordered: Ordered (ordered took 0.500 s)",
        "2026-01-01T00:00:01.000Z m1 copying: Ready",
        "2026-01-01T00:00:03.250Z m1 copying: Ready (copying took 2.750 s)",
    ]


def test_a_phase_that_goes_on_has_no_duration_and_a_turn_that_waits_has_its_time() -> None:
    assert story_of([migration("copying", ("ordered", "Ordered", 1), ("copying", "Ready", 2))])[-1] == (
        "2026-01-01T00:00:02.000Z m1 copying: Ready"
    )
    assert story_of([migration("ordered")]) == ["2026-01-01T00:00:00.000Z m1 ordered: ordered by ops"]


def test_a_clock_that_was_put_back_makes_no_phase_shorter_than_nothing() -> None:
    told = story_of([migration("done", ("ordered", "Ordered", 5), ("copying", "Ready", 1))])
    assert told[-1].endswith("(copying took 0.000 s)")
