"""Every protocol's table, walked: what it has, what it has not, and what it says again after a restart."""

from __future__ import annotations

import copy
from typing import get_args

import msgspec
import pytest

from whimbrel.core import wire
from whimbrel.core.errors import Bug, UnknownEvent, UnknownName
from whimbrel.core.keys import selection_of
from whimbrel.core.options import Options, ReplicateOptions
from whimbrel.core.protocols import PROTOCOLS, machine, protocol_named
from whimbrel.core.protocols.machine import (
    ABORTED,
    DONE,
    ORDERED,
    Abandoned,
    Announce,
    Command,
    Copied,
    CopyCheckpoint,
    Event,
    Failed,
    Fenced,
    Forget,
    Load,
    Loaded,
    Migration,
    Ordered,
    Protocol,
    Started,
    StartInstance,
    StopInstance,
    Stopped,
    StoryLine,
    Takeover,
    stay,
)
from whimbrel.core.record import Aborted, Evicted, Kind, Left, Move, Opened, Ready, Rejected, Unreadable, Warm
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore

MOVE = Move("m1", "stage", "live", "a", "b", selection_of(["k"]), 1, frozenset({"r"}))
EVENTS: dict[type, Event] = {
    Ordered: Ordered(),
    Abandoned: Abandoned("enough"),
    Ready: Ready("m1", "b", 0, 1),
    Warm: Warm("m1", "b", 0, 1),
    Takeover: Takeover(),
    Left: Left("m1", "a", 0, 1, 3, 40, 50),
    Opened: Opened("m1", "b", 0, 1),
    Aborted: Aborted("m1", "a", 0, 1),
    Stopped: Stopped(),
    Copied: Copied(7),
    Started: Started("edge"),
    Failed: Failed("no disk"),
    Fenced: Fenced(),
    Loaded: Loaded({"r": 7}, 3, 40),
    Evicted: Evicted("m1", "a", 0, 1),
    Rejected: Rejected("m1", "b", 0, 1, "a checksum"),
    Unreadable: Unreadable("m1", "r", "position 7 was trimmed"),
}


def phases(protocol: Protocol) -> set[str]:
    """Every phase a protocol has."""
    return {phase for phase, _ in protocol.table}


def _options(protocol: Protocol) -> Options:
    """Such that every phase can be reached."""
    return ReplicateOptions(standby=True) if isinstance(protocol.options, ReplicateOptions) else protocol.options


def migration(protocol: Protocol, phase: str = ORDERED) -> Migration:
    """A migration in some phase, with a past."""
    move = msgspec.structs.replace(MOVE, protocol=protocol.name, options=_options(protocol))
    story = [] if phase == ORDERED else [StoryLine(ORDERED, "Ordered", 1), StoryLine(phase, "Something", 2)]
    return Migration(move, "cloud", "edge", phase, story=story)


PAIRS = [
    (protocol, phase, event)
    for protocol in PROTOCOLS.values()
    for phase in sorted(phases(protocol))
    for event in EVENTS
]
MISSING = [(protocol, phase, event) for protocol, phase, event in PAIRS if (phase, event) not in protocol.table]
PRESENT = [(protocol, phase, event) for protocol, phase, event in PAIRS if (phase, event) in protocol.table]


def names(pairs: list[tuple[Protocol, str, type]]) -> list[str]:
    return [f"{protocol.name}-{phase}-{event.__name__}" for protocol, phase, event in pairs]


def test_the_walk_below_meets_every_event_there_is() -> None:
    assert set(EVENTS) == set(get_args(Event))
    assert MISSING
    assert PRESENT


@pytest.mark.parametrize(("protocol", "phase", "event"), MISSING, ids=names(MISSING))
def test_an_event_that_the_table_does_not_have_raises_and_changes_nothing(
    protocol: Protocol, phase: str, event: type
) -> None:
    subject = migration(protocol, phase)
    before = copy.deepcopy(subject)
    with pytest.raises(UnknownEvent) as raised:
        machine.handle(protocol, subject, EVENTS[event], 5)
    assert subject == before
    assert isinstance(raised.value, Bug)
    assert (raised.value.phase, raised.value.event) == (phase, event.__name__)
    assert raised.value.story == [f"{line.phase}: {line.event}" for line in before.story]
    assert all(line in str(raised.value) for line in raised.value.story)


