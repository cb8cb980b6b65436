"""Dealing keys out to instances: nothing is lost, everybody has about as much, and no more is moved than must be."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from whimbrel.core.balance import Held, Transfers, Unit, level, place, select, weigh
from whimbrel.core.keys import KeyMap, Selection, bin_of

NAMES = ["s-1", "s-2", "s-3", "s-4", "s-5"]

units = st.one_of(st.integers(0, 60), st.integers(0, 9).map("key-{}".format))
everything = st.dictionaries(units, st.tuples(st.integers(0, 9), st.sampled_from(NAMES)), max_size=60)
staffs = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)


def dealt(everything: dict[Unit, tuple[int, str]]) -> dict[str, dict[Unit, int]]:
    """By instance: what it has. A single key weighs what it weighs."""
    held: dict[str, dict[Unit, int]] = {name: {} for name in NAMES}
    for unit, (weight, name) in everything.items():
        held[name][unit] = weight if isinstance(unit, int) else 1
    return held


def after(held: Held, transfers: Transfers) -> dict[str, dict[Unit, int]]:
    """What everybody has when it is done."""
    changed = {name: dict(units) for name, units in held.items()}
    for (source, destination), moved in transfers.items():
        for unit in moved:
            changed[destination][unit] = changed[source].pop(unit)
    return changed


def loads(held: Held, to: list[str], *, known: bool) -> dict[str, int]:
    """How much each has: keys, or bins in which no key is known."""
    return {name: sum(w if known else not w for w in held[name].values()) for name in to}


def moved(held: Held, transfers: Transfers) -> int:
    return sum(held[source][unit] for (source, _), units in transfers.items() for unit in units)


@given(everything, staffs)
def test_nothing_is_lost_and_all_of_it_is_where_it_shall_be(
    everything: dict[Unit, tuple[int, str]], to: list[str]
) -> None:
    held = dealt(everything)
    for plan in (place, level):
        changed = after(held, plan(held, to))
        assert sorted((str(u), w) for name in to for u, w in changed[name].items()) == sorted(
            (str(u), w) for units in held.values() for u, w in units.items()
        )


@given(everything, staffs)
def test_everybody_has_as_much_within_one_bin(everything: dict[Unit, tuple[int, str]], to: list[str]) -> None:
    held = dealt(everything)
    changed = after(held, level(held, to))
    for known in (True, False):
        load = loads(changed, to, known=known)
        for name in to:
            lightest = min((w or 1 for w in changed[name].values() if bool(w) == known), default=0)
            assert load[name] - min(load.values()) <= lightest


@given(everything, staffs)
@example({0: (5, "s-2"), 1: (7, "s-1"), 2: (6, "s-1")}, ["s-1", "s-2"])  # where taking the heaviest first goes too far
def test_no_more_is_moved_than_must_be(everything: dict[Unit, tuple[int, str]], to: list[str]) -> None:
    """Exactly, if all bins weigh the same; otherwise up to half of the heaviest one for each instance."""
    same = {unit: (min(weight, 1), name) for unit, (weight, name) in everything.items()}
    heaviest = max((weight for weight, _ in everything.values()), default=1)
    for held, slack in ((dealt(same), 0), (dealt(everything), max(heaviest, 1) * len(to) / 2)):
        before = loads(held, to, known=True)
        total = sum(sum(units.values()) for units in held.values())
        low, high = divmod(total, len(to))
        quota = sorted(before.values(), reverse=True)
        must = total - sum(quota) + sum(max(0, load - low - (n < high)) for n, load in enumerate(quota))
        assert moved(held, level(held, to)) <= must + slack


@given(everything, staffs)
def test_what_is_even_stays_as_it_is(everything: dict[Unit, tuple[int, str]], to: list[str]) -> None:
    held = dealt(everything)
    assert level(after(held, level(held, to)), to) == {}


@given(everything, staffs)
def test_a_move_to_a_site_leaves_alone_what_is_there(everything: dict[Unit, tuple[int, str]], to: list[str]) -> None:
    held = dealt(everything)
    assert not {source for source, _ in place(held, to)} & set(to)


KEYS = [f"k{n}" for n in range(300)]


@given(
    st.lists(st.tuples(st.frozensets(st.sampled_from(KEYS[:40])), st.booleans(), st.sampled_from(NAMES)), max_size=6),
    staffs,
)
def test_routes_after_the_moves_are_even_whatever_they_were(
    history: list[tuple[frozenset[str], bool, str]], to: list[str]
) -> None:
    """With real bins and single keys, and the selections that a coordinator gets."""
    owners = KeyMap("s-1")
    for keys, as_bins, name in history:
        owners.put(Selection(bins=frozenset(map(bin_of, keys))) if as_bins else Selection(keys=keys), name)
    parts = {name: owners.select(name) for name in NAMES}
    held = {name: weigh(part, KEYS) for name, part in parts.items()}
    assert {name: sum(held[name].values()) for name in NAMES} == {
        name: sum(owners[key] == name for key in KEYS) for name in NAMES
    }
    for (source, destination), moving in level(held, to).items():
        owners.put(select(moving, parts[source]), destination)
    counts = [sum(owners[key] == name for key in KEYS) for name in to]
    assert sum(counts) == len(KEYS)
    heaviest = max(sum(bin_of(key) == bin for key in KEYS) for bin in map(bin_of, KEYS))
    assert max(counts) - min(counts) <= heaviest
