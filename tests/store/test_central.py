"""The central store: what is written is found again, as it was at any checkpoint that is kept."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest

from tests.store.objects import ALL, Memory, increment, loaded, numbers, version
from whimbrel.checkpoints import names
from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.names import IncrementId
from whimbrel.checkpoints.place import Place
from whimbrel.checkpoints.version import Checkpoint, Increment, Retention, Segment
from whimbrel.core import wire
from whimbrel.core.errors import Conflict, Corrupt, NewerFormat, Refused, UnknownName
from whimbrel.core.increments import Version
from whimbrel.core.keys import bin_of, selection_of


def filled(store: CentralStore) -> None:
    """Two instances, three rounds; `b` moves from one to the other in between."""
    store.write("s", increment(1, version("a", 1), version("b", 2), reached=5))
    store.write("s", increment(1, version("c", 3), reached=4, instance="s-2"))
    assert store.checkpoint("s", {"s-1": 1, "s-2": 1}, 10_000_000) == 1
    store.write("s", increment(2, version("a", 11), version("b", 12), reached=15))
    store.write("s", increment(2, version("b", 14, epoch=1), reached=16, instance="s-2"))
    assert store.checkpoint("s", {"s-1": 1, "s-2": 1}, 20_000_000) == 2
    store.write("s", increment(3, version("b", 99), reached=25))  # of somebody who has not noticed
    store.write("s", increment(3, reached=26, instance="s-2"))
    assert store.checkpoint("s", {"s-1": 1, "s-2": 1}, 30_000_000) == 3
    store.write("s", increment(4, version("d", 40), reached=45))


FIRST = {"a": b"a@0.1", "b": b"b@0.2", "c": b"c@0.3"}
SECOND = {"a": b"a@0.11", "b": b"b@1.14", "c": b"c@0.3"}
NEWEST = {**SECOND, "d": b"d@0.40"}


def test_the_newest_version_of_each_key_now_and_as_of_each_checkpoint(place: Place) -> None:
    store = CentralStore(place)
    filled(store)
    assert [loaded(store, at) for at in (1, 2, 3, None)] == [FIRST, SECOND, SECOND, NEWEST]
    assert store.checkpoints("s") == [
        Checkpoint(1, 10_000_000, 3, 15, 4),
        Checkpoint(2, 20_000_000, 3, 17, 15),
        Checkpoint(3, 30_000_000, 3, 17, 25),
    ]
    assert [store.horizon("s", at) for at in (1, 2, 3, None)] == [4, 15, 25, 25]
    assert (store.kept("s"), store.last("s", "s-1"), store.last("s", "s-2"), store.last("s", "s-3")) == (4, 4, 3, -1)
    assert store.stages() == ["s"]


def test_compaction_changes_nothing_that_is_kept_and_leaves_nothing_that_is_not(place: Place) -> None:
    store = CentralStore(place)
    filled(store)
    store.compact("s", Retention(checkpoints=2), 31_000_000, slack=0)
    assert [loaded(store, at) for at in (2, 3, None)] == [SECOND, SECOND, NEWEST]
    assert [(one.number, one.keys, one.bytes, one.horizon) for one in store.checkpoints("s")] == [
        (2, 3, 17, 15),
        (3, 3, 17, 25),
    ]
    with pytest.raises(UnknownName, match="unknown checkpoint '1'; there is: 2, 3"):
        loaded(store, 1)
    assert len([name for name in place.names("s/manifests") if name.endswith(("1", "2"))]) == 4, (
        "the base's second copy"
    )
    store.write("s", increment(4, reached=46, instance="s-2"))
    assert store.checkpoint("s", {"s-1": 1, "s-2": 1}, 40_000_000) == 4
    store.compact("s", Retention(checkpoints=2), 41_000_000, slack=0)
    there = place.names("")
    assert there == [
        "s/base-segments/0000000002-000000",
        "s/base-segments/0000000003-000000",
        "s/bases/0000000002",
        "s/bases/0000000003",
        "s/checkpoints/0000000003",
        "s/checkpoints/0000000004",
        "s/manifests/s-1/00000-000000000000000003",
        "s/manifests/s-1/00000-000000000000000004",
        "s/manifests/s-2/00000-000000000000000004",
        "s/segments/s-1/00000-000000000000000003-000000",
        "s/segments/s-1/00000-000000000000000004-000000",
    ]
    store.compact("s", Retention(checkpoints=2), 31_000_000, slack=0)
    assert place.names("") == there
    assert [loaded(store, at) for at in (3, 4, None)] == [SECOND, NEWEST, NEWEST]
    assert (store.last("s", "s-1"), store.last("s", "s-2")) == (4, 4)


def test_a_saving_that_is_written_again_changes_nothing_before_and_after_it_was_folded(place: Place) -> None:
    store = CentralStore(place)
    filled(store)
    first = increment(1, version("a", 1), version("b", 2), reached=5)
    store.write("s", first)
    store.compact("s", Retention(checkpoints=1), 31_000_000, slack=0)
    store.write("s", first)
    assert (loaded(store), numbers(store), store.last("s", "s-1")) == (NEWEST, [3], 4)
    for number in (4, 5):
        store.write("s", increment(number + 1, version("e", number), reached=50))
        assert store.checkpoint("s", {"s-1": 1}, number * 10_000_000) == number
        store.compact("s", Retention(checkpoints=1), number * 10_000_000, slack=0)
    assert not [name for name in place.names("s") if "-000000000000000001" in name]


def test_a_stage_is_deleted_and_no_other(place: Place) -> None:
    store = CentralStore(place)
    filled(store)
    store.write("t", increment(1, version("x", 1)))
    store.compact("s", Retention(checkpoints=1), 31_000_000, slack=0)
    store.delete("s")
    assert (store.stages(), loaded(store), loaded(store, stage="t")) == (["t"], {}, {"x": b"x@0.1"})


# ── Without a place, for the rest does not depend on it ──────────────────────────────────────────────────────────────


def test_an_empty_store_has_nothing() -> None:
    store = CentralStore(Memory())
    assert (store.stages(), store.checkpoints("s"), loaded(store)) == ([], [], {})
    assert (store.horizon("s"), store.kept("s"), store.last("s", "s-1")) == (-1, -1, -1)
    store.compact("s", ALL, 0)
    store.delete("s")
    with pytest.raises(UnknownName):
        store.horizon("s", 1)


def test_only_selected_keys_are_loaded_and_only_their_segments_read() -> None:
    memory = Memory()
    store = CentralStore(memory)
    filled(store)
    del memory.blobs["s/segments/s-2/00000-000000000000000001-000000"]  # `c` lies there, and nothing else
    by_key = [one.key for one in store.load("s", selection_of(keys=["b", "nobody"]))]
    by_bin = [one.key for one in store.load("s", selection_of(bins=[bin_of("d")]))]
    assert (by_key, by_bin) == (["b"], ["d"])
    with pytest.raises(Corrupt, match="is missing"):
        loaded(store)


def test_a_checkpoint_waits_for_every_part_that_owns_keys() -> None:
    store = CentralStore(Memory())
    parts = {"s-1": 2, "s-2": 1}
    store.write("s", increment(1, version("a", 1), reached=5))
    store.write("s", increment(1, reached=7, instance="s-2"))
    assert store.checkpoint("s", parts, 1) is None
    store.write("s", increment(1, reached=3, part=1))
    assert (store.checkpoint("s", parts, 2), store.horizon("s")) == (1, 3)
    assert store.checkpoint("s", parts, 3) is None
    store.write("s", increment(2, reached=9))
    store.write("s", increment(2, reached=9, part=1))
    assert store.checkpoint("s", parts, 4) is None
    assert store.checkpoint("s", {"s-1": 2}, 5) == 2  # s-2 has no keys any more
    assert store.horizon("s") == 9
    assert store.checkpoint("s", {}, 6) is None


def test_retention_by_number_and_by_time() -> None:
    store = CentralStore(Memory())
    for number in range(1, 7):
        store.write("s", increment(number, version("a", number), reached=number))
        store.checkpoint("s", {"s-1": 1}, number * 1_000_000)
    store.compact("s", Retention(checkpoints=1, seconds=3.5), 7_000_000)
    assert numbers(store) == [4, 5, 6]
    store.compact("s", Retention(checkpoints=2), 7_000_000)
    assert (numbers(store), store.kept("s")) == ([5, 6], 5)
    store.compact("s", Retention(checkpoints=9, seconds=1), 10**12)
    assert numbers(store) == [5, 6]
    with pytest.raises(Refused, match="at least 1 checkpoint"):
        store.compact("s", Retention(checkpoints=0), 0)


def test_a_fold_waits_until_what_was_saved_since_is_as_large_as_the_last() -> None:
    memory = Memory()
    store = CentralStore(memory)
    folds = []
    for number in range(1, 40):
        store.write(
            "s", increment(number, *(version(f"k{key}", number) for key in range(10) if number == 1 or key == 0))
        )
        store.checkpoint("s", {"s-1": 1}, number)
        store.compact("s", Retention(checkpoints=1), number)
        folds.append(memory.names("s/bases"))
        assert len(memory.names("s/bases")) == len(memory.names("s/base-segments")) <= 2
    assert 2 < len({name for names in folds for name in names}) < 8
    assert len(memory.names("s/manifests")) < 30
    assert len(loaded(store)) == 10


def test_savings_of_nothing_go_with_the_checkpoints_that_counted_them_and_many_small_ones_are_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("whimbrel.checkpoints.compaction.MANY", 10)
    memory = Memory()
    store = CentralStore(memory)
    store.write("s", increment(1, version("a", 1, "x" * 5000)))
    for number in range(2, 40):
        store.checkpoint("s", {"s-1": 1}, number)
        store.compact("s", Retention(checkpoints=1), number)
        assert len(memory.names("s/manifests")) < (4 if number < 20 else 24)
        store.write("s", increment(number, *([version("b", number)] if number >= 20 else [])))
    assert store.last("s", "s-1") == 39
    assert loaded(store) == {"a": b"a@0.1" + b"x" * 5000, "b": b"b@0.39"}


def test_an_instance_that_was_folded_and_is_no_more_is_known_by_its_last_number() -> None:
    store = CentralStore(Memory())
    filled(store)
    for number in (5, 6, 7):
        store.write("s", increment(number))
        store.checkpoint("s", {"s-1": 1}, number)
        store.compact("s", Retention(checkpoints=1), number, slack=0)
    assert (store.last("s", "s-2"), loaded(store)) == (3, NEWEST)


def test_a_large_saving_and_a_large_fold_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.checkpoints.version.PIECE", 20)
    memory = Memory()
    store = CentralStore(memory)
    versions = [*(version(f"k{n}", n) for n in range(9)), version("large", 1, "x" * 50)]
    store.write("s", increment(1, *versions))
    store.checkpoint("s", {"s-1": 1}, 1)
    assert len(memory.names("s/segments")) == 4
    store.compact("s", Retention(checkpoints=1), 1, slack=0)
    assert len(memory.names("s/base-segments")) == 4
    assert loaded(store) == {one.key: one.key_state for one in versions}


def test_of_a_key_that_is_twice_in_a_saving_the_newest_counts() -> None:
    store = CentralStore(Memory())
    store.write("s", increment(1, version("a", 5), version("a", 9), version("a", 7)))
    store.checkpoint("s", {"s-1": 1}, 1)
    assert loaded(store) == {"a": b"a@0.9"}
    store.compact("s", Retention(), 1, slack=0)
    assert (loaded(store), store.checkpoints("s")[0].keys) == ({"a": b"a@0.9"}, 1)


def test_another_saving_of_the_same_number_is_refused_and_harms_nothing() -> None:
    store = CentralStore(Memory())
    store.write("s", increment(1, version("a", 1)))
    with pytest.raises(Conflict, match="above the last one"):
        store.write("s", increment(1, version("b", 1)))
    assert loaded(store) == {"a": b"a@0.1"}


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "/etc", "", ".hidden", "a\0"])
def test_names_that_lead_out_of_the_store_are_refused(name: str) -> None:
    memory = Memory()
    store = CentralStore(memory)
    with pytest.raises(Refused, match="lead out of the store"):
        store.write(name, increment(1, version("a", 1)))
    with pytest.raises(Refused, match="lead out of the store"):
        store.write("s", increment(1, version("a", 1), instance=name))
    for use in (store.checkpoints, store.horizon, store.delete, lambda stage: next(store.load(stage))):
        with pytest.raises(Refused, match="lead out of the store"):
            use(name)
    assert memory.blobs == {}


@pytest.mark.parametrize(("part", "number"), [(-1, 0), (0, -1), (10**5, 0), (0, 10**18)])
def test_numbers_that_would_not_sort_are_refused(part: int, number: int) -> None:
    with pytest.raises(Refused, match="it must be from 0 to"):
        CentralStore(Memory()).write("s", Increment("s-1", part, number, 0, 0, []))


def test_a_key_may_have_any_name() -> None:
    store = CentralStore(Memory())
    keys = ["", "../../etc/passwd", "a/b", "\0", "é", "x" * 5000]
    store.write("s", increment(1, *(version(key, 1) for key in keys)))
    assert sorted(loaded(store)) == sorted(keys)


# ── Damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────

SEGMENT, MANIFEST = "s/segments/s-1/00000-000000000000000002-000000", "s/manifests/s-1/00000-000000000000000002"
MOMENT = "s/checkpoints/0000000002"


def damaged(name: str, blob: bytes | None = None) -> CentralStore:
    """A store in which one object of the second round is not what it was."""
    memory = Memory()
    filled(CentralStore(memory))
    old = memory.blobs[name]
    memory.blobs[name] = old[:-1] + bytes([old[-1] ^ 1]) if blob is None else blob
    return CentralStore(memory)


@pytest.mark.parametrize("name", [SEGMENT, MANIFEST])
def test_what_is_damaged_is_said_and_the_next_older_checkpoint_can_be_used(name: str) -> None:
    store = damaged(name)
    for at in (None, 3, 2):
        with pytest.raises(Corrupt, match=f"{name}: the checksum does not fit"):
            loaded(store, at)
    assert loaded(store, 1) == FIRST
    assert numbers(store) == ([1, 2, 3] if name == SEGMENT else [1])


def test_a_damaged_checkpoint_is_listed_with_its_damage_and_the_others_can_be_used() -> None:
    store = damaged(MOMENT)
    listed = store.checkpoints("s")
    assert [one.number for one in listed if one.damage] == [2]
    assert listed[1].damage == f"{MOMENT}: the checksum does not fit"
    with pytest.raises(Corrupt):
        loaded(store, 2)
    assert [loaded(store, 1), loaded(store, 3), loaded(store)] == [FIRST, SECOND, NEWEST]
    store.write("s", increment(5, reached=50))
    store.write("s", increment(5, reached=50, instance="s-2"))
    assert store.checkpoint("s", {"s-1": 1, "s-2": 1}, 1) == 4
    store.compact("s", Retention(checkpoints=2), 1, slack=0)
    assert numbers(store) == [3, 4]


def test_without_any_checkpoint_that_can_be_read_the_fold_knows_what_it_has() -> None:
    memory = Memory()
    store = CentralStore(memory)
    filled(store)
    store.compact("s", Retention(checkpoints=1), 31_000_000, slack=0)
    for name in memory.names("s/checkpoints"):
        memory.blobs[name] = b"?"
    assert (loaded(store), store.horizon("s"), store.kept("s")) == (NEWEST, -1, -1)
    assert (store.last("s", "s-1"), store.last("s", "s-2")) == (4, 3)
    assert store.checkpoint("s", {"s-1": 1, "s-2": 1}, 1) is None
    store.write("s", increment(4, reached=50, instance="s-2"))
    assert (store.checkpoint("s", {"s-1": 1, "s-2": 1}, 1), loaded(store, 4)) == (4, NEWEST)


def folded(rounds: int = 3) -> tuple[Memory, dict[str, bytes]]:
    """A store with two bases and an increment behind them, and what it has."""
    memory = Memory()
    store = CentralStore(memory)
    for number in range(1, rounds + 1):
        versions = [version("always", number), version(f"k{number}", number)]
        store.write("s", increment(number, *versions, reached=number))
        store.checkpoint("s", {"s-1": 1}, number)
        store.compact("s", Retention(checkpoints=1), number, slack=0)
    store.write("s", increment(rounds + 1, version("last", 9), reached=9))
    return memory, loaded(store)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["a bit", "all of it", "gone", "newer"])
def test_one_damaged_object_of_what_is_folded_loses_nothing(rounds: int, how: str) -> None:
    """Whichever it is: the index or a piece of either base, or an increment that is in one. And the next base is
    whole."""
    sound, truth = folded(rounds)
    last = IncrementId("s-1", 0, rounds + 1)
    for name in sound.blobs:
        if "/checkpoints/" in name or names.increment_of(name) == last:
            continue
        memory = Memory(dict(sound.blobs))
        blob = memory.blobs.pop(name)
        damaged = {"a bit": blob[:-1] + bytes([blob[-1] ^ 1]), "all of it": b"?", "newer": b"\x09" + blob[1:]}
        memory.blobs |= {name: damaged[how]} if how in damaged else {}
        store = CentralStore(memory)
        assert loaded(store) == truth, name
        assert loaded(store, rounds) == {key: held for key, held in truth.items() if key != "last"}, name
        if "/segments/" not in name and "/manifests/" not in name:
            store.checkpoint("s", {"s-1": 1}, 9)
            store.compact("s", Retention(checkpoints=1), 9, slack=0)
            for older in memory.names("s/bases")[:-1]:
                memory.blobs[older] = b"?"
            assert loaded(store) == truth, f"{name}: the base behind it stands by itself"


def test_what_is_in_no_copy_any_more_is_named_and_the_rest_can_be_read() -> None:
    memory, truth = folded()
    for name in memory.names("s/base-segments"):
        memory.blobs[name] = b"?"
    found: dict[str, bytes] = {}
    with pytest.raises(Corrupt, match=r"the newest version of 2 keys \(k1, k2; bins .*\), and there is no other copy"):
        found.update((one.key, one.key_state) for one in CentralStore(memory).load("s"))
    with suppress(Corrupt):
        for one in CentralStore(memory).load("s"):
            found[one.key] = one.key_state
    assert truth.keys() - found.keys() == {"k1", "k2"}, "all that an increment has is there"


class Careless(Memory):
    """A place that does not keep what it is given: a bit flips on its way to the disk."""

    spoils = "nothing"

    def put(self, name: str, blob: bytes) -> None:
        super().put(name, blob[:-1] + bytes([blob[-1] ^ 1]) if f"/{self.spoils}/" in name else blob)


@pytest.mark.parametrize("spoils", ["base-segments", "bases"])
def test_a_fold_is_read_back_before_anything_is_given_up_for_it(spoils: str) -> None:
    memory = Careless()
    store = CentralStore(memory)
    filled(store)
    before = dict(memory.blobs)
    memory.spoils = spoils
    for _ in range(2):
        with pytest.raises(Corrupt, match=f"s/{spoils}/.* is not what was just written"):
            store.compact("s", Retention(checkpoints=1), 31_000_000, slack=0)
        assert before.items() <= memory.blobs.items()
        assert not memory.names("s/bases"), "nobody takes it for one"
        assert loaded(store) == NEWEST
    memory.spoils = "nothing"
    store.compact("s", Retention(checkpoints=1), 31_000_000, slack=0)
    assert (loaded(store), len(memory.names("s/bases"))) == (NEWEST, 1)


def test_nothing_is_folded_or_given_up_while_something_is_damaged() -> None:
    store = damaged(SEGMENT)
    with pytest.raises(Corrupt):
        store.compact("s", Retention(checkpoints=1), 31_000_000, slack=0)
    assert (numbers(store), loaded(store, 1)) == ([1, 2, 3], FIRST)


@pytest.mark.parametrize("name", [SEGMENT, MANIFEST, MOMENT])
def test_what_a_newer_version_has_written_is_said(name: str) -> None:
    store = damaged(name, b"\x09" + bytes(20))
    with pytest.raises(NewerFormat, match=f"{name}: format 9"):
        loaded(store, 2)
    assert loaded(store, 1) == FIRST


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (SEGMENT, SEGMENT.replace("2-0", "4-0")),
        (MANIFEST, MANIFEST.replace("s-1", "s-2")),
        (MOMENT, MOMENT[:-1] + "3"),
    ],
)
def test_an_object_in_another_ones_place_is_noticed(name: str, other: str) -> None:
    memory = Memory()
    store = CentralStore(memory)
    filled(store)
    memory.blobs[name] = memory.blobs[other]
    with pytest.raises(Corrupt):
        loaded(store, 2)


def test_even_a_segment_with_the_same_keys_and_sizes_is_noticed_in_another_ones_place() -> None:
    memory = Memory()
    store = CentralStore(memory)
    store.write("s", increment(1, version("a", 1, "x")))
    store.write("t", increment(1, version("a", 1, "y")))
    (own,), (other,) = memory.names("s/segments"), memory.names("t/segments")
    memory.blobs[own] = memory.blobs[other]
    with pytest.raises(Corrupt, match="holds other versions"):
        loaded(store)


def test_a_segment_of_the_right_name_that_is_not_what_its_index_lists_is_noticed() -> None:
    """Another try of the same increment, say: each version is sound, and it is not the one that counts."""
    memory = Memory()
    store = CentralStore(memory)
    store.write("s", increment(1, version("a", 1), version("b", 1)))
    (name,) = memory.names("s/segments")
    for others in ([version("a", 1)], [version("a", 2), version("b", 1)], [version("b", 1), version("a", 1)]):
        memory.blobs[name] = wire.pack(Segment(name, msgspec.Raw(wire.encode(others))))
        with pytest.raises(Corrupt, match=f"{name} holds other versions than its index says"):
            loaded(store)


def test_luggage_is_opaque() -> None:
    store = CentralStore(Memory())
    blob = bytes(range(256))
    store.write("s", increment(1, Version("a", bin_of("a"), 3, 4, blob)))
    assert list(store.load("s")) == [Version("a", bin_of("a"), 3, 4, blob)]
