"""The router: whose inbox a record goes into, decided when it comes."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.records import data, move, switching
from whimbrel.core import wire
from whimbrel.core.keys import EVERY_BIN, Selection, bin_of, selection_of
from whimbrel.core.options import RestoreOptions
from whimbrel.core.record import Barrier, Kind, Move, Record
from whimbrel.core.router import UNOWNED, Abort, Begin, Command, Cutover, Fence, Restore, Routed, Router, RouteTable

LIVE = move("k")
HOLD = move("k", hold=True)
PUSH = switching("k")


@pytest.fixture
def router() -> Router:
    """A router of a stage whose every key is at `a`."""
    return Router("r", RouteTable("a"))


def brief(routed: Routed) -> dict[str, list[str]]:
    """By inbox: the events and the names of the markers that go into it, with their epoch if it is not zero."""
    return {
        name: [
            (record.body if record.kind == Kind.DATA else Kind(record.kind).name)
            + (f"/{record.epoch}" if record.epoch else "")
            for record in records
        ]
        for name, records in routed.items()
    }


def send(router: Router, *events: str, key: str = "k", seq: int = 0) -> dict[str, list[str]]:
    """Route records of one key."""
    return brief(router.route([data(key, seq + n, event) for n, event in enumerate(events)]))


def order(router: Router, command: Command, seq: int = 0) -> dict[str, list[str]]:
    """Give the router a command."""
    return brief(router.apply(command, seq))


# ── While nothing moves ──────────────────────────────────────────────────────────────────────────────────────────────


def test_records_go_to_the_owner_in_order(router: Router) -> None:
    assert send(router, "x", "y") == {"a": ["x", "y"]}


def test_nothing_is_routed_nowhere(router: Router) -> None:
    assert router.route([]) == {}


def test_a_record_is_bound_when_it_comes_and_not_before(router: Router) -> None:
    """Late binding: the same record, routed before and after a hand-over, goes to different places."""
    record = data("k", 1, "x")
    before = router.route([record])
    router.table.hand_over(LIVE)
    after = router.route([record])
    assert before == {"a": [record]}
    assert after == {"b": [record._replace(epoch=1)]}


def test_a_key_may_be_elsewhere_than_its_bin(router: Router) -> None:
    router.table.owners.put(selection_of(["k0"]), "b")
    assert bin_of("k0") == bin_of("k673")
    assert send(router, "x", key="k0") == {"b": ["x"]}
    assert send(router, "x", key="k673") == {"a": ["x"]}


def test_a_record_gets_the_epoch_of_its_key_whatever_it_brought(router: Router) -> None:
    router.table.epochs.put(selection_of(bins=[bin_of("k")]), 3)
    router.table.epochs.put(selection_of(["j"]), 5)
    routed = router.route([data("k", 1, "x", epoch=9), data("j", 2, "y"), data("other", 3, "z", epoch=9)])
    assert brief(routed) == {"a": ["x/3", "y/5", "z"]}


# ── Dual routing ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_between_begin_and_cutover_records_go_to_both(router: Router) -> None:
    assert order(router, Begin(LIVE)) == {"a": ["BEGIN"], "b": ["BEGIN"]}
    assert send(router, "x", "y") == {"a": ["x", "y"], "b": ["x", "y"]}
    assert order(router, Cutover(LIVE)) == {"a": ["CUTOVER"], "b": ["CUTOVER"]}
    assert send(router, "z") == {"b": ["z/1"]}


def test_after_an_abort_records_go_to_the_source_alone(router: Router) -> None:
    order(router, Begin(LIVE))
    assert order(router, Abort(LIVE)) == {"a": ["ABORT"], "b": ["ABORT"]}
    assert send(router, "z") == {"a": ["z"]}
    assert router.table.epochs["k"] == 0


def test_other_keys_notice_nothing(router: Router) -> None:
    for command in (Begin(LIVE), Cutover(LIVE)):
        order(router, command)
        assert send(router, "x", key="other") == {"a": ["x"]}


def test_a_marker_says_everything_and_stands_at_the_writers_place(router: Router) -> None:
    (record,) = router.apply(Begin(LIVE), seq=77, now_us=5)["b"]
    assert (record.kind, record.bin, record.src, record.seq, record.ingress_us) == (Kind.BEGIN, EVERY_BIN, "r", 77, 5)
    assert wire.unpack(record.body, Move) == LIVE


def test_several_moves_at_once_do_not_mix(router: Router) -> None:
    order(router, Begin(LIVE))
    order(router, Begin(move("j", id="m2", destination="c")))
    assert send(router, "x") == {"a": ["x"], "b": ["x"]}
    assert send(router, "x", key="j") == {"a": ["x"], "c": ["x"]}
    order(router, Cutover(LIVE))
    assert send(router, "y", key="j") == {"a": ["y"], "c": ["y"]}


# ── Hold ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_held_records_go_nowhere_until_the_cutover_and_then_behind_it(router: Router) -> None:
    assert order(router, Begin(HOLD)) == {"a": ["BEGIN"], "b": ["BEGIN"]}
    assert send(router, "x", "y") == {}
    assert send(router, "o", key="other") == {"a": ["o"]}
    assert order(router, Cutover(HOLD)) == {"a": ["CUTOVER"], "b": ["CUTOVER", "x/1", "y/1"]}
    assert send(router, "z") == {"b": ["z/1"]}


def test_an_abort_gives_held_records_to_the_source_as_they_were(router: Router) -> None:
    order(router, Begin(HOLD))
    send(router, "x", "y")
    assert order(router, Abort(HOLD)) == {"a": ["ABORT", "x", "y"], "b": ["ABORT"]}
    assert send(router, "z") == {"a": ["z"]}


def test_held_records_keep_their_place_in_the_stream(router: Router) -> None:
    router.apply(Begin(HOLD), 10)
    router.route([data("k", 11, "x"), data("k", 12, "y")])
    released = router.apply(Cutover(HOLD), 20)["b"]
    assert [record.seq for record in released] == [20, 11, 12]


# ── Switching at once ────────────────────────────────────────────────────────────────────────────────────────────────


def hints(routed: Routed) -> list[tuple[str, list[str]]]:
    """The hints in the source's inbox: of which move, at which keys."""
    return [wire.unpack(r.body, tuple[str, list[str]]) for r in routed.get("a", []) if r.kind == Kind.HINT]


