"""Keys, bins, selections, and the map that knows a value for every key."""

from __future__ import annotations

import subprocess
import sys

import pytest

from whimbrel.core import wire
from whimbrel.core.keys import BINS, EVERYTHING, KeyMap, Selection, bin_of, part_of, selection_of

# k0, k673 and k949 lie in one bin; so do no others of these.
BIN, FIRST, SECOND, THIRD = 179, "k0", "k673", "k949"


@pytest.mark.parametrize(
    ("key", "bin"),
    [
        ("", 194),
        ("0", 85),
        ("a", 543),
        ("k0", 179),
        ("sensor-1", 314),
        ("sensor-2", 130),
        ("vehicle/42", 662),
        ("Brandenburg", 860),
        ("é", 179),
        ("日本", 960),
        ("🐦", 621),
        ("x" * 1000, 642),
    ],
)
def test_the_bin_of_a_key_is_the_same_for_ever(key: str, bin: int) -> None:
    """Checkpoints and logs are full of bins: if one of these ever changed, keys would be sought where they are not."""
    assert bin_of(key) == bin


def test_the_bin_of_a_key_is_the_same_in_every_process() -> None:
    """Unlike Python's own hash, which each process salts."""
    script = "from whimbrel.core.keys import bin_of; print(bin_of('sensor-1'), bin_of('日本'))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert outputs == {"314 960\n"}


def test_bins_are_evenly_filled() -> None:
    counts = [0] * BINS
    for n in range(100 * BINS):
        counts[bin_of(f"sensor-{n}")] += 1
    assert min(counts) > 50
    assert max(counts) < 160


def test_every_bin_has_one_part() -> None:
    for parts in (1, 2, 3, 16):
        assert {part_of(bin, parts) for bin in range(BINS)} == set(range(parts))


def test_keys_that_share_a_bin_for_the_tests_below() -> None:
    assert [bin_of(key) for key in (FIRST, SECOND, THIRD)] == [BIN] * 3


# ── Selection ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_selection_contains_the_keys_of_its_bins_but_those_without_and_its_own_keys() -> None:
    selection = Selection(frozenset({BIN}), frozenset({"sensor-1"}), frozenset({SECOND}))
    assert [key in selection for key in (FIRST, SECOND, "sensor-1", "sensor-2")] == [True, False, True, False]


def test_a_key_that_is_named_and_left_out_is_in() -> None:
    assert FIRST in Selection(frozenset({BIN}), frozenset({FIRST}), frozenset({FIRST}))


def test_only_the_selection_of_nothing_is_false() -> None:
    assert not Selection()
    assert not Selection(without=frozenset({"a"}))
    assert selection_of(keys=["a"])
    assert selection_of(bins=[1])


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (selection_of(["a"]), selection_of(["a", "b"]), True),
        (selection_of(["a"]), selection_of(["b"]), False),
        (selection_of([FIRST]), selection_of(bins=[BIN]), True),
        (selection_of([FIRST]), Selection(frozenset({BIN}), without=frozenset({FIRST})), False),
        (selection_of([SECOND]), Selection(frozenset({BIN}), without=frozenset({FIRST})), True),
        (selection_of(bins=[1, 2]), selection_of(bins=[2, 3]), True),
        (selection_of(bins=[1]), selection_of(bins=[2]), False),
        (EVERYTHING, selection_of(["anything"]), True),
        (EVERYTHING, Selection(), False),
    ],
)
def test_overlap(one: Selection, other: Selection, overlap: bool) -> None:
    assert one.overlaps(other) == other.overlaps(one) == overlap


# ── KeyMap ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_key_has_the_default_at_first() -> None:
    assert KeyMap("cloud")["anything"] == "cloud"


def test_putting_keys_leaves_their_neighbours_alone() -> None:
    owners = KeyMap("cloud")
    owners.put(selection_of([FIRST]), "edge")
    assert (owners[FIRST], owners[SECOND]) == ("edge", "cloud")


def test_putting_a_bin_takes_earlier_exceptions_in() -> None:
    owners = KeyMap("cloud")
    owners.put(selection_of([FIRST]), "edge")
    owners.put(selection_of(bins=[BIN]), "cabin")
    assert (owners[FIRST], owners[SECOND], owners.by_key) == ("cabin", "cabin", {})


