"""Restorations: what the destination makes of versions and replayed records, and who must discard what."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.records import (
    data,
    delivered,
    key_state,
    mark,
    move,
    notices,
    parcel,
    part,
    reloaded,
    save,
    shipped,
    switch,
    switching,
    tick,
    told,
)
from whimbrel.core import wire
from whimbrel.core.increments import Version, VersionChunk
from whimbrel.core.keys import bin_of
from whimbrel.core.options import RestoreOptions
from whimbrel.core.record import Kind, Message, Move, Parcel, Record
from whimbrel.core.restoration import Renewal, loads


def restoring(*keys: str, **more: Any) -> Move:
    """A restoration of keys that `a` has lost, at `b`."""
    options = RestoreOptions(more.pop("ends", frozenset()), more.pop("parties", frozenset("a")))
    return move(*keys, id="r1", protocol="restore", options=options, **{"epoch": 2, **more})


def messages(m: Move, versions: dict[str, Any], out: dict[str, int]) -> list[Record]:
    """All that the destination's control lane gets."""
    stored = [Version.of(key, 0, bag) for key, bag in versions.items()]
    return [delivered(message) for message in loads(m, stored, out)]


def replayed(key: str, seq: int, event: str, m: Move, **more: Any) -> Record:
    return data(key, seq, event, epoch=m.epoch, **more)


@pytest.mark.parametrize("again", [False, True])
def test_what_a_version_has_is_dropped_what_is_delivered_is_silent_the_rest_is_said(again: bool) -> None:
    b, m = part("b"), restoring("k")
    out = b.apply(messages(m, {"k": key_state(2, "v")}, {"k": 4}))
    assert notices(out) == ["Ready"]
    b = reloaded(b) if again else b
    out = b.apply([replayed("k", seq, f"e{seq}", m) for seq in range(1, 7)])
    assert told(out) == [("k", "v e3 e4 e5"), ("k", "v e3 e4 e5 e6")]
    assert {result.epoch for result in out.results} == {2}
    out = b.apply([mark(Kind.CUTOVER, m, 7), replayed("k", 8, "e8", m)])
    assert notices(out) == ["Opened"]
    assert told(out) == [("k", "v e3 e4 e5 e6 e8")]
    assert not b.moves.open


def test_a_key_without_a_version_starts_from_nothing_and_is_silent_up_to_what_is_delivered() -> None:
    b, m = part("b"), restoring("k")
    b.apply(messages(m, {}, {"k": 1}))
    assert told(b.apply([replayed("k", 1, "x", m), replayed("k", 2, "y", m)])) == [("k", "x y")]


def test_what_was_given_up_and_told_is_not_told_again() -> None:
    b, m = part("b"), restoring("k")
    b.apply(messages(m, {}, {"k": 1}))
    out = b.apply([replayed("k", 1, "raise", m), replayed("k", 2, "raise", m)])
    assert [(type(notice).__name__, notice.seq, notice.epoch) for notice in out.notices] == [("Parked", 2, 2)]  # type: ignore[union-attr]


def test_ticks_are_replayed_for_the_keys_of_the_move_alone() -> None:
    b, m = part("b"), restoring("k")
    b.apply([data("own", 1, "timer 50")])
    b.apply(messages(m, {"k": key_state(2, "v", timers=[40])}, {"k": 4}))
    assert told(b.apply([tick(9, 45)])) == [], "the time of a restored key stands still"
    assert told(b.apply([tick(3, 30, held_for=m), tick(4, 41, held_for=m)])) == [], "delivered"
    assert b.table.entries["k"].timers == []
    out = b.apply([replayed("k", 5, "timer 60", m), tick(6, 70, held_for=m)])
    assert told(out) == [("k", "v @40 timer 60"), ("k", "v @40 timer 60 @60")]
    assert told(b.apply([mark(Kind.CUTOVER, m, 10), tick(11, 71)])) == [("own", "timer 50 @50")]


