"""A part of an instance while nothing moves: records, duplicates, time, operators that raise, and what lasts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.unit.records import Tape, data, mark, move, notices, part, reloaded, tick, told
from whimbrel.core import operator, wire
from whimbrel.core.delta import Delta, unpacked
from whimbrel.core.instance import Instance
from whimbrel.core.operator import Context, Emit
from whimbrel.core.record import Emissions, Kind, Parked, Record
from whimbrel.core.table import LARGE


def apply(instance: Instance, *records: Record) -> Emissions:
    return instance.apply(records)


class Dice(operator.Operator):
    """Draws three numbers for each record and for each timer; a record `raise` draws them and then fails once."""

    tries = 2
    failed = False

    def process(self, key: str, event: str, state: Any, emit: Emit, ctx: Context) -> None:
        emit(drawn=[ctx.random.random() for _ in range(3)])
        if event == "raise" and not self.failed:
            self.failed = True
            raise ValueError(event)
        if event == "timers":
            for moment in (10, 20):
                ctx.timer(timedelta(microseconds=moment - ctx.now_us))

    def on_timer(self, key: str, state: Any, emit: Emit, ctx: Context) -> None:
        emit(drawn=[ctx.random.random() for _ in range(3)])


def drawn(*records: Record) -> list[list[float]]:
    return [result.values["drawn"] for result in Instance("s-1", Dice(), str).apply(records).results]


def test_draws_differ_within_a_call_between_keys_records_and_timers_and_a_replay_draws_the_same() -> None:
    records = [data("k", 1, "timers"), data("j", 1, "x"), data("k", 2, "x", at=30)]
    first = drawn(*records)
    assert len(first) == 5, "the two timers are due when the last record comes"
    assert len({number for numbers in first for number in numbers}) == 15
    assert drawn(*records) == first


def test_a_second_try_draws_what_the_first_one_drew() -> None:
    assert drawn(data("k", 1, "raise")) == drawn(data("k", 1, "x"))


# ── Records ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_records_are_applied_in_order_each_to_its_own_key() -> None:
    out = apply(part(), data("k", 1, "x"), data("j", 2, "y"), data("k", 3, "z"))
    assert told(out) == [("k", "x"), ("j", "y"), ("k", "x z")]
    assert (out.messages, out.notices) == ([], [])


def test_state_lasts_from_batch_to_batch() -> None:
    instance = part()
    apply(instance, data("k", 1, "x"))
    assert told(apply(instance, data("k", 2, "y"))) == [("k", "x y")]


def test_a_result_carries_the_identity_and_the_times_of_its_record() -> None:
    out = apply(part(), data("k", 7, "emit 2", at=50, epoch=3))
    assert [(r.key, r.epoch, r.seq, r.n, r.event_us, r.ingress_us) for r in out.results] == [
        ("k", 3, 7, 0, 50, 1007),
        ("k", 3, 7, 1, 50, 1007),
    ]


def test_an_empty_batch_says_nothing() -> None:
    assert apply(part()) == Emissions()


@pytest.mark.parametrize("again", [1, 2])
def test_a_record_that_comes_again_is_dropped_and_counted(again: int) -> None:
    instance = part()
    apply(instance, data("k", 1, "x"), data("k", 2, "y"))
    assert told(apply(instance, data("k", again, "again", offset=99), data("k", 3, "z"))) == [("k", "x y z")]
    assert instance.serving.duplicates == 1


def test_a_duplicate_is_known_after_a_restart_too() -> None:
    instance = part()
    apply(instance, data("k", 5, "x"))
    again = reloaded(instance)
    assert told(apply(again, data("k", 5, "x"))) == []
    assert again.serving.duplicates == 1


def test_rows_made_of_one_record_share_its_offset_and_are_no_duplicates() -> None:
    """`prepare` may multiply rows; their results are numbered through."""
    out = apply(part(), data("k", 1, "emit 2", offset=10), data("k", 1, "x", offset=10), data("k", 2, "y", offset=11))
    assert [(result.seq, result.n) for result in out.results] == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert told(out)[-1] == ("k", "emit 2 x y")


def test_rows_of_one_record_that_come_again_are_all_dropped() -> None:
    instance = part()
    rows = [data("k", 1, "x", offset=10), data("k", 1, "y", offset=10)]
    apply(instance, *rows)
    assert told(apply(instance, *[row._replace(offset=12) for row in rows])) == []
    assert instance.serving.duplicates == 2


# ── Time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tick_fires_the_timers_that_are_due_in_their_order() -> None:
    instance = part()
    apply(instance, data("k", 1, "timer 50"), data("k", 2, "timer 30"), data("k", 3, "timer 90"))
    out = apply(instance, tick(4, at=60))
    assert [(r.values["seen"].split()[-1], r.seq, r.n, r.event_us) for r in out.results] == [
        ("@30", 4, 0, 60),
        ("@50", 4, 1, 60),
    ]
    assert told(apply(instance, tick(5, at=60))) == []
    assert [r.values["seen"].split()[-1] for r in apply(instance, tick(6, at=90)).results] == ["@90"]


def test_the_same_moment_twice_fires_once() -> None:
    instance = part()
    apply(instance, data("k", 1, "timer 50"), data("k", 2, "timer 50"))
    assert len(apply(instance, tick(3, at=60)).results) == 1


def test_a_record_fires_what_is_due_by_its_own_time_first() -> None:
    out = apply(part(), data("k", 1, "timer 50"), data("k", 2, "x", at=70))
    assert told(out)[1:] == [("k", "timer 50 @50"), ("k", "timer 50 @50 x")]
    assert [(result.seq, result.n) for result in out.results[1:]] == [(2, 0), (2, 1)]


def test_a_tick_is_for_the_keys_of_its_own_router() -> None:
    """Only there has it an exact place in the key's stream."""
    instance = part()
    apply(instance, data("k", 1, "timer 50", "r"), data("j", 1, "timer 50", "s"))
    assert told(apply(instance, tick(2, at=60, src="s"))) == [("j", "timer 50 @50")]
    assert told(apply(instance, tick(2, at=60, src="r"))) == [("k", "timer 50 @50")]


