"""A link: what it is written as, and when a piece arrives."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.core.errors import Refused
from whimbrel.core.link import TIMEOUT_US, Line, Link

# ── As text ──────────────────────────────────────────────────────────────────────────────────────────────────────────

TEXTS = {
    "ideal": Link(),
    "delay=100ms,jitter=10ms,rate=20mbit,loss=1%": Link(100_000, 10_000, 20_000_000, 0.01),
    "delay=2s": Link(2_000_000),
    "delay=1500ms": Link(1_500_000),
    "delay=0.5ms": Link(500),
    "jitter=3ms": Link(0, 3000),
    "rate=1gbit": Link(rate=10**9),
    "rate=1500kbit": Link(rate=1_500_000),
    "rate=0.001kbit": Link(rate=1),
    "loss=7%": Link(loss=0.07),
    "loss=0.25%": Link(loss=0.0025),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_link_is_read_and_printed_the_same_way(text: str) -> None:
    assert Link.parse(text) == TEXTS[text]
    assert str(TEXTS[text]) == text


def test_order_and_blanks_do_not_matter_and_nothing_at_all_is_ideal() -> None:
    assert Link.parse(" rate = 1 mbit , delay=1ms ") == Link(1000, 0, 1_000_000)
    assert Link.parse("delay=0ms,loss=0%") == Link()
    assert Link().is_ideal
    assert not Link(loss=0.1).is_ideal


@given(
    st.integers(0, 10**10),
    st.integers(0, 10**7),
    st.none() | st.integers(1, 10**12),
    st.integers(0, 99_999).map(lambda n: n / 100_000),
)
def test_every_link_survives_being_printed(delay: int, jitter: int, rate: int | None, loss: float) -> None:
    link = Link(delay, jitter, rate, loss)
    assert Link.parse(str(link)) == link


BAD = {
    "": "delay, jitter, rate, loss",
    "100ms": "delay, jitter, rate, loss",
    "latency=1ms": "not 'latency'; write e.g. delay=100ms",
    "delay=1ms,": "not ''",
    "delay=100": "a number with s or ms, not '100'",
    "delay=1h": "a number with s or ms, not '1h'",
    "delay=-1ms": "a number with s or ms",
    "delay=1e3ms": "a number with s or ms",
    "delay=ms": "a number with s or ms",
    "delay=nanms": "a number with s or ms",
    "delay=٣ms": "a number with s or ms",
    "rate=20mb": "a number with gbit or mbit or kbit, not '20mb'",
    "rate=5ms": "a number with gbit or mbit or kbit",
    "loss=1": "a number with %",
    "delay=1ms,delay=2ms": "two values for delay",
    "rate=0kbit": "at least one bit",
    "rate=0.0001kbit": "at least one bit",
    "loss=100%": "below 100%",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_link_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(Refused) as raised:
        Link.parse(text)
    assert BAD[text] in str(raised.value)


@pytest.mark.parametrize(
    "bad", [{"delay_us": -1}, {"jitter_us": -1}, {"rate": 0}, {"rate": -5}, {"loss": 1.0}, {"loss": -0.1}]
)
def test_a_link_that_cannot_be_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(Refused):
        Link(**bad)  # type: ignore[arg-type]


# ── In time ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Dice(Random):
    """Chance that a test decides: which sendings are lost, and how far each delay is off."""

    def __init__(self, lost: list[bool] | None = None, off: int = 0) -> None:
        super().__init__(0)
        self.lost, self.off = lost or [], off

    def random(self) -> float:
        return 0.0 if self.lost and self.lost.pop(0) else 1.0

    def randint(self, a: int, b: int) -> int:
        return min(max(self.off, a), b)


def test_an_ideal_link_takes_no_time() -> None:
    assert Link().send(10**9, 77, Line(), Random(1)) == Line(77, 77, 10**9)


def test_a_delay_holds_nobody_up() -> None:
    line = Link(delay_us=100).send(10, 1000, Line(), Random(1))
    assert line == Line(1000, 1100, 10)
    assert Link(delay_us=100).send(10, 1050, line, Random(1)) == Line(1050, 1150, 10)


def test_a_rate_lets_one_piece_out_after_the_other() -> None:
    link = Link(delay_us=100, rate=8_000_000)  # a byte a microsecond
    first = link.send(500, 1000, Line(), Random(1))
    assert first == Line(1500, 1600, 500)
    second = link.send(20, 1000, first, Random(1))
    assert second == Line(1520, 1620, 20)
    assert link.send(20, 5000, second, Random(1)) == Line(5020, 5120, 20)  # long free again


def test_a_piece_takes_a_microsecond_at_least_and_nothing_takes_none() -> None:
    assert Link(rate=10**12).send(1, 0, Line(), Random(1)).free_us == 1
    assert Link(rate=1).send(0, 0, Line(), Random(1)).free_us == 0


@pytest.mark.parametrize(("off", "arrives"), [(0, 100), (40, 140), (-40, 60)])
def test_jitter_goes_to_both_sides(off: int, arrives: int) -> None:
    assert Link(delay_us=100, jitter_us=40).send(1, 0, Line(), Dice(off=off)).arrives_us == arrives


def test_jitter_beyond_the_delay_does_not_turn_time_back() -> None:
    assert Link(delay_us=10, jitter_us=40).send(1, 5, Line(), Dice(off=-40)).arrives_us == 5


def test_no_piece_overtakes_an_earlier_one() -> None:
    link = Link(delay_us=100, jitter_us=90)
    slow = link.send(1, 0, Line(), Dice(off=90))
    assert slow.arrives_us == 190
    assert link.send(1, 1, slow, Dice(off=-90)).arrives_us == 190


def test_a_lost_piece_costs_its_bytes_again_and_a_timeout_but_others_go_out_meanwhile() -> None:
    link = Link(delay_us=100, rate=8_000_000, loss=0.5)
    late = link.send(50, 0, Line(), Dice([True, True]))
    assert late == Line(150, 150 + 2 * TIMEOUT_US + 100, 150)
    behind = link.send(50, 0, late, Dice())
    assert behind == Line(200, late.arrives_us, 50)


def test_a_timeout_fits_the_way() -> None:
    assert Link(delay_us=5).timeout_us == TIMEOUT_US
    assert Link(delay_us=TIMEOUT_US, jitter_us=7).timeout_us == 2 * TIMEOUT_US + 14


def test_the_share_that_is_lost_is_the_links() -> None:
    link, random = Link(loss=0.2), Random(5)
    assert sum(link.send(1, 0, Line(), random).cost for _ in range(10_000)) == pytest.approx(12_500, rel=0.05)


@given(
    st.builds(
        Link, st.integers(0, 10**6), st.integers(0, 10**6), st.none() | st.integers(1000, 10**9), st.floats(0, 0.9)
    ),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=30),
    st.integers(),
)
def test_whatever_is_sent_the_line_holds_its_promises(link: Link, pieces: list[tuple[int, int]], seed: int) -> None:
    line, random, now = Line(), Random(seed), 0
    for pause, size in pieces:
        now += pause
        before, line = line, link.send(size, now, line, random)
        assert line.arrives_us >= before.arrives_us
        assert line.free_us >= max(now, before.free_us)
        assert line.arrives_us >= line.free_us + max(link.delay_us - link.jitter_us, 0)
        assert line.cost % size == 0 if size else line.cost == 0
        if link.rate:
            assert (line.free_us - max(now, before.free_us)) * link.rate >= line.cost * 8_000_000
    replayed, random, now = Line(), Random(seed), 0
    for pause, size in pieces:
        now += pause
        replayed = link.send(size, now, replayed, random)
    assert replayed == line


def test_what_goes_out_in_a_time() -> None:
    assert Link(rate=20_000_000).bytes_in(20_000) == 50_000
    assert Link(delay_us=5).bytes_in(20_000) is None
