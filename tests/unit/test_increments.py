"""Increments: what a part sends to the store, what it says it reaches, and what is covered by all of them."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.records import (
    Tape,
    data,
    delivered,
    key_state,
    kinds,
    mark,
    move,
    parcel,
    part,
    passed,
    reloaded,
    save,
    shipped,
    switch,
    switching,
    told,
)
from whimbrel.core.increments import STORE, Assembly, TrimHorizon, Version, VersionChunk
from whimbrel.core.instance import Instance
from whimbrel.core.keys import bin_of, part_of
from whimbrel.core.record import Checkpointed, Emissions, Kind, Record


def wakes(out: Emissions) -> list[Record]:
    """The wake-ups that a part has sent to itself, as they come back."""
    return [delivered(message) for message in out.messages if message.kind == Kind.WAKE]


class Store:
    """Takes what parts message to it."""

    def __init__(self) -> None:
        self.versions: list[Version] = []
        self.saved: list[Checkpointed] = []
        self._assembly = Assembly()

    def take(self, out: Emissions) -> None:
        for message in out.messages:
            if message.to == STORE:
                taken = self._assembly.take(message.kind, message.body)
                if isinstance(taken, Checkpointed):
                    self.saved.append(taken)
                else:
                    self.versions += taken.unpacked()

    def seen(self) -> dict[str, list[str]]:
        """By key: what it had seen when it was last saved."""
        bags = {version.key: version.unpacked() for version in self.versions}
        return {key: msgspec.msgpack.decode(bag.state, type=Tape.State).seen for key, bag in bags.items()}

    def drain(self, instance: Instance, out: Emissions) -> int:
        """Take all of an increment, however many batches it needs; return how many."""
        self.take(out)
        batches = 1
        while any(message.kind == Kind.WAKE for message in out.messages):
            out = instance.apply(wakes(out))
            self.take(out)
            batches += 1
        return batches


def test_nothing_is_noted_before_the_first_save() -> None:
    a = part()
    assert kinds(a.apply([data("k", 1, "x")])) == []
    assert a.moves.increments is None


def test_the_first_saving_has_everything_and_the_next_what_has_changed() -> None:
    a, store = part(), Store()
    a.apply([data("k", 1, "x"), data("l", 2, "y")])
    store.take(a.apply([save(3)]))
    assert store.seen() == {"k": ["x"], "l": ["y"]}
    assert store.saved == [Checkpointed("a", 0, 1, "r", 3, 3)]
    store = Store()
    a.apply([data("l", 4, "z")])
    assert kinds(a.apply([data("l", 5, "zz")])) == [], "only when it is told to"
    store.take(a.apply([save(6)]))
    assert (store.seen(), store.saved) == ({"l": ["y", "z", "zz"]}, [Checkpointed("a", 0, 1, "r", 6, 6)])
    assert [(v.key, v.bin, v.epoch, v.seq) for v in store.versions] == [("l", bin_of("l"), 0, 5)]


def test_what_comes_behind_it_in_the_batch_is_saved_too() -> None:
    a, store = part(), Store()
    store.take(a.apply([data("k", 1, "x"), save(2), data("k", 3, "y")]))
    assert store.seen() == {"k": ["x", "y"]}
    store = Store()
    store.take(a.apply([save(4)]))
    assert store.versions == [], "and not again"
    assert store.saved[-1].reached == 4


@pytest.mark.parametrize("again", [False, True])
def test_a_large_part_is_saved_over_several_batches(again: bool) -> None:
    a, store = part(), Store()
    a.apply([data(key, n, "x" * 50) for n, key in enumerate("klmnop", 1)])
    out = a.apply([save(9, budget=150)])
    batches = 1
    while True:
        store.take(out)
        woken = wakes(out)
        if not woken:
            break
        assert store.saved == [], "not before everything is there"
        a = reloaded(a) if again else a
        out = a.apply([*woken, data("k", 20 + batches, "late")] if batches == 1 else woken)
        batches += 1
    assert batches > 2
    assert {version.key for version in store.versions} == set("klmnop")
    assert store.saved == [Checkpointed("a", 0, 1, "r", 9, 9)]
    store = Store()
    store.take(a.apply([save(30, budget=1 << 20)]))
    assert set(store.seen()) == {"k"}, "changed after it had been saved"


@pytest.mark.parametrize("again", [False, True])
def test_a_large_key_is_saved_in_pieces_as_it_was(again: bool) -> None:
    a, store = part(), Store()
    a.apply([data("k", 1, "x" * 100)])
    out = a.apply([save(2, budget=1, chunk=30)])
    batches = 1
    while True:
        store.take(out)
        woken = wakes(out)
        if not woken:
            break
        a = reloaded(a) if again else a
        out = a.apply([*woken, data("k", 2 + batches, "y")])
        batches += 1
    assert batches > 3
    assert (store.seen(), store.versions[0].seq) == ({"k": ["x" * 100]}, 1)
    assert not a.table.stashed
    store = Store()
    store.take(a.apply([save(50, chunk=1 << 20)]))
    assert store.seen()["k"][1:] == ["y"] * (batches - 1)


def test_one_that_is_asked_for_meanwhile_waits_for_its_turn() -> None:
    a, store = part(), Store()
    a.apply([data(key, n, "x" * 50) for n, key in enumerate("klm", 1)])
    out = a.apply([save(9, budget=1)])
    store.take(out)
    out = a.apply(
        [*(delivered(message) for message in out.messages if message.to == "a"), data("k", 10, "y"), save(11, budget=1)]
    )
    store.drain(a, out)
    assert [saved.number for saved in store.saved] == [9, 11]
    assert [version.key for version in store.versions] == ["k", "l", "m", "k"]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_part_that_comes_back_knows_what_is_lacking(compacted: bool) -> None:
    a, store = part(), Store()
    kept: list[bytes] = []
    for batch in ([data("k", 1, "x"), save(2)], [data("l", 3, "y")], [data("m", 4, "z")]):
        a.apply(batch)
        kept += a.deltas()
    back = reloaded(a) if compacted else part()
    if not compacted:
        back.load(kept)
    store.take(back.apply([save(5)]))
    assert store.seen() == {"l": ["y"], "m": ["z"]}


def test_a_batch_that_changes_little_stores_little_of_the_book() -> None:
    a = part()
    a.apply([data(f"k{n}", n, "x") for n in range(500)])
    a.apply([save(1000)])
    a.deltas()
    a.apply([data("k1", 1001, "y")])
    assert sum(map(len, a.deltas())) < 200


def test_every_part_speaks_for_itself() -> None:
    one, two = part("a", 0, 2), part("a", 1, 2)
    store = Store()
    for n, instance in enumerate((one, two)):
        mine = [key for key in "klmnopqr" if part_of(bin_of(key), 2) == n]
        instance.apply([data(key, 1 + i, "x") for i, key in enumerate(mine)])
        store.take(instance.apply([save(50)]))
    assert store.saved == [Checkpointed("a", 0, 2, "r", 50, 50), Checkpointed("a", 1, 2, "r", 50, 50)]
    assert {version.key for version in store.versions} == set("klmnopqr")


# ── While keys move ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_routers_hold_back_is_not_reached() -> None:
    a, store = part(), Store()
    store.take(a.apply([save(9, bound=4)]))
    assert store.saved == [Checkpointed("a", 0, 1, "r", 9, 4)]


def test_while_keys_are_coming_it_reaches_no_further() -> None:
    b, m, store = part("b"), move("k"), Store()
    store.take(b.apply([data("own", 1, "x"), save(2)]))
    store.take(b.apply([mark(Kind.BEGIN, m, 3), data("k", 4, "y"), data("own", 5, "z"), save(6)]))
    assert [saved.reached for saved in store.saved] == [2, 2]
    assert store.seen() == {"own": ["x", "z"]}
    store.take(b.apply([parcel(m, {"k": key_state(3, "a")}), shipped(m), save(7)]))
    assert "k" not in store.seen(), "the source still speaks for it, and saves it"
    store.take(b.apply([mark(Kind.CUTOVER, m, 8), save(9)]))
    assert [saved.reached for saved in store.saved] == [2, 2, 2, 9]
    assert store.seen()["k"] == ["a", "y"]
    assert store.versions[-1].epoch == 1


def test_a_key_that_comes_with_a_switch_is_saved_when_the_switch_is_over() -> None:
    b, m, store = part("b"), switching("k"), Store()
    b.apply([switch(m), mark(Kind.BEGIN, m, 3)])
    b.apply([parcel(m, {"k": key_state(2, "a")}), passed(m), shipped(m)])
    store.take(b.apply([data("k", 4, "y", epoch=1), save(5)]))
    assert (store.versions, store.saved[-1].reached) == ([], -1)
    store.take(b.apply([mark(Kind.CUTOVER, m, 6), save(7)]))
    assert (store.seen(), store.saved[-1].reached) == ({"k": ["a", "y"]}, 7)


def test_a_key_that_has_left_is_not_saved() -> None:
    a, m, store = part(), move("k"), Store()
    a.apply([save(1)])
    a.apply([data("k", 2, "x"), data("l", 3, "y"), mark(Kind.BEGIN, m, 4)])
    a.apply([mark(Kind.CUTOVER, m, 5)])
    store.take(a.apply([save(6)]))
    assert set(store.seen()) == {"l"}
    assert store.saved[-1].reached == 6, "it has left with its key"


def test_saving_changes_no_result() -> None:
    plain, increment = part(), part()
    batches = [[data("k", n, f"e{n}")] for n in range(1, 6)]
    said = [told(plain.apply(batch)) for batch in batches]
    assert [told(increment.apply([*batch, save(100)])) for batch in batches] == said


@pytest.mark.parametrize("amid", [False, True], ids=["idle", "amid another"])
def test_another_store_gets_everything(amid: bool) -> None:
    a, store = part(), Store()
    a.apply([data("k", 1, "x"), data("l", 2, "y"), data("m", 3, "z")])
    out = a.apply([save(4, budget=1 if amid else 1000)])
    if amid:  # a key a batch: two are still to be saved for the old one
        store.take(out)
        out = a.apply([*wakes(out), save(5, anew=True)])
        store.drain(a, out)
    else:
        store.drain(a, out)
        store.drain(a, a.apply([save(5, anew=True)]))
    assert [version.key for version in store.versions] == ["k", "l", "m", "k", "l", "m"]
    assert kinds(a.apply([save(6)])) == [Kind.CHECKPOINTED], "once"


# ── At the store ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_of_two_versions_the_later_epoch_counts_then_the_later_seq() -> None:
    old, new = Version("k", 1, 1, 90, b""), Version("k", 1, 2, 50, b"")
    assert new.is_newer(old)
    assert not old.is_newer(new)
    assert not new.is_newer(new)
    assert Version("k", 1, 2, 51, b"").is_newer(new)
    assert old.is_newer(None)


def test_a_large_key_that_begins_again_begins_from_nothing() -> None:
    """Its part died between two batches: the same pieces come again."""
    a, assembly = part(), Assembly()
    a.apply([data("k", 1, "x" * 100)])
    messages = [message for message in a.apply([save(2, chunk=60)]).messages if message.kind == Kind.PARCEL]
    nothing = VersionChunk.of(("r", 2), [])
    assert assembly.take(messages[0].kind, messages[0].body) == nothing
    *before, last = [assembly.take(message.kind, message.body) for message in messages]
    assert before == [nothing] * (len(messages) - 1)
    assert not isinstance(last, Checkpointed)
    assert [version.unpacked() for version in last.unpacked()] == [a.table.entries["k"].saved]


def test_a_large_key_whose_first_piece_never_came_makes_no_version() -> None:
    a, assembly = part(), Assembly()
    a.apply([data("k", 1, "x" * 100)])
    messages = [message for message in a.apply([save(2, chunk=60)]).messages if message.kind == Kind.PARCEL]
    assert len(messages) > 1
    assert [assembly.take(message.kind, message.body) for message in messages[1:]] == [
        VersionChunk.of(("r", 2), [])
    ] * (len(messages) - 1)


# ── What is covered ──────────────────────────────────────────────────────────────────────────────────────────────────


def saved(instance: str, reached: int, part: int = 0, parts: int = 1, src: str = "r") -> Checkpointed:
    return Checkpointed(instance, part, parts, src, reached, reached)


def test_covered_is_what_all_parts_of_all_owners_have_reached() -> None:
    horizon = TrimHorizon("r")
    assert horizon.advance(["a"], {}, 999) == -1
    horizon.note(saved("a", 9, 0, 2))
    assert horizon.advance(["a"], {}, 999) == -1, "one part is missing"
    horizon.note(saved("a", 7, 1, 2))
    assert horizon.advance(["a"], {}, 999) == 7
    assert horizon.advance(["a", "b"], {}, 999) == 7, "what is covered once is covered for ever"
    horizon.note(saved("a", 20, 0, 2))
    horizon.note(saved("a", 20, 1, 2))
    assert horizon.advance(["a", "b"], {}, 999) == 7
    horizon.note(saved("b", 15))
    assert horizon.advance(["a", "b"], {}, 999) == 15
    horizon.note(saved("b", 12))
    assert horizon.advance(["b"], {}, 999) == 15


def test_who_has_gained_keys_must_have_reached_that_place() -> None:
    horizon = TrimHorizon("r")
    horizon.note(saved("b", 80))
    assert horizon.advance(["b"], {"b": 90}, 999) == -1
    horizon.note(saved("b", 100))
    assert horizon.advance(["b"], {"b": 90}, 999) == 100


def test_another_router_has_another_ruler() -> None:
    horizon = TrimHorizon("r")
    horizon.note(saved("a", 50, src="q"))
    assert horizon.advance(["a"], {}, 999) == -1


def test_a_router_that_comes_back_does_not_know_who_owns_what() -> None:
    horizon = TrimHorizon("r")
    horizon.note(saved("a", 50))
    assert horizon.advance(["a"], {}, 50) == -1, "it has not even sent that BARRIER again"
    assert horizon.advance(["a"], {}, 51) == 50


def test_where_nobody_owns_nothing_is_covered() -> None:
    assert TrimHorizon("r").advance([], {}, 999) == -1