def test_a_tick_that_was_held_back_is_for_the_keys_it_was_held_with() -> None:
    instance = part()
    apply(instance, data("k", 1, "timer 50"), data("j", 2, "timer 50"))
    assert told(apply(instance, tick(3, at=60, held_for=move("k", hold=True)))) == [("k", "timer 50 @50")]
    assert told(apply(instance, tick(4, at=60))) == [("j", "timer 50 @50")]


def test_a_tick_that_a_keys_state_has_behind_it_does_nothing() -> None:
    instance = part()
    apply(instance, data("k", 9, "timer 50"))
    assert told(apply(instance, tick(8, at=60))) == []
    assert told(apply(instance, tick(10, at=60))) == [("k", "timer 50 @50")]


def test_ticks_cost_nothing_where_no_operator_has_timers() -> None:
    class Plain(operator.Operator):
        def process(self, key: str, event: str, state: Any, emit: Emit) -> None:
            emit(event=event)

    instance = part(tape=Plain())
    assert len(apply(instance, data("k", 1, "x"), tick(2, at=60)).results) == 1


# ── An operator that raises ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_record_on_which_the_operator_raises_leaves_no_trace_but_a_dead_letter() -> None:
    instance = part()
    out = apply(instance, data("k", 1, "x"), data("k", 2, "raise"), data("k", 3, "y"))
    assert told(out) == [("k", "x"), ("k", "x y")]
    assert out.notices == [Parked("a", "k", 2, "r", "ValueError: raise", '"raise"')]
    assert told(apply(reloaded(instance), data("k", 4, "z"))) == [("k", "x y z")]


def test_a_record_that_was_parked_is_not_taken_again() -> None:
    instance = part()
    apply(instance, data("k", 2, "raise"))
    assert apply(instance, data("k", 2, "raise", offset=9)) == Emissions()


