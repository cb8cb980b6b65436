"""Plans of `fluid`: however a move is cut, every key is in one piece, and the matching is as large as any."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from whimbrel.core.keys import Selection, bin_of
from whimbrel.core.options import HandoverOptions
from whimbrel.core.protocols.fluid import PLANS, STEP, Pair, Plan, matched, scheduled
from whimbrel.core.protocols.machine import ORDERED, Migration
from whimbrel.core.record import Move

# Two keys of one bin, and two alone in theirs; beside them one key of each of those bins that nobody ever names.
NAMED = ("k0", "k673", "a", "sensor-1")
HOMES = sorted({bin_of(key) for key in NAMED})
UNNAMED = tuple(
    next(key for key in map(str, itertools.count()) if bin_of(key) == bin and key not in NAMED) for bin in HOMES
)


def migration(source: str, destination: str, selection: Selection) -> Migration:
    """A migration as the coordinator plans it, before it is cut."""
    move = Move(
        "m1", "stage", "fluid", source, destination, selection, 1, frozenset({"r"}), options=HandoverOptions(hold=True)
    )
    return Migration(move, "cloud", "edge")


def turns(pieces: Sequence[Migration]) -> list[list[Migration]]:
    """The pieces, turn by turn."""
    return [list(group) for _, group in itertools.groupby(pieces, key=lambda piece: piece.turn)]


# ── Matching ─────────────────────────────────────────────────────────────────────────────────────────────────────────

pairs = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("wxyz")), unique=True, max_size=9)


def is_matching(chosen: Sequence[Pair]) -> bool:
    """Whether no end is in two pairs."""
    return all(len({pair[end] for pair in chosen}) == len(chosen) for end in (0, 1))


@given(pairs)
def test_a_matching_is_as_large_as_any(pairs: list[Pair]) -> None:
    chosen = matched(pairs)
    assert set(chosen) <= set(pairs)
    assert is_matching(chosen)
    larger = itertools.combinations(pairs, len(chosen) + 1)
    assert not any(is_matching(other) for other in larger)


# ── Cutting ──────────────────────────────────────────────────────────────────────────────────────────────────────────

UNIVERSE = (*NAMED, *UNNAMED)
OTHERS = [bin for bin in range(12) if bin not in HOMES]
selections = st.builds(
    Selection,
    bins=st.frozensets(st.sampled_from([*HOMES, *OTHERS])),
    keys=st.frozensets(st.sampled_from(NAMED)),
    without=st.frozensets(st.sampled_from(NAMED)),
).filter(bool)
lists = st.lists(st.tuples(st.sampled_from([*HOMES, *OTHERS]), st.integers(0, 3)), unique_by=lambda pair: pair[0]).map(
    lambda placed: [[bin for bin, turn in placed if turn == number] for number in range(4)]
)
plans: st.SearchStrategy[Plan] = st.one_of(st.sampled_from(PLANS), lists)


def check_cut(whole: Selection, pieces: Sequence[Selection]) -> None:
    """Every key of a selection is in exactly one of its pieces, and no other key is in any."""
    for key in UNIVERSE:
        assert sum(key in piece for piece in pieces) == (key in whole), key
    for bin in OTHERS:
        assert sum(bin in piece.bins for piece in pieces) == (bin in whole.bins), bin
    assert all(pieces), "nobody waits for a piece of nothing"


@given(st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), selections, min_size=1), plans)
def test_the_pieces_of_a_plan_are_disjoint_and_together_the_selection(moves: dict[Pair, Selection], plan: Plan) -> None:
    planned = [migration(*pair, selection) for pair, selection in moves.items()]
    for step in (1, 3, STEP):
        pieces = scheduled(planned, plan, step, "m7")
        assert [piece.move.id for piece in pieces] == [f"m7/{n}" for n in range(1, len(pieces) + 1)]
        assert {(piece.plan, piece.phase) for piece in pieces} == {("m7", ORDERED)}
        assert [group[0].turn for group in turns(pieces)] == list(range(len(turns(pieces)))), "no turn is empty"
        for pair, selection in moves.items():
            mine = [piece.move.selection for piece in pieces if (piece.move.source, piece.move.destination) == pair]
            check_cut(selection, mine)


@given(st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), selections, min_size=1))
def test_in_a_turn_of_batched_nobody_sends_or_takes_two_pieces(moves: dict[Pair, Selection]) -> None:
    planned = [migration(*pair, selection) for pair, selection in moves.items()]
    for turn in turns(scheduled(planned, "batched", 2, "m1")):
        ends = [(piece.move.source, piece.move.destination) for piece in turn]
        assert is_matching(ends)
        assert all(len({bin_of(k) for k in p.move.selection.keys} | p.move.selection.bins) <= 2 for p in turn)


def test_a_bin_that_a_list_names_twice_moves_once() -> None:
    pieces = scheduled([migration("a", "x", Selection(frozenset({0, 1})))], [[0], [0, 1]], 1, "m1")
    check_cut(Selection(frozenset({0, 1})), [piece.move.selection for piece in pieces])
