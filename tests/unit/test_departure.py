"""Keys that leave a part: what it ships, when, and what it does until they are gone."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.records import data, delivered, kinds, mark, move, notices, parcels, part, reloaded, tick, told
from whimbrel.core import wire
from whimbrel.core.instance import Instance
from whimbrel.core.keys import EVERY_BIN, bin_of, selection_of
from whimbrel.core.record import Aborted, Closed, Emissions, KeyState, Kind, Left, Message, Move, Shipped

BEGIN, CUTOVER, ABORT = Kind.BEGIN, Kind.CUTOVER, Kind.ABORT
LIVE = move("k", "j")
HOLD = move("k", "j", hold=True)


def source(*events: str) -> Instance:
    """A part in which keys k and j have seen these events, up to seq 10 at most."""
    instance = part()
    instance.apply(
        [data(key, 2 * n + m, event) for n, event in enumerate(events or ["x"]) for m, key in enumerate("kj")]
    )
    return instance


def key_state(out: Emissions) -> dict[str, KeyState]:
    return {key: key_state for parcel in parcels(out) for key, key_state in parcel.keys.items()}


# ── Shipping ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("moved", [LIVE, HOLD], ids=["live", "hold"])
def test_begin_ships_the_selected_keys_and_then_says_so(moved: Move) -> None:
    out = source().apply([data("other", 11, "x"), mark(BEGIN, moved, 12)])
    assert kinds(out) == [Kind.PARCEL, Kind.PARCEL, Kind.SHIPPED]
    assert {message.to for message in out.messages} == {"b"}
    assert sorted(key_state(out)) == ["j", "k"]
    assert [message.bin for message in out.messages] == [bin_of("j"), bin_of("k"), EVERY_BIN]
    assert wire.unpack(out.messages[-1].body, Shipped) == Shipped(
        "m1", 0, 1, sorted([(bin_of("k"), 1), (bin_of("j"), 1)])
    )


def test_keys_of_one_bin_travel_in_one_parcel() -> None:
    instance = part()
    instance.apply([data("k0", 1, "x"), data("k673", 2, "x")])
    (parcel,) = parcels(instance.apply([mark(BEGIN, move("k0", "k673"), 3)]))
    assert (parcel.bin, sorted(parcel.keys)) == (179, ["k0", "k673"])


def test_a_part_that_has_none_of_the_keys_says_so_at_once() -> None:
    assert kinds(part().apply([mark(BEGIN, LIVE, 1)])) == [Kind.SHIPPED]


def test_luggage_is_everything_the_key_has() -> None:
    instance = part()
    instance.apply([data("k", 1, "timer 50"), data("k", 2, "x")])
    out = instance.apply([mark(BEGIN, move("k"), 3)])
    packed = key_state(out)["k"]
    assert (packed.src, packed.timers) == ("r", [50])
    assert msgspec.msgpack.decode(packed.state) == {"seen": ["timer 50", "x"]}


def test_live_luggage_reaches_as_far_as_the_part_has_read() -> None:
    """Also past the key's own last record: a tick in between must not be applied again."""
    out = source().apply([data("k", 11, "y"), mark(BEGIN, LIVE, 12), data("k", 13, "z"), tick(20, at=5)])
    assert {key: packed.seq for key, packed in key_state(out).items()} == {"k": 20, "j": 20}
    assert msgspec.msgpack.decode(key_state(out)["k"].state) == {"seen": ["x", "y", "z"]}


def test_luggage_of_held_keys_reaches_to_begin() -> None:
    """From there on their records and ticks are in the router's hands, whatever the part has read for other keys."""
    out = source().apply([mark(BEGIN, HOLD, 12), data("other", 13, "x"), tick(20, at=5)])
    assert {key: packed.seq for key, packed in key_state(out).items()} == {"k": 12, "j": 12}


def test_each_key_reaches_as_far_as_its_own_router() -> None:
    instance = part()
    instance.apply([data("k", 5, "x", "r"), data("j", 900, "x", "s")])
    both = move("k", "j", routers="rs")
    out = instance.apply([mark(BEGIN, both, 6, "r"), mark(BEGIN, both, 901, "s")])
    assert {key: (packed.src, packed.seq) for key, packed in key_state(out).items()} == {"k": ("r", 6), "j": ("s", 901)}


