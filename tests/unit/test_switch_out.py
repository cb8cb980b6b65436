"""Keys that leave by a switch: when they stop, in which order they leave, and with what."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.records import (
    data,
    delivered,
    fetch,
    hint,
    kinds,
    mark,
    notices,
    parcels,
    part,
    reloaded,
    switch,
    switching,
    tick,
    told,
)
from whimbrel.core import wire
from whimbrel.core.delta import Delta, unpacked
from whimbrel.core.instance import Instance
from whimbrel.core.keys import BINS, EVERY_BIN, bin_of, part_of, unit_of
from whimbrel.core.moves import Moves
from whimbrel.core.record import Closed, Emissions, KeyState, Kind, Left, Passed, Shipped, Tick
from whimbrel.core.schedules import units_of

BEGIN, CUTOVER = Kind.BEGIN, Kind.CUTOVER
PUSH = switching("k", "j")
FETCH = switching("k", "j", order="demand")
PAIR = ("k0", "k673")
"""Two keys of one bin."""


def source(*keys: str) -> Instance:
    """A part in which each of these keys, the last one last, has seen `x`: seqs 1, 2, ..."""
    instance = part()
    instance.apply([data(key, seq, "x") for seq, key in enumerate(keys or ("k", "j"), 1)])
    return instance


def packed(out: Emissions) -> dict[str, KeyState]:
    return {key: load for parcel in parcels(out) for key, load in parcel.keys.items()}


def backlog(out: Emissions) -> list[tuple[str, list[str]]]:
    """Which events were sent on, by key."""
    return [
        (key, [msgspec.msgpack.decode(record.body) for record in records])
        for parcel in parcels(out)
        for key, records in parcel.backlog.items()
    ]


def gone(out: Emissions) -> list[int]:
    """Units of which nothing is left."""
    return [unit for parcel in parcels(out) for unit in parcel.units]


def rest(instance: Instance, out: Emissions) -> list[str]:
    """The keys that leave with a batch and, one wake-up after another, behind it."""
    left = list(packed(out))
    while Kind.WAKE in kinds(out):
        wake = out.messages[-1]
        assert (wake.kind, wake.to) == (Kind.WAKE, "a")
        out = instance.apply([delivered(wake)])
        left += packed(out)
    return left


# ── The source stops ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_stop_with_the_batch_of_switch_and_that_is_said_once() -> None:
    instance = source()
    out = instance.apply([switch(PUSH), data("k", 11, "y"), data("other", 12, "x")])
    assert told(out) == [("k", "x y"), ("other", "x")]
    assert out.notices == [Closed("m1", "a", 0, 1, PUSH.selection, 1)]
    out = instance.apply([data("k", 13, "z"), data("other", 14, "y"), mark(BEGIN, PUSH, 15)])
    assert (told(out), out.notices) == ([("other", "x y")], [])


def test_a_begin_without_switch_before_it_stops_the_keys_too() -> None:
    out = source().apply([data("k", 11, "y"), mark(BEGIN, PUSH, 12)])
    assert (told(out), notices(out)) == ([("k", "x y")], ["Closed"])
    assert kinds(out)[-2:] == [Kind.PASSED, Kind.SHIPPED]


def test_the_state_that_leaves_has_the_last_batch() -> None:
    out = source().apply([switch(PUSH), data("k", 11, "y")])
    assert msgspec.msgpack.decode(packed(out)["k"].state) == {"seen": ["x", "y"]}
    assert {message.to for message in out.messages} == {"b"}


def test_what_comes_before_begin_is_sent_on_with_its_key_and_the_ticks_among_it() -> None:
    moved = switching("k", "j", budget=1)
    instance = source()
    assert list(packed(instance.apply([switch(moved)]))) == ["j"]
    out = instance.apply([data("k", 11, "y"), tick(12, at=5), data("j", 13, "late"), data("k", 14, "z")])
    assert told(out) == []
    assert list(packed(out)) == ["k"]
    assert backlog(out) == [("k", ["y", "z"]), ("j", ["late"])], "j has left: what came for it goes after it"
    assert [parcel.ticks for parcel in parcels(out)] == [[Tick(12, "r", 5, 1012)]] * 2
    assert {record.epoch for parcel in parcels(out) for held in parcel.backlog.values() for record in held} == {1}
    assert instance.table.waiting == {}
    out = instance.apply([mark(BEGIN, moved, 15)])
    assert kinds(out) == [Kind.PASSED, Kind.SHIPPED]
    assert wire.unpack(out.messages[0].body, Passed) == Passed("m1", 0, 1, [Tick(12, "r", 5, 1012)])
    assert wire.unpack(out.messages[1].body, Shipped) == Shipped("m1", 0, 1)


def test_a_key_that_the_source_never_had_is_not_made_there() -> None:
    instance = source("j")
    instance.apply([switch(PUSH)])
    out = instance.apply([data("k", 11, "new"), mark(BEGIN, PUSH, 12)])
    assert (packed(out), backlog(out)) == ({}, [("k", ["new"])])
    assert kinds(out) == [Kind.PARCEL, Kind.PASSED, Kind.SHIPPED]


@pytest.mark.parametrize("budget", [1, 8 << 20])
def test_a_shipped_key_is_forgotten_in_the_delta_of_the_batch_that_ships_it(budget: int) -> None:
    instance = source()
    instance.deltas()
    out = instance.apply([switch(switching("k", "j", budget=budget)), data("k", 11, "y")])
    shipped = list(packed(out))
    assert shipped == (["k"] if budget == 1 else ["k", "j"])
    delta = wire.unpack(instance.deltas()[0], Delta)
    assert {key for key, saved in delta.entries.items() if saved is None} == set(shipped)
    assert set(reloaded(instance).table.entries) == {"k", "j"} - set(shipped)


def test_only_the_selected_keys_are_touched() -> None:
    instance = source("k", "j", "other")
    instance.apply([switch(PUSH), mark(BEGIN, PUSH, 10)])
    assert told(instance.apply([data("other", 11, "y")])) == [("other", "x y")]


# ── How far a state reaches ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_state_reaches_as_far_as_the_part_has_read_before_begin() -> None:
    """Past the key's own last record: a tick in between must not be applied again."""
    out = source().apply([switch(PUSH), data("other", 11, "x"), tick(12, at=5)])
    assert {key: load.seq for key, load in packed(out).items()} == {"k": 12, "j": 12}