@pytest.mark.parametrize("by", ["arrival", "key", "demand"])
def test_a_switch_routes_to_the_destination_at_once_and_in_the_new_epoch(router: Router, by: str) -> None:
    moved = switching("k", order=by)
    assert order(router, Begin(moved)) == {"a": ["BEGIN"], "b": ["BEGIN"]}
    assert send(router, "x", "y")["b"] == ["x/1", "y/1"]
    assert order(router, Cutover(moved)) == {"a": ["CUTOVER"], "b": ["CUTOVER"]}
    assert send(router, "z") == {"b": ["z/1"]}
    assert send(router, "o", key="other") == {"a": ["o"]}


def test_the_source_is_hinted_at_each_key_once(router: Router) -> None:
    moved = switching("k", "j", "i")
    router.apply(Begin(moved), 10)
    routed = router.route([data("j", 11, "x"), data("other", 12, "x"), data("k", 13, "x"), data("j", 14, "x")])
    assert hints(routed) == [("m1", ["j", "k"])]
    assert [Kind(record.kind).name for record in routed["a"]] == ["DATA", "HINT"]
    (hint,) = (record for record in routed["a"] if record.kind == Kind.HINT)
    assert (hint.bin, hint.src, hint.seq, hint.ingress_us) == (EVERY_BIN, "r", 14, 1014)
    assert hints(router.route([data("k", 15, "y"), data("i", 16, "x")])) == [("m1", ["i"])]
    assert send(router, "z", key="j", seq=17) == {"b": ["z/1"]}


