"""Two classes on one link: state uses what records leave, and records hardly notice. Simulated time, emulated link."""

from __future__ import annotations

from collections import deque
from random import Random
from statistics import median
from typing import Any

import pytest

from tests.transport.places import Places, blobs
from whimbrel.core.errors import Refused
from whimbrel.core.link import Link
from whimbrel.log import Lane, MemoryLog
from whimbrel.transport import OutgoingSpool, RemoteLog, Sender
from whimbrel.transport.connection import local
from whimbrel.transport.emulated import EmulatedLink
from whimbrel.transport.protocol import VERSION, Batch, Failed, Hello, Piece, Taken, decode, encode
from whimbrel.transport.spool import RECORDS, STATE, Owner
from whimbrel.transport.window import PERIOD_US, QUEUE_US, SMALLEST, WINDOW, YieldingWindow

MBIT, DELAY_US = 20, 20_000
LINK = Link.parse(f"delay=20ms,rate={MBIT}mbit")
ENTRY = 1_000_000
EVERY_US = 50_000
"""Time between two records: none is aligned with a piece of state."""


class Arrivals:
    """A log that keeps only when each counter arrived."""

    def __init__(self, run: Run) -> None:
        self._run, self.at_us = run, list[int]()

    def append(self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane, replays: bool) -> int | None:
        assert counter == len(self.at_us), "in order, once"
        self.at_us.append(self._run.now_us)
        return counter


class Run:
    """Two spools from edge-1 to cloud over one link."""

    def __init__(self, link: Link = LINK, **state: Any) -> None:
        """`state`: arguments of the sender of state."""
        self.now_us = 0
        self.arrived = {RECORDS: Arrivals(self), STATE: Arrivals(self)}
        places = Places()
        receiver = places.receiver(log_of=self.arrived.__getitem__)
        self.link = EmulatedLink("edge-1->cloud", link, local(receiver, "edge-1"), lambda: self.now_us)
        self.spools = {kind: OutgoingSpool(MemoryLog(), Owner("d1", "edge-1", "cloud", kind)) for kind in self.arrived}
        self.senders = {
            kind: Sender(spool, self.link.connect, **(state if kind == STATE else {}))
            for kind, spool in self.spools.items()
        }
        self.most_in_flight = 0

    def append(self, kind: str, blobs: list[bytes]) -> None:
        remote = RemoteLog(self.spools[kind], kind)
        for blob in blobs:
            counter = remote.counter("w") + 1
            remote.append(blob, count=1, writer="w", counter=counter)

    def until(self, end_us: int) -> None:
        """Step both senders whenever one of them has something to do."""
        while True:
            dues = [due for sender in self.senders.values() if (due := sender.step(self.now_us)) is not None]
            self.most_in_flight = max(self.most_in_flight, self.senders[STATE].in_flight)
            due_us = max(min(dues, default=end_us), self.now_us + 1)
            if due_us >= end_us:
                self.now_us = end_us
                return
            self.now_us = due_us

    def with_records(self, seconds: float) -> list[float]:
        """A small record every 50 ms; the milliseconds that each took until it was in the log of the other place."""
        sent, before = [], len(self.arrived[RECORDS].at_us)
        for _ in range(round(seconds * 1e6 / EVERY_US)):
            sent.append(self.now_us)
            self.append(RECORDS, [b"r" * 200])
            self.until(self.now_us + EVERY_US)
        while not self.spools[RECORDS].is_empty:
            self.until(self.now_us + EVERY_US)
        return [(at - start) / 1000 for at, start in zip(self.arrived[RECORDS].at_us[before:], sent, strict=True)]


def state(megabytes: int) -> list[bytes]:
    """State that cannot be compressed, in parcels of 1 MB."""
    draw = Random(1)
    return [draw.randbytes(ENTRY) for _ in range(megabytes)]


def loaded(**sender: Any) -> tuple[float, float, float]:
    """Records beside 50 MB of state: their median and maximum delay in ms, and how much of the link was used."""
    run = Run(**sender)
    run.with_records(0.5)
    run.append(STATE, state(50))
    start_us, sent = run.now_us, run.link.sent
    delays = run.with_records(15)
    rate = (run.link.sent - sent) * 8 / (run.now_us - start_us)
    return median(delays), max(delays), rate / MBIT


def test_records_beside_state_keep_their_delay_and_the_link_is_used() -> None:
    alone = median(Run().with_records(1))
    assert alone == pytest.approx(DELAY_US / 1000, abs=1)
    middle, most, used = loaded()
    assert middle < alone + 35
    assert most < alone + 60
    assert used > 0.85


def test_without_yielding_records_wait_for_seconds() -> None:
    """The sabotage of the test above: the window of a sender that does not yield."""
    middle, _, _ = loaded(yields=False, window=WINDOW)
    assert middle > 1000


def test_state_alone_uses_the_link() -> None:
    run = Run()
    run.append(STATE, state(50))
    while not run.spools[STATE].is_empty:
        run.until(run.now_us + 1000)
    assert len(run.arrived[STATE].at_us) == 50
    assert 50 * ENTRY * 8 / run.now_us > 0.85 * MBIT
    assert run.most_in_flight < 400_000, "no more than the link needs"


