"""Keys that come to a part: waiting, following in silence, speaking; and all of it undone."""

from __future__ import annotations

import pytest

from tests.unit.records import data, forget, key_state, mark, move, notices, parcel, part, reloaded, shipped, tick, told
from whimbrel.core.instance import Instance
from whimbrel.core.keys import bin_of, selection_of
from whimbrel.core.record import Aborted, Emissions, KeyState, Kind, Move, Opened, Ready, Record, Rejected

BEGIN, CUTOVER, ABORT = Kind.BEGIN, Kind.CUTOVER, Kind.ABORT
LIVE = move("k", "j")
HOLD = move("k", "j", hold=True)


def destination(*records: Record) -> Instance:
    """A part of the destination that has applied this."""
    instance = part("b")
    instance.apply(records)
    return instance


def seen(instance: Instance, key: str) -> list[str]:
    """What a key's state has seen."""
    entry = instance.table.entries[key]
    if entry.state is None:
        assert entry.saved is not None
        return list(instance.table.decode(entry.saved).seen)
    return list(entry.state.seen)


# ── Waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_records_wait_until_their_state_is_here() -> None:
    instance = part("b")
    assert instance.apply([mark(BEGIN, LIVE, 10), data("k", 11, "y"), data("k", 12, "z")]) == Emissions()
    assert [record.body for record in instance.table.waiting["k"]] == ["y", "z"]
    assert instance.apply([parcel(LIVE, {"k": key_state(10, "x")})]) == Emissions(), "all of it in silence"
    assert seen(instance, "k") == ["x", "y", "z"]
    assert instance.table.waiting == {}


def test_what_the_luggage_reaches_is_not_applied_again() -> None:
    instance = destination(mark(BEGIN, LIVE, 10), data("k", 11, "y"), data("k", 12, "z"))
    instance.apply([parcel(LIVE, {"k": key_state(11, "x", "y")})])
    assert seen(instance, "k") == ["x", "y", "z"]


def test_a_parcel_may_be_here_before_begin() -> None:
    """The control lane is faster than the data lane."""
    instance = destination(parcel(LIVE, {"k": key_state(11, "x")}), shipped(LIVE))
    out = instance.apply([mark(BEGIN, LIVE, 10), data("k", 11, "in the key state"), data("k", 12, "y")])
    assert (told(out), notices(out)) == ([], ["Ready"])
    assert seen(instance, "k") == ["x", "y"]


def test_a_parcel_that_nobody_could_read_is_missed_in_the_end() -> None:
    """It did not say whose it was; here another move was called off in its place (found by fluid/1534)."""
    sent = {bin_of("k"): 1, bin_of("j"): 1}
    instance = destination(mark(BEGIN, LIVE, 10), data("j", 11, "y"), parcel(LIVE, {"k": key_state(10, "x")}))
    out = instance.apply([shipped(LIVE, parcels=sent)])
    (rejected,) = out.notices
    assert isinstance(rejected, Rejected)
    assert (rejected.move, rejected.reason) == (LIVE.id, "b lacks parcels: it has 1 of 2")
    assert "j" not in instance.table.entries, "it does not start from nothing"
    assert notices(reloaded(instance).apply([parcel(LIVE, {"j": key_state(10, "x")})])) == [], "it is called off"


def test_parcels_for_another_part_are_not_missed() -> None:
    bin = bin_of("k")
    instance = part("b", bin % 2, parts=2)
    instance.apply([mark(BEGIN, LIVE, 10), parcel(LIVE, {"k": key_state(10, "x")})])
    assert notices(instance.apply([shipped(LIVE, parcels={bin: 1, bin + 1: 3})])) == ["Ready"]


def test_other_keys_are_served_as_ever() -> None:
    instance = destination(data("other", 1, "x"))
    out = instance.apply([mark(BEGIN, LIVE, 10), data("other", 11, "y"), data("k", 12, "z")])
    assert told(out) == [("other", "x y")]


def test_a_parcel_that_comes_again_changes_nothing() -> None:
    instance = destination(mark(BEGIN, LIVE, 10), parcel(LIVE, {"k": key_state(10, "x")}), data("k", 11, "y"))
    instance.apply([parcel(LIVE, {"k": key_state(10, "x")})])
    assert seen(instance, "k") == ["x", "y"]


