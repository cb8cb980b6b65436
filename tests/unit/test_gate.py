"""The gate: each key's results in order, epoch after epoch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from whimbrel.core.gate import Gate
from whimbrel.core.keys import Selection, bin_of, selection_of
from whimbrel.core.options import RestoreOptions
from whimbrel.core.record import Checkpointed, Closed, Evicted, Move, Opened, Parked, Result

K = selection_of(["k"])


def result(key: str, epoch: int, seq: int, n: int = 0) -> Result:
    return Result(key, epoch, seq, n, 0, 0, {"seq": seq})


def closed(selection: Selection, epoch: int, part: int = 0, parts: int = 1, was: int | None = None) -> Closed:
    """Of `was`, or the epoch before: results of `epoch` may be released now."""
    return Closed(f"m{epoch}", "a", part, parts, selection, epoch, epoch - 1 if was is None else was)


def ids(results: Iterable[Result]) -> list[tuple[str, int, int]]:
    return [(result.key, result.epoch, result.seq) for result in results]


def test_while_nothing_moves_everything_passes_in_order() -> None:
    results = [result("k", 0, 1), result("j", 0, 2), result("k", 0, 3)]
    assert Gate().offer(results) == results


def test_a_later_epoch_waits_until_the_one_before_is_closed() -> None:
    gate = Gate()
    assert gate.offer([result("k", 1, 5), result("k", 1, 6)]) == []
    assert ids(gate.offer([result("k", 0, 3), result("k", 0, 4)])) == [("k", 0, 3), ("k", 0, 4)]
    assert ids(gate.close(closed(K, 1))) == [("k", 1, 5), ("k", 1, 6)]
    assert ids(gate.offer([result("k", 1, 7)])) == [("k", 1, 7)]
    assert gate.held == {}


def test_a_key_that_waits_does_not_hold_up_the_others() -> None:
    gate = Gate()
    assert ids(gate.offer([result("k", 1, 5), result("j", 0, 1)])) == [("j", 0, 1)]


def test_a_zombie_is_refused_and_counted() -> None:
    gate = Gate()
    gate.close(closed(K, 1))
    assert ids(gate.offer([result("k", 0, 3), result("k", 1, 5), result("k", 0, 4)])) == [("k", 1, 5)]
    assert gate.refused == 2


def test_a_zombie_among_what_was_held_is_refused_when_its_turn_has_passed() -> None:
    gate = Gate()
    gate.offer([result("k", 1, 5)])
    assert gate.close(closed(K, 2, was=0)) == []
    assert (gate.refused, gate.held) == (1, {})


def test_several_epochs_held_come_out_one_after_the_other() -> None:
    gate = Gate()
    gate.offer([result("k", 2, 9), result("k", 1, 5), result("k", 2, 10), result("k", 1, 6)])
    assert ids(gate.close(closed(K, 1))) == [("k", 1, 5), ("k", 1, 6)]
    assert ids(gate.close(closed(K, 2))) == [("k", 2, 9), ("k", 2, 10)]
    assert (gate.refused, gate.held) == (0, {})


def test_a_closing_that_comes_before_an_earlier_one_waits_for_it() -> None:
    """The outboxes of two owners are read independently: that of the later one may be ahead."""
    gate = Gate()
    assert ids(gate.offer([result("k", 1, 5)])) == []
    assert gate.close(closed(K, 2)) == []
    assert ids(gate.offer([result("k", 2, 8)])) == []
    assert ids(gate.offer([result("k", 0, 3)])) == [("k", 0, 3)], "its owner has not closed yet"
    restored = Gate()
    restored.restore(gate.snapshot())
    for one in (gate, restored):
        assert ids(one.close(closed(K, 1))) == [("k", 1, 5), ("k", 2, 8)]
        assert (one.refused, one.held, one.early) == (0, {}, [])


def test_a_closing_ends_the_epoch_that_it_names_and_no_other() -> None:
    gate = Gate()
    gate.close(closed(K, 1))
    both = selection_of(["j", "k"])
    gate.offer([result("j", 3, 1), result("k", 3, 2)])
    assert ids(gate.close(closed(both, 3, was=1))) == [("k", 3, 2)]
    assert ids(gate.close(closed(selection_of(["j"]), 1))) == [("j", 3, 1)]


def test_a_fence_overtakes_closings_that_waited() -> None:
    gate = Gate()
    assert gate.close(closed(K, 2)) == []
    gate.fence(LOST)
    assert gate.early == []
    assert ids(gate.offer([result("k", 2, 8), result("k", 3, 9)])) == [("k", 3, 9)]


def test_each_part_of_a_source_closes_its_own_keys() -> None:
    gate = Gate()
    even, odd = "sensor-1", "k0"
    assert (bin_of(even) % 2, bin_of(odd) % 2) == (0, 1)
    both = selection_of(bins=[bin_of(even), bin_of(odd)])
    gate.offer([result(even, 1, 1), result(odd, 1, 2)])
    assert ids(gate.close(closed(both, 1, part=0, parts=2))) == [(even, 1, 1)]
    assert ids(gate.offer([result(odd, 0, 0)])) == [(odd, 0, 0)], "its part has not closed yet"
    assert ids(gate.close(closed(both, 1, part=1, parts=2))) == [(odd, 1, 2)]


def test_closing_keys_leaves_the_rest_of_their_bin_alone() -> None:
    gate = Gate()
    assert bin_of("k0") == bin_of("k673")
    gate.close(closed(selection_of(["k0"]), 1))
    assert (gate.current("k0"), gate.current("k673")) == (1, 0)


def test_all_results_of_one_record_stay_together() -> None:
    gate = Gate()
    gate.offer([result("k", 1, 5, n) for n in range(3)])
    assert [freed.n for freed in gate.close(closed(K, 1))] == [0, 1, 2]


def test_a_restored_gate_goes_on_where_it_was() -> None:
    gate = Gate()
    gate.close(closed(K, 1))
    gate.offer([result("k", 0, 1), result("k", 2, 9), result("j", 1, 4), result("k", 2, 10)])
    again = Gate()
    again.restore(gate.snapshot())
    assert (again.refused, again.held, again.epochs.dump()) == (gate.refused, gate.held, gate.epochs.dump())
    for one in (gate, again):
        assert ids(one.offer([result("k", 0, 1), result("k", 1, 8)])) == [("k", 1, 8)]
        assert ids(one.close(closed(K, 2))) == [("k", 2, 9), ("k", 2, 10)]


def test_a_restored_gate_refuses_a_zombie_even_if_nobody_else_speaks() -> None:
    gate = Gate()
    gate.close(closed(K, 1))
    again = Gate()
    again.restore(gate.snapshot())
    assert again.offer([result("k", 0, 3)]) == []
    assert again.refused == 1


def test_a_gate_that_was_never_used_can_be_restored() -> None:
    gate = Gate()
    gate.restore(Gate().snapshot())
    assert ids(gate.offer([result("k", 0, 1)])) == [("k", 0, 1)]


# ── What operators gave up ───────────────────────────────────────────────────────────────────────────────────────────


def parked(key: str, epoch: int, seq: int) -> Parked:
    return Parked("a", key, seq, "r", "no", "{}", epoch)


def test_what_was_given_up_takes_the_same_way_as_results() -> None:
    gate = Gate()
    assert gate.park(parked("k", 0, 1)) == [parked("k", 0, 1)]
    assert gate.park(parked("k", 1, 5)) == []
    again = Gate()
    again.restore(gate.snapshot())
    again.close(closed(K, 1))
    assert again.let_go() == [parked("k", 1, 5)]
    assert again.let_go() == []
    assert (again.park(parked("k", 0, 2)), again.refused) == ([], 1), "a zombie's"


def test_a_letter_is_released_by_the_closing_before_its_epoch_though_the_one_after_it_came_first() -> None:
    """A place that receives from many instances may get the closings of a key in any order."""
    gate = Gate()
    gate.park(parked("k", 1, 5))
    assert gate.close(closed(K, 2)) == []
    assert gate.let_go() == []
    gate.close(closed(K, 1))
    assert (gate.let_go(), gate.refused, gate.current("k")) == ([parked("k", 1, 5)], 0, 2)


# ── A fence ──────────────────────────────────────────────────────────────────────────────────────────────────────────

LOST = Move("r1", "s", "restore", "a", "c", K, 3, frozenset("r"), RestoreOptions(parties=frozenset({"a", "b"})))


def test_a_fence_closes_all_epochs_before_for_good() -> None:
    gate = Gate()
    gate.offer([result("k", 0, 1), result("k", 1, 2)])
    gate.park(parked("k", 1, 2))
    gate.fence(LOST)
    assert (gate.held, gate.refused) == ({}, 1)
    assert gate.let_go() == []
    assert gate.offer([result("k", 0, 3), result("k", 2, 4), result("j", 0, 5)]) == [result("j", 0, 5)]
    assert ids(gate.offer([result("k", 3, 6)])) == [("k", 3, 6)]
    assert gate.close(closed(K, 1)) == [], "a zombie closes its epoch"
    assert gate.current("k") == 3


# ── Increments ────────────────────────────────────────────────────────────────────────────────────────────────────────


def saved(instance: str, number: int, part: int = 0) -> Checkpointed:
    return Checkpointed(instance, part, 1, "r", number, number)


def test_a_saving_counts_at_once_where_nothing_moves() -> None:
    assert Gate().confirm(saved("a", 1)) == [saved("a", 1)]


def test_one_of_an_instance_that_is_ahead_counts_when_the_epoch_before_is_closed() -> None:
    gate = Gate()
    gate.note(Opened("m1", "b", 0, 1, K, 1))
    assert gate.confirm(saved("b", 1), saved("a", 1)) == [saved("a", 1)]
    assert gate.confirm(saved("b", 2)) == []
    again = Gate()
    again.restore(gate.snapshot())
    again.close(closed(K, 1))
    assert again.confirm() == [saved("b", 1), saved("b", 2)], "in their order"


def test_none_of_a_fenced_instance_counts_until_it_has_dropped_the_keys() -> None:
    gate = Gate()
    gate.note(Opened("m1", "b", 0, 1, K, 1))
    gate.confirm(saved("b", 1))
    gate.fence(LOST)
    assert gate.confirm(saved("a", 2), saved("b", 2), saved("c", 2)) == [saved("c", 2)]
    gate.note(Evicted("r1", "b", 0, 1))
    assert gate.confirm(saved("a", 3), saved("b", 3), saved("b", 3, part=1)) == [saved("b", 3)]


def test_one_that_had_dropped_the_keys_before_the_fence_is_not_barred() -> None:
    gate = Gate()
    gate.note(Opened("m1", "b", 0, 1, K, 1))
    gate.confirm(saved("b", 1))
    gate.note(Evicted("r1", "b", 0, 1))
    gate.fence(LOST)
    assert gate.confirm(saved("b", 2)) == [saved("b", 2)], "and what it saved before is given up"


def test_a_fence_is_forgotten_when_every_part_of_every_party_has_dropped_the_keys() -> None:
    gate = Gate()
    gate.fence(LOST)
    parties = sorted(LOST.parties)
    notices = [Evicted("r1", name, part, 2) for name in parties for part in range(2)]
    for notice in notices[:-1]:
        gate.note(notice)
        assert list(gate.fences) == ["r1"]
    gate.note(notices[-1])
    assert (gate.fences, gate.evicted) == ({}, [])
    gate.fence(LOST)
    assert gate.fences == {}, "said again, it bars nobody"
    assert gate.confirm(saved(parties[0], 7)) == [saved(parties[0], 7)]


def test_notices_of_keys_dropped_without_a_fence_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.core.gate.REMEMBERED", 3)
    gate = Gate()
    gate.fence(LOST)
    gate.note(Evicted("r1", "b", 0, 2))
    for number in range(10):
        gate.note(Evicted(f"r{number + 2}", "b", 0, 1))
    assert [one.move for one in gate.evicted] == ["r1", "r10", "r11"]