def test_a_state_never_reaches_beyond_begin() -> None:
    """Whatever stands behind BEGIN in the same batch: the keys' own records of that time are at the destination."""
    behind = [hint(PUSH, "k", seq=20), data("other", 30, "x"), tick(31, at=5)]
    out = source().apply([switch(PUSH), mark(BEGIN, PUSH, 12), *behind])
    assert {key: load.seq for key, load in packed(out).items()} == {"k": 12, "j": 12}


def test_a_state_that_leaves_late_reaches_no_further() -> None:
    moved = switching("k", "j", budget=1)
    instance = source()
    instance.apply([switch(moved), data("other", 8, "x")])
    out = instance.apply([data("other", 9, "x"), mark(BEGIN, moved, 12), data("other", 30, "x")])
    assert {key: load.seq for key, load in packed(out).items()} == {"k": 8}


def test_each_key_reaches_as_far_as_its_own_router() -> None:
    both = switching("k", "j", routers="rs")
    instance = part()
    instance.apply([data("k", 5, "x", "r"), data("j", 900, "x", "s")])
    out = instance.apply([switch(both), data("other", 7, "x", "r"), mark(BEGIN, both, 901, "s"), tick(950, 5, "s")])
    assert {key: (load.src, load.seq) for key, load in packed(out).items()} == {"k": ("r", 7), "j": ("s", 901)}


def test_a_tick_reaches_the_keys_at_the_source_before_begin_and_not_after() -> None:
    instance = part()
    instance.apply([data("k", 1, "timer 50"), data("j", 2, "timer 70"), data("other", 3, "timer 70")])
    out = instance.apply([switch(PUSH), tick(4, at=60), mark(BEGIN, PUSH, 5), tick(6, at=80)])
    assert told(out) == [("k", "timer 50 @50"), ("other", "timer 70 @70")]
    assert {key: load.timers for key, load in packed(out).items()} == {"k": [], "j": [70]}
    assert [parcel.ticks for parcel in parcels(out)] == [[], []], "the destination has the second one itself"


def test_a_tick_after_the_stop_does_not_reach_a_key_that_is_still_here() -> None:
    moved = switching("k", "j", budget=1)
    instance = part()
    instance.apply([data("k", 1, "timer 50"), data("j", 2, "x")])
    instance.apply([switch(moved)])
    out = instance.apply([tick(4, at=60)])
    assert told(out) == []
    assert packed(out)["k"].timers == [50]
    assert parcels(out)[0].ticks == [Tick(4, "r", 60, 1004)]


# ── The order in which keys leave ────────────────────────────────────────────────────────────────────────────────────

ENTRY = 1 << 20
"""Offsets that differ by this are places in two log entries."""


