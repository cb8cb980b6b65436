"""The gateway: whatever dies, and whatever append fails, the inboxes end up as if nothing had happened.

The main tests play one long script of records, ticks, moves and snapshots as often as it has appends, and let another
one fail each time: before it has happened, and after (the writer cannot know which).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.app.failing import Died, FailingLog, Fuse
from whimbrel.core import wire
from whimbrel.core.errors import Bug, Corrupt, Stop, Trimmed, Unavailable
from whimbrel.core.keys import BINS, EVERY_BIN, Selection, bin_of
from whimbrel.core.options import HandoverOptions, RestoreOptions
from whimbrel.core.record import Checkpointed, Kind, Move, Record
from whimbrel.core.router import UNOWNED, Abort, Begin, Command, Cutover, Fence, Restore, Router, RouteTable
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import parse_schema
from whimbrel.log import EmbeddedLog, chunks, codec
from whimbrel.log.contract import Entry, Lane, Log
from whimbrel.log.memory import MemoryLog
from whimbrel.orchestrator.known_keys import KnownKeys, seen

SCHEMA = parse_schema("n long")
KEYS = ["a", "b", "c", "d"]
NAMES = ["s-1", "s-2", "s-3"]


class World:
    """The logs, which outlive every gateway, and the gateway of the moment."""

    def __init__(
        self,
        fuse: Fuse | None = None,
        *,
        keep: bool = False,
        make: Callable[[str], Log] | None = None,
        stores: bool = False,
    ) -> None:
        self.stores = stores
        make = make or (lambda name: MemoryLog())
        self.fuse = fuse or Fuse()
        self.logs = {name: FailingLog(make(name), self.fuse) for name in ("ingress", "known", *NAMES)}
        self.journal: bytes | None = None
        self.step = 0
        self.keep = keep
        self.gateway = self.born()

    def born(self) -> Gateway:
        router = Router("gateway", RouteTable("s-1"))
        ingress, known = self.logs["ingress"], self.logs["known"]
        gateway = Gateway(
            router,
            ingress,
            known,
            self.logs.__getitem__,
            codec.ArrowCodec(SCHEMA),
            lambda: self.step * 1_000,
            uptime=lambda: self.step * 1_000_000,
            keep=self.keep,
            stores=self.stores,
        )
        gateway.recover(self.journal)
        return gateway

    def reborn(self) -> None:
        self.gateway = self.born()

    def save(self) -> None:
        blob = self.gateway.save()
        if blob is not None:
            self.journal = blob
            self.gateway.saved(blob)

    def inbox(self, name: str) -> list[Record]:
        return [record for entry in self.logs[name].read(0) for record in codec.records(entry)]

    def inboxes(self) -> dict[str, list[Record]]:
        return {name: self.inbox(name) for name in NAMES}


Step = Callable[[World], Any]


def send(counter: int, *keys: str) -> Step:
    events = [(key, (counter * 100 + number,), None) for number, key in enumerate(keys)]
    return lambda world: world.gateway.ingest(events, "source", counter)


def move(id: str, *keys: str, to: str = "s-2", source: str = "s-1", epoch: int = 1, hold: bool = False) -> Move:
    return Move(
        id=id,
        stage="s",
        protocol="pause" if hold else "live",
        source=source,
        destination=to,
        selection=Selection(keys=frozenset(keys)),
        epoch=epoch,
        routers=frozenset({"gateway"}),
        options=HandoverOptions(hold),
    )


def order(command: Command) -> Step:
    return lambda world: world.gateway.command(command)


def tick(counter: int) -> Step:
    return lambda world: world.gateway.tick(counter)


def save(world: World) -> None:
    world.save()


LIVE, BACK, HELD, OFF = (
    move("m1", "a"),
    move("m2", "b", to="s-3"),
    move("m3", "c", "d", hold=True),
    move("m4", "b", hold=True),
)
LOST = Move(
    id="r1",
    stage="s",
    protocol="restore",
    source="s-2",
    destination="s-3",
    selection=Selection(keys=frozenset({"a", "c", "d"})),
    epoch=2,
    routers=frozenset({"gateway"}),
    options=RestoreOptions(parties=frozenset({"s-2"})),
)
SINCE = {"gateway": 6 * codec.ROWS + 1}

SCRIPT: list[Step] = [
    send(0, *KEYS),
    save,
    send(1, "a", "b"),
    order(Begin(LIVE)),
    send(2, *KEYS),
    save,
    order(Begin(BACK)),
    tick(0),
    send(3, *KEYS, *KEYS),
    order(Cutover(LIVE)),
    order(Cutover(LIVE)),
    send(4, "a"),
    order(Abort(BACK)),
    save,
    send(5, *KEYS),
    order(Begin(HELD)),
    send(6, "c", "d", "c"),
    send(7, "c"),
    tick(1),
    order(Begin(OFF)),
    send(8, *KEYS),
    order(Begin(HELD)),
    order(Abort(OFF)),
    order(Cutover(HELD)),
    send(9, *KEYS),
    save,
    tick(2),
    send(10, "e", *KEYS),
]
RESCUE: list[Step] = [
    *SCRIPT,
    lambda world: world.gateway.order_checkpoint(0),
    order(Fence(LOST)),
    send(11, *KEYS),
    save,
    send(12, "a", "b"),
    tick(3),
    order(Restore(LOST, SINCE)),
    order(Restore(LOST, SINCE)),
    send(13, *KEYS),
    save,
    send(14, "c"),
]
"""The same in a world with a store: an instance is lost, and its keys are restored from the log."""


def play(world: World, script: list[Step] = SCRIPT) -> World:
    """The whole script. A step that failed is done again: by whoever is there then."""
    for number, step in enumerate(script):
        world.step = number
        try:
            step(world)
        except Died:
            world.reborn()
            step(world)
        except Unavailable:
            world.save()  # the saver's thread goes on meanwhile, and must not save a place that is not reached
            step(world)
    return world


SOUND = play(World())
APPENDS = SOUND.fuse.count


def test_the_script_without_a_failure_routes_as_it_should() -> None:
    """What the others are compared with: in every inbox, of each key, the right records in order."""
    data = {name: [(r.key, r.epoch, r.body[0]) for r in SOUND.inbox(name) if r.kind == Kind.DATA] for name in NAMES}
    assert [n for key, _, n in data["s-1"] if key == "a"] == [0, 100, 200, 300, 304]
    assert [(epoch, n) for key, epoch, n in data["s-2"] if key == "a"] == [
        (0, 200), (0, 300), (0, 304), (1, 400), (1, 500), (1, 800), (1, 900), (1, 1001)
    ]  # fmt: skip
    assert [n for key, _, n in data["s-1"] if key == "c"] == [2, 202, 302, 306, 502]
    assert [(epoch, n) for key, epoch, n in data["s-2"] if key == "c"] == [
        (1, 600), (1, 602), (1, 700), (1, 802), (1, 902), (1, 1003)
    ]  # fmt: skip
    assert [n for key, _, n in data["s-3"]] == [301, 305]
    assert [n for key, _, n in data["s-1"] if key == "b"] == [1, 101, 201, 301, 305, 501, 801, 901, 1002]
    for name, key in product(NAMES, KEYS):
        seqs = [record.seq for record in SOUND.inbox(name) if record.kind == Kind.DATA and record.key == key]
        assert seqs == sorted(set(seqs))
    markers = [Kind(record.kind).name for record in SOUND.inbox("s-2") if record.kind > Kind.TICK]
    assert markers == ["BEGIN", "CUTOVER", "BEGIN", "BEGIN", "ABORT", "CUTOVER"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_gateway_that_dies_at_any_append_is_rebuilt_by_its_log(after: bool) -> None:
    for at in range(APPENDS):
        world = play(World(Fuse(at, after=after)))
        assert world.fuse.is_blown
        assert world.inboxes() == SOUND.inboxes(), f"died at append {at}"
        assert set(world.gateway.keys) == {*KEYS, "e"}
        assert world.gateway.sent == SOUND.gateway.sent


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_gateway_whose_append_failed_once_loses_nothing_when_the_call_is_repeated(after: bool) -> None:
    """No death: a log that was busy, or a disk that was full, and the same gateway goes on."""
    for at in range(APPENDS):
        fuse = Fuse(at, after=after, error=lambda: Unavailable("the disk is full"))
        world = play(World(fuse))
        assert fuse.is_blown
        assert world.inboxes() == SOUND.inboxes(), f"append {at} failed"
        assert set(world.gateway.keys) == {*KEYS, "e"}


def test_a_gateway_that_dies_right_after_a_failed_append_loses_nothing() -> None:
    """The failed call was not repeated, something else came, a snapshot was taken: then the process died."""
    for at in range(APPENDS):
        world, failed = World(Fuse(at, error=lambda: Unavailable("busy"))), None
        for number, step in enumerate(SCRIPT):
            world.step = number
            try:
                step(world)
            except Unavailable:
                failed = step
                for other in (lambda world: world.gateway.tick(100), save):
                    with suppress(Unavailable):
                        other(world)
                world.reborn()
                failed(world)
        assert failed is not None
        without_ticks = {name: [r for r in box if r.kind != Kind.TICK] for name, box in world.inboxes().items()}
        for name, box in without_ticks.items():
            sound = [(r.kind, r.key, r.body) for r in SOUND.inbox(name) if r.kind != Kind.TICK]
            assert [(r.kind, r.key, r.body) for r in box] == sound, f"append {at} failed"


def test_a_gateway_in_files_is_rebuilt_too(tmp_path: Path) -> None:
    """The same with the logs that applications use, at one point between the appends to two inboxes."""
    at = next(at for at in range(APPENDS) if _is_between_two_inboxes(at))
    world = play(World(Fuse(at), make=lambda name: EmbeddedLog(tmp_path / name)))
    assert world.inboxes() == SOUND.inboxes()


def _is_between_two_inboxes(at: int) -> bool:
    world = World(Fuse(at))
    try:
        for step in SCRIPT:
            step(world)
    except Died:
        tails = [world.logs[name].tail() for name in NAMES]
        world.reborn()
        return sum(world.logs[name].tail() - tail for name, tail in zip(NAMES, tails, strict=True)) == 1
    return False


# ── Snapshots ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_snapshot_lets_the_log_go_and_is_all_a_successor_needs() -> None:
    world = World()
    for step in SCRIPT[:6]:
        step(world)
    assert world.logs["ingress"].head() == 1, "nothing is trimmed while something moves"
    for step in (order(Abort(LIVE)), order(Begin(BACK)), order(Cutover(BACK)), save):
        step(world)
    assert world.logs["ingress"].head() == world.logs["ingress"].tail()
    before = world.inboxes()
    world.reborn()
    assert world.inboxes() == before
    send(11, "b", "a")(world)
    assert [(r.key, r.epoch) for r in world.inbox("s-3")][-1] == ("b", 1)
    assert [(r.key, r.epoch) for r in world.inbox("s-1")][-1] == ("a", 0)


def test_how_much_was_sent_survives_a_snapshot_and_a_death() -> None:
    world = World()
    for step in (send(0, *KEYS), save, send(1, "a")):
        step(world)
    world.reborn()
    assert world.gateway.sent == 5


def test_a_log_that_is_kept_is_never_trimmed() -> None:
    world = play(World(keep=True))
    assert world.logs["ingress"].head() == 0
    assert world.inboxes() == SOUND.inboxes()


def test_a_repeated_batch_of_the_source_is_taken_once() -> None:
    world = World()
    assert send(0, "a")(world) is True
    assert send(0, "a")(world) is False
    world.reborn()
    assert send(0, "a")(world) is False
    assert len(world.inbox("s-1")) == 1


# ── Bytes that are used twice ────────────────────────────────────────────────────────────────────────────────────────


def test_while_nothing_moves_an_inbox_gets_the_ingress_entry_as_it_is() -> None:
    world = World()
    send(0, *KEYS)(world)
    ingress, inbox = world.logs["ingress"].read(0)[0], world.logs["s-1"].read(0)[0]
    assert inbox.blob == ingress.blob
    assert [(r.bin, r.key, r.seq, r.epoch, r.src, r.event_us, r.ingress_us, r.body) for r in world.inbox("s-1")] == [
        (bin_of(key), key, number, 0, "gateway", 0, 0, (number,)) for number, key in enumerate(KEYS)
    ]


def test_when_everything_has_moved_to_one_inbox_the_records_carry_their_new_epoch() -> None:
    """All records go to one inbox again, nothing moves, and yet the ingress entry will not do."""
    world = World()
    everything = Move(
        id="m9",
        stage="s",
        protocol="live",
        source="s-1",
        destination="s-2",
        selection=Selection(bins=frozenset(range(BINS)), without=frozenset({"a"})),
        epoch=1,
        routers=frozenset({"gateway"}),
    )
    for step in (order(Begin(everything)), order(Cutover(everything)), send(0, "b", "c"), send(1, "a")):
        step(world)
    assert [(r.key, r.epoch) for r in world.inbox("s-2") if r.kind == Kind.DATA] == [("b", 1), ("c", 1)]
    assert [(r.key, r.epoch) for r in world.inbox("s-1") if r.kind == Kind.DATA] == [("a", 0)]


@pytest.mark.parametrize("after", [False, True])
def test_a_tick_that_did_not_get_to_an_inbox_is_sent_though_nothing_else_comes(after: bool) -> None:
    world = World()
    world.step = 5
    send(0, "a")(world)
    world.fuse.at, world.fuse.after = world.fuse.count + 1, after
    world.fuse.error = lambda: Unavailable("the disk is full")
    with pytest.raises(Unavailable):
        world.gateway.tick(0)
    assert not world.gateway.has_sent_tick, "or the end would be taken for quiet"
    world.gateway.tick(1)
    assert world.gateway.has_sent_tick
    assert [record.kind for record in world.inbox("s-1")] == [Kind.DATA, Kind.TICK]


def test_replayed_records_are_the_same_as_those_that_were_routed_at_once() -> None:
    """A replay never has the ingress entry at hand: it encodes again, and the inbox must hold the same."""
    at_once = World()
    send(0, *KEYS)(at_once)
    died = World(Fuse(2))
    with pytest.raises(Died):
        send(0, *KEYS)(died)
    assert died.inbox("s-1") == []
    died.reborn()
    assert died.inbox("s-1") == at_once.inbox("s-1") != []


# ── Time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tick_tells_the_latest_event_time_seen_also_after_a_rebirth() -> None:
    world = World()
    world.gateway.ingest([("a", (1,), 5_000), ("b", (2,), 9_000), ("c", (3,), 7_000)], "source", 0)
    world.reborn()
    world.gateway.tick(0)
    assert [r.event_us for r in world.inbox("s-1") if r.kind == Kind.TICK] == [9_000]


def test_a_tick_that_tells_nothing_new_is_not_sent() -> None:
    """Or a stage with timers would have something to do for ever, and its run would never come to an end."""
    world = World()
    assert world.gateway.has_sent_tick, "no record, no time"
    send(0, "a")(world)
    world.step = 7
    send(1, "a")(world)
    assert not world.gateway.has_sent_tick
    for counter in range(3):
        world.gateway.tick(counter)
        assert world.gateway.has_sent_tick
    assert [r.event_us for r in world.inbox("s-1") if r.kind == Kind.TICK] == [7_000]
    send(2, "a")(world)
    world.gateway.tick(3)
    assert [r.event_us for r in world.inbox("s-1") if r.kind == Kind.TICK] == [7_000], "the same moment again"
    world.step = 8
    send(3, "a")(world)
    world.reborn()
    assert not world.gateway.has_sent_tick
    world.gateway.tick(4)
    assert [r.event_us for r in world.inbox("s-1") if r.kind == Kind.TICK] == [7_000, 8_000]


def test_where_events_have_no_time_of_their_own_the_clock_goes_on_without_them() -> None:
    world = World()
    gateway = Gateway(
        Router("gateway", RouteTable("s-1")),
        MemoryLog(),
        MemoryLog(),
        world.logs.__getitem__,
        codec.ArrowCodec(SCHEMA),
        lambda: world.step * 1_000,
        wall_clock=True,
        uptime=lambda: world.step * 1_000_000,
    )
    for world.step in (3, 4):
        gateway.tick(world.step)
        assert gateway.has_sent_tick
    assert [r.event_us for r in world.inbox("s-1") if r.kind == Kind.TICK] == [3_000, 4_000]


# ── With a central store ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_log_is_trimmed_only_as_far_as_everything_is_in_savings_that_count() -> None:
    world = World(stores=True)
    for number in range(4):
        send(number, *KEYS)(world)
    world.gateway.order_checkpoint(0)
    send(4, *KEYS)(world)
    save(world)
    assert (world.gateway.horizon(), world.logs["ingress"].head()) == (-1, 0)
    saved = Checkpointed("s-1", 0, 1, "gateway", 4 * codec.ROWS, 4 * codec.ROWS)
    world.gateway.count(saved)
    save(world)
    assert (world.gateway.horizon(), world.logs["ingress"].head()) == (4 * codec.ROWS, 4)
    world.reborn()
    assert world.gateway.horizon() == 4 * codec.ROWS, "also for a successor, whom nobody has told yet"


def test_the_oldest_checkpoint_that_is_kept_keeps_its_records() -> None:
    world = World(stores=True)
    for number in range(4):
        send(number, *KEYS)(world)
    world.gateway.order_checkpoint(0)
    world.gateway.count(Checkpointed("s-1", 0, 1, "gateway", 4 * codec.ROWS, 4 * codec.ROWS))
    world.gateway.keep_from(2 * codec.ROWS)
    save(world)
    assert world.logs["ingress"].head() == 2


def test_the_order_to_save_stands_between_the_records() -> None:
    world = World(stores=True)
    send(0, "a")(world)
    world.gateway.order_checkpoint(0)
    world.gateway.order_checkpoint(0)
    send(1, "a")(world)
    assert [Kind(record.kind) for record in world.inbox("s-1")] == [Kind.DATA, Kind.BARRIER, Kind.DATA]


def test_keys_that_nobody_owns_are_in_no_inbox_also_if_all_others_go_to_one() -> None:
    world = World(stores=True)
    lost = Move(
        "r1", "s", "restore", "s-1", "s-2", Selection(keys=frozenset("a")), 1, frozenset({"gateway"}), RestoreOptions()
    )
    order(Fence(lost))(world)
    send(0, "a", "b")(world)
    assert [record.key for record in world.inbox("s-1")] == ["b"]


RESCUED = play(World(stores=True), RESCUE)
SENT: dict[int, str] = {
    3: "abcdabcd",
    4: "a",
    5: "abcd",
    6: "cdc",
    7: "c",
    8: "abcd",
    9: "abcd",
    10: "eabcd",
    11: "abcd",
    12: "ab",
    13: "abcd",
    14: "c",
}
"""By number: the keys that were sent from where on the log is read again."""


def test_records_of_a_lost_instance_are_read_again_and_then_it_goes_on() -> None:
    def keys(name: str, epoch: int) -> list[tuple[str, int]]:
        found = [record for record in RESCUED.inbox(name) if record.kind == Kind.DATA and record.epoch == epoch]
        return [(record.key, record.body[0]) for record in found]

    values = [[(key, counter * 100 + n) for n, key in enumerate(sent)] for counter, sent in SENT.items()]
    since = [pair for group in values for pair in group if pair[0] in "acd" and pair[1] > 300]
    assert keys("s-3", 2) == since
    assert ("a", 1100) not in keys("s-2", 1), "nobody gets what comes after the fence"
    kinds = [Kind(record.kind) for record in RESCUED.inbox("s-3")]
    assert kinds.count(Kind.TICK) > 2
    assert Kind.DISCARD in [record.kind for record in RESCUED.inbox("s-2")]


@pytest.mark.parametrize("chunk", [1, 1 << 20], ids=["in pieces", "at once"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_restoration_that_fails_at_any_append_is_made_good(
    dies: bool, after: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "SIZE", chunk)
    for place in range(APPENDS, RESCUED.fuse.count):
        error = Died if dies else lambda: Unavailable("the disk is full")
        world = play(World(Fuse(place, after=after, error=error), stores=True), RESCUE)
        assert world.fuse.is_blown
        assert world.inboxes() == RESCUED.inboxes(), f"failed at append {place}"


# ── What a restoration needs ─────────────────────────────────────────────────────────────────────────────────────────


def lost(id: str = "r1", epoch: int = 1, to: str = "s-2") -> Move:
    """All that s-1 had of two keys."""
    return msgspec.structs.replace(
        LOST,
        id=id,
        source="s-1",
        destination=to,
        selection=Selection(keys=frozenset("ab")),
        epoch=epoch,
        options=RestoreOptions(parties=frozenset({"s-1"})),
    )


def lived(make: Callable[[str], Log] | None = None) -> World:
    """Five entries, the second of which a checkpoint has; then s-1 is lost."""
    world = World(stores=True, make=make)
    for number in range(5):
        send(number, *KEYS)(world)
    world.gateway.keep_from(1 * codec.ROWS)
    order(Fence(lost()))(world)
    send(5, *KEYS)(world)
    return world


def restored(world: World, since: int, move: Move) -> list[int]:
    """The records of `a` that a destination gets, in order."""
    order(Restore(move, {"gateway": since * codec.ROWS}))(world)
    return [r.body[0] for r in world.inbox(move.destination) if r.key == "a" and r.epoch == move.epoch]


def test_nothing_is_trimmed_between_a_fence_and_its_restoration_whatever_is_given_up_meanwhile() -> None:
    world = lived()
    world.gateway.order_checkpoint(0)
    world.gateway.count(Checkpointed("s-1", 0, 1, "gateway", 7 * codec.ROWS, 7 * codec.ROWS))
    world.gateway.keep_from(7 * codec.ROWS)  # a checkpoint that was under way when the fence came
    assert world.gateway._horizon is not None
    world.gateway._horizon.horizon = 7 * codec.ROWS
    world.save()
    assert world.logs["ingress"].head() == 0
    assert restored(world, 2, lost()) == [200, 300, 400, 500]
    world.save()
    assert world.logs["ingress"].head() == 7, "and now it may go"


def test_a_restoration_whose_records_are_gone_gets_no_place_in_the_log() -> None:
    world = lived()
    world.logs["ingress"].trim(3)
    with pytest.raises(Trimmed, match="position 2 was trimmed; the log now starts at 3"):
        restored(world, 2, lost())
    assert world.logs["ingress"].counter("coordinator/r1/RESTORE") == -1
    assert world.gateway.router.owners() >= {UNOWNED}
    send(6, "a", "c")(world)
    assert [(r.key, r.body[0]) for r in world.inbox("s-1")][-1] == ("c", 601)
    order(Fence(lost("r2", 2)))(world)
    assert restored(world, 3, lost("r2", 2)) == [300, 400, 500, 600]


class Racing(MemoryLog):
    """A log that is trimmed right after somebody has looked how far it can be read."""

    to = 0

    def within(self, start: int, size: int, lane: Lane = Lane.DATA) -> int:
        found = super().within(start, size, lane)
        self.trim(self.to)
        return found


def test_whether_records_are_there_is_looked_at_in_the_turn_of_the_restoration() -> None:
    logs: dict[str, Racing] = {}
    world = lived(make=lambda name: logs.setdefault(name, Racing()))
    logs["ingress"].to = 3
    with pytest.raises(Trimmed):
        restored(world, 2, lost())
    assert logs["ingress"].counter("coordinator/r1/RESTORE") == -1


def placed(world: World, move: Move, since: int) -> int:
    """RESTORE in the log, by a gateway that died right there."""
    ingress = world.logs["ingress"]
    body = wire.pack(Restore(move, {"gateway": since * codec.ROWS}))
    record = Record(0, Kind.RESTORE, EVERY_BIN, "", ingress.tail() * codec.ROWS, 0, "gateway", 0, 0, body)
    blob = codec.encode([record], codec.entry_schema(SCHEMA))
    position = ingress.append(blob, count=1, writer=f"coordinator/{move.id}/RESTORE", counter=0)
    assert position is not None
    return position


def test_a_restoration_in_the_log_that_cannot_be_read_keeps_no_gateway_from_starting() -> None:
    world = lived()
    world.save()
    placed(world, lost(), 2)
    world.logs["ingress"].trim(3)
    for life in range(3):  # each one decides the same, though the destination's inbox has gone on since
        world.reborn()
        assert "r1 needs all records of gateway from position 2 on" in world.gateway.refused["r1"]
        assert "the log now starts at 3" in world.gateway.refused["r1"] or life
        assert UNOWNED in world.gateway.router.owners()
        assert [r.key for r in world.inbox("s-2")] == []
        with pytest.raises(Stop, match="restore them again"):  # whoever says it again hears why
            restored(world, 2, lost())
        send(6 + life, "a", "c")(world)
    other = move("m5", "c", to="s-2")
    for command in (Begin(other), Cutover(other)):
        order(command)(world)
    send(9, "c")(world)
    world.reborn()
    assert world.gateway.router.owners() == {"s-1", "s-2", UNOWNED}
    order(Fence(lost("r2", 2)))(world)
    assert restored(world, 3, lost("r2", 2)) == [300, 400, 500, 600, 700, 800]
    world.save()
    world.reborn()
    assert UNOWNED not in world.gateway.router.owners()
    assert world.gateway.refused.keys() == {"r1"}, "until somebody has been told, and for whoever asks again"


def test_a_restoration_that_was_replayed_is_not_read_again_by_a_successor() -> None:
    world = lived()
    send(6, "c")(world)  # nothing of this is replayed, so that nothing shows it has been
    world.save()
    assert restored(world, 2, lost()) == [200, 300, 400, 500]
    before = world.inboxes()
    world.logs["ingress"].trim(8)  # up to the snapshot; RESTORE stands behind it
    assert world.logs["ingress"].head() == 8
    world.reborn()
    assert (world.gateway.refused, world.inboxes()) == ({}, before)
    assert UNOWNED not in world.gateway.router.owners()


class Damaged(MemoryLog):
    """A log with an entry that cannot be read."""

    bad: int | None = None

    def read(self, start: int, end: int | None = None, lane: Lane = Lane.DATA) -> list[Entry]:
        found = super().read(start, end, lane)
        if any(entry.position == self.bad for entry in found):
            raise Corrupt(f"entry {self.bad} is damaged")
        return found


@pytest.mark.parametrize("bad", range(2, 7))
def test_records_that_are_damaged_end_a_restoration_and_nothing_else(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether that is found before RESTORE has its place, or when it has."""
    monkeypatch.setattr(chunks, "SIZE", 1)
    logs: dict[str, Damaged] = {}
    world = lived(make=lambda name: logs.setdefault(name, Damaged()))
    save(world)
    logs["ingress"].bad = bad
    for _ in range(2):
        with pytest.raises(Stop, match=f"entry {bad} is damaged"):
            restored(world, 2, lost())
        assert UNOWNED in world.gateway.router.owners()
    send(6, "c")(world)
    assert world.inbox("s-1")[-1].body == (600,)


