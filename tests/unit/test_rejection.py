"""What comes with a move and cannot be taken: refused as a whole, and whoever decides hears why."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.records import (
    Tape,
    data,
    delivered,
    key_state,
    mark,
    move,
    notices,
    parcel,
    part,
    passed,
    reloaded,
    shipped,
    started,
    switch,
    switching,
    told,
)
from whimbrel.core import operator, wire
from whimbrel.core.instance import Instance
from whimbrel.core.keys import bin_of
from whimbrel.core.operator import shape_of
from whimbrel.core.record import Emissions, KeyState, Kind, Message, Record, Rejected

LIVE, PUSH = move("k", "j"), switching("k", "j")
BEGIN, CUTOVER, ABORT = Kind.BEGIN, Kind.CUTOVER, Kind.ABORT


class Counter(operator.Operator):
    """Another version of the same job: its state has the same field with another type."""

    class State(operator.State):
        seen: int = 0

    def process(self, key: str, event: Any, state: Any, emit: operator.Emit) -> None:
        """One event."""
        state.seen += 1


def damaged(record: Record) -> Record:
    return record._replace(body=record.body[:-1] + bytes((record.body[-1] ^ 1,)))


def newer(record: Record) -> Record:
    return record._replace(body=bytes((wire.VERSION + 1,)) + record.body[1:])


def of_another_job(record: Record) -> Record:
    return parcel(LIVE, {"k": key_state(10, "x"), "j": KeyState(10, "r", [], wire.encode({"seen": 3}))})


def reasons(out: Emissions) -> list[str]:
    return [notice.reason for notice in out.notices if isinstance(notice, Rejected)]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(damaged, "checksum"), (newer, "format 2"), (of_another_job, r"the state of key 'j' does not match Tape\.State")],
)
def test_a_parcel_that_does_not_fit_is_refused_as_a_whole(spoil: Any, why: str) -> None:
    instance = part("b")
    instance.apply([data("other", 1, "o"), mark(BEGIN, LIVE, 10)])
    out = instance.apply([spoil(parcel(LIVE, {"k": key_state(10, "x"), "j": key_state(10, "y")})), shipped(LIVE)])
    assert notices(out) == ["Rejected"], "and never Ready, though everything has been shipped"
    (reason,) = reasons(out)
    assert reason.startswith("b refuses a PARCEL: ")
    assert re.search(why, reason)
    assert {*instance.table.entries} == {"other"}
    instance = reloaded(instance)
    out = instance.apply([mark(BEGIN, LIVE, 11, "r"), data("k", 12, "z"), data("other", 13, "p")])
    assert told(out) == [("other", "o p")], "others go on, and the move's keys speak at their source"
    out = instance.apply([mark(ABORT, LIVE, 20)])
    assert notices(out) == ["Aborted"]
    assert {*instance.table.entries} == {"other"}
    assert not instance.table.waiting


def test_what_cannot_be_read_before_its_move_has_begun_is_held_against_the_next_one() -> None:
    instance = part("b")
    assert instance.apply([damaged(parcel(LIVE, {"k": key_state(10, "x")}))]) == Emissions()
    instance = reloaded(instance)
    assert notices(instance.apply([shipped(LIVE), mark(BEGIN, LIVE, 10)])) == ["Rejected"]
    later = move("k", "j", id="m2")
    instance.apply([mark(ABORT, LIVE, 11)])
    out = instance.apply([mark(BEGIN, later, 12), parcel(later, {"k": key_state(12, "x")}), shipped(later)])
    assert notices(out) == ["Ready"], "once only"


def test_a_move_that_is_complete_has_nothing_to_do_with_what_cannot_be_read() -> None:
    instance = part("b")
    instance.apply([mark(BEGIN, LIVE, 10), parcel(LIVE, {"k": key_state(10, "x")}), shipped(LIVE)])
    assert instance.apply([damaged(parcel(LIVE, {}))]) == Emissions()
    assert notices(instance.apply([mark(CUTOVER, LIVE, 11)])) == ["Opened"]


def test_what_cannot_be_read_may_have_come_with_a_move_that_begins_later() -> None:
    """Its parcel may overtake BEGIN, while another move is under way: that one is not the only suspect."""
    instance = part("b")
    instance.apply([mark(BEGIN, LIVE, 10)])
    assert notices(instance.apply([damaged(parcel(LIVE, {"k": key_state(10, "x")}))])) == ["Rejected"]
    other = move("z", id="m2")
    out = instance.apply([shipped(other), mark(BEGIN, other, 12)])
    assert [notice.move for notice in out.notices if isinstance(notice, Rejected)] == ["m2"]
    assert "it came before this move had begun" in reasons(out)[0]


def test_states_of_the_same_job_are_taken_as_their_operator_made_them() -> None:
    """A shape says that both ends run the same class, which its operator may not honour."""
    loose = KeyState(10, "r", [], wire.encode({"seen": ("x",), "more": 1}))
    odd = KeyState(10, "r", [], wire.encode({"seen": 7}))
    same = shape_of(Tape.State)
    instance = part("b")
    instance.apply([mark(BEGIN, LIVE, 10)])
    assert not reasons(instance.apply([parcel(LIVE, {"k": odd}, shape=same)]))
    assert not reasons(instance.apply([parcel(LIVE, {"j": loose}, shape="another")])), "unknown fields are ignored"
    assert shape_of(Counter.State) != same


def test_the_last_piece_of_a_large_state_decides() -> None:
    state = wire.encode({"seen": 7})
    pieces = [parcel(LIVE, {"k": KeyState(10, "r", [], state[n : n + 4])}, n // 4, 2) for n in (0, 4)]
    assert 4 < len(state) <= 8
    instance = part("b")
    assert not reasons(instance.apply([mark(BEGIN, LIVE, 10), pieces[0]]))
    assert reasons(instance.apply([pieces[1], shipped(LIVE)]))
    instance.apply([mark(ABORT, LIVE, 20)])
    assert not instance.table.gathered


# ── No way back: it waits for somebody who can take it ───────────────────────────────────────────────────────────────


def switched(tape: operator.Operator) -> Instance:
    """A destination of `push` whose job is another one than its source's; a record waits for its key."""
    instance = part("b", tape=tape)
    instance.apply([switch(PUSH), mark(BEGIN, PUSH, 10), data("k", 11, "y", epoch=1)])
    return instance