def test_push_takes_the_backlog_by_arrival_then_hints_then_what_was_seen_last() -> None:
    keys = ("old", "hinted", "second", "heavy", "light", "recent", "last")
    moved = switching(*keys, budget=1)
    instance = source(*keys)
    assert list(packed(instance.apply([switch(moved)]))) == ["last"]
    together = [data(key, 10 + n, "y", offset=ENTRY + n) for n, key in enumerate(("light", "heavy", "heavy"))]
    assert list(packed(instance.apply([*together, data("second", 20, "y", offset=2 * ENTRY)]))) == ["heavy"]
    out = instance.apply([mark(BEGIN, moved, 30), hint(moved, "hinted", "recent", seq=31)])
    assert rest(instance, out) == ["light", "second", "hinted", "recent", "old"]


def test_push_takes_the_backlog_before_hints_of_the_same_batch() -> None:
    keys = ("old", "hinted", "waiting", "last")
    moved = switching(*keys, budget=1)
    instance = source(*keys)
    instance.apply([switch(moved)])
    out = instance.apply([data("waiting", 10, "y"), mark(BEGIN, moved, 11), hint(moved, "hinted", seq=12)])
    assert rest(instance, out) == ["waiting", "hinted", "old"]


def test_in_the_order_of_names_neither_backlog_nor_recency_counts() -> None:
    keys = ("c", "a", "d", "b")
    moved = switching(*keys, order="key", budget=1)
    instance = source(*keys)
    assert list(packed(instance.apply([switch(moved)]))) == ["a"]
    assert rest(instance, instance.apply([data("d", 10, "y"), mark(BEGIN, moved, 11)])) == ["b", "c", "d"]


def test_a_budget_never_ships_a_key_twice_and_ends_with_shipped() -> None:
    """A key may be wanted for several reasons at once."""
    keys = tuple(f"key-{n}" for n in range(6))
    moved = switching(*keys, budget=1)
    instance = source(*keys)
    left = list(packed(instance.apply([switch(moved), mark(BEGIN, moved, 10), hint(moved, *keys, *keys, seq=11)])))
    wake = delivered(instance.message("a", Kind.WAKE))
    for _ in range(5):
        out = instance.apply([hint(moved, *keys, seq=12), wake])
        left += packed(out)
    assert sorted(left) == sorted(keys)
    assert Kind.SHIPPED in kinds(out)
    assert instance.apply([wake]).messages == []


def test_what_waited_for_a_key_in_pieces_goes_with_the_last_piece() -> None:
    moved = switching("k", "j", budget=1, chunk=10)
    instance = part()
    instance.apply([data("k", 1, "x" * 25), data("j", 2, "")])
    instance.apply([switch(moved)])
    pieces = parcels(instance.apply([data("k", 11, "y")]))
    for _ in range(3):  # a piece a batch, even if the source is rebuilt between them
        instance = reloaded(instance)
        assert "k" in instance.table.entries, "it is here until the last piece has left"
        pieces += parcels(instance.apply([delivered(instance.message("a", Kind.WAKE))]))
    assert "k" not in instance.table.entries
    assert [(parcel.piece, parcel.pieces) for parcel in pieces] == [(n, 4) for n in range(4)]
    assert [list(parcel.backlog) for parcel in pieces] == [[], [], [], ["k"]]
    whole = b"".join(parcel.keys["k"].state for parcel in pieces)
    assert msgspec.msgpack.decode(whole) == {"seen": ["x" * 25]}


def test_a_hint_at_a_key_that_is_not_here_is_answered_so() -> None:
    instance = source("j")
    out = instance.apply([switch(PUSH), mark(BEGIN, PUSH, 10), hint(PUSH, "k", "j", seq=11)])
    assert [parcel.absent for parcel in parcels(out)] == [[], ["k"]]
    assert out.messages[1].bin == EVERY_BIN
    assert kinds(out)[-2:] == [Kind.PASSED, Kind.SHIPPED]
    assert instance.apply([hint(PUSH, "k", seq=12)]).messages == [], "everything has been sent: that says it"


def test_a_repeated_batch_ships_the_same() -> None:
    instance = source("k", "j", "i")
    moved = switching("k", "j", "i", budget=1, chunk=4)
    instance.apply([switch(moved)])
    batch = [data("k", 11, "y"), mark(BEGIN, moved, 12), hint(moved, "i", seq=13)]
    assert reloaded(instance).apply(batch) == reloaded(instance).apply(batch)


# ── What the destination asks for ────────────────────────────────────────────────────────────────────────────────────