def test_a_large_version_comes_in_pieces() -> None:
    b, m = part("b"), restoring("k", chunk=10)
    control = messages(m, {"k": key_state(2, "v" * 50)}, {"k": 2})
    assert len(control) > 4
    for record in control:
        b = reloaded(b)
        b.apply([record])
    assert told(b.apply([replayed("k", 3, "x", m)])) == [("k", "v" * 50 + " x")]


def test_an_order_to_load_that_is_repeated_begins_anew_or_comes_too_late() -> None:
    b, m = part("b"), restoring("k", "l")
    first = messages(m, {"k": key_state(2, "old"), "l": key_state(2, "l")}, {"k": 2, "l": 2})
    second = messages(m, {"k": key_state(3, "old", "new")}, {"k": 2})
    b.apply(first[:2])
    assert notices(b.apply(second)) == ["Ready"]
    assert set(b.table.entries) == {"k"}
    assert notices(b.apply(first)) == ["Ready"], "said again, for whoever has not heard"
    assert (set(b.table.entries), b.table.entries["k"].seq) == ({"k"}, 3)
    b.apply([mark(Kind.CUTOVER, m, 5)])
    b.apply([replayed("k", 6, "x", m)])
    assert notices(b.apply(first)) == []
    assert b.table.entries["k"].seq == 6


def test_one_that_is_called_off_leaves_nothing() -> None:
    b, m = part("b"), restoring("k")
    b.apply(messages(m, {"k": key_state(2, "v")}, {"k": 2}))
    off = delivered(Message("b", Kind.ABORT, -1, wire.pack(m)))
    assert notices(b.apply([off])) == ["Aborted"]
    assert (b.table.entries, b.moves.open) == ({}, [])
    b.apply(messages(m, {"k": key_state(2, "v")}, {"k": 2}))
    assert b.table.entries == {}


def test_one_that_is_called_off_before_its_load_takes_nothing() -> None:
    """The deadline may pass before the fence is placed: until DISCARD the keys belong to whom the routers say."""
    b, m = part("b"), restoring("k")
    b.apply([data("k", 1, "e1")])
    off = delivered(Message("b", Kind.ABORT, -1, wire.pack(m)))
    assert notices(b.apply([off])) == ["Aborted"]
    assert told(b.apply([data("k", 2, "e2")])) == [("k", "e1 e2")]
    assert b.moves.open == []


# ── Who must discard ─────────────────────────────────────────────────────────────────────────────────────────────────


def discard(m: Move, seq: int, src: str = "r") -> Record:
    return mark(Kind.DISCARD, m, seq, src)


def test_the_lost_one_comes_back_drops_the_keys_and_is_an_instance_without_them() -> None:
    a, m = part(), restoring("k", routers="rq")
    a.apply([data("k", 1, "x"), data("own", 2, "y")])
    assert notices(a.apply([discard(m, 3)])) == []
    assert set(a.table.entries) == {"own"}
    late = a.apply([data("k", 4, "z", src="q"), data("own", 5, "w")])
    assert (told(late), set(a.table.entries)) == ([("own", "y w")], {"own"}), "a router that does not know yet"
    assert notices(reloaded(a).apply([discard(m, 6, "q")])) == ["Evicted"]
    assert notices(a.apply([discard(m, 6, "q")])) == ["Evicted"]
    assert a.apply([data("k", 7, "new", epoch=3)]).results, "it may have them again one day"


def test_the_other_end_of_a_move_that_is_ended_forgets_its_part_in_it() -> None:
    b, m = part("b"), move("k")
    ended = restoring("k", ends=frozenset({"m1"}), parties=frozenset("ab"), destination="c")
    b.apply([mark(Kind.BEGIN, m, 1), data("k", 2, "x"), parcel(m, {"l": key_state(1, "l")})])
    assert notices(b.apply([discard(ended, 3)])) == ["Evicted"]
    assert (b.table.entries, b.table.waiting, b.moves.open) == ({"l": b.table.entries["l"]}, {}, [])
    for said in (parcel(m, {"k": key_state(1, "v")}), shipped(m), mark(Kind.CUTOVER, m, 4), switch(switching("k"))):
        b.apply([said])
    assert ("k" in b.table.entries, b.moves.open) == (False, []), "what a zombie still says of it does not count"