def test_pieces_are_joined() -> None:
    whole = key_state(10, "x" * 30)
    pieces = [
        parcel(LIVE, {"k": KeyState(10, "r", [50], whole.state[n * 9 : n * 9 + 9])}, n, 5) for n in range(5)
    ]  # fmt: skip
    instance = destination(mark(BEGIN, LIVE, 10), data("k", 11, "y"), *pieces[:2])
    instance = reloaded(instance)
    instance.apply(pieces[1:4])
    assert "k" not in instance.table.entries
    instance.apply(pieces[4:])
    assert seen(instance, "k") == ["x" * 30, "y"]
    assert instance.table.entries["k"].timers == [50]


# ── Ready ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ready_when_every_part_of_the_source_has_sent_everything_and_every_router_has_begun() -> None:
    both = move("k", routers="rs")
    instance = part("b")
    steps = [
        shipped(both, 0, 2),
        mark(BEGIN, both, 10, "r"),
        mark(BEGIN, both, 10, "s"),
        parcel(both, {"k": key_state(10, "x")}),
        shipped(both, 1, 2),
    ]
    heard = [instance.apply([step]).notices for step in steps]
    assert heard == [[], [], [], [], [Ready("m1", "b", 0, 1)]]


def test_not_ready_before_the_last_router_has_begun_even_if_everything_is_here() -> None:
    both = move("k", routers="rs")
    instance = destination(parcel(both, {"k": key_state(10, "x")}), shipped(both))
    assert instance.apply([mark(BEGIN, both, 10, "s")]).notices == []
    assert notices(instance.apply([mark(BEGIN, both, 10, "r")])) == ["Ready"]


def test_ready_is_said_once() -> None:
    instance = destination(mark(BEGIN, LIVE, 10), shipped(LIVE))
    assert instance.apply([mark(BEGIN, LIVE, 10), shipped(LIVE)]).notices == []


def test_keys_that_nobody_had_start_from_nothing() -> None:
    """Between BEGIN and READY they could not be told from keys whose state is under way."""
    bins = move(selection=selection_of(bins=[179]))
    instance = destination(mark(BEGIN, bins, 10), data("k0", 11, "x"))
    assert notices(instance.apply([shipped(bins)])) == ["Ready"]
    assert seen(instance, "k0") == ["x"]
    instance.apply([data("k673", 12, "new", at=1)])
    assert seen(instance, "k673") == ["new"], "once ready, nobody waits"
    out = instance.apply([mark(CUTOVER, bins, 13), data("k0", 14, "y", epoch=1), data("k949", 15, "z", epoch=1)])
    assert told(out) == [("k0", "x y"), ("k949", "z")]


# ── Following in silence ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def shadow() -> Instance:
    """A part that is ready: k has seen x, and a timer of it is set for 50."""
    timed = key_state(10, "x", timers=[50])
    return destination(mark(BEGIN, LIVE, 10), parcel(LIVE, {"k": timed}), shipped(LIVE))


def test_a_shadow_applies_and_says_nothing(shadow: Instance) -> None:
    assert shadow.apply([data("k", 11, "y"), data("k", 12, "emit 3")]) == Emissions()
    assert seen(shadow, "k") == ["x", "y", "emit 3"]


def test_a_shadow_parks_nothing_and_undoes_all_the_same(shadow: Instance) -> None:
    """The source parks the record; a dead letter must not be there twice."""
    assert shadow.apply([data("k", 11, "raise"), data("k", 12, "y")]) == Emissions()
    assert seen(shadow, "k") == ["x", "y"]


def test_a_shadows_timers_fire_in_silence(shadow: Instance) -> None:
    assert shadow.apply([tick(11, at=60)]) == Emissions()
    assert seen(shadow, "k") == ["x", "@50"]


def test_ticks_are_caught_up_with_in_their_place() -> None:
    """y came before the tick, z after it: so it must be once the state is here."""
    instance = destination(
        mark(BEGIN, LIVE, 10), tick(11, at=55), data("k", 12, "y"), tick(13, at=60), data("k", 14, "z"), tick(15, at=80)
    )
    instance.apply([parcel(LIVE, {"k": key_state(11, "x", timers=[58, 70])})])
    assert seen(instance, "k") == ["x", "y", "@58", "z", "@70"]


def test_a_tick_that_the_luggage_has_behind_it_is_not_applied_again() -> None:
    instance = destination(mark(BEGIN, LIVE, 10), tick(11, at=60))
    instance.apply([parcel(LIVE, {"k": key_state(11, "x", timers=[58])})])
    assert seen(instance, "k") == ["x"]
    instance.apply([tick(12, at=60)])
    assert seen(instance, "k") == ["x", "@58"]