class Moody(Tape):
    """Raises the first `bad` times."""

    tries = 3

    def __init__(self, bad: int) -> None:
        self.bad = bad
        self.calls = 0

    def process(self, key: str, event: str, state: Any, emit: Emit, ctx: Context) -> None:
        super().process(key, event, state, emit, ctx)
        if event == "moody":
            self.calls += 1
            if self.calls <= self.bad:
                raise RuntimeError("not now")


@pytest.mark.parametrize(("bad", "calls", "parked"), [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 3, 1), (9, 3, 1)])
def test_a_record_is_tried_as_often_as_the_operator_says(bad: int, calls: int, parked: int) -> None:
    moody = Moody(bad)
    instance = part(tape=moody)
    apply(instance, data("k", 1, "old"))
    out = apply(instance, data("k", 2, "timer 50"), data("k", 3, "moody"), data("k", 4, "new"))
    assert (moody.calls, len(out.notices)) == (calls, parked)
    assert told(out)[-1] == ("k", "old timer 50 new" if parked else "old timer 50 moody new")
    assert [result.n for result in out.results] == [0] * len(out.results), "no number is used up in vain"
    assert told(apply(instance, tick(5, at=60)))[-1][1].endswith("@50")


def test_one_of_several_rows_of_a_record_may_fail() -> None:
    rows = [data("k", 1, event, offset=10) for event in ("emit 2", "raise", "x")]
    out = apply(part(), *rows)
    assert [(result.seq, result.n) for result in out.results] == [(1, 0), (1, 1), (1, 2)]
    assert told(out)[-1] == ("k", "emit 2 x")
    assert notices(out) == ["Parked"]


def test_a_timer_that_raises_is_parked_and_the_stream_goes_on() -> None:
    """It must not come back with each later record, nor vanish with what else was due."""
    instance = part()
    apply(instance, data("k", 1, "timer 666"), data("k", 2, "timer 500"), data("k", 3, "timer 700"))
    out = apply(instance, tick(4, at=800))
    fired = "timer 666 timer 500 timer 700 @500"
    assert told(out) == [("k", fired), ("k", f"{fired} @700")]
    assert [result.n for result in out.results] == [0, 1]
    assert out.notices == [Parked("a", "k", 4, "r", "ValueError: timer 666", '{"timer":666}')]
    out = apply(instance, data("k", 5, "x", at=900), tick(6, at=900))
    assert told(out) == [("k", "timer 666 timer 500 timer 700 @500 @700 x")]
    assert out.notices == []


def test_a_timer_that_raises_before_a_record_does_not_take_the_record_with_it() -> None:
    out = apply(part(), data("k", 1, "timer 666"), data("k", 2, "x", at=700), data("k", 3, "raise"), data("k", 4, "y"))
    assert told(out)[1:] == [("k", "timer 666 x"), ("k", "timer 666 x y")]
    assert [(n.seq, n.error) for n in out.notices if isinstance(n, Parked)] == [
        (2, "ValueError: timer 666"),
        (3, "ValueError: raise"),
    ]


def test_whether_a_timer_failed_before_or_after_a_restart_makes_no_difference() -> None:
    """Spark's workers come and go: one that kept the instance in memory and one that loaded it must say the same."""
    kept = part()
    apply(kept, data("k", 1, "timer 666"), tick(2, at=700))
    for instance in (reloaded(kept), kept):
        assert apply(instance, tick(3, at=800)) == Emissions()
        assert told(apply(instance, data("k", 4, "x", at=900))) == [("k", "timer 666 x")]


def test_an_event_that_json_does_not_know_can_be_parked() -> None:
    out = apply(part(), data("k", 1, "raise")._replace(body=Strange("raise")))
    assert [notice.event for notice in out.notices if isinstance(notice, Parked)] == ['"strange"']


class Strange:
    """Looks like an event but is nothing that JSON has a form for."""

    def __init__(self, text: str) -> None:
        self.partition = text.partition

    def __repr__(self) -> str:
        return "strange"


# ── What lasts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def whole(instance: Instance) -> Delta:
    """All that an instance keeps."""
    return wire.unpack(instance.snapshot()[0], Delta)