def test_a_standby_of_a_lost_instance_forgets_its_copies() -> None:
    b, m = part("b"), switching("k", order="replica")
    ended = restoring("k", ends=frozenset({"m1"}), parties=frozenset("ab"), destination="c")
    copy = Parcel("m1", bin_of("k"), {"k": key_state(1, "v")})
    b.apply([delivered(Message("b", Kind.REPLICATE, -1, wire.pack(m)))])
    b.apply([delivered(Message("b", Kind.REPLICA, copy.bin, wire.pack(copy)))])
    assert b.table.replicas
    b.apply([discard(ended, 3)])
    assert (b.table.replicas, b.moves.standbys) == ({}, {})


def test_a_destination_that_took_part_in_what_is_ended_keeps_what_was_loaded() -> None:
    """The control lane is read first: the load may be here before DISCARD is."""
    b, m = part("b"), move("k")
    r = restoring("k", ends=frozenset({"m1"}), parties=frozenset("ab"))
    b.apply([mark(Kind.BEGIN, m, 1), data("k", 2, "x")])
    b.apply(messages(r, {"k": key_state(2, "v")}, {"k": 2}))
    out = b.apply([data("k", 3, "old"), mark(Kind.CUTOVER, m, 4), discard(r, 5)])
    assert (notices(out), told(out), b.table.entries["k"].seq) == (["Evicted"], [], 2)
    assert told(b.apply([replayed("k", 3, "new", r)])) == [("k", "v new")]


def test_a_late_discard_spares_what_a_later_restoration_brought() -> None:
    b, first = part("b"), restoring("k", parties=frozenset("b"), source="b", destination="c")
    second = restoring("k", epoch=3)
    b.apply([wire_restore(second), *messages(second, {"k": key_state(2, "v")}, {"k": 2})])
    b.apply([discard(first, 5)])
    assert b.table.entries["k"].seq == 2


def wire_restore(m: Move) -> Record:
    return delivered(Message("b", Kind.RESTORE, -1, wire.pack(m)))


def test_a_saving_under_way_is_given_up_and_all_that_is_left_is_saved_anew() -> None:
    a, m = part(), restoring("k")
    a.apply([data(key, n, "x" * 50) for n, key in enumerate("klm", 1)])
    first = a.apply([save(9, budget=1)])
    assert [message.kind for message in first.messages if message.to == "@store"] == [Kind.PARCEL]
    a.apply([discard(m, 10)])
    out = a.apply([save(11)])
    sent = [wire.unpack(message.body, VersionChunk) for message in out.messages if message.kind == Kind.PARCEL]
    assert {version.key: one.increment for one in sent for version in one.unpacked()} == {
        "l": ("r", 11),
        "m": ("r", 11),
    }


# ── What a part remembers of moves that are over ─────────────────────────────────────────────────────────────────────


def nth(n: int, **more: Any) -> Move:
    """The nth restoration: it ends a move, and all with lower numbers are over."""
    options = RestoreOptions(frozenset({f"m{2 * n}"}), frozenset("ab"), floor=2 * n, **more)
    return move("k", id=f"m{2 * n + 1}", protocol="restore", options=options, epoch=n + 1)


def test_a_part_remembers_a_bounded_number_of_moves_that_are_over() -> None:
    b = part("b")
    for n in range(1, 50):
        m = nth(n)
        b.apply([mark(Kind.DISCARD, m, 10 * n)])
        b.apply([*messages(m, {}, {}), mark(Kind.CUTOVER, m, 10 * n + 1)])
        b = reloaded(b)
        assert len(b.moves.ended) <= 4
        assert len(b.moves.evicted) <= 2
    assert not b.moves.open


