"""The forwarder: what is taken over arrives once, in order and in its time, whoever dies. Time is what a test says."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from tests.app.failing import Died, FailingLog, Fuse
from tests.app.waiting import until
from whimbrel.core.errors import Corrupt, Unavailable
from whimbrel.core.link import Link
from whimbrel.core.record import Kind
from whimbrel.log import EmbeddedLog, Lane, Log, MemoryLog
from whimbrel.log.carrier import number
from whimbrel.log.codec import encode_messages, messages
from whimbrel.site.forwarder import PIECE_US, Forwarder, Sending

SLOW = Link(delay_us=1000, rate=8_000_000)  # a byte a microsecond
SIZE = PIECE_US * 2 // 5  # two messages a piece


def sending(counter: int, texts: str, *, writer: str = "s-1@x", size: int = SIZE, to: str = "s-2") -> Sending:
    """Messages of one size, each filled with a letter: all of a batch."""
    blob = encode_messages((Kind.PARCEL, 0, letter.encode() * size) for letter in texts)
    return Sending("s-1", to, writer, number(counter, len(texts) - 1), blob)


def read(inbox: Log) -> list[str]:
    """What has arrived: by entry, the letters of its messages."""
    entries = inbox.read(0, lane=Lane.CONTROL)
    assert [entry.records for entry in entries] == [len(messages(entry.blob)) for entry in entries]
    return ["".join(body[:1].decode() for _, _, body in messages(entry.blob)) for entry in entries]


class House:
    """Logs, which last, and the forwarder of the moment; each append of any of them may be the one that fails."""

    def __init__(self, link: Link = SLOW, fuse: Fuse | None = None) -> None:
        fuse = fuse or Fuse()
        self.link = link
        self.spool: Log = FailingLog(MemoryLog(), fuse)
        self.inboxes = {name: FailingLog(MemoryLog(), fuse) for name in ("s-2", "s-3")}
        self.now = 0
        self.begin()

    def begin(self) -> None:
        self.forwarder = Forwarder("a-b", self.link, self.spool, self.inboxes.__getitem__)

    def finish(self) -> list[int]:
        """Let time pass until nothing is under way; return the moments at which something was due."""
        moments = []
        while (due := self.forwarder.step(self.now)) is not None:
            assert due > self.now
            self.now = due
            moments.append(due)
        return moments

    @property
    def arrived(self) -> list[str]:
        return read(self.inboxes["s-2"])


def test_an_entry_arrives_piece_by_piece_each_at_its_time() -> None:
    house = House()
    house.forwarder.append(sending(5, "abcde"))
    assert house.forwarder.step(0) == 2 * SIZE + 1000
    assert house.arrived == []
    assert house.forwarder.step(2 * SIZE + 999) == 2 * SIZE + 1000
    assert house.arrived == []
    assert house.forwarder.step(2 * SIZE + 1000) == 4 * SIZE + 1000
    assert house.arrived == ["ab"]
    assert not house.forwarder.is_idle
    house.now = 2 * SIZE + 1000
    house.finish()
    assert house.now == 5 * SIZE + 1000
    assert house.arrived == ["ab", "cd", "e"]
    assert house.forwarder.is_idle


def test_pieces_do_not_wait_for_each_others_delay() -> None:
    house = House(Link(delay_us=10_000_000, rate=8_000_000))
    for counter, text in enumerate(["aa", "bb", "cc", "dd"]):
        house.forwarder.append(sending(counter, text))
    house.finish()
    assert house.now == 8 * SIZE + 10_000_000
    assert house.arrived == ["aa", "bb", "cc", "dd"]


def test_a_post_larger_than_a_piece_travels_alone_and_without_a_rate_all_travel_together() -> None:
    house = House()
    house.forwarder.append(sending(0, "abc", size=PIECE_US * 2))
    house.finish()
    assert house.arrived == ["a", "b", "c"]
    house = House(Link(delay_us=1000))
    house.forwarder.append(sending(0, "abc", size=PIECE_US * 2))
    assert house.finish() == [1000]
    assert house.arrived == ["abc"]


def test_bytes_are_counted_while_they_are_under_way_and_when_they_are_through() -> None:
    house = House()
    house.forwarder.append(sending(0, "abc"))
    house.forwarder.append(sending(1, "de"))
    seen = [(house.forwarder.sent, house.forwarder.under_way)]
    while (due := house.forwarder.step(house.now)) is not None:
        house.now = due
        seen.append((house.forwarder.sent, house.forwarder.under_way))
    seen.append((house.forwarder.sent, house.forwarder.under_way))
    assert sorted(set(seen)) == [(n * SIZE, (5 - n) * SIZE) for n in (0, 2, 3, 5)]


def test_what_is_lost_goes_out_again_and_costs() -> None:
    house = House(Link(rate=8_000_000, loss=0.5))
    for counter in range(50):
        house.forwarder.append(sending(counter, "ab"))
    house.finish()
    assert house.arrived == ["ab"] * 50
    assert house.forwarder.sent > 130 * SIZE
    assert house.now > house.forwarder.sent


def test_an_append_that_is_repeated_is_taken_over_once() -> None:
    house = House()
    assert house.forwarder.append(sending(7, "ab")) == 0
    assert house.forwarder.append(sending(7, "ab")) is None
    house.finish()
    assert house.forwarder.append(sending(7, "ab")) is None
    assert house.forwarder.append(sending(7, "ab", to="s-3")) == 1  # a batch messages to several, under one number
    house.finish()
    assert house.arrived == ["ab"]
    assert read(house.inboxes["s-3"]) == ["ab"]


def test_what_has_come_another_way_is_not_delivered_again() -> None:
    """A batch that is repeated after its instance was relocated: its messages went through another spool, or
    directly."""
    house = House()
    blob = sending(7, "ab").messages
    house.inboxes["s-2"].append(blob, count=2, writer="s-1@x", counter=number(7, 1), lane=Lane.CONTROL)
    house.forwarder.append(sending(7, "ab"))
    house.forwarder.append(sending(8, "cd"))
    house.finish()
    assert house.arrived == ["ab", "cd"]
    assert house.forwarder.sent == 2 * SIZE
    assert house.inboxes["s-2"].counter("s-1@x", Lane.CONTROL) == number(8, 1)


def test_while_cut_nothing_is_delivered_and_afterwards_it_goes_on_where_it_was() -> None:
    house = House()
    house.forwarder.append(sending(0, "abcd"))
    house.forwarder.step(0)
    house.forwarder.step(2 * SIZE + 1000)
    assert house.arrived == ["ab"]
    house.forwarder.cut(True)
    house.forwarder.append(sending(1, "ef"))
    assert house.forwarder.step(10**9) is None
    assert house.arrived == ["ab"]
    assert house.forwarder.under_way == 4 * SIZE
    house.forwarder.cut(False)
    house.now = 10**9
    house.finish()
    assert house.now == 10**9 + 4 * SIZE + 1000
    assert house.arrived == ["ab", "cd", "ef"]
    assert house.forwarder.sent == 6 * SIZE


# ── Deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────


APPENDS = 7


def run(house: House) -> None:
    """Like a sink and its forwarder: whoever dies starts again, and repeats what was not acknowledged."""
    todo = [(0, "abc"), (1, "de"), (5, "f")]
    for _ in range(3):
        try:
            while todo:
                house.forwarder.append(sending(*todo[0]))
                del todo[0]
            house.finish()
        except Died:
            house.begin()


@pytest.mark.parametrize("at", range(APPENDS))
@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
def test_a_death_at_any_append_loses_and_repeats_nothing(at: int, after: bool) -> None:
    fuse = Fuse(at, after=after)
    house = House(fuse=fuse)
    run(house)
    assert fuse.is_blown
    assert fuse.count >= APPENDS
    assert house.arrived == ["ab", "c", "de", "f"]
    assert house.forwarder.is_idle
    assert house.spool.head() == house.spool.tail(), "what has arrived is given up"


def test_a_death_may_be_followed_by_another_link() -> None:
    """Other pieces, the same messages."""
    house = House()
    house.forwarder.append(sending(0, "abcdefg"))
    for moment in (0, 2 * SIZE + 1000):
        house.forwarder.step(moment)
    assert house.arrived == ["ab"]
    house.link = Link(rate=12_000_000)
    house.begin()
    house.forwarder.step(0)
    assert house.forwarder.under_way == 5 * SIZE
    house.finish()
    assert house.arrived == ["ab", "cde", "fg"]


def test_a_death_between_the_last_piece_and_the_trim_is_only_tidied_up() -> None:
    house = House()
    house.forwarder.append(sending(0, "ab"))
    house.inboxes["s-2"].append(
        sending(0, "ab").messages, count=2, writer="s-1@x", counter=number(0, 1), lane=Lane.CONTROL
    )
    house.begin()
    house.finish()
    assert house.arrived == ["ab"]
    assert house.forwarder.sent == 0
    assert house.forwarder.is_idle


# ── The thread, and real logs ────────────────────────────────────────────────────────────────────────────────────────


def test_a_thread_delivers_through_what_fails_for_a_while(tmp_path: Path) -> None:
    spool, inbox = EmbeddedLog(tmp_path / "spool.db"), EmbeddedLog(tmp_path / "inbox.db")
    failing = FailingLog(inbox, Fuse(1, error=lambda: Unavailable("the disk is full")))
    forwarder = Forwarder("a-b", Link(1000, 500, 80_000_000, 0.01), spool, lambda _: failing)
    numbers = count()
    forwarder.append(sending(next(numbers), "abc" * 20))
    forwarder.start()
    for _ in range(20):
        forwarder.append(sending(next(numbers), "def"))
    until(lambda: forwarder.is_idle, "everything has arrived")
    forwarder.stop()
    assert "".join(read(inbox)) == "abc" * 20 + "def" * 20
    assert len(read(inbox)) > 21
    assert forwarder.error is None


def test_an_error_that_does_not_pass_is_told() -> None:
    inbox = FailingLog(MemoryLog(), Fuse(0, error=lambda: Corrupt("not a log")))
    forwarder = Forwarder("a-b", Link(), MemoryLog(), lambda _: inbox)
    forwarder.start()
    forwarder.append(sending(0, "a"))
    until(lambda: forwarder.error, "the error is told")
    forwarder.stop()
    assert isinstance(forwarder.error, Corrupt)
    assert not forwarder.is_idle
