"""Keys that come by a switch: what they wait for, when they open, and what is asked for."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tests.unit.records import (
    data,
    key_state,
    mark,
    notices,
    parcel,
    part,
    passed,
    reloaded,
    shipped,
    switch,
    switching,
    tick,
    told,
)
from whimbrel.core import wire
from whimbrel.core.instance import Instance
from whimbrel.core.keys import BINS, bin_of, selection_of, unit_of
from whimbrel.core.record import Buffered, Emissions, Fetch, Kind, Opened, Ready, Record, Tick
from whimbrel.core.schedules import units_of

BEGIN, CUTOVER = Kind.BEGIN, Kind.CUTOVER
PUSH = switching("k", "j")
FETCH = switching("k", "j", order="demand")
PAIR = ("k0", "k673")
"""Two keys of one bin."""


def destination(*records: Record) -> Instance:
    instance = part("b")
    instance.apply(records)
    return instance


def sent_on(record: Record) -> Buffered:
    """A record as it travels behind its key."""
    return part().table.stored(record._replace(epoch=1))


def asked(out: Emissions) -> tuple[list[int], list[int]] | None:
    """What the destination asks for: units it needs, and those of the next step."""
    for message in out.messages:
        if message.kind == Kind.FETCH:
            assert message.to == "a"
            question = wire.unpack(message.body, Fetch)
            return question.needed, question.step
    return None


# ── The destination opens ────────────────────────────────────────────────────────────────────────────────────────────

OPENING = {"state": parcel(PUSH, {"k": key_state(10, "x")}), "passed": passed(PUSH)}


@pytest.mark.parametrize("order", list(itertools.permutations(OPENING)))
def test_a_key_opens_when_its_state_is_here_and_its_source_has_passed(order: tuple[str, str]) -> None:
    instance = destination(switch(PUSH), mark(BEGIN, PUSH, 10))
    assert told(instance.apply([data("k", 11, "y", epoch=1)])) == []
    first, second = (OPENING[name] for name in order)
    assert told(instance.apply([first, data("k", 12, "z", epoch=1)])) == []
    out = reloaded(instance).apply([second, data("k", 13, "end", epoch=1)])
    assert told(out) == [("k", "x y"), ("k", "x y z"), ("k", "x y z end")]
    assert {result.epoch for result in out.results} == {1}


def test_what_waited_at_the_source_is_spoken_for_at_once_and_before_what_waits_here() -> None:
    instance = destination(switch(PUSH), mark(BEGIN, PUSH, 14), data("k", 15, "here", epoch=1))
    behind = {"k": [sent_on(data("k", 11, "y")), sent_on(data("k", 13, "z"))]}
    load = key_state(10, "x", timers=[50])
    out = instance.apply([parcel(PUSH, {"k": load}, backlog=behind, ticks=[Tick(12, "r", 60, 0)])])
    assert told(out) == [("k", "x y"), ("k", "x y @50"), ("k", "x y @50 z")]
    assert {result.epoch for result in out.results} == {1}
    assert told(instance.apply([passed(PUSH, ticks=[Tick(12, "r", 60, 0)])])) == [("k", "x y @50 z here")]


def test_a_record_that_the_state_has_is_not_applied_again() -> None:
    instance = destination(switch(PUSH), mark(BEGIN, PUSH, 14))
    behind = {"k": [sent_on(data("k", 10, "again")), sent_on(data("k", 11, "y"))]}
    out = instance.apply(
        [parcel(PUSH, {"k": key_state(10, "x", timers=[5])}, backlog=behind, ticks=[Tick(9, "r", 9, 0)])]
    )
    assert told(out) == [("k", "x y")]


def test_a_backlog_of_a_key_that_has_no_state_makes_it() -> None:
    instance = destination(switch(PUSH), mark(BEGIN, PUSH, 12), data("k", 13, "z", epoch=1))
    lone = parcel(PUSH, {}, backlog={"k": [sent_on(data("k", 11, "y"))]})
    assert told(instance.apply([lone])) == [("k", "y")]
    assert told(instance.apply([passed(PUSH)])) == [("k", "y z")]


def test_a_backlog_may_come_behind_its_key() -> None:
    instance = destination(switch(PUSH), parcel(PUSH, {"k": key_state(10, "x")}))
    late = parcel(PUSH, {}, backlog={"k": [sent_on(data("k", 11, "y"))]})
    assert told(instance.apply([late, mark(BEGIN, PUSH, 12), data("k", 13, "z", epoch=1)])) == [("k", "x y")]
    assert told(instance.apply([passed(PUSH)])) == [("k", "x y z")]


def test_pieces_are_put_together_and_the_backlog_comes_with_the_last() -> None:
    whole = key_state(10, "a long story")
    cut = [msgspec.structs.replace(whole, state=state) for state in (whole.state[:9], whole.state[9:])]
    instance = destination(switch(PUSH), mark(BEGIN, PUSH, 12), passed(PUSH), data("k", 13, "z", epoch=1))
    assert told(instance.apply([parcel(PUSH, {"k": cut[0]}, 0, 2)])) == []
    behind = {"k": [sent_on(data("k", 11, "y"))]}
    out = reloaded(instance).apply([parcel(PUSH, {"k": cut[1]}, 1, 2, backlog=behind)])
    assert told(out) == [("k", "a long story y"), ("k", "a long story y z")]


def test_an_absent_key_begins_from_nothing_once_its_source_has_passed() -> None:
    instance = destination(switch(PUSH), mark(BEGIN, PUSH, 10), data("k", 11, "y", epoch=1))
    assert told(instance.apply([parcel(PUSH, {}, absent=["k"])])) == []
    assert told(instance.apply([passed(PUSH)])) == [("k", "y")]
    assert told(instance.apply([data("j", 12, "z", epoch=1)])) == [], "of which nothing is known"


def test_shipped_opens_the_rest() -> None:
    instance = destination(switch(PUSH), mark(BEGIN, PUSH, 10), data("k", 11, "y", epoch=1))
    out = instance.apply([passed(PUSH), shipped(PUSH), data("j", 12, "z", epoch=1)])
    assert told(out) == [("k", "y"), ("j", "z")]
    assert out.notices == [Ready("m1", "b", 0, 1)]


def test_a_whole_unit_tells_which_keys_there_are_not() -> None:
    unit = unit_of("k", units_of(FETCH).split)
    instance = destination(switch(FETCH), mark(BEGIN, FETCH, 10), passed(FETCH), data("k", 11, "y", epoch=1))
    assert told(instance.apply([parcel(FETCH, {}, units=[unit_of("j", units_of(FETCH).split)])])) == []
    assert told(instance.apply([parcel(FETCH, {}, units=[unit])])) == [("k", "y")]


def test_keys_of_nobody_elses_business_are_served_meanwhile() -> None:
    instance = destination(data("other", 1, "x"), switch(PUSH), mark(BEGIN, PUSH, 10))
    assert told(instance.apply([data("other", 11, "y")])) == [("other", "x y")]


# ── Time at the destination ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_tick_that_came_before_the_state_is_caught_up_with_in_its_place() -> None:
    instance = destination(switch(PUSH), mark(BEGIN, PUSH, 10))
    assert told(instance.apply([data("k", 11, "y", epoch=1), tick(12, at=60), data("k", 13, "z", epoch=1)])) == []
    out = instance.apply([parcel(PUSH, {"k": key_state(10, "x", timers=[50])}), passed(PUSH)])
    assert told(out) == [("k", "x y"), ("k", "x y @50"), ("k", "x y @50 z")]
    assert {result.epoch for result in out.results} == {1}, "a timer's result too"


def test_time_stands_still_for_a_key_that_has_not_opened() -> None:
    instance = destination(switch(PUSH), mark(BEGIN, PUSH, 10), parcel(PUSH, {"k": key_state(8, "x", timers=[50, 70])}))
    assert told(instance.apply([tick(12, at=80)])) == []
    older = Tick(9, "r", 60, 0)
    out = instance.apply([passed(PUSH, ticks=[older])])
    assert [(result.seq, result.values["seen"]) for result in out.results] == [(9, "x @50"), (12, "x @50 @70")]


def test_an_open_key_has_its_time_like_any_other() -> None:
    instance = destination(
        switch(PUSH), mark(BEGIN, PUSH, 10), passed(PUSH), parcel(PUSH, {"k": key_state(10, "x", timers=[50])})
    )
    assert told(instance.apply([tick(11, at=60)])) == [("k", "x @50")]
    assert told(instance.apply([parcel(PUSH, {"j": key_state(10, "x", timers=[50])})])) == [("j", "x @50")]


# ── Ready, and the end ───────────────────────────────────────────────────────────────────────────────────────────────


def test_ready_needs_begin_of_every_router_and_everything_from_every_part() -> None:
    both = switching("k", "j", routers="rs")
    needed = {
        "r": mark(BEGIN, both, 10, "r"),
        "s": mark(BEGIN, both, 10, "s"),
        "0": shipped(both, 0, 2),
        "1": shipped(both, 1, 2),
    }
    for order in itertools.permutations(needed):
        instance = destination(switch(both), passed(both, 0, 2), passed(both, 1, 2))
        said = [notices(instance.apply([needed[name]])) for name in order]
        assert said == [[], [], [], ["Ready"]], order


def test_a_key_opens_with_its_own_part_of_the_source() -> None:
    even, odd = (next(key for key in map(str, range(9)) if bin_of(key) % 2 == number) for number in range(2))
    moved = switching(even, odd)
    loads = [parcel(moved, {key: key_state(10, "x")}) for key in (even, odd)]
    instance = destination(switch(moved), mark(BEGIN, moved, 10), *loads)
    instance.apply([data(even, 11, "y", epoch=1), data(odd, 12, "y", epoch=1)])
    assert told(instance.apply([passed(moved, 1, 2)])) == [(odd, "x y")]
    assert told(instance.apply([data(odd, 13, "z", epoch=1), data(even, 14, "z", epoch=1)])) == [(odd, "x y z")]
    assert told(instance.apply([passed(moved, 0, 2)])) == [(even, "x y"), (even, "x y z")]


def test_a_part_of_the_source_that_has_sent_everything_says_nothing_about_the_others() -> None:
    even, odd = (next(key for key in map(str, range(9)) if bin_of(key) % 2 == number) for number in range(2))
    moved = switching(even, odd)
    instance = destination(switch(moved), mark(BEGIN, moved, 10), passed(moved, 0, 2), passed(moved, 1, 2))
    instance.apply([data(even, 11, "y", epoch=1), data(odd, 12, "y", epoch=1)])
    assert told(instance.apply([shipped(moved, 1, 2)])) == [(odd, "y")]
    assert told(instance.apply([parcel(moved, {even: key_state(10, "x")})])) == [(even, "x y")]


def test_after_cutover_from_every_router_the_keys_are_here_for_good() -> None:
    both = switching("k", "j", routers="rs")
    instance = destination(
        switch(both),
        mark(BEGIN, both, 10, "r"),
        mark(BEGIN, both, 10, "s"),
        parcel(both, {"k": key_state(10, "x", timers=[50])}),
        passed(both),
        shipped(both),
    )
    assert instance.apply([mark(CUTOVER, both, 11, "s")]) == Emissions()
    out = instance.apply([mark(CUTOVER, both, 11, "r"), data("k", 12, "y", epoch=1)])
    assert (told(out), out.notices) == ([("k", "x y")], [Opened("m1", "b", 0, 1, both.selection, 1)])
    for end in (reloaded(instance), instance):
        assert end.moves.open == []
        (result,) = end.apply([tick(13, at=60)]).results
        assert (result.key, result.epoch) == ("k", 1)


# ── What the destination asks for ────────────────────────────────────────────────────────────────────────────────────


def test_push_asks_for_nothing() -> None:
    instance = destination(switch(PUSH))
    assert asked(instance.apply([mark(BEGIN, PUSH, 10), data("k", 11, "y", epoch=1)])) is None


def test_nothing_is_asked_for_before_a_begin() -> None:
    instance = part("b")
    assert asked(instance.apply([switch(FETCH)])) is None
    assert asked(instance.apply([data("other", 1, "x")])) is None
    assert asked(instance.apply([mark(BEGIN, FETCH, 10)])) is not None


def test_needed_units_are_asked_for_in_the_order_of_their_records_and_once() -> None:
    moved = switching("k", "j", "i", order="demand", step=1)
    instance = destination(switch(moved))
    records = [data("j", 11, "y"), data("i", 12, "y"), data("j", 13, "y"), data("other", 14, "y")]
    question = asked(instance.apply([mark(BEGIN, moved, 10), *records]))
    assert question is not None
    assert question[0] == [unit_of("j", units_of(FETCH).split), unit_of("i", units_of(FETCH).split)]
    assert not set(question[0]) & set(question[1])
    assert asked(instance.apply([data("j", 15, "z")])) is None
    assert asked(reloaded(instance).apply([data("i", 15, "z")])) is None


def test_steps_follow_one_after_another() -> None:
    moved = switching(selection=selection_of(bins=[3, 5, 7, 9, 11]), order="demand", split=2, step=2)
    instance = destination(switch(moved))
    steps = []
    question = asked(instance.apply([mark(BEGIN, moved, 10)]))
    while question is not None:
        needed, step = question
        assert needed == []
        steps.append(step)
        *some, last = step
        assert asked(instance.apply([parcel(moved, {}, units=some)])) is None, "the step has not come as a whole"
        instance = reloaded(instance)
        question = asked(instance.apply([parcel(moved, {}, units=[last])]))
    assert steps == [[3, 3 + BINS, 5, 5 + BINS], [7, 7 + BINS, 9, 9 + BINS], [11, 11 + BINS]]


def test_a_step_leaves_out_what_has_been_asked_for() -> None:
    moved = switching(*PAIR, order="demand", split=1)
    instance = destination(switch(moved))
    assert asked(instance.apply([mark(BEGIN, moved, 10), data("k0", 11, "y")])) == ([bin_of("k0")], [])


def test_each_part_asks_for_its_own_bins() -> None:
    moved = switching(selection=selection_of(bins=range(6)), order="demand", split=1)
    steps = [asked(part("b", number, 2).apply([switch(moved), mark(BEGIN, moved, 10)])) for number in range(2)]
    assert steps == [([], [0, 2, 4]), ([], [1, 3, 5])]


def test_nothing_is_asked_for_when_everything_has_been_sent() -> None:
    instance = destination(switch(FETCH), passed(FETCH), shipped(FETCH))
    assert asked(instance.apply([mark(BEGIN, FETCH, 10), data("k", 11, "y", epoch=1)])) is None


def test_a_destination_hurries_until_everything_is_here() -> None:
    instance = destination()
    assert not instance.is_urgent
    instance.apply([switch(PUSH), mark(BEGIN, PUSH, 10), data("k", 11, "y", epoch=1)])
    assert reloaded(instance).is_urgent
    instance.apply([parcel(PUSH, {"k": key_state(10, "x")}), passed(PUSH), shipped(PUSH)])
    assert not instance.is_urgent