@pytest.mark.parametrize(
    "link", ["delay=1ms,rate=1gbit", "delay=100ms,rate=50mbit", "delay=20ms,rate=2mbit", "delay=20ms,jitter=5ms"]
)
def test_state_uses_short_long_and_slow_links(link: str) -> None:
    run = Run(Link.parse(link))
    rate = run.link.link.rate
    run.append(STATE, state(4 if rate == 2_000_000 else 60))
    while not run.spools[STATE].is_empty:
        run.until(run.now_us + 1000)
        assert run.now_us < 60_000_000
    if rate is not None:
        assert len(run.arrived[STATE].at_us) * ENTRY * 8 / run.now_us > 0.65 * rate / 1e6, "from the first byte on"


def test_records_that_fill_the_link_displace_state_and_state_never_starves() -> None:
    run = Run()
    run.append(STATE, state(20))
    run.until(3_000_000)
    draw, arrived = Random(2), len(run.arrived[STATE].at_us)
    for _ in range(250):  # for 5 s, at 19 Mbit/s
        run.append(RECORDS, [draw.randbytes(47_500)])
        run.until(run.now_us + 20_000)
    assert len(run.arrived[RECORDS].at_us) > 230
    assert run.senders[STATE].window < 100_000
    assert len(run.arrived[STATE].at_us) > arrived


def test_a_link_that_becomes_longer_is_not_taken_for_a_full_one_for_ever() -> None:
    window, now_us = YieldingWindow(), 0

    def answers(delay_us: int, number: int) -> int:
        nonlocal now_us
        for _ in range(number):
            now_us += delay_us // 8
            window.answered(window.size // 8, delay_us, window.size, now_us)
        return window.size

    assert answers(10_000, 1000) == WINDOW
    assert answers(90_000, 1000) == SMALLEST, "as if others filled the link"
    assert answers(90_000, 3 * PERIOD_US // 90_000 * 8) == WINDOW


def test_a_window_that_is_not_used_does_not_grow_and_shrinks_when_the_link_is_full() -> None:
    window = YieldingWindow()
    before = window.size
    for now_us in range(0, 1_000_000, 10_000):
        window.answered(100, 10_000, 100, now_us)
    assert window.size == before
    for now_us in range(1_000_000, 2_000_000, 10_000):
        window.answered(window.piece, 10_000 + 20 * QUEUE_US, 100, now_us)
    assert window.size == SMALLEST


# ── Pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pieces_arrive_as_the_batch_they_were_cut_from_whenever_the_connection_breaks() -> None:
    for moment in range(1, 12):
        places = Places()
        remote = places.remote()
        expected = [bytes([counter]) * 30_000 + Random(counter).randbytes(30_000) for counter in range(4)]
        for counter, blob in enumerate(expected):
            remote.append(blob, count=1, writer="w", counter=counter)
        link = EmulatedLink("e", LINK, local(places.receiver(), "edge-1"), lambda: places.now_us)  # noqa: B023
        sender = places.sender(link.connect, yields=True)
        for _ in range(moment):
            places.now_us = max(places.now_us + 1, sender.step(places.now_us) or 0)
        link.cut(True)
        sender.step(places.now_us)
        link.cut(False)
        places.drain(sender)
        assert blobs(places.logs["inbox"]) == expected


def test_pieces_that_do_not_fit_end_the_session_and_append_nothing() -> None:
    places = Places()
    places.remote().append(b"x", count=1, writer="w", counter=0)
    batch = Batch(0, places.spool().entries(0, 1000))
    hello = encode(Hello(VERSION, "d1", "edge-1", "cloud", STATE))
    part = encode(Piece(b"\0" * (9 << 20), more=True))
    for frames in (
        [encode(Piece(b"", more=True))],
        [hello, part, encode(batch)],
        [hello, part, part],
        [hello, encode(Piece(hello, more=False))],
        [hello, encode(Piece(encode(Piece(encode(batch), more=False)), more=False))],
        [hello, encode(Piece(b"\0junk", more=False))],
        [hello, encode(Taken())],
    ):
        session = places.receiver().session("edge-1")
        answers = deque(decode(session.answer(frame)) for frame in frames)
        assert isinstance(answers[-1], Failed)
        assert not any(isinstance(answer, Failed) for answer in list(answers)[:-1])
        assert blobs(places.logs["inbox"]) == []


def test_the_class_of_a_spool_is_one_that_both_ends_know() -> None:
    with pytest.raises(Refused, match="'stat'"):
        OutgoingSpool(MemoryLog(), Owner("d1", "edge-1", "cloud", "stat"))
    log = MemoryLog()
    OutgoingSpool(log, Owner("d1", "edge-1", "cloud", STATE))
    with pytest.raises(Refused, match="from edge-1 to cloud, state, not to deployment 'd1', from edge-1 to cloud, rec"):
        OutgoingSpool(log, Owner("d1", "edge-1", "cloud", RECORDS))
    session = Places().receiver().session("edge-1")
    answer = decode(session.answer(encode(Hello(VERSION, "d1", "edge-1", "cloud", "other"))))
    assert isinstance(answer, Failed)
    assert answer.kind == "refused"