def test_fetch_sends_nothing_unasked_but_keys_with_a_backlog() -> None:
    instance = source()
    assert instance.apply([switch(FETCH)]).messages == []
    out = instance.apply([data("k", 11, "y"), mark(BEGIN, FETCH, 12)])
    assert (list(packed(out)), kinds(out)) == (["k"], [Kind.PARCEL, Kind.PASSED])
    out = instance.apply([fetch(FETCH, [unit_of("j", units_of(FETCH).split)])])
    assert (list(packed(out)), gone(out)) == (["j"], [unit_of("j", units_of(FETCH).split)])
    assert kinds(out) == [Kind.PARCEL, Kind.PARCEL, Kind.SHIPPED]


def test_fetch_sends_needed_units_before_steps_and_steps_in_their_order() -> None:
    keys = ("a", "b", "c", "d", "e")
    moved = switching(*keys, order="demand", budget=1)
    units = {key: unit_of(key, units_of(FETCH).split) for key in keys}
    instance = source(*keys)
    instance.apply([switch(moved), mark(BEGIN, moved, 10)])
    out = instance.apply([fetch(moved, [], [units["d"], units["a"]]), fetch(moved, [], [units["c"], units["b"]])])
    assert list(packed(out)) == ["d"]
    out = instance.apply([fetch(moved, [units["e"]])])
    assert rest(instance, out) == ["e", "a", "c", "b"]


@pytest.mark.parametrize("as_step", [False, True])
def test_a_unit_is_told_gone_only_when_nothing_of_it_is_left(as_step: bool) -> None:
    moved = switching(*PAIR, order="demand", split=1, budget=1)
    instance = source(*PAIR)
    instance.apply([switch(moved), mark(BEGIN, moved, 10)])
    bin = bin_of("k0")
    first = instance.apply([fetch(moved, [], [bin]) if as_step else fetch(moved, [bin])])
    last = instance.apply([delivered(first.messages[-1])])
    assert sorted([*packed(first), *packed(last)]) == list(PAIR)
    assert (gone(first), gone(last)) == ([], [bin])


def test_an_empty_unit_is_told_gone_at_once() -> None:
    instance = source()
    empty = next(
        unit
        for unit in range(BINS)
        if unit not in (unit_of("k", units_of(FETCH).split), unit_of("j", units_of(FETCH).split))
    )
    out = instance.apply([switch(FETCH), mark(BEGIN, FETCH, 10), fetch(FETCH, [], [empty])])
    assert (packed(out), gone(out)) == ({}, [empty])


@pytest.mark.parametrize("as_step", [False, True])
def test_a_key_that_is_made_in_the_batch_of_the_question_is_not_forgotten(as_step: bool) -> None:
    """The question comes first, in the control lane, and the key behind it."""
    unit = unit_of("k", units_of(FETCH).split)
    question = fetch(FETCH, [], [unit]) if as_step else fetch(FETCH, [unit])
    out = part().apply([switch(FETCH), question, data("k", 11, "x"), mark(BEGIN, FETCH, 12)])
    assert [(list(parcel.keys), parcel.units) for parcel in parcels(out)] == [(["k"], []), ([], [unit])]


def test_a_question_that_comes_when_everything_has_left_is_not_answered() -> None:
    instance = source("other")
    assert Kind.SHIPPED in kinds(instance.apply([switch(FETCH), mark(BEGIN, FETCH, 10)]))
    assert instance.apply([fetch(FETCH, [unit_of("k", units_of(FETCH).split)])]) == Emissions()
    instance.apply([mark(CUTOVER, FETCH, 11)])
    assert instance.apply([fetch(FETCH, [unit_of("k", units_of(FETCH).split)])]) == Emissions()


def test_two_switches_at_once_do_not_mix() -> None:
    other = switching("i", id="m2", destination="c", order="demand")
    instance = source("k", "j", "i")
    out = instance.apply([switch(PUSH), switch(other)])
    assert (sorted(packed(out)), {message.to for message in out.messages}) == (["j", "k"], {"b"})
    out = instance.apply([data("k", 11, "y"), data("i", 12, "y"), mark(BEGIN, PUSH, 13), mark(BEGIN, other, 14)])
    sent = {parcel.move: (list(parcel.keys), list(parcel.backlog)) for parcel in parcels(out)}
    assert sent == {"m1": ([], ["k"]), "m2": (["i"], ["i"])}
    assert {(message.to, message.kind) for message in out.messages} == {
        (to, kind) for to in "bc" for kind in (Kind.PARCEL, Kind.PASSED, Kind.SHIPPED)
    }


# ── Several routers, several parts of the source ─────────────────────────────────────────────────────────────────────