def test_nothing_is_shipped_before_every_router_has_begun() -> None:
    both = move("k", "j", routers="rs")
    instance = source()
    assert instance.apply([mark(BEGIN, both, 12, "r")]) == Emissions()
    out = instance.apply([data("k", 13, "y"), data("new", 14, "x"), mark(BEGIN, both, 1, "s")])
    assert msgspec.msgpack.decode(key_state(out)["k"].state) == {"seen": ["x", "y"]}


def test_begin_twice_ships_once() -> None:
    instance = source()
    instance.apply([mark(BEGIN, LIVE, 12)])
    assert instance.apply([mark(BEGIN, LIVE, 12)]).messages == []


def test_a_key_that_is_new_after_begin_is_not_shipped() -> None:
    """Both instances get its records from the first one on."""
    bins = move(selection=selection_of(bins=[179]))
    instance = part()
    out = instance.apply([data("k0", 1, "x"), mark(BEGIN, bins, 2), data("k673", 3, "x")])
    assert sorted(key_state(out)) == ["k0"]
    assert told(out) == [("k0", "x"), ("k673", "x")]


def test_only_the_selected_keys_are_touched() -> None:
    instance = source()
    instance.apply([data("other", 11, "x")])
    instance.apply([mark(BEGIN, LIVE, 12), mark(CUTOVER, LIVE, 13)])
    assert told(instance.apply([data("other", 14, "y")])) == [("other", "x y")]


# ── The budget ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_budget_spreads_the_keys_over_batches_that_the_part_asks_itself_for() -> None:
    instance = part()
    keys = [f"key-{n}" for n in range(5)]
    instance.apply([data(key, n, "x" * 100) for n, key in enumerate(keys)])
    small = move(*keys, budget=300)
    shipped: list[list[str]] = []
    out = instance.apply([mark(BEGIN, small, 9)])
    while True:
        shipped.append(sorted(key_state(out)))
        if out.messages[-1].kind == Kind.SHIPPED:
            break
        wake = out.messages[-1]
        assert (wake.kind, wake.to) == (Kind.WAKE, "a")
        out = instance.apply([delivered(wake)])
    assert shipped == [["key-0", "key-1"], ["key-2", "key-3"], ["key-4"]]
    assert instance.apply([delivered(wake)]) == Emissions(), "there is nothing left to ship"


def test_serving_goes_on_between_the_batches_and_late_luggage_has_it() -> None:
    instance = source()
    small = move("k", "j", budget=1)
    assert sorted(key_state(instance.apply([mark(BEGIN, small, 12)]))) == ["j"]
    out = instance.apply([data("k", 13, "y"), data("j", 14, "y")])
    assert told(out) == [("k", "x y"), ("j", "x y")]
    assert sorted(key_state(out)) == ["k"]
    assert key_state(out)["k"].seq == 14
    assert msgspec.msgpack.decode(key_state(out)["k"].state) == {"seen": ["x", "y"]}


def test_a_restart_between_two_batches_goes_on_shipping() -> None:
    instance = source()
    instance.apply([mark(BEGIN, move("k", "j", budget=1), 12)])
    out = reloaded(instance).apply([delivered(Message("a", Kind.WAKE, EVERY_BIN, b""))])
    assert (sorted(key_state(out)), kinds(out)[-1]) == (["k"], Kind.SHIPPED)


def test_a_repeated_batch_ships_the_same() -> None:
    """Spark repeats a batch that failed: what the first try has written, the second must not contradict."""
    instance = source()
    batch = [mark(BEGIN, move("k", "j", budget=1, chunk=4), 12), data("k", 13, "y")]
    once, twice = reloaded(instance).apply(batch), reloaded(instance).apply(batch)
    assert once == twice


def test_a_key_larger_than_a_chunk_travels_in_pieces() -> None:
    instance = part()
    instance.apply([data("k", 1, "x" * 25)])
    out = instance.apply([mark(BEGIN, move("k", chunk=10), 2)])
    pieces = parcels(out)
    assert [(parcel.piece, parcel.pieces) for parcel in pieces] == [(n, 4) for n in range(4)]
    assert [len(parcel.keys["k"].state) for parcel in pieces] == [10, 10, 10, 3]
    whole = b"".join(parcel.keys["k"].state for parcel in pieces)
    assert msgspec.msgpack.decode(whole) == {"seen": ["x" * 25]}
    assert {parcel.keys["k"].seq for parcel in pieces} == {2}