def test_keys_that_a_selection_leaves_out_keep_what_they_had() -> None:
    owners = KeyMap("cloud")
    owners.put(selection_of([FIRST]), "edge")
    owners.put(Selection(frozenset({BIN}), without=frozenset({FIRST, SECOND})), "cabin")
    assert [owners[key] for key in (FIRST, SECOND, THIRD)] == ["edge", "cloud", "cabin"]


def test_a_part_changes_only_what_it_holds() -> None:
    epochs = KeyMap(0)
    epochs.put(Selection(frozenset({BIN, BIN + 1}), frozenset({"sensor-1"})).of_part(1, 2), 1)
    assert epochs[FIRST] == 1, "bin 179 is odd"
    assert epochs.by_bin[BIN + 1] == 0
    assert epochs["sensor-1"] == 0, "bin 314 is even"


def test_the_values_that_a_selection_has() -> None:
    owners = KeyMap("cloud")
    owners.put(selection_of([FIRST]), "edge")
    owners.put(selection_of(bins=[5]), "cabin")
    assert set(owners.values(selection_of(bins=[BIN]))) == {"cloud", "edge"}
    assert set(owners.values(Selection(frozenset({BIN}), without=frozenset({FIRST})))) == {"cloud"}
    assert set(owners.values(selection_of([FIRST], [5]))) == {"edge", "cabin"}
    assert list(owners.values(Selection())) == []


def test_select_is_exact_within_a_bin() -> None:
    owners = KeyMap("cloud")
    owners.put(selection_of([FIRST]), "edge")
    assert owners.select("edge") == selection_of([FIRST])
    cloud = owners.select("cloud")
    assert (FIRST in cloud, SECOND in cloud) == (False, True)
    assert owners.select("edge", selection_of(bins=[BIN])) == selection_of([FIRST])
    assert not owners.select("edge", selection_of([SECOND]))


def test_the_same_keys_are_the_same_selection_however_they_were_asked_for() -> None:
    """`restart` compares what was selected with all that an instance has."""
    owners = KeyMap("cloud")
    owners.put(selection_of([FIRST, SECOND]), "edge")
    whole = owners.select("cloud")
    assert owners.select("cloud", EVERYTHING) == whole
    assert owners.select("cloud", Selection(EVERYTHING.bins, frozenset({"sensor-1"}))) == whole
    assert owners.select("cloud", Selection(EVERYTHING.bins, frozenset({"x"}), frozenset({"x", FIRST}))) == whole
    assert owners.select("edge", selection_of([FIRST, SECOND, THIRD])) == owners.select("edge")


def test_a_dump_brings_a_map_back() -> None:
    owners = KeyMap("cloud")
    owners.put(selection_of([FIRST], [5]), "edge")
    again = KeyMap("")
    again.restore(owners.dump())
    assert (again.by_bin, again.by_key) == (owners.by_bin, owners.by_key)
    again.put(EVERYTHING, "cabin")
    assert owners[FIRST] == "edge", "a dump shares nothing"


def test_what_is_derived_from_a_map_follows_every_change() -> None:
    epochs = KeyMap(0)

    def derived() -> tuple[set[int], Selection, object]:
        return epochs.values(), epochs.select(0), wire.decode(epochs.encode(), tuple[list[int], dict[str, int]])

    assert derived() == ({0}, EVERYTHING, ([0], {})), "a single value stands for all bins"
    copied = epochs.copy()
    epochs.put(selection_of(bins=[5]), 1)
    assert derived() == ({0, 1}, Selection(EVERYTHING.bins - {5}), epochs.dump())
    epochs.lift(EVERYTHING, 2)
    assert derived() == ({2}, Selection(), ([2], {}))
    for part in range(3):
        epochs.put(EVERYTHING.of_part(part, 3), part)
    assert epochs.values() == {0, 1, 2}
    assert epochs.by_bin[:4] == [0, 1, 2, 0]
    epochs.restore(copied.dump())
    assert derived() == ({0}, EVERYTHING, ([0], {}))
    assert copied.values() == {0}, "a copy shares nothing"
