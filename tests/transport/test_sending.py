"""Sender and receiver: in order and exactly once, whichever of them dies between any two of their steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.transport.places import OWNER, Places, blobs, fill
from whimbrel.core.errors import Diverged, Full, Refused, Unavailable
from whimbrel.log import Lane, Log, MemoryLog
from whimbrel.log.large import LargeEntries
from whimbrel.transport import Sender
from whimbrel.transport.connection import Connect, Connection, local
from whimbrel.transport.protocol import (
    VERSION,
    Ack,
    Batch,
    Failed,
    Hello,
    Welcome,
    decode,
    encode,
)
from whimbrel.transport.sender import BATCHES


class Died(BaseException):
    """A process dies: nothing may catch it."""


class Mortal:
    """Any object, whose process dies before or after the n-th of all calls that change or send something."""

    left = 0
    CALLS = ("append", "trim", "send", "receive", "read", "write", "remove")

    def __init__(self, inner: Any, after: bool) -> None:
        self._inner, self._after = inner, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self.CALLS:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            Mortal.left -= 1
            if Mortal.left == 0 and not self._after:
                raise Died
            done = found(*args, **kwargs)
            if Mortal.left == 0:
                raise Died
            return done

        return call


def run_until_done(places: Places, connect: Callable[[], Connect], most: int = 200) -> int:
    """A sender, and a new one after each death. Returns the number of deaths."""
    for deaths in range(most):
        try:
            places.drain(Sender(places.spool(), connect(), batch=40))
        except Died:
            continue
        return deaths
    raise AssertionError("it never ends")


@pytest.mark.parametrize("in_files", [False, True], ids=["in the log", "in files"])
@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after the call"])
def test_killed_at_any_step_every_entry_arrives_once_and_in_order(after: bool, in_files: bool, tmp_path: Path) -> None:
    deaths = 0
    for moment in range(1, 80):
        places = Places(large=LargeEntries(tmp_path / f"{moment}", least=0) if in_files else None)
        expected = fill(places, 4)
        inbox = places.logs["inbox"]
        places.logs["inbox"] = Mortal(inbox, after)
        plain = places.spooled
        places.spooled = Mortal(plain, after)
        if places.large is not None:
            places.large = Mortal(places.large, after)  # type: ignore[assignment]
        Mortal.left = moment + 1  # the spool's first look at its owner is a call of its own

        def connect() -> Connect:
            inner = local(places.receiver(), "edge-1")  # noqa: B023
            return lambda wake: Mortal(inner(wake), after)

        deaths += run_until_done(places, connect)
        assert blobs(inbox) == expected, moment
        assert plain.head() == plain.tail()
        assert not list(tmp_path.glob("*/*")), "no file is left"
        assert [inbox.counter(writer) for writer in "abc"] == [3, 3, 3]
    assert deaths > 30, "the seams were reached"


def test_a_consumer_that_trims_at_once_does_not_turn_a_repeated_batch_into_a_difference() -> None:
    places = Places()
    fill(places, 3)
    first = local(places.receiver(), "edge-1")(lambda: None)
    first.send(encode(Hello(VERSION, "d1", "edge-1", "cloud")))
    first.send(encode(Batch(0, places.spool().entries(0, 10_000))))
    inbox = places.logs["inbox"]
    inbox.trim(inbox.tail())  # and the acknowledgement is lost
    places.drain(places.sender())
    assert (inbox.head(), inbox.tail()) == (9, 9)


class Slow:
    """A receiver that answers only when it is told to: what is in flight can be counted."""

    due_us = None

    def __init__(self, inner: Connection) -> None:
        self._inner, self.frames, self.closed = inner, deque[bytes](), False

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    def pass_on(self, number: int = 1) -> None:
        for _ in range(number):
            self._inner.send(self.frames.popleft())

    def receive(self) -> bytes | None:
        return self._inner.receive()

    def close(self) -> None:
        self.closed = True


def test_several_batches_are_in_flight_and_only_acknowledged_ones_are_trimmed() -> None:
    places = Places()
    fill(places, 10)
    made: list[Slow] = []

    def connect(wake: Callable[[], None]) -> Connection:
        made.append(Slow(local(places.receiver(), "edge-1")(wake)))
        return made[-1]

    sender = places.sender(connect, batch=100, window=500)
    sender.step(0)
    assert len(made[0].frames) == 1, "the greeting, and nothing before it is answered"
    made[0].pass_on()
    sender.step(1)
    assert 4 <= len(made[0].frames) <= 6
    assert sender.in_flight >= 500
    assert places.spooled.head() == 0
    made[0].pass_on(2)
    sender.step(2)
    assert places.spooled.head() == places.logs["inbox"].tail() > 0
    assert len(made[0].frames) >= 4, "what was acknowledged makes room"


def test_small_batches_in_flight_are_bounded_in_number() -> None:
    places = Places()
    fill(places, 50)
    made: list[Slow] = []

    def connect(wake: Callable[[], None]) -> Connection:
        made.append(Slow(local(places.receiver(), "edge-1")(wake)))
        return made[-1]

    sender = places.sender(connect, batch=1)
    sender.step(0)
    made[0].pass_on()
    sender.step(1)
    assert len(made[0].frames) == BATCHES


def failing(log: Log, error: Exception) -> Log:
    """A log whose appends fail."""

    class Failing:
        def append(self, *args: Any, **kwargs: Any) -> None:
            raise error

    return Failing()  # type: ignore[return-value]


@pytest.mark.parametrize("error", [Full("disk of cloud"), Unavailable("the log is locked"), OSError("what")])
def test_a_full_disk_or_a_lock_is_waited_for_with_back_off(error: Exception) -> None:
    places = Places()
    expected = fill(places, 2)
    inbox = places.logs["inbox"]
    places.logs["inbox"] = failing(inbox, error)
    sender = places.sender()
    pauses, now_us = [], 0
    for _ in range(3):
        while (due_us := sender.step(now_us)) is None:
            pass
        pauses.append(due_us - now_us)
        now_us = due_us
        held_up = sender.held_up()
        assert held_up is not None
        assert f"cloud answers: {error}" in held_up.why
    assert pauses[0] < pauses[1] < pauses[2]
    assert sender.step(now_us - 1) == now_us, "not before its time"
    assert not sender.spool.is_empty
    places.logs["inbox"] = inbox
    places.now_us = now_us
    places.drain(sender)
    assert blobs(inbox) == expected
    assert sender.held_up() is None


def test_a_place_can_neither_write_in_another_name_nor_to_a_log_that_it_must_not() -> None:
    def policy(place: str, log: str, lane: Lane, writer: str) -> bool:
        return log == "inbox" and writer.startswith(f"{place}/")

    for log, writer, good in [
        ("inbox", "edge-1/a", True),
        ("inbox", "edge-2/a", False),
        ("journal", "edge-1/a", False),
    ]:
        places = Places("inbox", "journal")
        places.remote(log).append(b"x", count=1, writer=writer, counter=0)
        sender = places.sender(local(places.receiver(may_append=policy), "edge-1"))
        if good:
            places.drain(sender)
        else:
            with pytest.raises(Refused, match=rf"edge-1 may not append to {log} \(DATA\) as '{writer}'"):
                places.drain(sender)
        assert (blobs(places.logs[log]) == [b"x"]) is good


def test_a_log_that_does_not_exist_is_named() -> None:
    places = Places()
    places.remote("nowhere").append(b"x", count=1, writer="w", counter=0)
    with pytest.raises(Refused, match="unknown log 'nowhere'"):
        places.drain(places.sender())


def test_a_sender_to_another_deployment_stops_and_one_with_another_version_waits() -> None:
    places = Places()
    fill(places, 1)
    with pytest.raises(Refused, match=r"'d1'.*'d2'"):
        places.drain(places.sender(local(places.receiver(deployment="d2"), "edge-1")))

    class Newer:
        """A receiver of a newer version."""

        due_us = None

        def send(self, frame: bytes) -> None:
            self.answer: bytes | None = encode(Failed("a kind of tomorrow", "edge-1 speaks 1, cloud speaks 2"))

        def receive(self) -> bytes | None:
            return self.answer

        def close(self) -> None: ...

    sender = places.sender(lambda wake: Newer())
    assert sender.step(0) is not None
    held_up = sender.held_up()
    assert held_up is not None
    assert "cloud speaks 2" in held_up.why


@pytest.mark.parametrize("answer", [Ack(99), Welcome(VERSION, "edge-7"), Hello(VERSION, "d1", "x", "y")])
def test_answers_that_do_not_fit_trim_nothing(answer: Any) -> None:
    places = Places()
    fill(places, 1)

    class Liar(Slow):
        def receive(self) -> bytes | None:
            return encode(answer)

    sender = places.sender(lambda wake: Liar(local(places.receiver(), "edge-1")(wake)))
    assert sender.step(0) is not None
    assert sender.held_up() is not None
    assert places.spooled.head() == 0


def test_a_difference_at_the_other_place_stops_the_sender_with_both_contents() -> None:
    places = Places()
    places.logs["inbox"].append(b"theirs", count=1, writer="a", counter=0)
    places.remote().append(b"ours", count=1, writer="a", counter=0)
    sender = places.sender()
    with pytest.raises(Diverged, match=r"theirs.*ours"):
        places.drain(sender)
    assert sender.error is not None
    assert blobs(places.logs["inbox"]) == [b"theirs"]


def test_the_owner_of_a_spool_is_who_says_hello() -> None:
    heard: list[bytes] = []

    class Ear(Slow):
        def send(self, frame: bytes) -> None:
            heard.append(frame)

    places = Places(make=lambda name: MemoryLog())
    places.sender(lambda wake: Ear(local(places.receiver(), "edge-1")(wake))).step(0)
    assert [decode(frame) for frame in heard] == [Hello(VERSION, OWNER.deployment, OWNER.here, OWNER.there)]
