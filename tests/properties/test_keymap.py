"""KeyMap against a plain dictionary that knows every key there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whimbrel.core.keys import EVERYTHING, KeyMap, Selection, bin_of, part_of

# Two keys of one bin, and one each of two others; beside them one key a bin that stands for all that nobody ever names.
NAMED = ["k0", "k673", "a", "sensor-1"]
KEYS = {key: bin_of(key) for key in (*NAMED, *(f"k{n}" for n in range(9000)))}
BINS = sorted({KEYS[key] for key in NAMED})
UNNAMED = [next(key for key, bin in KEYS.items() if bin == wanted and key not in NAMED) for wanted in BINS]
UNIVERSE = [*NAMED, *UNNAMED]

selections = st.builds(
    Selection,
    bins=st.one_of(st.just(EVERYTHING.bins), st.frozensets(st.sampled_from(BINS))),
    keys=st.frozensets(st.sampled_from(NAMED)),
    without=st.frozensets(st.sampled_from(NAMED)),
)
values = st.sampled_from(["cloud", "edge-1", "edge-2"])
shares = st.integers(1, 3).flatmap(lambda parts: st.tuples(st.integers(0, parts - 1), st.just(parts)))
puts = st.lists(st.tuples(selections, values, shares), max_size=8)


def build(history: list[tuple[Selection, str, tuple[int, int]]]) -> tuple[KeyMap[str], dict[str, str]]:
    """The map and the dictionary after the same puts."""
    subject, model = KeyMap("cloud"), dict.fromkeys(UNIVERSE, "cloud")
    for selection, value, (part, parts) in history:
        subject.put(selection.of_part(part, parts), value)
        model |= {key: value for key in UNIVERSE if key in selection and part_of(bin_of(key), parts) == part}
        assert {key: subject[key] for key in UNIVERSE} == model
    return subject, model


def extent(selection: Selection) -> set[str]:
    """The keys of a selection, of those there are."""
    return {key for key in UNIVERSE if key in selection}


@given(puts, values, selections)
def test_select_is_exact(history: list[tuple[Selection, str, tuple[int, int]]], value: str, among: Selection) -> None:
    subject, model = build(history)
    having = {key for key in UNIVERSE if model[key] == value}
    assert extent(subject.select(value)) == having
    assert extent(subject.select(value, among)) == having & extent(among)


@given(puts, values, selections)
def test_the_same_keys_come_out_as_the_same_selection(
    history: list[tuple[Selection, str, tuple[int, int]]], value: str, among: Selection
) -> None:
    subject, _ = build(history)
    once = subject.select(value, among)
    assert subject.select(value, once) == once
    if among.bins == EVERYTHING.bins and extent(once) == extent(subject.select(value)):
        assert once == subject.select(value)


@given(puts, selections)
def test_selecting_every_value_is_a_partition(
    history: list[tuple[Selection, str, tuple[int, int]]], among: Selection
) -> None:
    subject, _ = build(history)
    shares = [extent(subject.select(value, among)) for value in ("cloud", "edge-1", "edge-2")]
    assert sorted(key for share in shares for key in share) == sorted(extent(among))


@given(puts, selections)
def test_values_are_those_of_the_selected_keys(
    history: list[tuple[Selection, str, tuple[int, int]]], selection: Selection
) -> None:
    subject, model = build(history)
    elsewhere = {value for bin, value in enumerate(subject.by_bin) if bin in selection.bins and bin not in BINS}
    assert set(subject.values(selection)) == {model[key] for key in extent(selection)} | elsewhere


@given(selections, selections)
def test_overlap_is_a_common_key(one: Selection, other: Selection) -> None:
    elsewhere = bool((one.bins & other.bins) - set(BINS))
    assert one.overlaps(other) == (bool(extent(one) & extent(other)) or elsewhere)


@given(puts, puts)
def test_a_dump_is_all_there_is(
    history: list[tuple[Selection, str, tuple[int, int]]], other: list[tuple[Selection, str, tuple[int, int]]]
) -> None:
    subject, model = build(history)
    again, _ = build(other)
    again.restore(subject.dump())
    assert {key: again[key] for key in UNIVERSE} == model


levels = st.lists(st.tuples(selections, st.integers(0, 3), shares), max_size=8)


@given(levels)
def test_lifting_never_lowers(history: list[tuple[Selection, int, tuple[int, int]]]) -> None:
    subject, model = KeyMap(0), dict.fromkeys(UNIVERSE, 0)
    for selection, least, (part, parts) in history:
        subject.lift(selection.of_part(part, parts), least)
        for key in UNIVERSE:
            if key in selection and part_of(bin_of(key), parts) == part:
                model[key] = max(model[key], least)
        assert {key: subject[key] for key in UNIVERSE} == model


@given(selections, selections)
def test_a_union_has_the_keys_of_both(one: Selection, other: Selection) -> None:
    assert extent(one.union(other)) == extent(one) | extent(other)