def history() -> list[list[Record]]:
    """Batches with a bit of everything that can happen while nothing moves."""
    return [
        [data("k", 1, "x"), data("j", 2, "timer 40")],
        [data("k", 3, "raise"), data("k", 4, "timer 50", at=9), tick(5, at=20)],
        [data("i", 1, "timer 30", "s"), tick(6, at=45)],
        [],
        [data("k", 7, "y", at=60), data("i", 2, "z", "s", at=10), tick(3, at=90, src="s")],
    ]


def test_all_deltas_together_are_the_snapshot() -> None:
    instance, deltas = part(), []
    for batch in history():
        instance.apply(batch)
        deltas += instance.deltas()
    again = part()
    again.load(deltas)
    assert whole(again) == whole(instance)


def test_a_restart_between_any_two_batches_changes_nothing() -> None:
    steady, restarted = part(), part()
    for batch in history():
        assert steady.apply(batch) == restarted.apply(batch)
        restarted = reloaded(restarted)


def test_a_worker_that_was_away_catches_up_with_the_deltas_it_missed() -> None:
    """Spark's tasks wander between workers: the one that gets a part back loads what others did meanwhile."""
    here, there = part(), part()
    for number, batch in enumerate(history()):
        one, other = (here, there) if number % 2 else (there, here)
        one.apply(batch)
        other.load(one.deltas())
        assert whole(other) == whole(one)
    assert told(apply(here, data("k", 9, "end", at=60))) == told(apply(there, data("k", 9, "end", at=60)))


def test_a_delta_holds_only_what_its_batch_changed() -> None:
    instance = part()
    apply(instance, *[data(f"k{n}", n, "x" * 50) for n in range(100)])
    whole = len(instance.deltas()[0])
    apply(instance, data("k1", 101, "y"))
    assert len(instance.deltas()[0]) < whole / 20


def test_moves_that_have_not_changed_are_not_written_again() -> None:
    instance = part("b")
    apply(instance, mark(Kind.BEGIN, move("k"), 1))
    blobs = instance.deltas()
    for seq, word in enumerate(("x", "y"), 2):
        apply(instance, data("j", seq, word))
        blobs += instance.deltas()
    assert [bool(delta.moves) for delta in unpacked(blobs)] == [True, False, False]
    again = part("b")
    again.load(blobs)
    assert whole(again) == whole(instance)


def test_records_waiting_for_their_state_survive_a_restart() -> None:
    instance = part("b")
    apply(instance, mark(Kind.BEGIN, move("k"), 1), data("k", 2, "x", at=7), data("k", 3, "y"))
    again = part("b")
    again.load(instance.deltas())
    assert again.table.waiting == instance.table.waiting
    assert whole(again) == whole(instance)


def test_parts_know_nothing_of_each_other() -> None:
    one, two = part(number=0, parts=2), part(number=1, parts=2)
    apply(one, data("sensor-1", 1, "x"))
    apply(two, data("k0", 2, "y"))
    assert (list(one.table.entries), list(two.table.entries)) == (["sensor-1"], ["k0"])


def test_large_changes_are_stored_as_many_small_blobs() -> None:
    instance = part()
    instance.apply([data("small", 1, "x"), data("large", 2, "y" * 500), data("timed", 3, "timer 50")])
    blobs = instance.deltas(limit=64)
    assert len(blobs) > 8
    assert max(map(len, blobs)) < 250
    again, compacted = part(), part()
    again.load(blobs)
    compacted.load(instance.snapshot(limit=64))
    for other in (again, compacted):
        assert {key: entry.saved for key, entry in other.table.entries.items()} == {
            key: entry.saved for key, entry in instance.table.entries.items()
        }
        assert other.table.state_bytes == instance.table.state_bytes
    assert told(again.apply([data("large", 4, "z")])) == [("large", f"{'y' * 500} z")]


def test_a_large_state_is_not_kept_decoded() -> None:
    instance = part()
    instance.apply([data("large", 1, "y" * LARGE), data("small", 2, "x")])
    assert instance.table.entries["large"].state is None
    assert instance.table.entries["small"].state is not None
    assert instance.table.state_bytes > LARGE
    assert told(instance.apply([data("large", 3, "z")])) == [("large", f"{'y' * LARGE} z")]