@pytest.mark.parametrize("by", ["key", "demand"])
def test_nobody_is_hinted_at_keys_whose_order_is_another(router: Router, by: str) -> None:
    order(router, Begin(switching("k", order=by)))
    assert send(router, "x") == {"b": ["x/1"]}


def test_two_switches_hint_apart(router: Router) -> None:
    order(router, Begin(PUSH))
    order(router, Begin(switching("j", id="m2", destination="c")))
    routed = router.route([data("j", 1, "x"), data("k", 2, "x")])
    assert sorted(hints(routed)) == [("m1", ["k"]), ("m2", ["j"])]
    assert {name: len(records) for name, records in routed.items()} == {"a": 2, "b": 1, "c": 1}


def test_after_the_cutover_there_are_no_hints(router: Router) -> None:
    order(router, Begin(PUSH))
    order(router, Cutover(PUSH))
    assert send(router, "x") == {"b": ["x/1"]}
    assert router.hinted == {}


def test_a_repeated_begin_hints_at_nothing_again(router: Router) -> None:
    order(router, Begin(PUSH))
    assert send(router, "x") == {"b": ["x/1"], "a": ["HINT"]}
    assert order(router, Begin(PUSH)) == {}
    assert send(router, "y") == {"b": ["y/1"]}


# ── Ticks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tick_goes_to_everybody_who_has_keys_or_gets_some(router: Router) -> None:
    assert brief(router.tick(1, 50, 60)) == {"a": ["TICK"]}
    order(router, Begin(LIVE))
    assert brief(router.tick(2, 51, 61)) == {"a": ["TICK"], "b": ["TICK"]}
    order(router, Cutover(LIVE))
    assert brief(router.tick(3, 52, 62)) == {"a": ["TICK"], "b": ["TICK"]}
    router.table.owners.put(Selection(bins=frozenset(range(1024))), "c")
    assert brief(router.tick(4, 53, 63)) == {"c": ["TICK"]}


def test_a_tick_behind_a_switch_goes_to_a_source_only_if_it_has_other_keys(router: Router) -> None:
    """The keys that have not left get theirs from the destination's hands."""
    whole = switching(selection=Selection(bins=frozenset(range(1024))))
    order(router, Begin(whole))
    assert brief(router.tick(2, 51, 61)) == {"b": ["TICK"]}
    order(router, Cutover(whole))
    assert brief(router.tick(3, 52, 62)) == {"b": ["TICK"]}


def test_a_tick_says_how_late_it_is(router: Router) -> None:
    assert router.tick(7, 50, 60) == {"a": [Record(0, Kind.TICK, EVERY_BIN, "", 7, 0, "r", 50, 60, b"")]}


def test_a_tick_is_held_among_the_records_and_released_in_its_place(router: Router) -> None:
    """For the moving keys alone: the others had it in time."""
    order(router, Begin(HOLD))
    send(router, "x", seq=1)
    assert brief(router.tick(2, 50, 60)) == {"a": ["TICK"], "b": ["TICK"]}
    send(router, "y", seq=3)
    released = router.apply(Cutover(HOLD), 4)["b"]
    assert [(Kind(record.kind).name, record.seq) for record in released] == [
        ("CUTOVER", 4),
        ("DATA", 1),
        ("TICK", 2),
        ("DATA", 3),
    ]
    assert wire.unpack(released[2].body, Move) == HOLD


# ── Again, and too late ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("moved", "end"),
    [(LIVE, Cutover), (LIVE, Abort), (HOLD, Cutover), (HOLD, Abort), (PUSH, Cutover)],
    ids=["live", "live-abort", "hold", "hold-abort", "switch"],
)
def test_a_repeated_command_does_nothing(router: Router, moved: Move, end: type[Cutover | Abort]) -> None:
    order(router, Begin(moved))
    send(router, "x")
    assert order(router, Begin(moved)) == {}
    assert len(router.held["m1"]) == (1 if moved.hold else 0), "a second BEGIN forgets nothing"
    order(router, end(moved))
    table = (router.table.owners.dump(), router.table.epochs.dump())
    for command in (Begin(moved), Cutover(moved), Abort(moved)):
        assert order(router, command) == {}
    assert (router.table.owners.dump(), router.table.epochs.dump()) == table
    assert (router.moving, router.held) == ({}, {})