@pytest.mark.parametrize(("protocol", "phase", "event"), PRESENT, ids=names(PRESENT))
def test_an_event_that_the_table_has_leads_to_a_phase_of_it_and_is_told(
    protocol: Protocol, phase: str, event: type
) -> None:
    subject = migration(protocol, phase)
    machine.handle(protocol, subject, EVENTS[event], 5)
    assert subject.phase in phases(protocol)
    assert (subject.story[-1].phase, subject.story[-1].at_us) == (phase, 5)
    assert subject.story[-1].event.startswith(event.__name__)


STAYING = [pair for pair in PRESENT if pair[0].table[pair[1], pair[2]] is stay]


@pytest.mark.parametrize(("protocol", "phase", "event"), STAYING, ids=names(STAYING))
def test_an_event_that_comes_late_changes_nothing_but_the_story(protocol: Protocol, phase: str, event: type) -> None:
    subject = migration(protocol, phase)
    before = copy.deepcopy(subject)
    assert machine.handle(protocol, subject, EVENTS[event]) == []
    subject.story = subject.story[:-1]
    assert subject == before


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_no_way_leads_out_of_an_end(protocol: Protocol) -> None:
    for end in (DONE, ABORTED):
        for event in EVENTS:
            if (end, event) in protocol.table:
                subject = migration(protocol, end)
                machine.handle(protocol, subject, EVENTS[event])
                assert subject.phase == end


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_every_phase_can_be_reached_and_left(protocol: Protocol) -> None:
    reached, frontier = {ORDERED}, [ORDERED]
    while frontier:
        phase = frontier.pop()
        for event in EVENTS:
            if (phase, event) not in protocol.table:
                continue
            for variant in variants(event):
                subject = migration(protocol, phase)
                if phase not in (ORDERED, DONE, ABORTED):  # the other side has said its part
                    subject.received = {said: machine.Received(1, {0}) for said in ("Left a", "Opened b", "Ready b")}
                machine.handle(protocol, subject, variant)
                if subject.phase not in reached:
                    reached.add(subject.phase)
                    frontier.append(subject.phase)
    assert reached == phases(protocol)
    assert {DONE, ABORTED} <= reached


def variants(event: type) -> list[Event]:
    """An event as it may come from either end."""
    return [Started("edge"), Started("cloud")] if event is Started else [EVENTS[event]]


@pytest.mark.parametrize(("name", "phase"), [("push", "pushing"), ("fetch", "fetching"), ("replicate", "switching")])
def test_where_there_is_no_way_back_a_migration_waits_and_says_why(name: str, phase: str) -> None:
    protocol = PROTOCOLS[name]
    subject = migration(protocol, phase)
    assert machine.handle(protocol, subject, EVENTS[Rejected]) == []
    assert (subject.phase, subject.reason) == (phase, "a checksum")
    for event in (Ready("m1", "b", 0, 1), Left("m1", "a", 0, 1), Opened("m1", "b", 0, 1)):
        machine.handle(protocol, subject, event)
    assert (subject.phase, subject.reason) == (DONE, None), "somebody could take it in the end"


@pytest.mark.parametrize("phase", ["copying", "standby"])
def test_a_standby_without_all_copies_ceases(phase: str) -> None:
    subject = migration(PROTOCOLS["replicate"], phase)
    machine.handle(PROTOCOLS["replicate"], subject, EVENTS[Rejected])
    assert (subject.phase, subject.reason) == ("ceasing", "a checksum")


def test_a_restoration_that_is_refused_leaves_the_keys_to_the_next_attempt() -> None:
    subject = migration(PROTOCOLS["restore"], "loading")
    machine.handle(PROTOCOLS["restore"], subject, EVENTS[Rejected])
    assert (subject.phase, subject.reason) == (ABORTED, "a checksum")


def test_an_unknown_protocol_is_named_with_what_there_is() -> None:
    with pytest.raises(
        UnknownName,
        match="unknown protocol 'teleport'; there is: fetch, fluid, live, pause, push, replicate, restart, restore",
    ):
        protocol_named("teleport")


# ── A hand-over: live and pause ──────────────────────────────────────────────────────────────────────────────────────

