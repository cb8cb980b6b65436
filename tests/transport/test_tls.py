"""Real sockets with TLS: who is let in, what everybody else is told, and connections that break."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.app.waiting import until
from tests.transport.places import Places, blobs
from whimbrel.core.errors import Refused, Unavailable
from whimbrel.transport import Receiver
from whimbrel.transport.certificates import Authority
from whimbrel.transport.identity import Identity
from whimbrel.transport.protocol import VERSION, Hello, Welcome, decode, encode
from whimbrel.transport.sender import Sender
from whimbrel.transport.server import ReceiverServer
from whimbrel.transport.sockets import Dialer, EventLoop, SocketConnection
from whimbrel.transport.spool import ENTRY, RECORDS, STATE
from whimbrel.transport.threaded import ThreadedSender

NOW = datetime.now(UTC)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    authority = Authority(tmp_path / "keys")
    for place in ("cloud", "edge-1", "edge-2"):
        authority.issue(place)
    return tmp_path / "keys"


class Served:
    """A receiver behind a port, in a process of its own as far as the other side can tell."""

    def __init__(self, loop: EventLoop, receiver: Receiver, identity: Identity) -> None:
        self._loop, self._receiver, self._identity = loop, receiver, identity
        self.server = ReceiverServer(loop, receiver, identity)

    def again(self) -> None:
        """On the same port."""
        self.server = ReceiverServer(self._loop, self._receiver, self._identity, port=self.server.port)


@pytest.fixture
def places() -> Places:
    return Places()


@pytest.fixture
def served(loop: EventLoop, keys: Path, places: Places) -> Iterator[Served]:
    served = Served(loop, places.receiver(), Identity.of(keys / "cloud"))
    yield served
    served.server.close()


def dialer(loop: EventLoop, folder: Path, served: Served, place: str = "cloud") -> Dialer:
    return Dialer(loop, Identity.of(folder), place, "127.0.0.1", served.server.port)


def refused(loop: EventLoop, folder: Path, served: Served, place: str = "cloud") -> str:
    """What a sender with these files is told."""
    sender = Sender(Places().spool(), dialer(loop, folder, served, place).connect)
    told: list[str] = []

    def is_told() -> bool:
        sender.step(0)
        held_up = sender.held_up()
        told[:] = [held_up.why] if held_up else []
        return bool(told)

    until(is_told, "the sender is told why")
    assert not sender.is_connected
    sender.close()
    return told[0]


def test_appends_cross_a_socket_in_order_and_once(loop: EventLoop, keys: Path, places: Places, served: Served) -> None:
    remote, expected = places.remote(), []
    sending = ThreadedSender(places.spool(), dialer(loop, keys / "edge-1", served).connect)
    sending.start()
    for counter in range(300):
        expected.append(f"{counter}".encode() * (1 + counter * 37 % 400))
        remote.append(expected[-1], count=1, writer="w", counter=counter)
    until(lambda: sending.sender.spool.is_empty, "all has arrived")
    assert blobs(places.logs["inbox"]) == expected
    sending.stop()
    assert sending.error is None


def test_an_entry_of_the_largest_size_crosses(loop: EventLoop, keys: Path, places: Places, served: Served) -> None:
    blob = ssl.RAND_bytes(ENTRY)
    places.remote().append(blob, count=1, writer="w", counter=0)
    sending = ThreadedSender(places.spool(), dialer(loop, keys / "edge-1", served).connect)
    sending.start()
    until(lambda: sending.sender.spool.is_empty, "it has arrived")
    sending.stop()
    assert blobs(places.logs["inbox"]) == [blob]


def test_a_receiver_that_goes_away_is_waited_for(loop: EventLoop, keys: Path, places: Places, served: Served) -> None:
    remote = places.remote()
    sending = ThreadedSender(places.spool(), dialer(loop, keys / "edge-1", served).connect)
    sending.start()
    counter = 0
    for _ in range(3):
        for _ in range(50):
            remote.append(b"%d" % counter, count=1, writer="w", counter=counter)
            counter += 1
        until(lambda: sending.sender.spool.is_empty, "all has arrived")
        served.server.close()
        remote.append(b"%d" % counter, count=1, writer="w", counter=counter)
        counter += 1
        until(lambda: sending.sender.held_up() is not None, "the sender has noticed")
        assert not sending.sender.is_connected
        served.again()
    until(lambda: sending.sender.spool.is_empty, "all has arrived")
    sending.stop()
    assert blobs(places.logs["inbox"]) == [b"%d" % number for number in range(counter)]


def test_the_policy_sees_the_name_in_the_certificate(loop: EventLoop, keys: Path, places: Places) -> None:
    seen = []

    def policy(place: str, log: str, lane: object, writer: str) -> bool:
        seen.append((place, log, writer))
        return False

    served = Served(loop, places.receiver(may_append=policy), Identity.of(keys / "cloud"))
    places.remote().append(b"x", count=1, writer="w", counter=0)
    sending = ThreadedSender(places.spool(), dialer(loop, keys / "edge-1", served).connect)
    sending.start()
    until(lambda: sending.error is not None, "it stops")
    sending.stop()
    served.server.close()
    assert isinstance(sending.error, Refused)
    assert seen == [("edge-1", "inbox", "w")]


def test_a_place_with_the_certificate_of_another_is_refused(
    loop: EventLoop, keys: Path, places: Places, served: Served
) -> None:
    places.remote().append(b"x", count=1, writer="w", counter=0)
    sending = ThreadedSender(places.spool(), dialer(loop, keys / "edge-2", served).connect)
    sending.start()
    until(lambda: sending.error is not None, "it stops")
    sending.stop()
    assert "edge-2, as its certificate says, calls itself edge-1" in str(sending.error)
    assert blobs(places.logs["inbox"]) == []


def test_another_authority_is_told_by_either_side(
    loop: EventLoop, keys: Path, served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Authority(tmp_path / "foreign").issue("edge-1")
    foreign = tmp_path / "foreign" / "edge-1"
    assert "the certificate of cloud is signed by another authority" in refused(loop, foreign, served)
    (foreign / "ca.pem").write_bytes((keys / "cloud" / "ca.pem").read_bytes())
    assert "is not signed by the authority in" in refused(loop, foreign, served), "noticed before anything is sent"


class Careless(Dialer):
    """Sends a certificate without looking at it first."""

    def __init__(self, careful: Dialer) -> None:
        self.__dict__.update(careful.__dict__)
        self._identity = Unchecked(*self._identity)


class Unchecked(Identity):
    def check(self, now: datetime | None = None) -> None: ...


@pytest.mark.parametrize(
    ("made", "days", "here", "there"),
    [
        (NOW - timedelta(days=30), 20, "has expired at", "it has expired: renew it"),
        (NOW + timedelta(days=3), 20, "is the clock of edge-1 right?", "not valid yet: is the clock"),
    ],
    ids=["expired", "not yet valid"],
)
def test_a_certificate_out_of_its_time_is_told_by_its_owner_and_by_the_other(
    loop: EventLoop, keys: Path, served: Served, caplog: pytest.LogCaptureFixture, made: datetime, days: int, here: str,
    there: str,
) -> None:  # fmt: skip
    Authority(keys, now=made).issue("edge-1", days=days, renew=True)
    assert here in refused(loop, keys / "edge-1", served)
    careless, alerts = Careless(dialer(loop, keys / "edge-1", served)), list[str]()

    def is_told() -> bool:
        with pytest.raises(Unavailable) as caught:
            careless.connect(lambda: None)
        alerts.append(str(caught.value))
        return "cloud refuses the certificate of this place" in alerts[-1]

    with caplog.at_level(logging.WARNING):
        until(is_told, "TLS's alert arrives; it may be lost when the socket is closed")
        assert there in alerts[-1]
        until(lambda: "a connection was refused: the certificate of the caller" in caplog.text, "the server says so")


def test_the_certificate_of_a_server_out_of_its_time_is_told(loop: EventLoop, keys: Path, served: Served) -> None:
    Authority(keys, now=NOW + timedelta(days=3)).issue("cloud", renew=True)
    with pytest.raises(Unavailable, match="is the clock of cloud right"):
        Served(loop, Places().receiver(), Identity.of(keys / "cloud"))
    careless = Served(loop, Places().receiver(), Unchecked(*Identity.of(keys / "cloud")))
    assert "the certificate of cloud is not valid yet: is the clock" in refused(loop, keys / "edge-1", careless)
    careless.server.close()


def test_a_revoked_place_is_refused_at_once_and_again_when_it_returns(
    loop: EventLoop, keys: Path, places: Places, served: Served
) -> None:
    sending = ThreadedSender(places.spool(), dialer(loop, keys / "edge-1", served).connect)
    sending.start()
    places.remote().append(b"0", count=1, writer="w", counter=0)
    until(lambda: sending.sender.spool.is_empty, "it is let in")
    authority = Authority(keys)
    (keys / "edge-1" / "revoked.pem").rename(keys / "old")
    assert authority.revoke("edge-1") == 1
    (keys / "old").rename(keys / "edge-1" / "revoked.pem")  # it does not know yet
    places.remote().append(b"1", count=1, writer="w", counter=1)
    until(lambda: sending.sender.held_up() is not None, "its open connection ends")
    told = "cloud answers: the certificate of edge-1 is revoked since"
    held_up = sending.sender.held_up()
    assert held_up is not None
    assert told in held_up.why
    assert told in refused(loop, keys / "edge-1", served)
    assert blobs(places.logs["inbox"]) == [b"0"]
    assert authority.issue("edge-1"), "a new certificate is good again"
    until(lambda: sending.sender.spool.is_empty, "without a restart")
    sending.stop()


def test_a_revoked_server_is_told_nothing(loop: EventLoop, keys: Path, served: Served) -> None:
    Authority(keys).revoke("cloud")
    assert "the certificate of cloud is revoked" in refused(loop, keys / "edge-1", served)


def test_a_server_with_another_name_is_told_nothing(loop: EventLoop, keys: Path, served: Served) -> None:
    told = refused(loop, keys / "edge-1", served, place="edge-2")
    assert "shows the certificate of cloud, expected edge-2: a wrong address" in told
    with pytest.raises(Unavailable, match="shows the certificate of cloud, expected edge-9"):
        Served(loop, Places().receiver(place="edge-9"), Identity.of(keys / "cloud"))


def test_without_a_certificate_nobody_is_let_in(loop: EventLoop, keys: Path, places: Places, served: Served) -> None:
    context = ssl.create_default_context(cafile=keys / "cloud" / "ca.pem")
    with (
        socket.create_connection(("127.0.0.1", served.server.port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as tls,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        tls.recv(1)


def test_what_is_no_receiver_is_told_as_such(loop: EventLoop, keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(Unavailable, match=rf"cloud does not answer.*127\.0\.0\.1:{port}"):
        Dialer(loop, Identity.of(keys / "edge-1"), "cloud", "127.0.0.1", port).connect(lambda: None)


@pytest.mark.parametrize(
    ("file", "told"),
    [("certificate.pem", "is not a certificate"), ("key.pem", "not a certificate with its key"),
     ("ca.pem", "is not a certificate"), ("revoked.pem", "is not a list of revoked certificates")],
)  # fmt: skip
def test_damaged_or_missing_files_are_named(loop: EventLoop, keys: Path, served: Served, file: str, told: str) -> None:
    (keys / "edge-1" / file).write_text("none")
    assert told in refused(loop, keys / "edge-1", served)
    (keys / "edge-1" / file).unlink()
    assert file in refused(loop, keys / "edge-1", served)


def test_a_second_connection_of_a_place_replaces_the_first_of_its_class(
    loop: EventLoop, keys: Path, served: Served
) -> None:
    dial = dialer(loop, keys / "edge-1", served)

    def greeted(kind: str) -> SocketConnection:
        connection = dial.connect(lambda: None)
        connection.send(encode(Hello(VERSION, "d1", "edge-1", "cloud", kind)))
        answers: list[bytes] = []

        def is_answered() -> bool:
            answers.extend([answer] if (answer := connection.receive()) is not None else [])
            return bool(answers)

        until(is_answered, "an answer")
        assert decode(answers[0]) == Welcome(VERSION, "cloud")
        return connection

    def is_over() -> bool:
        try:
            return first.receive() is not None
        except Unavailable:
            return True

    first, other = greeted(RECORDS), greeted(STATE)
    assert not is_over()
    second = greeted(RECORDS)
    until(is_over, "the first one is closed")
    assert second.receive() is None
    assert other.receive() is None
    for connection in (first, second, other):
        connection.close()