# ── Going ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_until_cutover_the_source_serves_and_emits() -> None:
    instance = source()
    instance.apply([mark(BEGIN, LIVE, 12)])
    out = instance.apply([data("k", 13, "y"), mark(CUTOVER, LIVE, 14)])
    assert told(out) == [("k", "x y")]


def test_after_cutover_from_every_router_the_keys_are_forgotten_and_it_says_so() -> None:
    both = move("k", "j", routers="rs")
    instance = source()
    instance.apply([mark(BEGIN, both, 12, "r"), mark(BEGIN, both, 12, "s")])
    assert instance.apply([mark(CUTOVER, both, 13, "r")]) == Emissions()
    assert sorted(instance.table.entries) == ["j", "k"]
    out = instance.apply([mark(CUTOVER, both, 13, "s")])
    closed, left = out.notices
    assert closed == Closed("m1", "a", 0, 1, both.selection, 1)
    assert isinstance(left, Left)
    assert (left.move, left.instance, left.part, left.parts, left.keys) == ("m1", "a", 0, 1, 2)
    assert left.sent_bytes > left.state_bytes > 0
    assert instance.table.entries == {}
    assert instance.moves.open == []
    assert reloaded(instance).table.entries == {}


def test_every_part_closes_even_one_without_keys() -> None:
    out = part().apply([mark(BEGIN, LIVE, 1), mark(CUTOVER, LIVE, 2)])
    assert notices(out) == ["Closed", "Left"]


def test_a_timer_does_not_fire_at_the_source_behind_cutover() -> None:
    """One router is through, the other is not: the key is still here, but no longer ours."""
    both = move("k", routers="rs")
    instance = part()
    instance.apply([data("k", 1, "timer 50"), mark(BEGIN, both, 2, "r"), mark(BEGIN, both, 2, "s")])
    assert told(instance.apply([tick(3, at=10), mark(CUTOVER, both, 4, "r"), tick(5, at=60)])) == []


def test_a_timer_does_not_fire_at_the_source_while_its_key_is_held() -> None:
    held = move("k", hold=True)
    instance = part()
    instance.apply([data("k", 1, "timer 50"), data("other", 2, "timer 50"), mark(BEGIN, held, 3)])
    assert told(instance.apply([tick(4, at=60)])) == [("other", "timer 50 @50")]
    out = instance.apply([mark(ABORT, held, 5), tick(4, at=60, held_for=held)])
    assert told(out) == [("k", "timer 50 @50")], "the abort brings the held tick"


def test_a_live_source_fires_its_timers_until_cutover() -> None:
    instance = part()
    instance.apply([data("k", 1, "timer 50"), mark(BEGIN, move("k"), 2)])
    assert told(instance.apply([tick(3, at=60)])) == [("k", "timer 50 @50")]


# ── Staying after all ────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_abort_from_every_router_makes_a_plain_owner_again() -> None:
    both = move("k", "j", routers="rs")
    instance = source()
    instance.apply([mark(BEGIN, both, 12, "r"), mark(BEGIN, both, 12, "s")])
    assert instance.apply([mark(ABORT, both, 13, "r")]) == Emissions()
    assert instance.apply([mark(ABORT, both, 13, "s")]).notices == [Aborted("m1", "a", 0, 1)]
    assert told(instance.apply([data("k", 14, "y")])) == [("k", "x y")]
    assert instance.moves.open == []


def test_an_abort_stops_the_shipping() -> None:
    both = move("k", "j", routers="rs", budget=1)
    instance = source()
    instance.apply([mark(BEGIN, both, 12, "r"), mark(BEGIN, both, 12, "s")])
    assert instance.apply([mark(ABORT, both, 13, "s")]).messages == []


def test_an_abort_without_a_begin_is_acknowledged() -> None:
    """A router that never heard of the move puts the marker all the same."""
    assert notices(source().apply([mark(ABORT, LIVE, 12)])) == ["Aborted"]


def test_several_moves_leave_one_source_side_by_side() -> None:
    instance = source()
    first, second = move("k", id="m1"), move("j", id="m2", destination="c")
    out = instance.apply([mark(BEGIN, first, 12), mark(BEGIN, second, 13)])
    assert {(message.to, message.kind) for message in out.messages} == {
        (to, kind) for to in "bc" for kind in (Kind.PARCEL, Kind.SHIPPED)
    }
    instance.apply([mark(CUTOVER, first, 14)])
    assert list(instance.table.entries) == ["j"]
    assert notices(instance.apply([mark(ABORT, second, 15)])) == ["Aborted"]
