"""Plans: how a move is cut into pieces and turns, and how a coordinator lets one turn follow another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Conflict, Refused, UnknownName
from whimbrel.core.keys import BINS, EVERYTHING, KeyMap, Selection, bin_of, selection_of
from whimbrel.core.options import FetchOptions, HandoverOptions, PushOptions
from whimbrel.core.protocols.fluid import PLANS, STEP, Plan, matched, scheduled
from whimbrel.core.protocols.machine import ABORTED, DONE, Abandoned, Migration, Ordered
from whimbrel.core.record import Aborted, Left, Move, Opened, Ready
from whimbrel.core.router import Abort, Begin, Cutover, RouteTable

SITES = {"a": "cloud", "b": "edge", "c": "edge"}


def migration(source: str, destination: str, selection: Selection) -> Migration:
    """A migration as the coordinator plans it, before it is cut."""
    move = Move(
        "m1", "stage", "fluid", source, destination, selection, 1, frozenset({"r"}), options=HandoverOptions(hold=True)
    )
    return Migration(move, "cloud", "edge")


def turns(pieces: Sequence[Migration]) -> list[list[Migration]]:
    """The pieces, turn by turn."""
    return [list(group) for _, group in itertools.groupby(pieces, key=lambda piece: piece.turn)]


# ── Cutting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_whoever_has_a_place_looks_for_another_if_somebody_needs_it() -> None:
    assert sorted(matched([("a", "x"), ("a", "y"), ("b", "x")])) == [("a", "y"), ("b", "x")]


def test_an_instance_may_give_and_take_in_one_turn() -> None:
    assert sorted(matched([("a", "b"), ("b", "c")])) == [("a", "b"), ("b", "c")]


def test_the_plans_differ_in_how_much_moves_at_a_time() -> None:
    two = [migration("a", "b", selection_of(bins=range(4))), migration("c", "d", selection_of(bins=range(4, 8)))]
    shapes = {plan: [len(turn) for turn in turns(scheduled(two, plan, 2, "m1"))] for plan in PLANS}
    assert shapes == {"sudden": [2], "fluid": [1, 1, 1, 1], "batched": [2, 2]}


def test_a_piece_is_like_the_whole_but_for_its_name_and_its_keys() -> None:
    whole = migration("a", "b", selection_of(bins=[1, 2]))
    first, second = scheduled([whole], "fluid", 1, "m1")
    for number, piece in enumerate((first, second), 1):
        assert piece.move == Move(
            f"m1/{number}",
            "stage",
            "fluid",
            "a",
            "b",
            selection_of(bins=[number]),
            1,
            frozenset({"r"}),
            options=HandoverOptions(hold=True),
        )
        assert (piece.from_site, piece.to_site, piece.turn) == ("cloud", "edge", number - 1)


def test_a_list_says_what_moves_when_and_the_rest_moves_last() -> None:
    whole = migration("a", "b", Selection(frozenset(range(6)), without=frozenset({"k0"})))
    pieces = scheduled([whole], [[4], [0, 900], [900]], 1, "m1")
    assert [(sorted(piece.move.selection.bins), piece.turn) for piece in pieces] == [
        ([4], 0),
        ([0], 1),
        ([1, 2, 3, 5], 2),
    ]


def test_a_list_that_names_everything_has_no_last_turn() -> None:
    pieces = scheduled([migration("a", "b", EVERYTHING)], [range(500), range(500, BINS)], 1, "m1")
    assert [len(piece.move.selection.bins) for piece in pieces] == [500, 524]


def test_a_key_moves_with_its_bin_and_what_was_left_out_stays_out() -> None:
    bin = bin_of("k0")
    whole = migration("a", "b", Selection(frozenset({3, bin}), frozenset({"sensor-1"}), frozenset({"k673"})))
    pieces = scheduled([whole], [[bin], [bin_of("sensor-1")]], 1, "m1")
    assert [piece.move.selection for piece in pieces] == [
        Selection(frozenset({bin}), without=frozenset({"k673"})),
        selection_of(["sensor-1"]),
        selection_of(bins=[3]),
    ]


def test_an_unknown_plan_is_refused_with_what_there_is() -> None:
    message = "unknown plan 'slowly'; there is: a list of lists of bins, batched, fluid, sudden"
    with pytest.raises(UnknownName, match=message):
        scheduled([migration("a", "b", EVERYTHING)], "slowly", 1, "m1")


# ── Turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def coordinator() -> Coordinator:
    """Of a stage whose every key is at a."""
    return Coordinator("stage", RouteTable("a"), dict(SITES), KeyMap("r"))


def order(coordinator: Coordinator, plan: Plan = ((0,), (1,)), **options: Any) -> list[Migration]:
    """A move of bins 0, 1 and 2, two turns of one bin and the rest, or as another plan says; all pieces started."""
    selection = selection_of(bins=range(3))
    pieces = coordinator.plan([(selection, "b")], "edge", "fluid", "m1", plan=plan, **options)
    for piece in pieces:
        commands = coordinator.start(piece)
        assert commands == ([] if piece.turn else [Begin(piece.move)])
    return pieces


def finish(coordinator: Coordinator, piece: Migration) -> None:
    id = piece.move.id
    assert coordinator.handle(id, Ready(id, "b", 0, 1)) == [Cutover(piece.move)]
    coordinator.handle(id, Left(id, "a", 0, 1))
    coordinator.handle(id, Opened(id, "b", 0, 1))
    assert piece.phase == DONE


def restarted(coordinator: Coordinator) -> tuple[Coordinator, list[Migration]]:
    """What a restart makes of it, and its migrations, from the journal."""
    journal = [wire.pack(migration) for migration in coordinator.migrations.values()]
    again = Coordinator("stage", RouteTable("a"), dict(SITES), KeyMap("r"))
    pieces = [wire.unpack(blob, Migration) for blob in journal]
    for piece in pieces:
        again.adopt(piece)
    return again, pieces


@pytest.mark.parametrize("restarts", [False, True])
def test_each_turn_begins_when_the_one_before_is_done(coordinator: Coordinator, restarts: bool) -> None:
    pieces = order(coordinator)
    assert [piece.turn for piece in pieces] == [0, 1, 2]
    for number, later in enumerate(pieces[1:], 1):
        assert coordinator.due() == []
        finish(coordinator, pieces[number - 1])
        if restarts:
            coordinator, pieces = restarted(coordinator)
            later = pieces[number]
        assert coordinator.due() == [(later.move.id, Ordered())]
        assert coordinator.handle(later.move.id, Ordered()) == [Begin(later.move)]
    finish(coordinator, pieces[-1])
    assert coordinator.due() == []
    assert list(coordinator.open.values()) == []
    assert coordinator.table.owners.by_bin[:4] == ["b", "b", "b", "a"]


def test_a_turn_waits_for_every_piece_of_the_one_before(coordinator: Coordinator) -> None:
    coordinator.table.owners.put(selection_of(bins=[1]), "c")
    first, second, later = order(coordinator, [[0, 1], [2]])
    assert (first.turn, second.turn, later.turn) == (0, 0, 1)
    finish(coordinator, first)
    assert coordinator.due() == []
    id = second.move.id
    for notice in (Ready(id, "b", 0, 1), Left(id, "c", 0, 1), Opened(id, "b", 0, 1)):
        coordinator.handle(id, notice)
    assert coordinator.due() == [(later.move.id, Ordered())]


def test_all_pieces_of_a_turn_begin_together(coordinator: Coordinator) -> None:
    coordinator.table.owners.put(selection_of(bins=[2]), "c")
    first, *later = order(coordinator, [[0], [1, 2]])
    finish(coordinator, first)
    assert coordinator.due() == [(piece.move.id, Ordered()) for piece in later]


@pytest.mark.parametrize("restarts", [False, True])
def test_an_abort_cancels_the_turns_to_come_and_leaves_what_is_done(coordinator: Coordinator, restarts: bool) -> None:
    pieces = order(coordinator)
    finish(coordinator, pieces[0])
    coordinator.handle("m1/2", Ordered())
    assert coordinator.handle("m1/2", Abandoned("enough")) == [Abort(pieces[1].move)]
    assert coordinator.due() == [], "it is not out yet"
    coordinator.handle("m1/2", Aborted("m1/2", "a", 0, 1))
    if restarts:
        coordinator, pieces = restarted(coordinator)
    ((id, event),) = coordinator.due()
    assert (id, event) == ("m1/3", Abandoned("an earlier turn of its plan was aborted"))
    assert coordinator.handle(id, event) == []
    assert [piece.phase for piece in pieces] == [DONE, ABORTED, ABORTED]
    assert coordinator.due() == []
    assert coordinator.table.owners.by_bin[:3] == ["b", "a", "a"]
    coordinator.handle("m1/2", Aborted("m1/2", "b", 0, 1))
    assert list(coordinator.open.values()) == []


def test_a_later_turn_can_be_aborted_before_it_begins(coordinator: Coordinator) -> None:
    pieces = order(coordinator)
    assert coordinator.handle("m1/2", Abandoned("enough")) == []
    ((id, event),) = coordinator.due()
    coordinator.handle(id, event)
    assert [piece.phase for piece in pieces] == ["holding", ABORTED, ABORTED]
    finish(coordinator, pieces[0])
    assert coordinator.due() == []


def test_two_plans_do_not_wait_for_each_other(coordinator: Coordinator) -> None:
    order(coordinator)
    elsewhere = coordinator.plan([(selection_of(bins=range(5, 7)), "b")], "edge", "fluid", "m4", plan=[[5], [6]])
    for piece in elsewhere:
        coordinator.start(piece)
    finish(coordinator, elsewhere[0])
    assert coordinator.due() == [("m4/2", Ordered())]


def test_keys_of_a_turn_to_come_cannot_be_moved_by_others(coordinator: Coordinator) -> None:
    order(coordinator)
    with pytest.raises(Conflict, match=r"migration m1/3 \(ordered\)"):
        coordinator.plan([(selection_of(bins=[2]), "c")], "edge", "live", "m9")


def test_a_restarted_coordinator_says_again_what_its_turn_said(coordinator: Coordinator) -> None:
    pieces = order(coordinator)
    again = Coordinator("stage", RouteTable("a"), dict(SITES), KeyMap("r"))
    said = [again.adopt(wire.unpack(wire.pack(piece), Migration)) for piece in pieces]
    assert said == [[Begin(pieces[0].move)], [], []]
    assert again.due() == []


# ── Orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_word_the_plan_is_batched_and_a_piece_has_its_usual_size(coordinator: Coordinator) -> None:
    pieces = coordinator.plan([(EVERYTHING, "b")], "edge", "fluid", "m1")
    assert [len(piece.move.selection.bins) for piece in pieces] == [STEP] * (BINS // STEP)
    assert [piece.turn for piece in pieces] == list(range(BINS // STEP))
    assert {piece.move.hold for piece in pieces} == {True}


def test_the_step_can_be_chosen(coordinator: Coordinator) -> None:
    pieces = coordinator.plan([(EVERYTHING, "b")], "edge", "fluid", "m1", step=512, budget=5)
    assert [len(piece.move.selection.bins) for piece in pieces] == [512, 512]
    assert {piece.move.budget for piece in pieces} == {5}


def test_what_is_there_already_has_no_turns(coordinator: Coordinator) -> None:
    assert coordinator.plan([(EVERYTHING, "a")], "cloud", "fluid", "m1") == []


def test_several_destinations_are_one_plan(coordinator: Coordinator) -> None:
    wanted = [(selection_of(bins=[0, 1]), "b"), (selection_of(bins=[2, 3]), "c")]
    pieces = coordinator.plan(wanted, "edge", "fluid", "m1", step=1)
    assert [(piece.move.destination, piece.turn) for piece in pieces] == [("b", 0), ("b", 1), ("c", 2), ("c", 3)]
    assert {piece.plan for piece in pieces} == {"m1"}


@pytest.mark.parametrize("plan", ["sudden", "batched", "fluid"])
def test_two_selections_for_one_destination_both_move(coordinator: Coordinator, plan: str) -> None:
    wanted = [(selection_of(bins=[0]), "b"), (selection_of(bins=[1]), "b")]
    pieces = coordinator.plan(wanted, "edge", "fluid", "m1", plan=plan)
    assert sorted(bin for piece in pieces for bin in piece.move.selection.bins) == [0, 1]


@pytest.mark.parametrize(
    ("protocol", "options", "message"),
    [
        ("live", {"step": 3}, "unknown option of live 'step'; there is: budget, chunk"),
        ("pause", {"plan": "fluid"}, "unknown option of pause 'plan'"),
        ("push", {"split": 3}, "unknown option of push 'split'; there is: budget, chunk, order"),
        ("fetch", {"order": "key"}, "unknown option of fetch 'order'; there is: budget, chunk, split, step"),
        ("fluid", {"order": "key"}, "unknown option of fluid 'order'; there is: budget, chunk, plan, step"),
        ("push", {"order": "demand"}, "unknown order 'demand'; there is: arrival, key"),
        ("push", {"order": "whatever"}, "unknown order 'whatever'; there is: arrival, key"),
        ("fluid", {"plan": "slowly"}, "unknown plan 'slowly'"),
        ("fluid", {"step": 0}, "step must be at least 1, got 0"),
        ("fetch", {"step": -1}, "step must be at least 1, got -1"),
        ("fetch", {"split": 0}, "split must be at least 1, got 0"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(
    coordinator: Coordinator, protocol: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        coordinator.plan([(EVERYTHING, "b")], "edge", protocol, "m1", **options)
    assert coordinator.migrations == {}


@pytest.mark.parametrize(
    ("protocol", "options"),
    [("push", {"order": "key"}), ("fetch", {"split": 4, "step": 2}), ("push", {}), ("fetch", {})],
)
def test_what_an_order_chooses_is_in_the_options_of_the_move(
    coordinator: Coordinator, protocol: str, options: dict[str, Any]
) -> None:
    (planned,) = coordinator.plan([(EVERYTHING, "b")], "edge", protocol, "m1", **options)
    assert planned.move.switch
    usual: PushOptions | FetchOptions = PushOptions() if protocol == "push" else FetchOptions()
    assert planned.move.options == msgspec.structs.replace(usual, **options)