HANDOVERS = pytest.mark.parametrize(
    ("name", "preparing", "committing", "undoing"),
    [("live", "copying", "cutting", "aborting"), ("pause", "holding", "releasing", "resuming")],
)


class Told:
    """A migration that is told events, and remembers what it answered."""

    def __init__(self, name: str) -> None:
        self.protocol = PROTOCOLS[name]
        self.migration = migration(self.protocol)
        self.move = self.migration.move

    def __call__(self, event: Event) -> tuple[str, list[Command]]:
        commands = machine.handle(self.protocol, self.migration, event)
        return self.migration.phase, commands

    @property
    def resume(self) -> list[Command]:
        """What would be said again, by somebody who knows nothing but the journal."""
        return machine.resume(self.protocol, wire.unpack(wire.pack(self.migration), Migration))


def notice(kind: type, instance: str, part: int = 0, parts: int = 1) -> Event:
    if kind is Left:
        return Left("m1", instance, part, parts, 3, 40, 50)
    made: Event = kind("m1", instance, part, parts)
    return made


@HANDOVERS
def test_the_happy_path_of_a_hand_over(name: str, preparing: str, committing: str, undoing: str) -> None:
    tell = Told(name)
    assert tell.resume == [], "nothing was said yet"
    assert tell(Ordered()) == (preparing, [Begin(tell.move)])
    assert tell.resume == [Begin(tell.move)]
    assert tell(notice(Ready, "b", 0, 2)) == (preparing, [])
    assert tell(notice(Ready, "b", 1, 2)) == (committing, [Cutover(tell.move)])
    assert tell.resume == [Cutover(tell.move)]
    assert tell(notice(Left, "a", 0, 3)) == (committing, [])
    assert tell(notice(Opened, "b", 0, 2)) == (committing, [])
    assert tell(notice(Left, "a", 2, 3)) == (committing, [])
    assert tell(notice(Opened, "b", 1, 2)) == (committing, [])
    assert not tell.migration.is_over
    assert tell(notice(Left, "a", 1, 3)) == (DONE, [])
    assert tell.resume == []
    assert (tell.migration.is_over, tell.migration.reason) == (True, None)
    assert (tell.migration.keys, tell.migration.state_bytes, tell.migration.sent_bytes) == (9, 120, 150)


@HANDOVERS
@pytest.mark.parametrize("last", [Left, Opened])
def test_it_is_done_when_both_ends_are(name: str, preparing: str, committing: str, undoing: str, last: type) -> None:
    first = Opened if last is Left else Left
    ends: dict[type, str] = {Left: "a", Opened: "b"}
    tell = Told(name)
    tell(Ordered())
    tell(notice(Ready, "b"))
    assert tell(notice(first, ends[first])) == (committing, [])
    assert tell(notice(last, ends[last])) == (DONE, [])


@HANDOVERS
def test_a_notice_that_is_repeated_counts_once(name: str, preparing: str, committing: str, undoing: str) -> None:
    tell = Told(name)
    tell(Ordered())
    for _ in range(3):
        assert tell(notice(Ready, "b", 0, 2)) == (preparing, [])
    assert tell(notice(Ready, "b", 1, 2)) == (committing, [Cutover(tell.move)])
    assert tell(notice(Ready, "b", 1, 2)) == (committing, [])
    for _ in range(3):
        assert tell(notice(Opened, "b")) == (committing, [])
        assert tell(notice(Left, "a", 0, 2)) == (committing, [])
    assert tell(notice(Left, "a", 1, 2)) == (DONE, [])
    assert tell(notice(Left, "a", 1, 2)) == (DONE, [])
    assert tell.migration.keys == 6


@HANDOVERS
def test_an_abort_before_the_cutover(name: str, preparing: str, committing: str, undoing: str) -> None:
    tell = Told(name)
    tell(Ordered())
    tell(notice(Ready, "b", 0, 2))
    assert tell(Abandoned("too slow")) == (undoing, [Abort(tell.move)])
    assert tell.resume == [Abort(tell.move)]
    assert tell(notice(Ready, "b", 1, 2)) == (undoing, []), "too late"
    assert tell(notice(Aborted, "a", 0, 2)) == (undoing, [])
    assert tell(notice(Aborted, "a", 1, 2)) == (ABORTED, [])
    assert tell.resume == []
    assert tell(notice(Aborted, "b")) == (ABORTED, [Forget(tell.move)])
    assert tell.resume == [Forget(tell.move)]
    assert tell.migration.reason == "too slow"