def test_ticks_of_another_router_do_not_concern_a_key() -> None:
    both = move("k", routers="rs")
    instance = destination(mark(BEGIN, both, 10, "r"), mark(BEGIN, both, 10, "s"), tick(99, at=60, src="s"))
    instance.apply([parcel(both, {"k": key_state(10, "x", timers=[58])})])
    assert seen(instance, "k") == ["x"]


def test_a_new_key_catches_up_with_ticks_too() -> None:
    instance = destination(mark(BEGIN, LIVE, 10), data("k", 11, "timer 50"), tick(12, at=60), data("k", 13, "y"))
    instance.apply([shipped(LIVE)])
    assert seen(instance, "k") == ["timer 50", "@50", "y"]


def test_ticks_and_waiting_records_survive_a_restart() -> None:
    instance = destination(mark(BEGIN, LIVE, 10), data("k", 12, "y"), tick(13, at=60), data("k", 14, "z"))
    instance = reloaded(instance)
    instance.apply([parcel(LIVE, {"k": key_state(10, "x", timers=[50])})])
    assert seen(instance, "k") == ["x", "y", "@50", "z"]


# ── Speaking ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_cutover_the_destination_speaks_in_the_new_epoch(shadow: Instance) -> None:
    out = shadow.apply([data("k", 11, "y"), mark(CUTOVER, LIVE, 12), data("k", 13, "z", epoch=1), tick(14, at=60)])
    assert told(out) == [("k", "x y z"), ("k", "x y z @50")]
    assert [result.epoch for result in out.results] == [1, 1], "a timer's result too"
    assert out.notices == [Opened("m1", "b", 0, 1, LIVE.selection, 1)]
    assert shadow.moves.open == []


def test_a_timer_has_the_new_epoch_for_ever(shadow: Instance) -> None:
    shadow.apply([mark(CUTOVER, LIVE, 12)])
    for instance in (reloaded(shadow), shadow):
        (result,) = instance.apply([tick(14, at=60)]).results
        assert result.epoch == 1


def test_each_router_lets_its_own_keys_speak() -> None:
    both = move("k", "j", routers="rs")
    instance = destination(
        mark(BEGIN, both, 10, "r"),
        mark(BEGIN, both, 10, "s"),
        parcel(both, {"k": key_state(10, "x", src="r", timers=[50])}),
        parcel(both, {"j": key_state(10, "x", src="s", timers=[50])}),
        shipped(both),
    )
    out = instance.apply([mark(CUTOVER, both, 11, "r"), data("k", 12, "y", "r", epoch=1), data("j", 12, "y", "s")])
    assert (told(out), out.notices) == ([("k", "x y")], [])
    out = instance.apply([tick(13, at=60, src="r"), tick(13, at=60, src="s")])
    assert [(result.key, result.epoch) for result in out.results] == [("k", 1)]
    out = instance.apply([mark(CUTOVER, both, 14, "s"), data("j", 15, "z", "s", epoch=1)])
    assert told(out) == [("j", "x y @50 z")]
    assert notices(out) == ["Opened"]


def test_held_records_come_behind_cutover_and_are_spoken_for() -> None:
    instance = destination(mark(BEGIN, HOLD, 10), parcel(HOLD, {"k": key_state(10, "x", timers=[50])}), shipped(HOLD))
    assert instance.apply([tick(12, at=60)]) == Emissions(), "the key's time stands still, here too"
    out = instance.apply(
        [
            mark(CUTOVER, HOLD, 20),
            data("k", 11, "y", epoch=1),
            tick(12, at=60, held_for=HOLD),
            data("k", 13, "z", epoch=1),
        ]
    )
    assert told(out) == [("k", "x y"), ("k", "x y @50"), ("k", "x y @50 z")]
    assert {result.epoch for result in out.results} == {1}


def test_a_tick_held_at_the_luggages_reach_is_not_lost() -> None:
    """The key state of a held key reaches to BEGIN, and no further."""
    instance = destination(mark(BEGIN, HOLD, 10), tick(11, at=60))
    instance.apply([parcel(HOLD, {"k": key_state(10, "x", timers=[50])}), shipped(HOLD)])
    assert seen(instance, "k") == ["x"]
    out = instance.apply([mark(CUTOVER, HOLD, 12), tick(11, at=60, held_for=HOLD)])
    assert told(out) == [("k", "x @50")]