def test_an_end_without_a_begin_is_carried_out_and_the_begin_comes_too_late(router: Router) -> None:
    """A coordinator that died between two commands says only the last one again."""
    assert order(router, Abort(LIVE)) == {"a": ["ABORT"], "b": ["ABORT"]}
    assert order(router, Begin(LIVE)) == {}
    assert send(router, "x") == {"a": ["x"]}


# ── What lasts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_restored_router_routes_like_the_one_that_died(router: Router) -> None:
    order(router, Begin(LIVE))
    order(router, Cutover(LIVE))
    blob = router.snapshot()
    assert blob is not None
    again = Router("r", RouteTable("nobody"))
    again.restore(blob)
    for key in ("k", "other"):
        assert send(again, "x", key=key) == send(router, "x", key=key)
    assert order(again, Cutover(LIVE)) == {}, "it knows what is finished"


def test_there_is_no_snapshot_while_something_moves(router: Router) -> None:
    """What is held back lies nowhere else than in the ingress log: a replay has to start before the BEGIN."""
    order(router, Begin(HOLD))
    assert router.snapshot() is None
    order(router, Abort(HOLD))
    assert router.snapshot() is not None


@pytest.mark.parametrize("moved", [HOLD, PUSH], ids=["hold", "switch"])
def test_a_replay_from_a_snapshot_repeats_every_append(moved: Move) -> None:
    """The log a router lives on: whatever it had written, it writes again, byte for byte, so inboxes recognise it."""
    log: list[Command | list[Record] | int] = [
        [data("k", 0, "x"), data("other", 1, "x")],
        Begin(moved),
        [data("k", 20, "y")],
        50,
        [data("k", 40, "z"), data("other", 41, "y")],
        Cutover(moved),
        [data("k", 60, "end")],
    ]

    def run(router: Router, start: int) -> list[Routed]:
        written = []
        for position, content in enumerate(log[start:], start):
            if isinstance(content, list):
                written.append(router.route(content))
            elif isinstance(content, int):
                written.append(router.tick(position * 10, content, content))
            else:
                written.append(router.apply(content, position * 10))
        return written

    first = Router("r", RouteTable("a"))
    blob = first.snapshot()
    assert blob is not None
    written = run(first, 0)
    again = Router("r", RouteTable("nobody"))
    again.restore(blob)
    assert run(again, 0) == written


# ── Several routers ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_router_changes_over_at_its_own_moment() -> None:
    one, two = Router("r", RouteTable("a")), Router("s", RouteTable("a"))
    both = move("k", routers="rs")
    for router in (one, two):
        order(router, Begin(both))
    order(one, Cutover(both))
    assert send(one, "x") == {"b": ["x/1"]}
    assert send(two, "x") == {"a": ["x"], "b": ["x"]}
    (marker,) = two.apply(Cutover(both), 9)["a"]
    assert marker.src == "s"


def test_the_next_epoch_is_above_all_that_a_selection_has_been_in() -> None:
    table = RouteTable("a")
    assert table.next_epoch(selection_of(["k"])) == 1
    table.hand_over(LIVE)
    assert table.next_epoch(selection_of(["k"])) == 2
    assert table.next_epoch(selection_of(["other"])) == 1
    assert table.next_epoch(selection_of(bins=[bin_of("k")])) == 2
    assert table.next_epoch(Selection()) == 1


# ── A lost instance ──────────────────────────────────────────────────────────────────────────────────────────────────

LOST = move("k", id="r1", epoch=3, options=RestoreOptions(frozenset({"m1"}), frozenset({"a", "b"})))