def test_after_a_switch_keys_wait_until_their_states_can_be_taken() -> None:
    instance = switched(Counter())
    sent = [parcel(PUSH, {"k": key_state(9, "x")}), passed(PUSH), shipped(PUSH)]
    out = instance.apply(sent)
    assert notices(out) == ["Rejected"]
    assert told(out) == []
    assert told(instance.apply([data("k", 12, "z", epoch=1)])) == []
    again = part("b")
    again.load(instance.snapshot())
    out = again.apply([started(), data("k", 13, "!", epoch=1)])
    assert [text for _, text in told(out)] == ["x y", "x y z", "x y z !"], "the right version goes on where it stopped"
    assert notices(out) == ["Ready"]
    assert not again.table.gathered


def test_whoever_cannot_take_it_either_keeps_it_and_says_so_again() -> None:
    instance = switched(Counter())
    instance.apply([parcel(PUSH, {"k": key_state(9, "x")}), passed(PUSH), shipped(PUSH)])
    for _ in range(2):
        instance = reloaded(instance)
        out = instance.apply([started(), data("k", 12, "z", epoch=1)])
        assert notices(out) == ["Rejected"]
    again = part("b")
    again.load(instance.snapshot())
    assert told(again.apply([started(), data("k", 13, "!", epoch=1)]))[0] == ("k", "x y")


def test_a_batch_that_is_repeated_after_a_restart_does_what_it_did_before() -> None:
    instance = switched(Counter())
    instance.apply([parcel(PUSH, {"k": key_state(9, "x")}), passed(PUSH), shipped(PUSH)])
    again = part("b")  # the right version
    again.load(instance.snapshot())
    batch = [data("k", 12, "z", epoch=1)]
    assert again.apply(batch) == instance.apply(batch) == Emissions(), "what was refused is tried when its host says so"


def test_a_damaged_parcel_after_a_switch_lets_no_key_begin_from_nothing() -> None:
    instance = part("b")
    instance.apply([switch(PUSH), mark(BEGIN, PUSH, 10), data("k", 11, "y", epoch=1)])
    out = instance.apply([damaged(parcel(PUSH, {"k": key_state(9, "x")})), passed(PUSH), shipped(PUSH)])
    assert (notices(out), told(out)) == (["Rejected"], [])
    assert "k" in instance.table.waiting


def test_who_asks_in_words_that_nobody_understands_gets_everything() -> None:
    fetch = switching("k", "j", order="demand")
    source = part("a")
    source.apply([data("k", 1, "x"), data("j", 2, "y")])
    source.apply([switch(fetch), mark(BEGIN, fetch, 10)])
    question = delivered(Message("a", Kind.FETCH, bin_of("k"), b"\xff\xff\xff\xff\xff\xff"))
    kinds = [message.kind for message in source.apply([question]).messages]
    assert Kind.PARCEL in kinds
    assert Kind.SHIPPED in kinds


def test_a_standby_that_lacks_a_copy_does_not_take_over() -> None:
    """The source takes every copy it has sent for one that is there."""
    replica = switching("k", "j", order="replica")
    announce = Record(0, Kind.REPLICATE, -1, "", -1, 0, "", 0, 0, wire.pack(replica))
    copy = parcel(replica, {"k": key_state(5, "old")})._replace(kind=Kind.REPLICA)
    fresh = parcel(replica, {"k": key_state(9, "old", "new")})._replace(kind=Kind.REPLICA)
    instance = part("b")
    instance.apply([announce, copy])
    assert notices(instance.apply([damaged(fresh)])) == ["Rejected"]
    out = instance.apply([switch(replica), mark(BEGIN, replica, 10), passed(replica), shipped(replica)])
    out2 = instance.apply([data("k", 11, "y", epoch=1)])
    assert told(out) + told(out2) == [], "not with the old copy"


def test_keys_that_waited_open_in_the_same_order_after_a_restart() -> None:
    """What was stored of them has no order of its own, and a batch that is repeated must say the same."""
    keys = [f"k{number}" for number in range(40, 0, -1)]
    push = switching(*keys)
    instance = part("b")
    instance.apply([switch(push), mark(BEGIN, push, 10), *(data(k, 11 + n, "y", epoch=1) for n, k in enumerate(keys))])
    batch = [passed(push), shipped(push)]
    again = part("b")
    again.load(instance.deltas())
    out = instance.apply(batch)
    assert again.apply(batch) == out
    assert len(out.results) == len(keys)