# ── Undone ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_abort_leaves_nothing_behind() -> None:
    instance = destination(
        data("other", 1, "x"),
        mark(BEGIN, LIVE, 10),
        parcel(LIVE, {"k": key_state(10, "x", timers=[50])}),
        data("j", 11, "y"),
    )
    assert instance.apply([mark(ABORT, LIVE, 12)]).notices == [Aborted("m1", "b", 0, 1)]
    for left in (instance, reloaded(instance)):
        assert (list(left.table.entries), left.table.waiting, left.moves.open) == (["other"], {}, [])
        assert told(left.apply([data("other", 13, "y"), tick(14, at=60)])) == [("other", "x y")]


def test_the_copy_is_kept_until_every_router_is_out() -> None:
    both = move("k", routers="rs")
    instance = destination(
        mark(BEGIN, both, 10, "r"), mark(BEGIN, both, 10, "s"), parcel(both, {"k": key_state(10, "x")})
    )
    assert instance.apply([mark(ABORT, both, 11, "s"), data("k", 11, "y")]) == Emissions()
    assert seen(instance, "k") == ["x", "y"]
    assert notices(instance.apply([mark(ABORT, both, 12, "r")])) == ["Aborted"]
    assert instance.table.entries == {}


def test_what_arrives_after_an_abort_is_ignored_until_nothing_can_arrive_any_more() -> None:
    """Seeds live/1 and pause/45: the source may ship once more before the abort reaches it."""
    instance = destination(mark(BEGIN, LIVE, 10), mark(ABORT, LIVE, 11))
    for late in (instance, reloaded(instance)):
        assert late.apply([parcel(LIVE, {"k": key_state(10, "x")}), shipped(LIVE)]) == Emissions()
        assert (late.table.entries, late.moves.open) == ({}, [])
        late.apply([forget(LIVE)])
        assert (late.moves.aborted, reloaded(late).moves.aborted) == (set(), set())


def test_pieces_of_an_aborted_move_do_not_stay() -> None:
    instance = destination(mark(BEGIN, LIVE, 10), parcel(LIVE, {"k": key_state(10, "x")}, 0, 2), mark(ABORT, LIVE, 11))
    instance.apply([parcel(LIVE, {"k": key_state(10, "x")}, 1, 2)])
    assert (instance.table.entries, instance.moves.open) == ({}, [])


def test_parcels_before_an_abort_without_begin_are_dropped_with_it() -> None:
    instance = destination(parcel(LIVE, {"k": key_state(10, "x")}), mark(ABORT, LIVE, 11))
    assert (instance.table.entries, instance.moves.open) == ({}, [])


def test_the_same_keys_may_come_again_by_another_move() -> None:
    again = move("k", "j", id="m2")
    instance = destination(
        mark(BEGIN, LIVE, 10), parcel(LIVE, {"k": key_state(10, "x")}), mark(ABORT, LIVE, 12), forget(LIVE)
    )
    instance.apply([mark(BEGIN, again, 20), parcel(again, {"k": key_state(20, "x", "y")}), shipped(again)])
    out = instance.apply([mark(CUTOVER, again, 21), data("k", 22, "z", epoch=1)])
    assert told(out) == [("k", "x y z")]


# ── The whole way ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("moved", [LIVE, HOLD], ids=["live", "hold"])
def test_a_restart_after_every_single_record_changes_nothing(moved: Move) -> None:
    between = (
        [] if moved.hold else [data("k", 11, "y"), tick(12, at=30), data("new", 13, "n"), data("j", 14, "timer 70")]
    )
    behind = [data("k", 11, "y", epoch=1), tick(12, at=30, held_for=moved)] if moved.hold else []
    records = [
        data("other", 1, "timer 60"),
        parcel(moved, {"j": key_state(10, "a", timers=[25])}),
        mark(BEGIN, moved, 10),
        *between,
        parcel(moved, {"k": key_state(10, "x", timers=[20, 90])}),
        shipped(moved),
        tick(15, at=50),
        mark(CUTOVER, moved, 16),
        *behind,
        data("k", 17, "z", epoch=1),
        tick(18, at=99),
    ]
    steady, restarted = part("b"), part("b")
    for record in records:
        assert steady.apply([record]) == restarted.apply([record])
        restarted = reloaded(restarted)
    assert {key: seen(steady, key) for key in steady.table.entries} == {
        key: seen(restarted, key) for key in restarted.table.entries
    }
    assert seen(steady, "k")[-2:] == ["z", "@90"]