@HANDOVERS
def test_what_the_destination_refuses_is_called_off(name: str, preparing: str, committing: str, undoing: str) -> None:
    tell = Told(name)
    tell(Ordered())
    tell(Ready("m1", "b", 0, 2))
    refused = Rejected("m1", "b", 1, 2, "b refuses a PARCEL: the checksum does not fit")
    assert tell(refused) == (undoing, [Abort(tell.move)])
    assert tell(refused) == (undoing, []), "once"
    assert tell(Aborted("m1", "a", 0, 1))[0] == ABORTED
    assert tell.migration.reason == refused.reason
    assert any(refused.reason in line.event for line in tell.migration.story)


@HANDOVERS
def test_the_destination_may_be_out_first(name: str, preparing: str, committing: str, undoing: str) -> None:
    """Seeds live/1 and pause/45: FORGET before the source is out would let its last parcels in again."""
    tell = Told(name)
    tell(Ordered())
    tell(Abandoned("too slow"))
    assert tell(notice(Aborted, "b")) == (undoing, [])
    assert tell(notice(Aborted, "b")) == (undoing, [])
    assert tell(notice(Aborted, "a")) == (ABORTED, [Forget(tell.move)])


@HANDOVERS
def test_there_is_no_return_after_the_cutover(name: str, preparing: str, committing: str, undoing: str) -> None:
    tell = Told(name)
    tell(Ordered())
    tell(notice(Ready, "b"))
    assert tell(Abandoned("changed my mind")) == (committing, [])
    assert tell.migration.reason is None


@pytest.mark.parametrize("name", PROTOCOLS)
def test_what_has_not_begun_is_abandoned_without_a_word(name: str) -> None:
    tell = Told(name)
    assert tell(Abandoned("never mind")) == (ABORTED, [])
    assert tell.resume == []
    assert tell.migration.reason == "never mind"


# ── A switch: push and fetch ─────────────────────────────────────────────────────────────────────────────────────────

SWITCH, REPLICATE, CEASE = Kind.SWITCH, Kind.REPLICATE, Kind.CEASE
SWITCHES = pytest.mark.parametrize(("name", "moving"), [("push", "pushing"), ("fetch", "fetching")])


@SWITCHES
def test_the_happy_path_of_a_switch(name: str, moving: str) -> None:
    tell = Told(name)
    begun: list[Command] = [Announce(SWITCH, tell.move, "b"), Announce(SWITCH, tell.move, "a"), Begin(tell.move)]
    assert tell(Ordered()) == (moving, begun), "the destination hears of it first, the routers last"
    assert tell.resume == begun
    assert tell(notice(Ready, "b", 0, 2)) == (moving, [])
    assert tell(notice(Ready, "b", 1, 2)) == ("settling", [Cutover(tell.move)])
    assert tell.resume == [Cutover(tell.move)]
    assert tell(notice(Left, "a", 0, 2)) == ("settling", [])
    assert tell(notice(Opened, "b")) == ("settling", [])
    assert tell(notice(Left, "a", 1, 2)) == (DONE, [])
    assert (tell.resume, tell.migration.keys, tell.migration.state_bytes, tell.migration.sent_bytes) == ([], 6, 80, 100)


@SWITCHES
def test_a_switch_has_no_way_back(name: str, moving: str) -> None:
    tell = Told(name)
    tell(Ordered())
    assert tell(Abandoned("changed my mind")) == (moving, [])
    tell(notice(Ready, "b"))
    assert tell(Abandoned("changed my mind")) == ("settling", [])
    assert tell.migration.reason is None


# ── A standby ────────────────────────────────────────────────────────────────────────────────────────────────────────


def both(kind: Kind, move: Move) -> list[Command]:
    return [Announce(kind, move, "b"), Announce(kind, move, "a")]