@pytest.mark.parametrize("kind", ["parcel", "shipped", "begin", "restore"])
def test_a_message_of_a_move_that_was_over_long_ago_has_no_effect(kind: str) -> None:
    b = part("b")
    for n in (1, 2, 3):
        b.apply([mark(Kind.DISCARD, nth(n), 10 * n)])
    old = move("k", id="m2.1")
    late = {
        "parcel": parcel(old, {"k": key_state(1, "v")}),
        "shipped": shipped(old),
        "begin": mark(Kind.BEGIN, old, 40),
        "restore": messages(nth(1), {}, {})[0],
    }[kind]
    before = wire.pack(b.moves)
    assert not b.apply([late]).notices
    assert (wire.pack(b.moves), b.moves.open, b.table.entries) == (before, [], {})


def test_a_move_that_was_open_when_a_restoration_was_ordered_goes_on() -> None:
    b = part("b")
    b.apply([mark(Kind.DISCARD, nth(9, open=frozenset({"m1/7"})), 1)])
    b.apply([parcel(move("j", id="m1/7"), {"j": key_state(1, "v")})])
    assert b.moves.open == ["m1/7"]
    b.apply(
        [parcel(move("j", id="m1/6"), {"j": key_state(1, "v")}), parcel(move("j", id="m20"), {"j": key_state(1, "v")})]
    )
    assert b.moves.open == ["m1/7", "m20"], "what is over stays so, and a later order is none of it"


# ── Who starts without its state ─────────────────────────────────────────────────────────────────────────────────────


def renewal(floor: int, *undoing: Move, spared: str = "") -> Record:
    told = Renewal(floor, frozenset(spared.split()), list(undoing))
    return delivered(Message("b", Kind.RENEW, -1, wire.canonical(told)))


def test_records_routed_to_both_ends_of_an_undone_move_are_not_the_new_lifes() -> None:
    b, m = part("b"), move("k", epoch=1, routers="rq")
    b.apply([renewal(2, m, spared="m1")])
    assert told(b.apply([data("k", 1, "x"), data("own", 2, "y")])) == [("own", "y")]
    b = reloaded(b)
    assert notices(b.apply([mark(Kind.ABORT, m, 3)])) == []
    assert told(b.apply([data("k", 4, "x", src="q")])) == [], "the other router has not aborted"
    assert notices(b.apply([mark(Kind.ABORT, m, 5, src="q")])) == ["Aborted"]
    assert told(b.apply([data("k", 6, "new", epoch=1)])) == [("k", "new")], "a later move has brought it"
    assert not b.moves.undone


def test_an_abort_that_was_read_before_the_loss_is_known_by_the_next_move_of_the_keys() -> None:
    b, m, later = part("b"), move("k", epoch=1), move("k", id="m2", epoch=2)
    b.apply([renewal(2, m, spared="m1")])
    b.apply([mark(Kind.BEGIN, later, 1)])
    assert (b.moves.undone, b.moves.coming_with("m2") is not None) == ({}, True)


def test_messages_of_moves_that_the_new_life_cannot_know_are_void() -> None:
    b, over, undone = part("b"), move("k", id="m1"), move("l", id="m2")
    b.apply([parcel(over, {"k": key_state(1, "k")}), parcel(undone, {"l": key_state(1, "l")})])
    b.apply([renewal(3, undone, spared="m2")])
    assert (b.table.entries, b.moves.open) == ({}, [])
    b.apply([parcel(over, {"k": key_state(1, "k")}), parcel(undone, {"l": key_state(1, "l")})])
    assert (b.table.entries, b.moves.open) == ({}, [])


def test_an_open_move_of_which_only_states_came_is_turned_down() -> None:
    b, m = part("b"), move("k")
    b.apply([parcel(m, {"k": key_state(1, "k")})])
    out = b.apply([renewal(2, spared="m1")])
    assert (notices(out), b.table.entries) == (["Rejected"], {})


def test_a_renewal_that_is_repeated_drops_nothing() -> None:
    b = part("b")
    b.apply([renewal(2), data("k", 1, "x")])
    b.apply([renewal(2)])
    assert told(b.apply([data("k", 2, "y")])) == [("k", "x y")]


def test_a_hint_without_a_role_changes_nothing() -> None:
    a = part()
    a.apply([delivered(Message("a", Kind.HINT, -1, wire.pack(("m1", ["k"]))))])
    assert a.moves.open == []