class Gated(MemoryLog):
    """An inbox to which a replay can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()

    def append(self, blob: bytes, *, writer: str, **named: Any) -> int | None:
        if writer == "gateway/r1":
            self.reached.set()
            assert self.gate.wait(30)
        return super().append(blob, writer=writer, **named)


def test_records_come_in_while_the_log_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SIZE", 1)
    logs: dict[str, Gated] = {}
    world = lived(make=lambda name: logs.setdefault(name, Gated()))
    inbox = logs["s-2"]
    inbox.gate.clear()
    reading = threading.Thread(target=restored, args=(world, 0, lost()), daemon=True)
    reading.start()
    assert inbox.reached.wait(30)
    coming = threading.Thread(target=send(6, *KEYS), args=(world,), daemon=True)
    coming.start()
    coming.join(30)
    assert not coming.is_alive(), "a record waits for a whole log to be read"
    inbox.gate.set()
    reading.join(30)
    assert [r.body[0] for r in world.inbox("s-2") if r.key == "a"] == [0, 100, 200, 300, 400, 500, 600]
    assert world.inbox("s-2")[-1].kind == Kind.CUTOVER


class Metered(MemoryLog):
    """A log that knows how much was read at once."""

    most = 0

    def read(self, start: int, end: int | None = None, lane: Lane = Lane.DATA) -> list[Entry]:
        found = super().read(start, end, lane)
        self.most = max(self.most, sum(len(entry.blob) for entry in found))
        return found

    def within(self, start: int, size: int, lane: Lane = Lane.DATA) -> int:
        most, found = self.most, super().within(start, size, lane)
        self.most = most
        return found


@pytest.mark.parametrize("measured", ["ingress", "known"])
def test_however_long_a_log_is_a_bounded_part_of_it_is_in_memory(
    measured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: dict[str, Metered] = {}
    world = World(stores=True, make=lambda name: logs.setdefault(name, Metered()))
    for number in range(200):
        send(number, *KEYS, f"k{number}")(world)
    chunk = sum(len(entry.blob) for entry in logs[measured].read(0)) // 20
    monkeypatch.setattr(chunks, "SIZE", chunk)
    logs[measured].most = 0
    world.reborn()
    assert 0 < logs[measured].most <= chunk
    logs[measured].most = 0
    known = KnownKeys([partial(seen, logs["known"])])
    assert len(known.now()) == len(world.gateway.keys) == 204
    order(Fence(lost()))(world)
    assert len(restored(world, 0, lost())) == 200
    assert 0 < logs[measured].most <= chunk


# ── Entries of bounded size ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dies", [False, True])
def test_what_was_held_back_comes_in_entries_of_bounded_size(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    monkeypatch.setattr("whimbrel.gateway.ingress.MOST", 4)
    world = World()
    held = move("m1", "a", hold=True)
    order(Begin(held))(world)
    for counter in range(1, 6):
        send(counter, *["a"] * 3, "b")(world)
    if dies:
        world.reborn()
    order(Cutover(held))(world)
    world.reborn()
    entries = [len(list(codec.records(entry))) for entry in world.logs["s-2"].read(0)]
    assert max(entries) == 4
    values = [record.body[0] for record in world.inbox("s-2") if record.kind == Kind.DATA]
    assert values == [100 * counter + row for counter in range(1, 6) for row in range(3)]


def test_an_entry_with_more_records_than_there_are_offsets_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ROWS", 3)
    with pytest.raises(Bug, match=r"at most 3 records, .*: got 4"):
        World().gateway.ingest([("a", (n,), None) for n in range(4)], "source", 0)


def test_a_router_that_fails_amid_an_entry_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had held back of the entry must not be held back twice, nor the entry be forgotten."""
    world, held = World(), move("m1", "a", hold=True)
    order(Begin(held))(world)
    send(1, "a", "b")(world)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "encode", _fails_at(codec.encode, 2))
        with pytest.raises(MemoryError):
            send(2, "a", "b")(world)
    send(3, "a", "b")(world)
    order(Cutover(held))(world)
    assert [r.body[0] for r in world.inbox("s-2") if r.kind == Kind.DATA] == [100, 200, 300]
    assert [r.body[0] for r in world.inbox("s-1") if r.kind == Kind.DATA] == [101, 201, 301]
    assert world.gateway.sent == 6


def _fails_at(encode: Callable[..., bytes], call: int) -> Callable[..., bytes]:
    calls = iter(range(1, 100))

    def encoded(*args: Any) -> bytes:
        if next(calls) == call:
            raise MemoryError
        return encode(*args)

    return encoded