@pytest.mark.parametrize("standby", [False, True])
def test_the_happy_path_of_a_standby(standby: bool) -> None:
    tell = Told("replicate")
    move = tell.migration.move = tell.move = msgspec.structs.replace(
        tell.move, options=ReplicateOptions(standby=standby)
    )
    assert tell(Ordered()) == ("copying", both(REPLICATE, move))
    assert tell.resume == both(REPLICATE, move)
    assert tell(notice(Warm, "b", 0, 2)) == ("copying", [])
    switched: list[Command] = [*both(SWITCH, move), Begin(move)]
    if standby:
        assert tell(notice(Warm, "b", 1, 2)) == ("standby", [])
        assert (tell.resume, tell.migration.is_standby, tell.migration.is_over) == ([], True, False)
        assert tell(Takeover()) == ("switching", switched)
    else:
        assert tell(notice(Warm, "b", 1, 2)) == ("switching", switched)
    assert tell.resume == switched
    assert tell(Abandoned("too late")) == ("switching", [])
    assert tell(notice(Ready, "b")) == ("settling", [Cutover(move)])
    assert tell(notice(Opened, "b")) == ("settling", [])
    assert tell(notice(Left, "a")) == (DONE, [])


@pytest.mark.parametrize("warm", [False, True])
def test_a_standby_that_is_not_wanted_ceases(warm: bool) -> None:
    tell = Told("replicate")
    move = tell.migration.move = tell.move = msgspec.structs.replace(tell.move, options=ReplicateOptions(standby=True))
    tell(Ordered())
    if warm:
        tell(notice(Warm, "b"))
    assert tell(Abandoned("enough")) == ("ceasing", both(CEASE, move))
    assert tell.resume == both(CEASE, move)
    assert tell(notice(Aborted, "b")) == ("ceasing", [])
    assert tell(notice(Aborted, "a")) == (ABORTED, [Forget(move)])
    assert tell.migration.reason == "enough"


# ── restart ──────────────────────────────────────────────────────────────────────────────────────────────────────────

STOP, COPY = StopInstance("a"), CopyCheckpoint("a", "edge")
THERE, HERE = StartInstance("a", "edge"), StartInstance("a", "cloud")


def test_the_happy_path_of_a_restart() -> None:
    tell = Told("restart")
    assert tell(Ordered()) == ("stopping", [STOP])
    assert tell.resume == [STOP]
    assert tell(Stopped()) == ("copying", [COPY])
    assert tell.resume == [COPY]
    assert tell(Copied(7)) == ("starting", [THERE])
    assert tell.resume == [THERE]
    assert tell(Started("cloud")) == ("starting", []), "not there"
    assert tell(Started("edge")) == (DONE, [])
    assert tell.resume == []
    assert tell.migration.sent_bytes == 7


@pytest.mark.parametrize(
    ("past", "event", "reason"),
    [
        ([Ordered()], Abandoned("enough"), "enough"),
        ([Ordered(), Stopped()], Abandoned("enough"), "enough"),
        ([Ordered(), Stopped()], Failed("no disk"), "no disk"),
        ([Ordered(), Stopped(), Copied(7)], Failed("no master"), "no master"),
    ],
)
def test_a_restart_that_fails_goes_back_to_where_it_was(past: list[Event], event: Event, reason: str) -> None:
    tell = Told("restart")
    for earlier in past:
        tell(earlier)
    assert tell(event) == ("returning", [HERE])
    assert tell.resume == [HERE]
    assert tell(Stopped()) == ("returning", []), "an answer that was under way"
    assert tell(Started("edge")) == ("returning", []), "not here"
    assert tell(Started("cloud")) == (ABORTED, [])
    assert (tell.migration.reason, tell.resume) == (reason, [])


def test_there_is_no_return_once_the_start_is_ordered() -> None:
    tell = Told("restart")
    for event in (Ordered(), Stopped(), Copied(7)):
        tell(event)
    assert tell(Abandoned("enough")) == ("starting", [])
    assert tell(Started("edge")) == (DONE, [])


def test_answers_that_are_repeated_do_no_harm() -> None:
    tell = Told("restart")
    tell(Ordered())
    assert tell(Ordered()) == ("stopping", [])
    tell(Stopped())
    assert tell(Stopped()) == ("copying", [])
    tell(Copied(7))
    assert tell(Copied(7)) == ("starting", [])
    tell(Started("edge"))
    for event in (Started("edge"), Copied(7), Stopped(), Ordered(), Abandoned("late")):
        assert tell(event) == (DONE, [])