def test_keys_that_are_fenced_belong_to_nobody(router: Router) -> None:
    assert order(router, Fence(LOST)) == {"a": ["DISCARD"], "b": ["DISCARD"]}
    assert order(router, Fence(LOST)) == {}, "said twice"
    assert send(router, "x") == {}
    assert send(router, "y", key="other") == {"a": ["y"]}
    assert router.owners() == {"a", UNOWNED}
    assert set(router.tick(5, 0, 0)) == {"a"}
    assert router.snapshot() is not None


def test_a_fence_that_comes_behind_a_later_one_changes_nothing(router: Router) -> None:
    second = msgspec.structs.replace(LOST, id="r2", epoch=4)
    order(router, Fence(second))
    order(router, Restore(second, {"r": 0}))
    assert order(router, Fence(LOST)) == {}
    assert send(router, "x") == {"b": ["x/4"]}


@pytest.mark.parametrize("begun", [LIVE, HOLD, PUSH])
def test_a_fence_ends_moves_and_what_else_is_said_of_them_comes_too_late(router: Router, begun: Move) -> None:
    order(router, Begin(begun))
    send(router, "x")
    order(router, Fence(LOST))
    assert order(router, Cutover(begun)) == order(router, Begin(begun)) == {}
    assert send(router, "y") == {}
    assert router.moving == {}


def test_a_restoration_hands_the_keys_over_and_reads_the_log_again(router: Router) -> None:
    order(router, Fence(LOST))
    restore = Restore(LOST, {"r": 5})
    assert router.replays(restore)
    past = [data("k", 4, "old"), data("k", 5, "x"), data("other", 6, "y"), data("k", 7, "z")]
    assert [(record.body, record.epoch) for record in router.replayed(restore, past)] == [("x", 3), ("z", 3)]
    ticks = router.replayed(restore, [Record(0, Kind.TICK, EVERY_BIN, "", 8, 0, "r", 9, 9, b"")])
    assert [wire.unpack(record.body, Move) for record in ticks] == [LOST]
    assert router.replayed(restore, [Record(0, Kind.BEGIN, EVERY_BIN, "", 9, 0, "r", 9, 9, b"")]) == []
    assert order(router, restore, 10) == {"b": ["CUTOVER"]}
    assert (order(router, restore), router.replays(restore)) == ({}, False)
    assert send(router, "new") == {"b": ["new/3"]}
    assert router.gained == {"b": 10}
    again = Router("r", RouteTable("a"))
    blob = router.snapshot()
    assert blob is not None
    again.restore(blob)
    assert (again.gained, again.fenced, order(again, Fence(LOST))) == ({"b": 10}, {"r1": None}, {})


def test_nothing_is_read_again_for_one_that_had_no_keys(router: Router) -> None:
    assert not router.replays(Restore(move(id="r1", options=RestoreOptions())))


def test_the_order_to_save_goes_to_all_who_may_have_keys_and_says_what_is_held_back(router: Router) -> None:
    def bounds(seq: int) -> dict[str, int]:
        routed = router.save(Barrier(seq), seq)
        return {name: wire.unpack(records[0].body, Barrier).bound for name, records in routed.items()}

    assert bounds(3) == {"a": 3}
    order(router, Begin(HOLD))
    assert bounds(4) == {"a": 4, "b": 4}
    send(router, "x", "y", seq=5)
    assert bounds(9) == {"a": 4, "b": 4}
    order(router, Cutover(HOLD), 10)
    assert bounds(11) == {"a": 11, "b": 11}
    assert router.gained == {"b": 10}


def test_a_router_knows_the_last_moves_that_are_over_and_so_does_one_that_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("whimbrel.core.router.REMEMBERED", 3)
    router = Router("r", RouteTable("a"))
    for number in range(1, 6):
        one = move("k", id=f"m{number}", epoch=number)
        for command in (Begin(one), Abort(one)):
            order(router, command)
    again = Router("r", RouteTable("a"))
    blob = router.snapshot()
    assert blob is not None
    again.restore(blob)
    assert list(again.finished) == list(router.finished) == ["m3", "m4", "m5"]
    assert order(again, Begin(move("k", id="m5", epoch=5))) == {}