def test_a_part_has_passed_when_every_router_has_begun() -> None:
    both = switching("k", "j", routers="rs")
    instance = source()
    assert Kind.PASSED not in kinds(instance.apply([switch(both), mark(BEGIN, both, 10, "r")]))
    out = instance.apply([data("j", 7, "y", "s"), tick(8, 5, "s"), tick(11, 5, "r"), mark(BEGIN, both, 9, "s")])
    assert backlog(out) == [("j", ["y"])]
    assert kinds(out) == [Kind.PARCEL, Kind.PASSED, Kind.SHIPPED]
    assert wire.unpack(out.messages[1].body, Passed).ticks == [Tick(8, "s", 5, 1008)], "the other one came after BEGIN"


def test_each_part_answers_for_its_own_keys() -> None:
    keys = tuple(f"key-{n}" for n in range(8))
    mine = [[key for key in keys if part_of(bin_of(key), 2) == number] for number in range(2)]
    assert all(mine)
    moved, asking = switching(*keys), switching(*keys, order="demand")
    for number in range(2):
        instance = part(number=number, parts=2)
        out = instance.apply([switch(moved), mark(BEGIN, moved, 10), hint(moved, *keys, seq=11)])
        assert [key for parcel in parcels(out) for key in parcel.absent] == mine[number]
        assert wire.unpack(out.messages[-1].body, Shipped) == Shipped("m1", number, 2)
        instance = part(number=number, parts=2)
        instance.apply([data(key, seq, "x") for seq, key in enumerate(mine[number])])
        units = [unit_of(key, units_of(FETCH).split) for key in keys]
        out = instance.apply([switch(asking), fetch(asking, units[:4], units[4:])])
        assert sorted(packed(out)) == sorted(mine[number])
        assert sorted(gone(out)) == sorted(unit_of(key, units_of(FETCH).split) for key in mine[number])


# ── The end, at the source ───────────────────────────────────────────────────────────────────────────────────────────


def test_after_cutover_from_every_router_the_source_has_left() -> None:
    both = switching("k", "j", routers="rs")
    instance = source()
    sent = instance.apply([switch(both), mark(BEGIN, both, 10, "r"), mark(BEGIN, both, 10, "s")])
    assert instance.apply([mark(CUTOVER, both, 11, "r")]) == Emissions()
    (left,) = instance.apply([mark(CUTOVER, both, 11, "s")]).notices
    state = sum(len(load.state) for load in packed(sent).values())
    assert left == Left("m1", "a", 0, 1, 2, state, sum(len(message.body) for message in sent.messages))
    assert (instance.table.entries, instance.moves.open) == ({}, [])


def lasting(instance: Instance) -> list[tuple[Any, ...]]:
    """All that lasts of a part; its moves decoded, whose sets have no order."""
    return [
        (delta.entries, delta.positions, wire.decode(delta.moves, Moves)) for delta in unpacked(instance.snapshot())
    ]


def test_a_switch_that_comes_twice_changes_nothing() -> None:
    instance = source()
    instance.apply([switch(PUSH)])
    before = lasting(instance)
    assert instance.apply([switch(PUSH)]) == Emissions()
    assert lasting(reloaded(instance)) == before


def test_what_is_needed_does_not_keep_a_large_key_from_stopping_for_this_batch() -> None:
    """Once the room was used up by pieces, somebody who waited for another key made the source go round for ever."""
    moved = switching("k", "j", budget=1, chunk=10)
    instance = part()
    instance.apply([data("k", 1, "x" * 25), data("j", 2, "y" * 25)])
    out = instance.apply([switch(moved), mark(BEGIN, moved, 10), hint(moved, "k", "j", seq=11)])
    assert [(list(parcel.keys), parcel.piece) for parcel in parcels(out)] == [(["k"], 0)]
    wake = delivered(instance.message("a", Kind.WAKE))
    left = [parcel for _ in range(8) for parcel in parcels(instance.apply([wake]))]
    assert [(*parcel.keys, parcel.piece) for parcel in left] == [
        *(("k", n) for n in range(1, 4)),
        *(("j", n) for n in range(4)),
    ]


def test_a_source_hurries_as_long_as_it_may_be_asked() -> None:
    instance = source()
    instance.apply([switch(FETCH), mark(BEGIN, FETCH, 3)])
    assert reloaded(instance).is_urgent
    out = instance.apply([fetch(FETCH, [unit_of(key, units_of(FETCH).split) for key in ("k", "j")])])
    assert Kind.SHIPPED in kinds(out)
    assert not instance.is_urgent


def test_a_source_that_nobody_asks_does_not_hurry() -> None:
    instance = source()
    instance.apply([switch(PUSH), mark(BEGIN, PUSH, 3)])
    assert not instance.is_urgent