# ── restore ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_happy_path_of_a_restoration() -> None:
    tell = Told("restore")
    assert tell(Ordered()) == ("fencing", [Fence(tell.move)])
    assert tell.resume == [Fence(tell.move)]
    assert tell(Fenced()) == ("loading", [Load(tell.move)])
    assert tell.resume == [Load(tell.move)]
    assert tell(Loaded({"r": 7}, 3, 40)) == ("loading", [])
    assert tell(notice(Ready, "b", 0, 2)) == ("loading", [])
    assert tell(notice(Ready, "b", 1, 2)) == ("replaying", [Restore(tell.move, {"r": 7})])
    assert tell.resume == [Restore(tell.move, {"r": 7})]
    assert tell(notice(Opened, "b", 0, 2)) == ("replaying", [])
    assert tell(notice(Opened, "b", 1, 2)) == (DONE, [])
    assert (tell.resume, tell.migration.keys, tell.migration.state_bytes) == ([], 3, 40)


def test_who_is_ready_before_the_answer_waits_for_it() -> None:
    """Its coordinator died before it could note from where on the routers must read their logs again."""
    tell = Told("restore")
    tell(Ordered())
    tell(Fenced())
    assert tell(notice(Ready, "b")) == ("loading", [])
    assert tell(Loaded({"r": 7})) == ("replaying", [Restore(tell.move, {"r": 7})])
    assert tell(Loaded({"r": 9})) == ("replaying", [])
    assert tell.migration.since == {"r": 7}


@pytest.mark.parametrize("past", [[Ordered()], [Ordered(), Fenced()], [Ordered(), Fenced(), Loaded()]])
def test_a_restoration_that_is_called_off_clears_its_destination(past: list[Event]) -> None:
    tell = Told("restore")
    for event in past:
        tell(event)
    off: list[Command] = [Announce(Kind.ABORT, tell.move, "b")]
    assert tell(Abandoned("another site")) == (ABORTED, off)
    assert tell.resume == off
    assert tell(notice(Aborted, "b")) == (ABORTED, [])
    assert (tell.resume, tell.migration.reason) == ([], "another site")


def test_there_is_no_return_once_the_routers_replay() -> None:
    tell = Told("restore")
    for event in (Ordered(), Fenced(), Loaded(), notice(Ready, "b")):
        tell(event)
    assert tell(Abandoned("enough")) == ("replaying", [])


def test_the_lost_one_may_come_back_at_any_time() -> None:
    tell = Told("restore")
    for event in (Ordered(), Fenced(), Loaded(), notice(Ready, "b"), notice(Opened, "b")):
        tell(event)
        assert not tell.migration.has_received(Evicted, "a")
    assert tell(notice(Evicted, "a")) == (DONE, [])
    assert tell.migration.has_received(Evicted, "a")


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_a_migration_that_a_restoration_ends_is_aborted_in_any_phase_and_says_nothing_more(protocol: Protocol) -> None:
    for phase in phases(protocol) - {DONE, ABORTED}:
        subject = migration(protocol, phase)
        machine.end(subject, "m9", 7)
        assert (subject.phase, subject.ended_by, subject.reason) == (ABORTED, "m9", "m9 restores its keys")
        assert subject.story[-1] == StoryLine(phase, "Ended: m9 restores its keys", 7)
        for event in EVENTS.values():
            assert machine.handle(protocol, subject, event) == []
            assert subject.phase == ABORTED
        assert machine.resume(protocol, subject) == []
    over = migration(protocol, DONE)
    machine.end(over, "m9")
    assert (over.phase, over.ended_by) == (DONE, "")


def test_a_story_that_goes_on_and_on_keeps_its_beginning_its_end_and_what_ended_its_phases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "MOST_LINES", 20)
    live = PROTOCOLS["live"]
    subject = migration(live)
    machine.handle(live, subject, Ordered(), 1)
    for number in range(30):
        machine.handle(live, subject, Rejected("m1", "b", 0, 1, f"reason {number}"), 2)
        subject.phase = "copying"
    machine.handle(live, subject, notice(Ready, "b"), 3)
    told = [line.event for line in subject.story]
    assert len(told) == 20
    assert told[:2] == ["Ordered", "Rejected: reason 0"]
    assert told[-2:] == ["Rejected: reason 29", "Ready b 1/1"]
    assert subject.has_begun
