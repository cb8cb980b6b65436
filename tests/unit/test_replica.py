"""A standby: what it is sent, what it keeps, and how it takes over."""

from __future__ import annotations

from tests.unit.records import data, delivered, mark, move, notices, part, reloaded, switch, switching, told
from whimbrel.core import wire
from whimbrel.core.instance import Instance
from whimbrel.core.keys import EVERY_BIN
from whimbrel.core.options import RestoreOptions
from whimbrel.core.record import Emissions, Kind, Message, Move, Parcel, Passed, Record

COPY = switching("k", "j", order="replica")
BEGIN, CUTOVER = Kind.BEGIN, Kind.CUTOVER


def announced(kind: Kind, copy: Move = COPY) -> Record:
    return delivered(Message("", kind, EVERY_BIN, wire.pack(copy)))


def source(*events: Record, copy: Move = COPY) -> tuple[Instance, Emissions]:
    """A source with two keys that has just been told of its standby."""
    instance = part()
    instance.apply([data("k", 1, "x"), data("j", 2, "y"), *events])
    return instance, instance.apply([announced(Kind.REPLICATE, copy)])


def copies(out: Emissions) -> list[str]:
    """The keys whose copies are sent."""
    found = [wire.unpack(message.body, Parcel) for message in out.messages if message.kind == Kind.REPLICA]
    return sorted(key for parcel in found for key in parcel.keys)


def carried(out: Emissions, standby: Instance) -> Emissions:
    """What the standby says to what was sent to it."""
    return standby.apply([delivered(message) for message in out.messages if message.to == "b"])


def test_everything_is_copied_once_and_then_what_changes() -> None:
    instance, out = source()
    assert copies(out) == ["j", "k"]
    assert [message.kind for message in out.messages][-1] == Kind.REPLICATED
    assert copies(instance.apply([data("k", 3, "z")])) == ["k"]
    assert copies(instance.apply([data("other", 4, "z")])) == []
    assert told(instance.apply([data("j", 5, "w")])) == [("j", "y w")], "the source serves on"


def test_an_interval_gathers_what_changes() -> None:
    copy = switching("k", "j", order="replica", interval=3)
    instance, _ = source(copy=copy)
    sent = [copies(instance.apply([data(key, seq, "z")])) for seq, key in enumerate("kjkjkj", 3)]
    assert sent == [[], ["j", "k"], [], [], ["j", "k"], []]


def test_a_budget_makes_the_copy_take_several_batches_and_a_restart_changes_nothing() -> None:
    copy = switching("k", "j", order="replica", budget=1, chunk=8)
    instance, out = source(copy=copy)
    standby = part("b")
    standby.apply([announced(Kind.REPLICATE, copy)])
    said = notices(carried(out, standby))
    for _ in range(10):
        instance, standby = reloaded(instance), reloaded(standby)
        out = instance.apply([delivered(instance.message("a", Kind.WAKE))])
        assert len([message for message in out.messages if message.kind == Kind.REPLICA]) <= 1, "a piece a batch"
        said += notices(carried(out, standby))
    assert said == ["Warm"]
    assert standby.table.replicated(COPY.id) == ["j", "k"]
    assert not instance.table.stashed
    assert not standby.table.gathered


def test_copies_are_not_served() -> None:
    _, out = source()
    standby = part("b")
    standby.apply([announced(Kind.REPLICATE)])
    assert notices(carried(out, standby)) == ["Warm"]
    assert (standby.table.replicated(COPY.id), standby.table.entries) == (["j", "k"], {})
    assert reloaded(standby).table.replicas == standby.table.replicas


def test_a_standby_that_ceases_forgets_everything() -> None:
    instance, out = source()
    standby = part("b")
    standby.apply([announced(Kind.REPLICATE)])
    carried(out, standby)
    for side in (instance, standby):
        assert notices(side.apply([announced(Kind.CEASE)])) == ["Aborted"]
        assert not side.moves.replications
        assert not side.moves.standbys
        assert not side.table.replicas
    late = instance.apply([data("k", 3, "z")])
    assert copies(late) == []
    assert notices(part("b").apply([announced(Kind.CEASE)])) == ["Aborted"], "even if nobody had told it before"


def test_at_the_takeover_only_what_is_not_fresh_travels_and_the_rest_opens_at_once() -> None:
    copy = switching("k", "j", order="replica", interval=100)
    instance, out = source(copy=copy)
    standby = part("b")
    standby.apply([announced(Kind.REPLICATE, copy)])
    carried(out, standby)
    instance.apply([data("k", 3, "z")])  # the copy of k is not fresh any more
    out = instance.apply([switch(copy), data("j", 4, "w"), data("k", 5, "v"), mark(BEGIN, copy, 6)])
    assert notices(out) == ["Closed"]
    assert told(out) == [("j", "y w"), ("k", "x z v")], "what came with SWITCH is still served"
    parcels = [wire.unpack(message.body, Parcel) for message in out.messages if message.kind == Kind.PARCEL]
    assert sorted(key for parcel in parcels for key in parcel.keys) == ["j", "k"], "both have changed"
    assert instance.table.entries == {}
    standby.apply([switch(copy), mark(BEGIN, copy, 6), data("k", 7, "new", epoch=1)])
    assert told(carried(out, standby)) == [("k", "x z v new")]
    assert notices(standby.apply([mark(CUTOVER, copy, 8)])) == ["Opened"]
    assert not standby.table.replicas


def test_a_fresh_copy_opens_when_the_source_has_passed() -> None:
    instance, out = source()
    standby = part("b")
    standby.apply([announced(Kind.REPLICATE)])
    carried(out, standby)
    out = instance.apply([switch(COPY), mark(BEGIN, COPY, 3)])
    assert [message.kind for message in out.messages] == [Kind.PASSED, Kind.SHIPPED]
    assert wire.unpack(out.messages[0].body, Passed).stale == []
    standby.apply([switch(COPY), mark(BEGIN, COPY, 3)])
    assert told(standby.apply([data("j", 4, "early", epoch=1)])) == []
    assert told(carried(out, standby)) == [("j", "y early")]
    assert sorted(standby.table.entries) == ["j", "k"]


def test_the_backlog_of_a_key_whose_copy_is_fresh_finds_it() -> None:
    """It comes before PASSED says which copies are: the source has forgotten the key, so its copy is."""
    instance, out = source()
    standby = part("b")
    standby.apply([announced(Kind.REPLICATE)])
    carried(out, standby)
    carried(instance.apply([switch(COPY)]), standby)
    standby.apply([switch(COPY)])
    out = instance.apply([data("k", 3, "late")])
    assert told(out) == []
    assert told(carried(out, standby)) == [("k", "x late")]


def test_a_standby_that_a_restoration_ends_takes_no_copies_of_the_next_one() -> None:
    """Copies come through the control lane, ahead of the DISCARD that an earlier restoration put between records."""
    standby = part("b")
    older = switching("k", "j", id="m0", order="replica", source="lost")
    standby.apply([announced(Kind.REPLICATE, older), announced(Kind.REPLICATE)])
    _, out = source()
    carried(out, standby)
    restored = move(
        "k",
        "j",
        id="m9",
        protocol="restore",
        destination="a",
        options=RestoreOptions(frozenset({"m0"}), frozenset({"b"})),
    )
    standby.apply([mark(Kind.DISCARD, restored, 1)])
    assert (list(standby.moves.standbys), standby.table.replicated(COPY.id)) == ([COPY.id], ["j", "k"])
    assert reloaded(standby).table.replicated(COPY.id) == ["j", "k"]
